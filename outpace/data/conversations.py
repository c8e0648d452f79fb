"""Conversion of rows to conversations: messages, which of them to train on, and tools."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.data.json_rows import RepeatedKeyError, read_value
from outpace.data.row import AS_TEXT, Row, checked_text, nested_rows, rows_in_columns
from outpace.data.tool_calls import with_arguments
from outpace.records.errors import BadInputError, quote_names

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# Column names of questions and answers in data without lists of messages.
_PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"),
    ("instruction", "response"), ("question", "answer"),
)  # fmt: skip
_LISTS = ("messages", "conversations")
# Columns whose presence marks a row as a conversation.
_NAMES = frozenset((*_LISTS, *(ask for ask, _ in _PAIRS)))
_SYSTEM = ("system", "system_prompt", "system_message")
# Columns whose text is appended to the question.
_ABOUT = ("input", "context")
_TOOLS = ("tools", "functions")
_EMPTY: tuple[Any, ...] = (None, "", [], {})  # values that count as missing
# Roles, with the names that data uses for them, in lower case.
_ROLES: Mapping[str, Collection[str]] = {
    "user": ("human", "prompter"),
    "assistant": (
        "gpt", "chatgpt", "gpt-3.5", "gpt-4", "gpt4", "bard", "bing", "claude", "gemini", "llama",
        "llm", "model", "bot", "chatbot", "ai",
    ),
    "system": (),
    "developer": (),
    "tool": ("function", "function_response", "observation", "ipython", "tool_response"),
}  # fmt: skip
_KNOWN = {name: role for role, names in _ROLES.items() for name in (role, *names)}
# Message keys for the role and for the text in common data sets, and label columns.
_SPEAKERS = frozenset(("role", "from", "speaker", "author", "sender"))
_CONTENTS = frozenset(("content", "value", "text"))
_CLASSES = frozenset(("label", "labels"))
# Message keys that enable training on the message. torchtune's key has the opposite meaning.
WEIGHTS = ("weight", "train", "training", "trainable", "loss", "loss_weight", "loss_mask",
            "loss_scale")  # fmt: skip
_MASKED = "masked"
# Columns of KTO data (trl, ms-swift; LLaMA-Factory) that say whether an answer is desirable.
_WANTED = ("label", "kto_tag")
LEARNING_KEYS = frozenset((*WEIGHTS, _MASKED))
_FORMS = (
    "'messages' (a list of {role, content}), 'conversations' (a list of {from, value}), "
    + ", ".join(f"{ask!r} and {answer!r}" for ask, answer in _PAIRS)
)


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, whether to train on each (`learned`), and the tools.

    `unread` lists the row's other columns that are not empty.
    """

    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    tools: tuple[Tool, ...] = ()
    unread: tuple[str, ...] = ()


def conversation_of(row: Row, roles: Collection[str] = ()) -> Conversation:
    """Read the conversation of a row in a supported format. Raises BadInputError for others.

    `roles` are additional role names that are kept unchanged.
    """
    values = row.values
    _require_desirable_answer(row)
    listed = next((name for name in _LISTS if values.get(name) is not None), None)
    if listed is not None:
        read = [listed]
        found = [_read_turn(one, row, roles) for one in _require_list(values[listed], listed, row)]
    else:
        found, read = _read_pair(row, roles)
    for name in _SYSTEM:
        if values.get(name) not in _EMPTY:
            found, read = _prepend_system_prompt(found, name, row), [*read, name]
    tools: tuple[Tool, ...] = ()
    for name in _TOOLS:
        if values.get(name):
            tools, read = (*tools, *_read_tools(values[name], name, row)), [*read, name]
    messages, learned = zip(*found, strict=True)
    unread = [n for n, value in values.items() if n not in read and value not in _EMPTY]
    return Conversation(messages, learned, tools, tuple(unread))


