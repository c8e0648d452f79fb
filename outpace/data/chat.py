"""Chat templates, which render conversations as text, and the assistant's answers in that text.

The tokenizer's chat template (Jinja, rendered as in transformers) renders a conversation as one
text. The template may mark the assistant's text with {% generation %} blocks. If it does not,
outpace renders two prefixes for each answer: the conversation before the answer, with the
generation prompt, and the conversation including the answer. Both must be prefixes of the whole
text. outpace checks this because some templates render earlier turns differently when more messages
follow.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import tokenizers

from outpace.data.content_parts import takes_parts, with_parts
from outpace.data.conversations import Message, Tool, conversation_of
from outpace.data.isolation import IsolatedError, call_isolated
from outpace.data.row import Row, checked_text
from outpace.data.template_omissions import (
    answers_of,
)
from outpace.data.tokenizer import Tokenizer
from outpace.data.tool_calls import takes_text, with_arguments
from outpace.records.errors import BadInputError, OutpaceError, shorten

# Limits on processor time and memory of a template, far above what useful ones need.
_TRIAL_CPU_S, CONVERSATION_CPU_S = 5.0, 60.0
MEMORY_BYTES = 2 << 30
# Limits on the length of a template's output: a constant, plus a multiple of the input's length.
_LONGEST_CHARACTERS, _LONGEST_TIMES = 1_000_000, 64

Span = tuple[int, int]  # characters [start, end) of a text

# Default for tokenizers without a template. Role markers are plain text, so no tokens have to be
# added. Answers end with the tokenizer's end-of-text token.
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
_CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# Jinja functions with random output.
_RANDOM = re.compile(r"\|\s*random\b|\blipsum\s*\(")
_QUOTED = re.compile(r"(['\"])([\w.-]+)\1")
# Date that templates write instead of the current one, so that a resumed run trains on the same
# text. Llama 3.1's template falls back to this date.
LEARNED_DATE = datetime(2024, 7, 26)


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer, with DEFAULT_TEMPLATE as its chat template if it has none.

    Raises BadInputError if the tokenizer has several named templates and none is the default.
    """
    if tokenizer.chat_template is not None:
        return tokenizer
    if tokenizer.chat_templates:
        raise BadInputError(
            f"the tokenizer has the chat templates {', '.join(map(repr, tokenizer.chat_templates))}"
            ", and none is called 'default'. Keep the one to use as chat_template in "
            f"{tokenizer.template_file or 'tokenizer_config.json'}."
        )
    return tokenizer.replace(tokenizer.inner, {"chat_template": DEFAULT_TEMPLATE})


def messages_of(row: Row) -> list[Message]:
    """Return the messages of a row in a supported format. Raises BadInputError for others."""
    return list(conversation_of(row).messages)


def _with_fixed_date(template: str) -> str:
    """Replace the current date in a template, from strftime_now, by the fixed LEARNED_DATE.

    Raises BadInputError if the rendered text could still change from one run to the next.
    """
    if (drawn := _RANDOM.search(template)) is not None:
        raise BadInputError(
            f"the tokenizer's chat template is not deterministic ({drawn.group().strip('( |')}), "
            "so a resumed run would train on different text. Set a chat_template without it in the "
            "tokenizer's folder."
        )
    fixed = _CLOCK.sub(lambda call: repr(LEARNED_DATE.strftime(call.group(2))), template)
    if "strftime_now(" in fixed:
        raise BadInputError(
            "the tokenizer's chat template computes the format that it passes to strftime_now, so "
            "a resumed run would train on different text. Write the format as a string literal in "
            "the template, or set chat_template in the tokenizer's folder."
        )
    return fixed


