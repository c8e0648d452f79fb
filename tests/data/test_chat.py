"""What of a conversation is learnt: the assistant's words, whatever the template."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.data.chat import ChatFormat, encode_all, messages_of
from outpace.data.padded import IGNORED
from outpace.data.row_files import Row
from outpace.data.tokenizer import train_tokenizer
from outpace.records.errors import BadInputError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes earlier answers in another way once others follow, as templates of thinking models do.
FORGETFUL = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think></think>' }}{% endif %}{{ m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SHUFFLED = "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def plain():
    learnt = train_tokenizer(["user assistant system hello there it is as the answer"] * 4, 400)
    learnt.inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return learnt.changed(learnt.inner, {})


@pytest.fixture(scope="module")
def formats(plain):
    """outpace's own template, whose answers are marked, and one where they are found."""
    return [ChatFormat(plain), ChatFormat(plain.changed(plain.inner, {"chat_template": CHATML}))]


def row(*turns):
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)]
    return Row({"messages": messages}, "line 1")


WORDS = st.text(string.printable + "é日本 ", max_size=20)


@settings(max_examples=60)
@given(st.lists(st.tuples(WORDS, WORDS.filter(str)), min_size=1, max_size=3))
def test_what_is_learnt_decodes_to_the_assistants_words(formats, pairs):
    for chat, ends in zip(formats, ("<|endoftext|>", "<|im_end|>\n"), strict=True):
        rendered = chat.render(
            messages_of(row(*(text for pair in pairs for text in pair))), "a conversation"
        )
        ids, said = chat.encode(rendered)
        learnt = [i for i, mine in zip(ids, said, strict=True) if mine]
        words = chat.tokenizer.inner.decode(learnt, skip_special_tokens=False)
        assert words == "".join(answer + ends for _, answer in pairs)
        assert chat.tokenizer.inner.decode(ids, skip_special_tokens=False) == rendered.text


def test_an_answer_ends_with_the_templates_own_token(formats, plain):
    vocabulary = plain.inner.get_vocab()
    ends = [chat.stop_id for chat in formats]
    assert ends == [vocabulary["<|endoftext|>"], vocabulary["<|im_end|>"]]


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "input": "", "output": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ],
)
def test_usual_forms_mean_the_same(values):
    said = [(m["role"], m["content"]) for m in messages_of(Row(values, "line 1"))]
    assert said == [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"text": "a"}, "line 1 has 'text', but a conversation is one of"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [{"content": "a"}]}, "has no role"),
        ({"prompt": "a", "completion": 3}, "'completion' is int '3', not text"),
    ],
)
def test_other_forms_are_refused(values, said):
    with pytest.raises(BadInputError, match=said):
        messages_of(Row(values, "line 1"))


def test_a_template_that_rewrites_earlier_answers_shows_the_last(plain):
    chat = ChatFormat(plain.changed(plain.inner, {"chat_template": FORGETFUL}))
    found = encode_all(chat, [row("q", "one", "r", "two")], 64)
    targets = found.samples.values["targets"]
    learnt = [int(t) for t in targets if t != IGNORED]
    assert chat.tokenizer.decode(learnt) == "<think></think>two\n"
    assert found.partial == 1


def test_a_template_in_which_answers_cannot_be_found_is_refused(plain):
    with pytest.raises(BadInputError, match="does not begin a conversation with what it makes"):
        ChatFormat(plain.changed(plain.inner, {"chat_template": SHUFFLED}))


def test_long_conversations_are_cut_and_counted(formats):
    rows = [row("hello", "there"), row("hello " * 40, "there"), row("hello", "there " * 40)]
    found = encode_all(formats[0], rows, 48)
    assert (found.cut, found.empty, len(found.samples)) == (2, 1, 2)
    assert found.samples.lengths.max() == 48
    tokens, targets = found.samples.values["tokens"], found.samples.values["targets"]
    here = slice(int(found.samples.starts[0]), int(found.samples.starts[1]))
    kept = targets[here] != IGNORED
    assert (targets[here][:-1][kept[:-1]] == tokens[here][1:][kept[:-1]]).all()
    with pytest.raises(BadInputError, match="none of 1 conversations has an answer"):
        encode_all(formats[0], rows[1:2], 48)
