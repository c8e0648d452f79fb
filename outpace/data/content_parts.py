"""Message contents as a chat template expects them: a string or a list of parts.

Templates of multimodal models may render only lists of parts, and nothing for a plain string. All
other templates accept strings.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from outpace.records.errors import BadInputError

Messages = Sequence[Mapping[str, Any]]

_WORD = "outpace_word"


def takes_parts(render: Callable[[Messages], str]) -> bool:
    """Return whether a template renders contents only if they are lists of parts.

    `render` applies the template to messages, and raises BadInputError if the template rejects
    them.
    """
    for content in (_WORD, _as_parts(_WORD)):
        with suppress(BadInputError):
            if _WORD in render([{"role": "user", "content": content}]):
                return isinstance(content, list)
    return False


def with_parts(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with each content wrapped in a list of one text part."""
    return [{**message, "content": _as_parts(message["content"])} for message in messages]


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