def _template_tokens(tokenizer: Tokenizer, template: str) -> dict[str, Any]:
    """Return the tokens that a template may refer to by name, such as bos_token.

    Raises BadInputError if the template refers to a token that is not in the vocabulary.
    """
    found, vocabulary = tokenizer.named_tokens, tokenizer.inner.get_vocab(with_added_tokens=True)
    for name, token in found.items():
        if token not in vocabulary and re.search(rf"\b{re.escape(name)}\b", template):
            raise BadInputError(
                f"the chat template writes {name}, but its value in the tokenizer is {token!r}, "
                "which is not in its vocabulary. Name another token in tokenizer_config.json, or "
                "add the token to tokenizer.json."
            )
    return {**found}


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as text, with the spans of the assistant's answers.

    Each span is the range of an answer in `text`, and `answers` holds the index of its message, or
    is None if the indices are unknown. `whole` is False if only the last answer was found in the
    text.
    """

    text: str
    spans: tuple[Span, ...]
    answers: tuple[int, ...] | None
    whole: bool = True


class ChatFormat:
    """A tokenizer and its chat template, ready to render conversations.

    `stop_id` is the token that ends an answer. If the template writes none, `stops` is False and
    `stop_id` is the end-of-text token. `special_names` matches the names of special tokens. Raises
    BadInputError if the template cannot be used.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers import PreTrainedTokenizerFast

        tokenizer = with_template(tokenizer)
        template = tokenizer.chat_template
        assert template is not None
        self.tokenizer = tokenizer
        self._template = template
        self._tool_template = tokenizer.chat_templates.get("tool_use", template)
        # All quoted names in the templates; these include the roles that the templates handle.
        self.roles = {name for _, name in _QUOTED.findall(template + self._tool_template)}
        self._names = _template_tokens(tokenizer, template + self._tool_template)
        self.dated = "strftime_now" in template + self._tool_template
        self._theirs = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer.inner, chat_template=template, **tokenizer.roles
        )
        # Without the post-processor, which may trim spaces from token offsets.
        self._inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
        self._inner.post_processor = None
        self._takes_text: dict[str, bool] = {}  # by template
        self._takes_parts: dict[str, bool] = {}
        self.stop_id, self.stops = self._find_stop_token()
        names = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self.special_names = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def _find_stop_token(self) -> tuple[int, bool]:
        """Return the id of the token that ends answers, and True.

        If the template writes no such token, return the id of the end-of-text token, and False. To
        find out, this renders and encodes a short conversation.
        """
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        where = "the first conversation tried, of two messages"

        def encode_trial() -> tuple[list[int], list[bool]]:
            try:
                return self.encode(self.render(talk, where))
            except _HeaderError as error:  # answers in the data may begin with it
                opened = {**talk[1], "content": f"{error.opening}b"}
                with suppress(BadInputError):
                    return self.encode(self.render([talk[0], opened], where))
                raise

        # Run in a process with limits: a template may loop forever or exhaust memory.
        with self._convert_template_errors(where):
            ids, said = call_isolated(encode_trial, _TRIAL_CPU_S, MEMORY_BYTES)
        special = {
            number
            for number, token in self.tokenizer.inner.get_added_tokens_decoder().items()
            if token.special
        }
        special.add(self.tokenizer.eos_id)
        ends = [i for i, target in zip(ids, said, strict=True) if target and i in special]
        return (ends[-1], True) if ends else (self.tokenizer.eos_id, False)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Render the conversation so far, followed by the generation prompt."""
        where = "the conversation"
        template = self._tool_template if tools else self._template
        with self._convert_template_errors(where):
            return call_isolated(
                lambda: self._render_text(messages, True, where, tools, template),
                CONVERSATION_CPU_S,
                MEMORY_BYTES,
            )

    def _render_text(
        self,
        messages: Sequence[Message],
        add_prompt: bool,
        where: str,
        tools: Sequence[Tool],
        template: str,
    ) -> str:
        messages = self._adapt_messages(messages, where, template)
        return self._apply_template(messages, add_prompt, where, tools, template)

    def _adapt_messages(
        self, messages: Sequence[Message], where: str, template: str
    ) -> Sequence[Message]:
        """Convert message contents and call arguments to the types that the template expects."""

        def render(trial: Sequence[Message]) -> str:
            return self._apply_template(trial, False, where, (), template)

        if any(message.get("tool_calls") for message in messages):
            if template not in self._takes_text:
                self._takes_text[template] = takes_text(render)
            messages = with_arguments(messages, self._takes_text[template], where)
        if template not in self._takes_parts:
            self._takes_parts[template] = takes_parts(render)
        return with_parts(messages) if self._takes_parts[template] else messages

    def _apply_template(
        self,
        messages: Sequence[Message],
        add_prompt: bool,
        where: str,
        tools: Sequence[Tool],
        template: str,
    ) -> str:
        with self._convert_template_errors(where):
            rendered = self._theirs.apply_chat_template(
                [dict(message) for message in messages], tokenize=False,
                add_generation_prompt=add_prompt, tools=[dict(tool) for tool in tools] or None,
                chat_template=template, **self._names,
            )  # fmt: skip
        return self._require_limited_text(rendered, where, messages, tools)

    def _require_limited_text(
        self, rendered: Any, where: str, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> str:
        """Return the rendered text. Raises BadInputError if it is far longer than its input."""
        text = checked_text(rendered, where, "the chat template's text")
        given = len(str(messages)) + len(str(tools))
        if len(text) > _LONGEST_CHARACTERS + _LONGEST_TIMES * given:
            raise BadInputError(
                f"{where}: the tokenizer's chat template{self._file_clause()} writes {len(text):,} "
                f"characters for a conversation of {given:,}. It may write at most "
                f"{_LONGEST_CHARACTERS:,}, plus {_LONGEST_TIMES} for each of the conversation's "
                "characters. Look for a loop in the template, and shorten what it writes."
            )
        return text

    def _render_before_answer(
        self,
        messages: Sequence[Message],
        where: str,
        tools: Sequence[Tool],
        template: str,
    ) -> str:
        """Render the messages before an answer, followed by the generation prompt.

        Raises BadInputError if there are no messages and the template requires one, as most do.
        """
        try:
            return self._render_text(messages, True, where, tools, template)
        except BadInputError:
            if messages:
                raise
        raise BadInputError(
            f"{where}: the first message is from the assistant, so it answers nothing. Put a "
            "user's or a system message before it, or use a template with {% generation %} blocks."
        )

    def text(self, messages: Sequence[Message], where: str, tools: Sequence[Tool] = ()) -> str:
        """Render a conversation as text, without searching for answers."""
        template = _with_fixed_date(self._tool_template if tools else self._template)
        return self._render_text(messages, False, where, tools, template)

    def render(
        self, messages: Sequence[Message], where: str, tools: Sequence[Tool] = ()
    ) -> RenderedConversation:
        """Render a conversation and find the assistant's answers in the text.

        The fixed LEARNED_DATE replaces the current date. If the last answer cannot be found, the
        messages after it are dropped, except if they include a tool's message. If only earlier
        answers cannot be found, the result has just the last one. Raises BadInputError, naming
        `where`, if the template fails or the last answer is still not found.
        """
        template = _with_fixed_date(self._tool_template if tools else self._template)
        if _MARKED.search(template):
            with self._convert_template_errors(where):
                return self._render_generation_marks(
                    self._adapt_messages(messages, where, template), where, tools, template
                )
        text = self._render_text(messages, False, where, tools, template)
        answers = answers_of(messages)
        spans = []
        before = through = ""
        for number in answers:
            before = self._render_before_answer(messages[:number], where, tools, template)
            through = self._render_text(messages[: number + 1], False, where, tools, template)
            if not text.startswith(through) and text.endswith(self.tokenizer.eos_token or ""):
                # Some templates, such as Phi's, write the end-of-text token only after the last
                # message.
                through = through.removesuffix(self.tokenizer.eos_token or "")
            is_prefix = text.startswith(through) and through.startswith(before)
            spans.append((len(before), len(through)) if is_prefix else None)
        found = tuple(span for span in spans if span is not None)
        if len(found) == len(spans):
            return RenderedConversation(text, found, answers)
        if spans[-1] is None:
            rest = messages[answers[-1] + 1 :]  # no answer depends on these
            if rest and all(message["role"] != "tool" for message in rest):
                return self.render(messages[: -len(rest)], where, tools)
            asked = self._render_text(messages[: answers[-1]], False, where, tools, template)
            _require_prompt_in_answer(asked, before, through, where)
            raise BadInputError(
                f"{where}: outpace cannot find what the assistant says: the tokenizer's chat "
                "template "
                "renders the start of a conversation differently if more messages follow. Use a "
                "template with {% generation %} blocks, or set chat_template in the tokenizer's "
                "folder."
            )
        return RenderedConversation(text, (spans[-1],), answers[-1:], whole=False)

    def _render_generation_marks(
        self, messages: Sequence[Message], where: str, tools: Sequence[Tool], template: str
    ) -> RenderedConversation:
        """Render a conversation with a template that marks the assistant's text.

        `answers` is None in the result unless there is one marked span per assistant message.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        # `render_jinja_template` also returns spans, which its annotation omits.
        render: Callable[..., Any] = render_jinja_template
        texts, places = render(
            conversations=[[dict(message) for message in messages]],
            tools=[*tools] or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._names,
        )
        text = self._require_limited_text(texts[0], where, messages, tools)
        spans, answers = tuple((int(start), int(end)) for start, end in places[0]), None
        if len(spans) == len(answers_of(messages)):
            answers = answers_of(messages)
        return RenderedConversation(text, spans, answers)

    @contextmanager
    def _convert_template_errors(self, where: str) -> Iterator[None]:
        try:
            yield
        except IsolatedError as error:
            raise BadInputError(
                f"{where}: the tokenizer's chat template{self._file_clause()} cannot be used: "
                f"{error}"
            ) from None
        except (OutpaceError, MemoryError):  # a signal, out of memory, or already a BadInputError
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            place = self._file_clause()
            if (line := _find_template_line(error)) is not None:
                place += f", line {line},"
            raise BadInputError(
                f"{where}: the tokenizer's chat template{place} refuses the conversation: {reason}"
            ) from None

    def _file_clause(self) -> str:
        """Return " in FILE" to append to "template" in messages, or "" if the file is unknown."""
        file = self.tokenizer.template_file
        return "" if file is None else f" in {file}"

    def encode(
        self, rendered: RenderedConversation, spans: Sequence[Span] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Encode the text; also return for each token whether it starts inside one of `spans`.

        `spans` defaults to all answers.
        """
        ids, said, _ = self.encode_joined(rendered, rendered.spans if spans is None else spans)
        return ids, said

    def encode_joined(
        self, rendered: RenderedConversation, spans: Sequence[Span]
    ) -> tuple[list[int], list[bool], bool]:
        """Encode like `encode`; also return whether any span starts in the middle of a token.

        Such a token is not a training target.
        """
        encoding = self._inner.encode(rendered.text, add_special_tokens=False)
        starts = {start for start, _ in spans}
        joined = any(
            not starts.isdisjoint(range(first + 1, end)) for first, end in encoding.offsets
        )
        return list(encoding.ids), _mask_spans(encoding.offsets, spans), joined


def _mask_spans(places: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token offset whether it starts in a span. Offsets and spans are sorted."""
    found, at = [], 0
    for start, _ in places:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        found.append(at < len(spans) and start >= spans[at][0])
    return found


class _HeaderError(BadInputError):
    """Error for a rendered answer in which the end of the generation prompt is missing.

    `opening` is the missing text.
    """

    opening = ""


def _require_prompt_in_answer(
    conversation: str, with_prompt: str, with_answer: str, where: str
) -> None:
    """Raise _HeaderError if an answer does not begin with the template's generation prompt.

    `conversation` is the text before the answer, `with_prompt` adds the generation prompt to it,
    and `with_answer` adds the answer instead.
    """
    most = min(len(with_prompt), len(with_answer))
    shared = next((at for at in range(most) if with_prompt[at] != with_answer[at]), most)
    if shared < len(conversation):
        return
    error = _HeaderError(
        f"{where}: the tokenizer's chat template asks for an answer with "
        f"{with_prompt[len(conversation) :]!r}, but writes the answer as "
        f"{shorten(with_answer[len(conversation) :], 80)!r}, so the model would be prompted "
        "differently from how it is trained. Begin the answers in the data with the end "
        "of the prompt, if the template keeps that, or change the template in the tokenizer's "
        "folder (chat_template)."
    )
    error.opening = with_prompt[shared:]
    raise error


def _find_template_line(error: Exception) -> int | None:
    line = getattr(error, "lineno", None)
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == "<template>":
            line = step.tb_lineno
        step = step.tb_next
    return line
