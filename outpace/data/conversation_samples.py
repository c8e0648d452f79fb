"""Samples made from conversations, with the assistant's answers as targets."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from outpace.data.chat import (
    CONVERSATION_CPU_S,
    MEMORY_BYTES,
    ChatFormat,
    RenderedConversation,
    Span,
)
from outpace.data.conversations import Conversation, Message, conversation_of
from outpace.data.isolation import IsolatedError, iterate_isolated
from outpace.data.padded_batches import IGNORED, RaggedSamples, concatenate_samples
from outpace.data.row import Row
from outpace.data.template_omissions import (
    answers_of,
    require_calls_written,
    unwritten_keys,
    unwritten_roles,
)
from outpace.records.errors import BadInputError

# Longest start of an answer, such as <think>, that the generation prompt may already contain.
_HEADER_CHARACTERS = 64


@dataclass(frozen=True)
class Conversations:
    """Encoded conversations, and which of them could not be used exactly as written.

    - `cut`: number of conversations that are longer than a sample
    - `empty`: number of conversations without a target within the length of a sample
    - `partial`: number of conversations of which only the last answer was found
    - `altered`, `toolless`, `unwritten`: locations where the template omits text of an answer, the
      tools, or a message
    - `marked`: locations where the text contains names of special tokens
    - `wordless`: locations where an answer is empty
    - `joined`: locations where an answer starts in the middle of a token
    - `unread`: number of conversations by ignored column or message key
    - `fingerprint`: hash of all ids and target flags before truncation
    """

    samples: RaggedSamples
    fingerprint: str
    cut: int
    empty: int
    partial: int
    altered: tuple[str, ...] = ()
    toolless: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()
    wordless: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    unread: Mapping[str, int] = field(default_factory=dict)


def encode_all(
    chat: ChatFormat, rows: Iterable[Row], seq_len: int, part: str = ""
) -> Conversations:
    """Encode conversations; tokens that are not trained on have the target −100.

    Targets are shifted by one token, so a full sample uses `seq_len` + 1 ids; longer conversations
    are truncated. `part` says in the error message which conversations these are (" to train on").
    Raises BadInputError if no conversation has a target.
    """
    found, cut, empty, partial, silent = [], 0, 0, 0, 0
    altered, toolless, unwritten, marked, wordless, joined = [], [], [], [], [], []
    unread: Counter[str] = Counter()
    digest = xxhash.xxh3_128()
    for encoded in _encode_rows(chat, rows):
        unread.update(encoded.unread)
        toolless += [encoded.where] * encoded.toolless
        unwritten += [f"{encoded.where}: {role!r}" for role in encoded.unwritten[:1]]
        altered += [encoded.where] * encoded.altered
        marked += [encoded.where] * encoded.marked
        wordless += [encoded.where] * encoded.wordless
        joined += [encoded.where] * encoded.joined
        ids, said = encoded.ids, encoded.said
        digest.update(np.asarray([len(ids), *ids, *said], np.int64).tobytes())
        tokens, nexts = ids[:-1][:seq_len], list(zip(ids, said, strict=True))[1 : seq_len + 1]
        targets = [token if mine else IGNORED for token, mine in nexts]
        cut += len(ids) - 1 > seq_len
        partial += not encoded.whole
        silent += not any(said)
        if any(target != IGNORED for target in targets):
            found.append({"tokens": tokens, "targets": targets})
        else:
            empty += 1
    if not found:
        raise BadInputError(
            f"none of {empty} conversations{part} has an assistant's answer within {seq_len} "
            + (
                f"tokens; {silent} of them have no answer to train on at all. Use other data."
                if silent
                else "tokens. Use other data, or a longer --seq-len."
            )
        )
    pad = chat.tokenizer.pad_id
    fill = {"tokens": chat.tokenizer.eos_id if pad is None else pad, "targets": IGNORED}
    return Conversations(
        concatenate_samples(found, fill), digest.hexdigest(), cut, empty, partial, tuple(altered),
        tuple(toolless), tuple(unwritten), tuple(marked), tuple(wordless), tuple(joined),
        dict(unread),
    )  # fmt: skip


@dataclass(frozen=True)
class _EncodedMessages:
    """One encoded conversation.

    `said` says for each of its token ids whether it is a target, and `where` is the location of the
    conversation. The other fields are flags for the fields of `Conversations`.
    """

    where: str
    ids: list[int]
    said: list[bool]
    whole: bool
    altered: bool
    toolless: bool
    unwritten: tuple[str, ...]
    marked: bool
    wordless: bool
    joined: bool
    unread: tuple[str, ...]


def _encode_rows(chat: ChatFormat, rows: Iterable[Row]) -> Iterator[_EncodedMessages]:
    """Encode each conversation in a process with resource limits.

    Raises BadInputError, naming the row, if encoding fails.
    """
    listed, done = list(rows), 0

    def encode() -> Iterator[_EncodedMessages]:
        return (_encode_row(chat, row) for row in listed)

    try:
        for encoded in iterate_isolated(encode, CONVERSATION_CPU_S, MEMORY_BYTES):
            yield encoded
            done += 1
    except IsolatedError as error:
        raise BadInputError(
            f"{listed[min(done, len(listed) - 1)].where}: the chat template or the tokenizer "
            f"fails on this conversation: {str(error).rstrip('.')}. Correct or remove the "
            "conversation, or use another chat template"
        ) from None


def _encode_row(chat: ChatFormat, row: Row) -> _EncodedMessages:
    talk = conversation_of(row, chat.roles)
    rendered = chat.render(talk.messages, row.where, talk.tools)
    bare = talk.tools and rendered.text == chat.render(talk.messages, row.where).text
    spans = _find_target_spans(chat, rendered, talk, row.where)
    ids, said, joined = chat.encode_joined(rendered, spans)
    marked = any(chat.special_names.search(str(one["content"])) for one in talk.messages)
    wordless = any(
        mine and not str(one["content"]).strip() and not one.get("tool_calls")
        for one, mine in zip(talk.messages, talk.learned, strict=True)
    )

    def render(others: Sequence[Message]) -> str:
        return chat.text(others, row.where, talk.tools)

    unwritten = unwritten_roles(talk.messages, rendered.text, render)
    unread = (*talk.unread, *unwritten_keys(talk, render))
    return _EncodedMessages(
        row.where, ids, said, rendered.whole, _alters_answers(rendered, talk), bool(bare),
        unwritten, marked, wordless, joined, unread,
    )  # fmt: skip


def _find_target_spans(
    chat: ChatFormat, rendered: RenderedConversation, talk: Conversation, where: str
) -> tuple[Span, ...]:
    answers = answers_of(talk.messages)

    def render(others: Sequence[Message]) -> str:
        return chat.text(others, where, talk.tools)

    for number in answers:
        message = talk.messages[number]
        if message.get("tool_calls") and talk.learned[number]:
            require_calls_written(talk, number, where, render)
    if all(talk.learned[number] for number in rendered.answers or answers):
        return rendered.spans
    if rendered.answers is None:
        raise BadInputError(
            f"{where}: some of its answers are marked as not to be trained on, but the chat "
            "template does not have one {% generation %} block per answer, so these answers "
            "cannot be told apart from the others."
        )
    pairs = zip(rendered.answers, rendered.spans, strict=True)
    return tuple(span for number, span in pairs if talk.learned[number])


def _alters_answers(rendered: RenderedConversation, talk: Conversation) -> bool:
    """Return whether the template omits text of an answer to train on, ignoring white space."""
    if rendered.answers is None:
        return len(rendered.spans) < len(answers_of(talk.messages))
    return any(
        talk.learned[number]
        and not _is_written(
            talk.messages[number]["content"], rendered.text[:start], rendered.text[start:end]
        )
        for number, (start, end) in zip(rendered.answers, rendered.spans, strict=True)
    )


def _is_written(content: str, before: str, span: str) -> bool:
    """Return whether the rendered span has the whole content of an answer.

    The content may begin in the text `before` the span, since a generation prompt may end with the
    first words of an answer, such as <think>. White space is ignored.
    """
    words, answer = ("".join(text.split()) for text in (content, span))
    if words in answer:
        return True
    header = "".join(before.split())
    return any(
        header.endswith(words[:begun]) and words[begun:] in answer
        for begun in range(1, min(len(words), _HEADER_CHARACTERS) + 1)
    )
