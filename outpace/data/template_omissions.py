"""Detection of conversation parts that a chat template omits.

Templates skip roles, tools, tool calls and message keys that they were not written for, and some
omit the reasoning in answers.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from outpace.data.conversations import LEARNING_KEYS, WEIGHTS, Conversation, Message, Tool
from outpace.records.errors import BadInputError

Render = Callable[[Sequence[Message]], str]

# Message keys that are checked elsewhere: tool_calls by require_calls_written, weights when rows
# are read.
_READ = frozenset({"role", "content", "tool_calls", "tool_call_id"}) | LEARNING_KEYS


def answers_of(messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the indices of the assistant's messages."""
    return tuple(n for n, message in enumerate(messages) if message["role"] == "assistant")


def unwritten_parts(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    prompt: str,
    render: Callable[[Sequence[Message], Sequence[Tool]], str],
) -> list[str]:
    """Describe what a chat template omits from a conversation: messages, tools, or tool calls.

    `prompt` is the rendered conversation. `render` renders changed messages or tools, to see
    whether the text changes.
    """
    roles = unwritten_roles(messages, prompt, lambda others: render(others, tools))
    found = [f"messages of {role!r}" for role in roles]
    silent = [{k: v for k, v in one.items() if k != "tool_calls"} for one in messages]
    others: list[tuple[str, Sequence[Message], Sequence[Tool]]] = []
    if tools:
        others.append(("tools", messages, ()))
    if any(one.get("tool_calls") for one in messages):
        others.append(("calls of tools", silent, tools))
    for what, talk, given in others:
        with suppress(BadInputError):  # raised by a template on purpose
            if render(talk, given) == prompt:
                found.append(what)
    return found


def unwritten_roles(messages: Sequence[Message], whole: str, render: Render) -> tuple[str, ...]:
    """Return the roles of messages whose text is missing from the rendered conversation `whole`.

    Messages of the assistant are not checked here. `render` renders changed messages, to see
    whether the text changes.
    """
    plain = "".join(whole.split())
    found: dict[str, None] = {}
    for number, one in enumerate(messages):
        words = str(one.get("content") or "")
        if one["role"] == "assistant" or "".join(words.split()) in plain:
            continue
        others = [*messages[:number], {**one, "content": f"{words} {words}"}]
        with suppress(BadInputError):  # raised by a template on purpose
            if render([*others, *messages[number + 1 :]]) == whole:
                found[str(one["role"])] = None
    return tuple(found)


def unwritten_keys(talk: Conversation, render: Render) -> list[str]:
    """Describe the message keys that have no effect.

    Either the template omits the key, or it requests training on a message that is not the
    assistant's.
    """
    asked = dict.fromkeys(
        f"{key!r} of {one['role']!r} messages (only the assistant's are trained on)"
        for one in talk.messages
        for key in WEIGHTS
        if one["role"] != "assistant" and one.get(key) == 1
    )
    keys = dict.fromkeys(
        key
        for one in talk.messages
        for key, value in one.items()
        if key not in _READ and value not in (None, "", [], {})
    )
    if not keys:
        return list(asked)
    whole = render(talk.messages)
    found = list(asked)
    for key in keys:
        others = [{k: v for k, v in one.items() if k != key} for one in talk.messages]
        with suppress(BadInputError):  # raised by a template on purpose
            if render(others) == whole:
                found.append(f"{key!r} of messages")
    return found


def require_calls_written(talk: Conversation, number: int, where: str, render: Render) -> None:
    """Raise BadInputError if the template omits the tool calls of message `number`."""
    upto = [dict(message) for message in talk.messages[: number + 1]]
    with_calls = render(upto)
    del upto[-1]["tool_calls"]
    if render(upto) == with_calls:
        raise BadInputError(
            f"{where}: the assistant calls a tool, and the tokenizer's chat template does not "
            "write tool_calls: the model would be trained on an empty answer. Set a "
            "chat_template that writes them in the tokenizer's folder, or leave such "
            "conversations out."
        )