def describe_form(columns: Collection[str]) -> str | None:
    """Describe rows that no task supports, judging by their columns, and say what to do.

    Returns None for other rows.
    """
    if {"chosen", "rejected"} <= set(columns):
        return (
            "such a row is a pair of a preferred and a rejected answer, for preference training "
            "(DPO and the like), which outpace does not do. To train on the preferred answers "
            "with --task chat, write each as 'messages', or as 'prompt' and 'completion'."
        )
    if "input_ids" in columns:
        return (
            "such a row is already tokenised, and outpace does its own tokenisation. Give the "
            "texts; or, to pretrain on these ids, write them one after another into a .bin file "
            "of uint16 or uint32, with an end of text after each document, and name that as "
            "--data."
        )
    return None


def _require_desirable_answer(row: Row) -> None:
    for name in _WANTED:
        value = row.values.get(name)
        if value is False or (isinstance(value, str) and value.strip().lower() == "false"):
            raise BadInputError(
                f"{row.where} marks its answer as unwanted ({name!r}: false), as in data for "
                "preference training (KTO), which outpace does not support. Leave such rows out; "
                "all others are trained on. If the column means something else, rename it."
            )


_Turn = tuple[Message, bool]


def _read_pair(row: Row, roles: Collection[str]) -> tuple[list[_Turn], list[str]]:
    """Read the turns of a question and its answer.

    Also return the names of the columns that were read; the row may have others.
    """
    values = row.values
    given = {name for name, value in values.items() if value is not None}
    pair = next((pair for names in (given, values.keys()) for pair in _PAIRS if names >= set(pair)),
                None)  # fmt: skip
    if pair is None:
        raise _unknown_form_error(row)
    ask, answer = pair
    read = [ask, answer]
    turns: list[_Turn] = []
    if values.get("history"):
        turns += _read_history(values["history"], row)
        read.append("history")
    if rows := rows_in_columns(row):
        kind = type(values[ask]).__name__
        raise BadInputError(f"{row.where}: {ask!r} is {kind}, not text{rows}")
    lists = [name for name in pair if isinstance(values[name], list)]
    if len(lists) == 1 and any(isinstance(values[name], str) for name in pair):
        other = next(name for name in pair if name not in lists)
        raise BadInputError(
            f"{row.where}: {lists[0]!r} is {_quote(values[lists[0]])}, and {other!r} is text. "
            "Write both as texts, or both as lists of messages."
        )
    if lists:
        asked = [_read_turn(one, row, roles) for one in _require_list(values[ask], ask, row)]
        turns += [(message, False) for message, _ in asked]
        turns += [_read_turn(one, row, roles) for one in _require_list(values[answer], answer, row)]
        return turns, read
    question = _read_text(values[ask], ask, row)
    for name in _ABOUT:
        if values.get(name) not in _EMPTY:
            question = "\n\n".join(filter(None, (question, _read_text(values[name], name, row))))
            read.append(name)
    turns.append(({"role": "user", "content": question}, False))
    turns.append(({"role": "assistant", "content": _read_text(values[answer], answer, row)}, True))
    return turns, read


def _unknown_form_error(row: Row) -> BadInputError:
    values = row.values
    there = quote_names(values) or "no columns"
    if (name := next((name for name in _LISTS if name in values), None)) is not None:
        return BadInputError(
            f"{row.where}: {name!r} is null, not a list of messages. Leave the row out."
        )
    if (form := describe_form(values)) is not None:
        return BadInputError(f"{row.where} has {there}: {form}")
    if not _SPEAKERS.isdisjoint(values) and not _CONTENTS.isdisjoint(values):
        return BadInputError(
            f"{row.where} has {there}: it is one message, and a row holds a whole "
            'conversation. Write the messages of each into one row: {"messages": [{"role": …, '
            '"content": …}, …]}.'
        )
    if (name := _find_message_column(values)) is not None:
        return BadInputError(
            f"{row.where} has {there}. Its {name!r} is a list of messages: rename it to "
            "'messages', and the keys of a message to role and content."
        )
    if rows := nested_rows(row):
        return BadInputError(f"{row.where} has {there}{rows}")
    return BadInputError(
        f"{row.where} has {there}, but a conversation is one of: {_FORMS}. {_advise(values)}"
    )


