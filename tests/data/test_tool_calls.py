"""Calls of tools are learnt as a template writes them, however data and template hold arguments."""

import pytest

from outpace.data.chat import ChatFormat
from outpace.data.conversation_samples import encode_all
from outpace.data.padded_batches import IGNORED
from outpace.data.row import Row
from outpace.data.tokenizer_training import train_tokenizer
from outpace.records.errors import BadInputError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}[{{ f.name }} ARGUMENTS]"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_JSON = "{{ f.arguments | tojson }}"
AS_IT_IS = "{{ f.arguments }}"
JOINED = "{{ '' + f.arguments }}"
BOTH = "{{ f.arguments if f.arguments is string else f.arguments | tojson }}"
BY_KEY = "{% for k, v in f.arguments.items() %}{{ k }}={{ v }};{% endfor %}"


@pytest.fixture(scope="module")
def learnt():
    words = train_tokenizer(["user assistant tool see place it is as the answer"] * 4, 400)
    words.inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])

    def what_is_learnt(template, *messages):
        chat = ChatFormat(words.replace(words.inner, {"chat_template": template}))
        row = Row({"messages": [{"role": "user", "content": "a"}, *messages]}, "line 1")
        targets = encode_all(chat, [row], 512).samples.values["targets"]
        ids = [int(target) for target in targets if target != IGNORED]
        return words.inner.decode(ids, skip_special_tokens=False)

    return what_is_learnt


def call(arguments, **more):
    function = {"name": "see", "arguments": arguments}
    held = {"type": "function", "function": function} if not more.get("flat") else function
    return {"role": "assistant", "content": more.get("content"), "tool_calls": [held]}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("told", ['{"place": "é"}', {"place": "é"}])
@pytest.mark.parametrize(
    ("way", "written"),
    [
        (AS_JSON, '{"place": "é"}'),
        (AS_IT_IS, '{"place": "é"}'),
        (JOINED, '{"place": "é"}'),
        (BOTH, '{"place": "é"}'),
        (BY_KEY, "place=é;"),
    ],
)
def test_arguments_are_written_once(learnt, way, written, told, flat):
    found = learnt(TEMPLATE.replace("ARGUMENTS", way), call(told, flat=flat))
    assert found == f"[see {written}]<|im_end|>\n"


def test_a_text_for_a_template_that_takes_texts_stays_as_it_is(learnt):
    given = '{"a":1,  "b":2}'
    assert given in learnt(TEMPLATE.replace("ARGUMENTS", AS_IT_IS), call(given))


@pytest.mark.parametrize(
    ("told", "written"),
    [
        ("", "{}"),
        ('"{\\"a\\": 1}"', '{"a": 1}'),  # encoded twice
        ("print(1)", '"print(1)"'),  # not JSON: a text
        ("[1]", '"[1]"'),
    ],
)
def test_texts_that_are_no_object(learnt, told, written):
    assert learnt(TEMPLATE.replace("ARGUMENTS", AS_JSON), call(told)).startswith(f"[see {written}]")


@pytest.mark.parametrize("way", [AS_JSON, AS_IT_IS, JOINED])
@pytest.mark.parametrize("told", [None, "", " ", "null", "{}", {}, "absent"])
def test_no_arguments_are_an_empty_object(learnt, way, told):
    message = call(told)
    if told == "absent":
        del message["tool_calls"][0]["function"]["arguments"]
    assert learnt(TEMPLATE.replace("ARGUMENTS", way), message).startswith("[see {}]")


def test_content_beside_calls_is_kept(learnt):
    found = learnt(TEMPLATE.replace("ARGUMENTS", AS_JSON), call({"a": 1}, content="I look."))
    assert found == 'I look.[see {"a": 1}]<|im_end|>\n'


def test_a_template_that_writes_no_calls_is_refused(learnt):
    with pytest.raises(BadInputError, match=r"line 1: the assistant calls a tool, .* tool_calls"):
        learnt(TEMPLATE.replace("m.tool_calls or []", "[]"), call({"a": 1}))
