"""Arguments of tool calls in the form that a chat template expects.

In OpenAI's format, arguments are a JSON string; in transformers', they are an object. Most
templates write an object as JSON, but put a string into quotes. Others write a string unchanged,
but write an object as Python code.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from outpace.data.json_rows import RepeatedKeyError, read_value
from outpace.records.errors import BadInputError

Messages = Sequence[Mapping[str, Any]]

_NAME, _ARGUMENTS = "outpace_name", {"outpace_key": "outpace_value"}
_FUNCTION = {"name": _NAME, "arguments": _ARGUMENTS}
_TRIAL = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "",
     "tool_calls": [{"id": "call00001", "type": "function", "function": _FUNCTION}]},
)  # fmt: skip


def takes_text(render: Callable[[Messages], str]) -> bool:
    """Return whether a template writes arguments unchanged, so that they must be JSON strings.

    `render` applies the template to messages, and raises BadInputError if the template rejects
    them.
    """
    with suppress(BadInputError):
        words = render(_TRIAL)
        if _NAME not in words or ("outpace_key" in words and repr(_ARGUMENTS) not in words):
            return False
    with suppress(BadInputError):
        return json.dumps(_ARGUMENTS) in render(with_arguments(_TRIAL, True, "a trial"))
    return False


def with_arguments(messages: Messages, as_text: bool, where: str) -> list[dict[str, Any]]:
    """Return the messages with call arguments converted to JSON strings or to objects.

    Raises BadInputError, naming `where`, for arguments with a repeated key.
    """
    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {
                **message,
                "tool_calls": [_convert_call(one, as_text, where) for one in calls],
            }
        changed.append(dict(message))
    return changed


def _convert_call(call: Any, as_text: bool, where: str) -> Any:
    """Convert the arguments of a call, which may lack the `function` level.

    Missing, null or empty arguments become an empty object. A string that is not a JSON object is
    kept.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = told = function.get("arguments")
    if told is None or (isinstance(told, str) and told.strip() in ("", "null")):
        told = {}
    if as_text and isinstance(told, dict):
        told = json.dumps(told, ensure_ascii=False)
    elif not as_text and isinstance(told, str):
        told = _read_arguments(told, where)
    elif told is given:
        return call
    function = {**function, "arguments": told}
    return {**call, "function": function} if "function" in call else function


def _read_arguments(text: str, where: str) -> Any:
    """Parse an object from a JSON string, which may be encoded twice; else return the string."""
    value: Any = text
    try:
        for _ in range(2):
            value = read_value(value) if isinstance(value, str) else value
    except RepeatedKeyError as error:
        raise BadInputError(f"{where}: in the arguments of a call {error}") from None
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
