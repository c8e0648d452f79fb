"""Conversations to samples that learn what the assistant says.

A conversation is rendered as one text by the tokenizer's chat template (Jinja, as transformers
renders it). What the assistant says in it is found by the template's own marks ({% generation %}
blocks) where it has them. Else by rendering prefixes: the conversation up to an answer, with the
header that asks for one, and up to its end. Both have to be prefixes of the whole text, which is
checked: some templates write earlier turns in another way once others follow.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tokenizers

from outpace.data.padded import IGNORED, Ragged, ragged
from outpace.data.row_files import Row
from outpace.data.tokenizer import Tokenizer
from outpace.records.errors import BadInputError

Message = Mapping[str, Any]
Span = tuple[int, int]  # characters [start, end) of a text

# For a tokenizer that brings none. Its marks are plain text, so that it needs no new tokens, and
# an answer ends with the tokenizer's own end of text.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a question and its answer are called in data that is no list of messages.
_PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"),
    ("instruction", "response"), ("question", "answer"),
)  # fmt: skip
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_FORMS = (
    "'messages' (a list of {role, content}), 'conversations' (a list of {from, value}), "
    + ", ".join(f"{ask!r} and {answer!r}" for ask, answer in _PAIRS)
)


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with a chat template: its own, or DEFAULT_TEMPLATE. Saved with the model."""
    if tokenizer.chat_template is not None:
        return tokenizer
    return tokenizer.changed(tokenizer.inner, {"chat_template": DEFAULT_TEMPLATE})


def messages_of(row: Row) -> list[Message]:
    """The messages of a row in one of the usual forms. Raises BadInputError for another."""
    values = row.values
    for name in ("messages", "conversations"):
        if values.get(name) is not None:
            return [_message(one, row) for one in _listed(values[name], name, row)]
    for ask, answer in _PAIRS:
        if values.get(ask) is not None and values.get(answer) is not None:
            asked = _text(values[ask], ask, row)
            if ask == "instruction" and values.get("input"):
                asked = f"{asked}\n\n{_text(values['input'], 'input', row)}"
            said = _text(values[answer], answer, row)
            turns = (("system", values.get("system")), ("user", asked), ("assistant", said))
            return [{"role": role, "content": text} for role, text in turns if text is not None]
    there = ", ".join(map(repr, values))
    raise BadInputError(f"{row.where} has {there}, but a conversation is one of: {_FORMS}.")


def _listed(value: Any, name: str, row: Row) -> list[Any]:
    if isinstance(value, list) and value:
        return value
    raise BadInputError(f"{row.where}: {name!r} is {_show(value)}, not a list of messages")


def _message(one: Any, row: Row) -> Message:
    if isinstance(one, dict) and "from" in one and "value" in one:
        one = {"role": one["from"], "content": one["value"]}
    if not isinstance(one, dict) or not isinstance(one.get("role"), str):
        raise BadInputError(f"{row.where}: a message is {_show(one)}, and has no role")
    role = _ROLES.get(one["role"], one["role"])
    content = one.get("content")
    if content is None and one.get("tool_calls"):
        content = ""
    return {**one, "role": role, "content": _text(content, "content", row)}


def _text(value: Any, name: str, row: Row) -> str:
    if isinstance(value, str):
        return value
    raise BadInputError(f"{row.where}: {name!r} is {_show(value)}, not text")