def _find_message_column(values: Mapping[str, Any]) -> str | None:
    for name, value in values.items():
        listed = isinstance(value, list) and all(isinstance(one, dict) for one in value)
        if listed and value and all(not _SPEAKERS.isdisjoint(one) for one in value):
            return name
    return None


def _advise(columns: Collection[str]) -> str:
    if not _CLASSES.isdisjoint(columns):
        return "To train a classifier of texts, use --task classify."
    if "text" in columns:
        return "To train on texts as they are, leave --task chat out."
    return "Rename the columns to two of these names." if columns else "Leave such rows out."


def _read_history(value: Any, row: Row) -> list[_Turn]:
    """Read earlier question-answer pairs as turns, with their answers as training targets."""
    turns: list[_Turn] = []
    for pair in _require_list(value, "history", row):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadInputError(
                f"{row.where}: 'history' contains {_quote(pair)}. Each of its entries must be a "
                "pair [question, answer]"
            )
        asked, answered = (_read_text(text, "history", row) for text in pair)
        turns.append(({"role": "user", "content": asked}, False))
        turns.append(({"role": "assistant", "content": answered}, True))
    return turns


def _prepend_system_prompt(turns: Sequence[_Turn], name: str, row: Row) -> list[_Turn]:
    """Put the system prompt from a column before the turns.

    Raises BadInputError if the turns begin with a different system prompt.
    """
    text = _read_text(row.values[name], name, row)
    first = turns[0][0]
    if first["role"] != "system":
        return [({"role": "system", "content": text}, False), *turns]
    if first["content"] != text:
        raise BadInputError(
            f"{row.where} has two system prompts: {name!r} is {_quote(text)}, and the first "
            f"message is {_quote(first['content'])}. Leave one of them out."
        )
    return list(turns)


def _require_list(value: Any, name: str, row: Row) -> list[Any]:
    if isinstance(value, list) and value:
        return value
    text = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
    remedy = ": it is JSON inside a text. Decode it, so that the row holds the list" if text else ""
    raise BadInputError(f"{row.where}: {name!r} is {_quote(value)}, not a list of messages{remedy}")


def _read_turn(message: Any, row: Row, roles: Collection[str]) -> _Turn:
    """Read a message in any supported format; also return whether to train on it."""
    told = _first_nonempty(message, ("role", "from"), row) if isinstance(message, dict) else None
    if not isinstance(told, str):
        rows = (
            nested_rows(row) if isinstance(message, dict) and not _NAMES.isdisjoint(message) else ""
        )
        raise BadInputError(f"{row.where}: a message is {_quote(message)}, and has no role{rows}")
    role = _KNOWN.get(told.strip().lower(), told)
    names = set(roles) - {told}
    if role != "assistant" and told in roles and role not in names:
        role = told
    elif role not in _ROLES:
        raise BadInputError(
            f"{row.where}: a message has the unknown role {told!r}. Known roles are "
            f"{', '.join(_KNOWN)}, and those that the chat template names."
        )
    content = _first_nonempty(message, ("content", "value"), row)
    name = "content" if "content" in message or "value" not in message else "value"
    calls = message.get("tool_calls")
    if not calls and (older := message.get("function_call")):  # OpenAI's older form
        calls = [{"type": "function", "function": older}]
    if calls:
        content = content or ""
    elif name not in message:
        raise BadInputError(
            f"{row.where}: a message of {told!r} has {quote_names(message)}, and no content. "
            "Rename the key of its text to 'content', or leave the row out."
        )
    if isinstance(content, list):
        _require_one_text(content, row)
        content = "".join(_read_part(part, row) for part in content)
    other = ("from", "value", "function_call")
    # Arrow adds null values for keys that only other messages have; these are dropped.
    kept = {key: value for key, value in message.items() if key not in other and value is not None}
    if calls:
        with_arguments([{"tool_calls": calls}], False, row.where)  # refuses repeated keys
        kept["tool_calls"] = calls
    kept |= {"role": role, "content": _read_text(content, name, row)}
    return kept, role == "assistant" and _is_target(message, row)