def _show(value: Any) -> str:
    return "empty" if value in ([], "") else f"{type(value).__name__} {str(value)[:40]!r}"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and where the assistant speaks.

    `whole` is False where the template let only the last answer be found.
    """

    text: str
    spans: tuple[Span, ...]
    whole: bool = True


class ChatFormat:
    """A tokenizer with its chat template, ready to render. Raises BadInputError for a broken one.

    `stop_id` is the token with which the template ends an answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers import PreTrainedTokenizerFast

        tokenizer = with_template(tokenizer)
        template = tokenizer.chat_template
        assert template is not None
        self.tokenizer = tokenizer
        self._template = template
        self._marked = bool(_MARKED.search(template))
        self._theirs = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer.inner, chat_template=template, **tokenizer.roles
        )
        # Without a post-processor, which may trim blanks off the places of tokens.
        self._inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
        self._inner.post_processor = None
        self.stop_id = self._stop_id()

    def _stop_id(self) -> int:
        """The last special token of an answer, where it has one; else the end of text."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        ids, said = self.encode(self.render(talk, "a conversation of two messages"))
        special = {
            number
            for number, token in self.tokenizer.inner.get_added_tokens_decoder().items()
            if token.special
        }
        ends = [i for i, target in zip(ids, said, strict=True) if target and i in special]
        return ends[-1] if ends else self.tokenizer.eos_id

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation so far, with the header of the answer to come."""
        return self._text(messages, True, "the conversation")

    def _text(self, messages: Sequence[Message], ask: bool, where: str) -> str:
        with _refusals(where):
            rendered = self._theirs.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=ask
            )
        return str(rendered)

    def render(self, messages: Sequence[Message], where: str) -> Rendered:
        """The whole text and the assistant's part of it. Raises BadInputError, naming `where`."""
        if self._marked:
            with _refusals(where):
                return self._generated(messages)
        text = self._text(messages, False, where)
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._span(messages, number, text, where) for number in answers]
        found = tuple(span for span in spans if span is not None)
        if len(found) == len(spans):
            return Rendered(text, found)
        if spans[-1] is None:
            raise BadInputError(
                f"{where}: what the assistant says cannot be found: the tokenizer's chat template "
                "does not begin a conversation with what it makes of its beginning. Use a template "
                "with {% generation %} blocks, or set chat_template in the tokenizer's folder."
            )
        return Rendered(text, (spans[-1],), whole=False)

    def _generated(self, messages: Sequence[Message]) -> Rendered:
        """The text, and where the template's own marks say that the assistant speaks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # Declared to return a text, it returns texts and places.
        render: Callable[..., Any] = render_jinja_template
        texts, places = render(
            conversations=[[dict(message) for message in messages]],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **self._theirs.special_tokens_map,
        )
        return Rendered(texts[0], tuple((int(start), int(end)) for start, end in places[0]))

    def _span(self, messages: Sequence[Message], number: int, text: str, where: str) -> Span | None:
        """Of answer `number`: from after its header to before the next; None if not prefixes."""
        before = self._text(messages[:number], True, where)
        through = self._text(messages[: number + 1], False, where)
        if not (text.startswith(through) and through.startswith(before)):
            return None
        return len(before), len(through)

    def encode(self, rendered: Rendered) -> tuple[list[int], list[bool]]:
        """Ids of the text and which of them the assistant writes: those that begin in a span."""
        encoding = self._inner.encode(rendered.text, add_special_tokens=False)
        return list(encoding.ids), _inside(encoding.offsets, rendered.spans)


def _inside(places: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each place, in order, begins in one of the spans, which are in order."""
    found, at = [], 0
    for start, _ in places:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        found.append(at < len(spans) and start >= spans[at][0])
    return found


@dataclass(frozen=True)
class Conversations:
    """Samples of conversations, and how many of them could not be used whole.

    `cut` were longer than a sample, `empty` have nothing to learn (in what is left of them), and of
    `partial` the template shows the last answer only.
    """

    samples: Ragged
    cut: int
    empty: int
    partial: int


def encode_all(chat: ChatFormat, rows: Iterable[Row], seq_len: int) -> Conversations:
    """Tokens and targets, −100 on whatever the assistant does not say.

    A target is the token after: a sample of S tokens reads S and predicts S. What is longer is
    cut at its end. Raises BadInputError where nothing is left to learn from.
    """
    found, cut, empty, partial = [], 0, 0, 0
    for row in rows:
        rendered = chat.render(messages_of(row), row.where)
        ids, said = chat.encode(rendered)
        tokens, nexts = ids[:-1][:seq_len], list(zip(ids, said, strict=True))[1 : seq_len + 1]
        targets = [token if mine else IGNORED for token, mine in nexts]
        cut += len(ids) - 1 > seq_len
        partial += not rendered.whole
        if any(target != IGNORED for target in targets):
            found.append({"tokens": tokens, "targets": targets})
        else:
            empty += 1
    if not found:
        raise BadInputError(
            f"none of {empty} conversations has an answer of the assistant within {seq_len} "
            "tokens. Give others, or a longer --seq-len."
        )
    pad = chat.tokenizer.pad_id
    fill = {"tokens": chat.tokenizer.eos_id if pad is None else pad, "targets": IGNORED}
    return Conversations(ragged(found, fill), cut, empty, partial)


@contextmanager
def _refusals(where: str) -> Iterator[None]:
    """A template raises what it likes."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInputError(
            f"{where}: the tokenizer's chat template refuses it: {reason}"
        ) from None