def _first_nonempty(message: Message, names: tuple[str, str], row: Row) -> Any:
    """Return a message's value for the first of two keys that is not empty.

    In merged data sets, messages may have both keys, one of them null or empty. Raises
    BadInputError if both have values that differ.
    """
    found = [message[name] for name in names if message.get(name) not in _EMPTY]
    if len(found) > 1 and found[0] != found[1]:
        raise BadInputError(
            f"{row.where}: a message has both {names[0]!r} ({_quote(found[0])}) and {names[1]!r} "
            f"({_quote(found[1])}). Leave one of them out."
        )
    return found[0] if found else next((message[name] for name in names if name in message), None)


def _is_target(message: Message, row: Row) -> bool:
    """Return whether all weight and mask keys of a message allow training on it.

    Raises BadInputError for values other than 0 and 1.
    """
    for name in (*WEIGHTS, _MASKED):
        value = message.get(name)
        if value is None:
            continue
        no, yes = ("1 or true", "0 or false") if name == _MASKED else ("0 or false", "1 or true")
        if isinstance(value, (list, dict)) or value not in (0, 1):
            raise BadInputError(
                f"{row.where}: a message has the {name} {value!r}; it must be {no} (not trained "
                f"on) or {yes} (trained on). Rename the key if it means something else."
            )
        if bool(value) == (name == _MASKED):
            return False
    return True


def _require_one_text(parts: Sequence[Any], row: Row) -> None:
    """Refuse a list of several bare strings, which may be alternative answers."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) > 1:
        raise BadInputError(
            f"{row.where}: a message has a list of {len(texts)} texts ({_quote(texts[0])}, …), "
            "which may be parts of one text or alternatives. Join them, write parts "
            'as {"type": "text", "text": …}, or put each alternative into a separate row.'
        )


def _read_part(part: Any, row: Row) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and "text" in part:
        for name in (*WEIGHTS, _MASKED):
            if part.get(name) is not None:
                raise BadInputError(
                    f"{row.where}: a part of a message has the {name} {part[name]!r}, and only "
                    "whole messages can have one. Put it on the message (next to 'role'), or "
                    "leave it out."
                )
        return _read_text(part["text"], "text", row)
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise BadInputError(
        f"{row.where}: part of a message has type {kind!r}, but only text can be trained on"
    )


def _read_tools(value: Any, name: str, row: Row) -> tuple[Tool, ...]:
    if isinstance(value, str):
        try:
            value = read_value(value)
        except RepeatedKeyError as error:
            raise BadInputError(f"{row.where}: in {name!r} {error}") from None
        except (ValueError, RecursionError):
            raise BadInputError(
                f"{row.where}: {name!r} is {_quote(value)}, not a list of tools"
            ) from None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadInputError(f"{row.where}: {name!r} is {_quote(value)}, not a list of tools")
    if name == "functions":
        return tuple({"type": "function", "function": tool} for tool in value)
    return tuple(value)


def _read_text(value: Any, name: str, row: Row) -> str:
    if isinstance(value, str):
        return checked_text(value, row.where, name)
    raise BadInputError(f"{row.where}: {name!r} is {_quote(value)}, not text{AS_TEXT}")


def _quote(value: Any) -> str:
    if value is None:
        return "null"
    return "empty" if value in ([], "") else f"{type(value).__name__} {str(value)[:40]!r}"
