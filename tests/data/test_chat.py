"""What of a conversation is learnt: the assistant's words, whatever the template."""

import json
import string

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.data.chat import DEFAULT_TEMPLATE, ChatFormat, messages_of
from outpace.data.conversation_samples import encode_all
from outpace.data.conversations import conversation_of
from outpace.data.padded_batches import IGNORED
from outpace.data.row import Row
from outpace.data.rows import read_tables
from outpace.data.tokenizer_files import load_tokenizer
from outpace.data.tokenizer_training import train_tokenizer
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
    return learnt.replace(learnt.inner, {})


@pytest.fixture(scope="module")
def formats(plain):
    """outpace's own template, whose answers are marked, and one where they are found."""
    return [ChatFormat(plain), ChatFormat(plain.replace(plain.inner, {"chat_template": CHATML}))]


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
        ({"text": "a"}, "To train on texts as they are, leave --task chat out."),
        ({"text": "a", "label": 1}, "To train a classifier of texts, use --task classify."),
        ({"source": "a", "target": "b"}, "Rename the columns to two of these names."),
        (
            {"dialog": [{"role": "user", "content": "a"}], "id": 1},
            "Its 'dialog' is a list of messages: rename it to 'messages'",
        ),
        ({"thread": [{"text": "a", "role": "prompter"}]}, "rename it to 'messages', and the keys"),
        (
            {"role": "user", "content": "a"},
            "it is one message, and a row holds a whole conversation",
        ),
        ({"from": "human", "value": "a"}, "Write the messages of each into one row"),
        ({"messages": '[{"role": "user"}]'}, "it is JSON inside a text. Decode it"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "DPO.*To train on the preferred answers"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": []}, r"line 1 has .*\(DPO and"),
        ({"prompt": "a", "completion": "b", "label": False}, "marks its answer as unwanted"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ],
                "label": False,
            },
            "'label': false.*If the column means something else, rename it",
        ),
        ({"prompt": "a", "completion": "b", "kto_tag": "False"}, "'kto_tag': false"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": [{"type": "text", "text": "b", "weight": -1}],
                    },
                ]
            },
            "a part of a message has the weight -1, and only whole messages",
        ),
        ({"input_ids": [1, 2], "labels": [1, 2]}, "already tokenised.*into a .bin file"),
        ({"data": [{"prompt": "a", "completion": "b"}]}, "Its 'data' is a list of 1 objects: if"),
        ({"conversations": [{"messages": [], "id": 1}]}, "no role. Its 'conversations' is a list"),
        ({"prompt": ["a", "b"], "completion": ["c", "d"]}, "'prompt' is list.* columns of 2 rows"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": '[{"a": 1, "a": 2}]'}, "twice"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1,"a":2}'}}],
                    }
                ]
            },
            "line 1: in the arguments of a call an object has the key 'a' twice",
        ),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": None}, "'messages' is null, not a list of messages"),
        (
            {"messages": [{"role": "user", "text": "a"}]},
            "'user' has 'role', 'text', and no content. Rename the key of its text to 'content'",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "value": "b"}]},
            "has both 'content' .str 'a'. and 'value' .str 'b'.",
        ),
        ({"conversations": [{"role": "user", "from": "gpt", "value": "b"}]}, "both 'role' .str"),
        ({"prompt": "a", "completion": "b", "input": 0}, "'input' is int '0', not text"),
        ({"prompt": "a", "completion": "b", "system": 0}, "'system' is int '0', not text"),
        ({"messages": [{"content": "a"}]}, "has no role"),
        ({"prompt": "a", "completion": 3}, "'completion' is int '3', not text"),
        ({"prompt": "a", "completion": None}, "'completion' is null, not text. Write it as a text"),
        ({"prompt": "a", "completion": []}, "'completion' is empty, and 'prompt' is text. Write"),
        ({"prompt": ["a"], "completion": "b"}, "'prompt' is list .* and 'completion' is text"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role 'narrator'. Known"),
        ({"conversations": [{"from": "somebody", "value": "a"}]}, "unknown role 'somebody'"),
        ({"prompt": "a", "completion": "b", "history": ["c"]}, "Each of its entries must be a"),
        ({"prompt": "a", "completion": "b\ud800"}, "half of a surrogate pair.* at character 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "type 'image_url', but only text",
        ),
        (
            {"messages": [{"role": "assistant", "content": ["yes", "no"]}]},
            "line 1: a message has a list of 2 texts .str 'yes', …., which may be parts",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "the weight 0.5; it must be 0",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "train": "no"}]},
            "the train 'no'; it must be 0",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "masked": 2}]},
            "the masked 2; it must be 1 or true .not trained on. or 0",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "loss_scale": [0, 1]}]},
            "the loss_scale .0, 1.; it must be 0",
        ),
        (
            {"system": "x", "messages": [{"role": "system", "content": "y"}]},
            "has two system prompts: 'system' is str 'x'",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "none"}, "not a list of tools"),
    ],
)
def test_other_forms_are_refused(values, said):
    with pytest.raises(BadInputError, match=said):
        messages_of(Row(values, "line 1"))


def parts_of(values, roles=()):
    found = conversation_of(Row(values, "line 1"), roles)
    return [
        (m["role"], m["content"], mine)
        for m, mine in zip(found.messages, found.learned, strict=True)
    ]


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LEARNT = [("user", "a", False), ("assistant", "b", True)]
SYSTEM = ("system", "s", False)


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"system": "s", "messages": TALK}, [SYSTEM, *LEARNT]),
        ({"system": "s", "messages": [{"role": "system", "content": "s"}, *TALK]},
         [SYSTEM, *LEARNT]),
        ({"system": "", "messages": TALK}, LEARNT),
        ({"system_prompt": "s", "prompt": "a", "completion": "b"}, [SYSTEM, *LEARNT]),
        ({"system_message": "s", "messages": TALK}, [SYSTEM, *LEARNT]),
        ({"instruction": "a", "context": "c", "response": "b"},
         [("user", "a\n\nc", False), LEARNT[1]]),
        ({"question": "a", "context": "c", "answer": "b"}, [("user", "a\n\nc", False), LEARNT[1]]),
        ({"prompt": "a", "input": "c", "completion": "b"},
         [("user", "a\n\nc", False), LEARNT[1]]),
        ({"prompt": "a", "completion": None, "response": "b"}, LEARNT),
        ({"prompt": "", "input": "a", "completion": "b"}, LEARNT),
        ({"prompt": "a", "completion": "b", "input": [], "system": {}}, LEARNT),
        # Files that were joined from two sources, with the keys of both.
        *(
            ({"messages": [{"role": empty, "from": "human", "content": empty, "value": "a"},
                           {**TALK[1], "from": empty, "value": empty}]}, LEARNT)
            for empty in (None, "")
        ),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]], "system": "s"},
         [SYSTEM, ("user", "c", False), ("assistant", "d", True), *LEARNT]),
        ({"prompt": [*TALK, {"role": "user", "content": "a"}],
          "completion": [{"role": "assistant", "content": "b"}]},
         [LEARNT[0], ("assistant", "b", False), *LEARNT]),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0}]}, [LEARNT[0], ("assistant", "b", False)]),
        ({"messages": [TALK[0], {**TALK[1], "weight": 1}]}, LEARNT),
        ({"messages": [TALK[0], {**TALK[1], "train": False}]},
         [LEARNT[0], ("assistant", "b", False)]),
        ({"messages": [TALK[0], {**TALK[1], "train": 0}]}, [LEARNT[0], ("assistant", "b", False)]),
        *(
            ({"messages": [TALK[0], {**TALK[1], **key}]}, [LEARNT[0], ("assistant", "b", False)])
            for key in ({"training": False}, {"trainable": False}, {"loss_weight": 0.0},
                        {"loss_mask": 0}, {"loss_scale": 0}, {"masked": True})
        ),
        ({"messages": [TALK[0], {**TALK[1], "masked": False}]}, LEARNT),
        ({"messages": [TALK[0], {**TALK[1], "loss": 0}]}, [LEARNT[0], ("assistant", "b", False)]),
        ({"messages": [{"role": "User ", "content": "a"}, {"role": "ChatGPT", "content": "b"}]},
         LEARNT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, TALK[1]]},
         LEARNT),
        ({"messages": [TALK[0], {"role": "assistant", "content": [{"type": "text", "text": "b"}],
                                 "tool_calls": [{"function": {"name": "f"}}]}]}, LEARNT),
        ({"conversations": [{"from": "Human", "value": "a"}, {"from": "bard", "value": "b"}]},
         LEARNT),
        ({"conversations": [{"from": "human", "value": "a"},
                            {"from": "observation", "value": "t"}, {"from": "gpt", "value": "b"}]},
         [LEARNT[0], ("tool", "t", False), LEARNT[1]]),
    ],
)  # fmt: skip
def test_all_that_an_answer_depends_on_is_read(values, meant):
    assert parts_of(values) == meant


def test_speakers_that_the_template_names_stay():
    values = {"messages": [{"role": "critic", "content": "a"}]}
    assert parts_of(values, {"critic"}) == [("critic", "a", False)]
    values = {"messages": [{"role": "function", "content": "a"}]}
    assert parts_of(values, {"function"}) == [("function", "a", False)]
    assert parts_of(values, {"tool", "function"}) == [("tool", "a", False)]


def test_columns_that_are_not_read_are_counted(formats):
    found = encode_all(formats[0], [Row({"messages": TALK, "id": 1, "schema": "s"}, "line 1")], 64)
    assert found.unread == {"id": 1, "schema": 1}


def test_what_messages_have_beside_their_words_is_written_or_counted(plain, formats):
    thought = {**TALK[1], "reasoning_content": "why"}
    rows = [Row({"messages": [TALK[0], thought]}, "line 1")]
    assert encode_all(formats[1], rows, 64).unread == {"'reasoning_content' of messages": 1}
    quiet = [
        Row({"messages": [TALK[0], {**TALK[1], "train_on_turn": False, "name": ""}]}, "line 1")
    ]
    assert encode_all(formats[1], quiet, 64).unread == {"'train_on_turn' of messages": 1}
    asked = [Row({"messages": [{**TALK[0], "train": True, "weight": 0}, TALK[1]]}, "line 1")]
    told = "'train' of 'user' messages (only the assistant's are trained on)"
    assert encode_all(formats[1], asked, 64).unread == {told: 1}
    thinks = CHATML.replace("m.content +", "(m.reasoning_content or '') + m.content +")
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": thinks}))
    assert encode_all(chat, rows, 64).unread == {}


def test_names_of_special_tokens_in_what_is_said_are_counted(formats):
    rows = [row("a <|im_end|> b", "c"), row("a", "b")]
    for chat in formats:
        assert encode_all(chat, rows, 64).marked == ("line 1",)


WITH_TOOLS = "{% if tools %}[{{ tools | tojson }}]{% endif %}" + CHATML.replace(
    "m.content +", "m.content + (m.tool_calls | tojson if m.tool_calls else '') +"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "X"}'}}]


def learnt_of(chat, *rows):
    found = encode_all(chat, rows, 512)
    targets = [int(t) for t in found.samples.values["targets"] if t != IGNORED]
    whole = chat.tokenizer.inner.decode(
        found.samples.values["tokens"].tolist(), skip_special_tokens=False
    )
    return whole, chat.tokenizer.inner.decode(targets, skip_special_tokens=False), found


@pytest.mark.parametrize("given", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_given_to_the_template(plain, formats, given):
    rows = [Row({"messages": TALK, "tools": given}, "line 1")]
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": WITH_TOOLS}))
    whole, _, found = learnt_of(chat, *rows)
    assert '"name": "weather"' in whole and not found.toolless
    old = [Row({"messages": TALK, "functions": [TOOLS[0]["function"]]}, "line 1")]
    assert learnt_of(chat, *old)[0] == whole
    assert encode_all(formats[1], rows, 64).toolless == ("line 1",)


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("content", ["Be short.", "a"])
def test_messages_that_the_template_leaves_out_are_told(plain, formats, content):
    row = Row({"messages": [{"role": "system", "content": content}, *TALK]}, "line 1")
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": NO_SYSTEM}))
    told = content not in NO_SYSTEM + "".join(one["content"] for one in TALK)
    assert encode_all(chat, [row], 512).unwritten == (("line 1: 'system'",) if told else ())
    assert encode_all(formats[1], [row], 512).unwritten == ()
    assert encode_all(chat, [Row({"messages": TALK}, "line 1")], 512).unwritten == ()


def test_keys_that_a_columnar_file_fills_in_are_absent(tmp_path):
    """Arrow gives every object of a column the keys of all: a call would learn others' names."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [{"function": called}]},
            ],
            "label": None,
        }
        for called in (
            {"name": "find", "arguments": {"place": "b"}},
            {"name": "sum", "arguments": {"of": [1]}},
        )
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "calls.parquet")
    (table,) = read_tables([str(tmp_path / "calls.parquet")])
    for read, row in zip(table.rows, rows, strict=True):
        asked, answer = messages_of(read)
        assert asked == row["messages"][0]
        assert answer == {**row["messages"][1], "content": ""}


def test_a_key_of_a_message_without_a_value_is_absent():
    """`'tool_calls' in message`, as templates ask, is then as for other writers of the data."""
    given = {"role": "user", "content": "a", "tool_calls": None, "name": None}
    (message, _) = messages_of(
        Row({"messages": [given, {"role": "assistant", "content": "b"}]}, "line 1")
    )
    assert message == {"role": "user", "content": "a"}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {"extra_special_tokens": {"think_token": "<|im_start|>"}},
        {"think_token": "<|im_start|>"},
        {"think_token": {"content": "<|im_start|>", "special": True}},
        {"bos_token": "<|im_start|>"},
    ],
)
def test_tokens_that_a_template_writes_by_name(plain, tmp_path, config, marked):
    """As transformers gives them to it: a model's own names, too."""
    name = "bos_token" if "bos_token" in config else "think_token"
    template = "{{ NAME }}" + (DEFAULT_TEMPLATE if marked else CHATML)
    template = template.replace("NAME", name)
    found = plain.replace(plain.inner, {"chat_template": template, **config})
    chat = ChatFormat(found)
    found.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for talk in (TALK, TALK * 2):
        assert chat.render(talk, "line 1").text == theirs.apply_chat_template(talk, tokenize=False)
    assert chat.render(TALK, "line 1").text.startswith("<|im_start|><|")


def test_a_token_that_a_template_writes_is_in_the_vocabulary(plain):
    for template, refused in ((CHATML, False), ("{{ bos_token }}" + CHATML, True)):
        config = {"chat_template": template, "bos_token": "<begin>"}
        if refused:
            with pytest.raises(BadInputError, match=r"writes bos_token, .* '<begin>', which"):
                ChatFormat(plain.replace(plain.inner, config))
        else:
            ChatFormat(plain.replace(plain.inner, config))


def test_tools_have_a_template_of_their_own_where_there_is_one(plain):
    templates = [{"name": "tool_use", "template": WITH_TOOLS},
                 {"name": "default", "template": CHATML}]  # fmt: skip
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": templates}))
    assert "weather" in learnt_of(chat, Row({"messages": TALK, "tools": TOOLS}, "line 1"))[0]
    assert learnt_of(chat, Row({"messages": TALK}, "line 1"))[0].startswith("<|im_start|>user")


def test_calls_of_tools_are_learnt_or_the_template_is_refused(plain, formats):
    row = Row({"messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": CALLS},
                            {"role": "tool", "content": "12"}, TALK[1]]}, "line 1")  # fmt: skip
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": WITH_TOOLS}))
    _, words, _ = learnt_of(chat, row)
    assert '"arguments": {"city": "X"}' in words and words.endswith("b<|im_end|>\n")
    with pytest.raises(BadInputError, match=r"line 1: the assistant calls a tool, .* tool_calls"):
        encode_all(formats[1], [row], 64)
    older = {"role": "assistant", "content": "", "function_call": CALLS[0]["function"]}
    old = Row({"messages": [TALK[0], older, *row.values["messages"][2:]]}, "line 1")
    assert learnt_of(chat, old)[:2] == learnt_of(chat, row)[:2]


def test_a_conversation_that_the_assistant_begins_is_refused_with_what_to_do(formats):
    messages = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Hi."}]
    with pytest.raises(BadInputError, match=r"x, line 1: the first message is from the assistant"):
        formats[1].render(messages, "x, line 1")


def test_answers_of_no_weight_are_not_learnt(formats):
    talk = [TALK[0], {"role": "assistant", "content": "wrong", "weight": 0}, *TALK]
    for chat in formats:
        whole, words, _ = learnt_of(chat, Row({"messages": talk}, "line 1"))
        assert "wrong" in whole and "wrong" not in words and words.startswith("b<|")


def test_answers_that_a_template_swallows_are_counted(plain):
    without = CHATML.replace("m.content +", "m.content.split('</t>')[-1] +")
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": without}))
    rows = [row("q", "<t>why</t>one"), row("q", "two ")]
    assert encode_all(chat, rows, 64).altered == ("line 1",)
    once = (
        "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}{% generation %}"
        "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": once}))
    assert encode_all(chat, [row("q", "one", "r", "two")], 64).altered == ("line 1",)


@pytest.mark.parametrize("clock", ["strftime_now('%d %b %Y %H:%M:%S')", 'strftime_now("%A")'])
def test_the_date_that_is_learnt_does_not_change(plain, clock):
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": "{{ " + clock + " }}" + CHATML}))
    whole, _, _ = learnt_of(chat, row("q", "a"))
    assert whole.startswith(("26 Jul 2024 00:00:00<", "Friday<")) and chat.dated
    with pytest.raises(BadInputError, match="computes the format that it passes to strftime_now"):
        other = "{% set f = '%d' %}{{ strftime_now(f) }}" + CHATML
        ChatFormat(plain.replace(plain.inner, {"chat_template": other}))


@pytest.mark.parametrize("drawn", ["{{ ['a', 'b'] | random }}", "{{ lipsum(n=1) }}"])
@pytest.mark.parametrize("template", [CHATML, DEFAULT_TEMPLATE])
def test_a_template_that_writes_something_random_is_refused(plain, drawn, template):
    with pytest.raises(BadInputError, match=r"is not deterministic .(random|lipsum)"):
        ChatFormat(plain.replace(plain.inner, {"chat_template": drawn + template}))


def test_a_broken_template_is_told_with_its_file_and_line(plain, tmp_path):
    plain.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }}")
    with pytest.raises(BadInputError, match=r"template in .*chat_template\.jinja, line 2, refuses"):
        ChatFormat(load_tokenizer(str(tmp_path)))
    (tmp_path / "chat_template.jinja").write_text("\n\n{{ raise_exception('no') }}")
    with pytest.raises(
        BadInputError, match=r"chat_template\.jinja, line 3, refuses the conversation: no"
    ):
        ChatFormat(load_tokenizer(str(tmp_path)))


def test_templates_of_which_none_is_the_default_are_named(plain):
    templates = [{"name": name, "template": CHATML} for name in ("tool_use", "rag")]
    with pytest.raises(BadInputError, match=r"templates 'tool_use', 'rag', and none is .*default"):
        ChatFormat(plain.replace(plain.inner, {"chat_template": templates}))


def test_a_part_without_an_answer_is_named(formats):
    rows = [Row({"messages": TALK[:1]}, "line 1")]
    with pytest.raises(
        BadInputError, match=r"conversations held out has .* 1 of them have no answer"
    ):
        encode_all(formats[0], rows, 64, " held out")


def test_a_template_that_rewrites_earlier_answers_shows_the_last(plain):
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": FORGETFUL}))
    found = encode_all(chat, [row("q", "one", "r", "two")], 64)
    targets = found.samples.values["targets"]
    learnt = [int(t) for t in targets if t != IGNORED]
    assert chat.tokenizer.decode(learnt) == "<think></think>two\n"
    assert found.partial == 1
    assert learnt_of(chat, row("q", "one", "r"))[:2] == learnt_of(chat, row("q", "one"))[:2]


def test_a_template_that_ends_the_whole_conversation_shows_all_answers(plain):
    """As Phi's, whose end of text stands behind the last message alone."""
    once = CHATML.replace(
        "{% if add", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if add"
    )
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": once}))
    _, said, found = learnt_of(chat, row("q", "one", "r", "two"))
    assert said == "one<|im_end|>\ntwo<|im_end|>\n<|endoftext|>" and not found.partial
    assert learnt_of(chat, row("q", "one", "r"))[1] == "one<|im_end|>\n"


def test_a_template_in_which_answers_cannot_be_found_is_refused(plain):
    with pytest.raises(BadInputError, match="renders the start of a conversation differently"):
        ChatFormat(plain.replace(plain.inner, {"chat_template": SHUFFLED}))


# Its prompt opens a block, which answers in a conversation have only if the data write it.
OPENED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def test_a_prompt_that_opens_the_answer_is_told_from_the_answer(plain):
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": OPENED}))
    assert chat.stops
    thought = row("q", "<think>\nso\n</think>\n\none")
    _, learnt, found = learnt_of(chat, thought)
    assert learnt == "so\n</think>\n\none<|im_end|>\n" and not found.altered
    said = r"line 1: .* asks for an answer with '.*<think>\\n', but writes the answer as '.*none"
    for answer in ("none", "so\n</think>\n\nnone"):
        with pytest.raises(BadInputError, match=said):
            encode_all(chat, [row("q", answer)], 64)
    # As R1's, which leaves out what an answer has before its end of thought.
    left_out = OPENED.replace("m.content", "m.content.split('</think>')[-1]")
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": left_out}))
    with pytest.raises(BadInputError, match=r"asks for an answer with .*but writes the answer as"):
        encode_all(chat, [thought], 64)


@pytest.mark.parametrize("marked", [False, True])
def test_a_template_of_parts_gets_parts(plain, marked):
    """As those of models that see images, which write nothing of a text."""
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    parts = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        f"{begin}{{% for p in m.content %}}{{{{ p.text }}}}{{% endfor %}}{end}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": parts}))
    text = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one"}]
    listed = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in text]
    for messages in (text, listed):
        whole, learnt, found = learnt_of(chat, Row({"messages": messages}, "line 1"))
        assert "user\nq<|im_end|>" in whole and "one" in learnt
        assert not found.altered and not found.unwritten


def test_long_conversations_are_cut_and_counted(formats):
    rows = [row("hello", "there"), row("hello " * 40, "there"), row("hello", "there " * 40)]
    found = encode_all(formats[0], rows, 48)
    assert (found.cut, found.empty, len(found.samples)) == (2, 1, 2)
    assert found.samples.lengths.max() == 48
    tokens, targets = found.samples.values["tokens"], found.samples.values["targets"]
    here = slice(int(found.samples.starts[0]), int(found.samples.starts[1]))
    kept = targets[here] != IGNORED
    assert (targets[here][:-1][kept[:-1]] == tokens[here][1:][kept[:-1]]).all()
    with pytest.raises(BadInputError, match="none of 1 conversations has an assistant's answer"):
        encode_all(formats[0], rows[1:2], 48)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
            "{% endfor %}{% endfor %}{% endfor %}",
            "not finished after 1 s of CPU time",
        ),
        ("{% set x = 'a' * 30000000000 %}", "needs more than 2.00 GiB of memory"),
        ("{{ '%050000000000d' % 1 }}", "needs more than 2.00 GiB of memory"),
        ("{{ 'a'.ljust(30000000000) }}", "needs more than 2.00 GiB of memory"),
        pytest.param(
            "{% set n = namespace(x='a' * 64) %}{% for i in range(64) %}"
            "{% set n.x = n.x ~ n.x %}{% endfor %}",
            "needs more than 2.00 GiB of memory",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_template_without_an_end_is_refused(plain, template, said, monkeypatch):
    # A slow machine takes seconds to fill 2 GiB: only the first, which needs none, has few.
    limit_s = 1.0 if "not finished" in said else 600.0
    monkeypatch.setattr("outpace.data.chat._TRIAL_CPU_S", limit_s)  # 5 as it is
    with pytest.raises(BadInputError, match=f"the first conversation tried.*: .*{said}"):
        ChatFormat(plain.replace(plain.inner, {"chat_template": template + CHATML}))


def test_a_conversation_with_which_a_template_has_no_end_is_named(plain):
    grows = "{% if messages[0].content == 'grow' %}{{ 'a' * 30000000000 }}{% endif %}" + CHATML
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": grows}))
    talks = [
        Row({"messages": [{"role": "user", "content": word},
                          {"role": "assistant", "content": "yes"}]}, f"a.jsonl, line {line}")
        for line, word in enumerate(("go", "grow"), 1)
    ]  # fmt: skip
    with pytest.raises(BadInputError, match=r"a.jsonl, line 2: .* 2.00 GiB of memory"):
        encode_all(chat, talks, 64)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_TEMPLATE])
def test_a_template_that_writes_far_more_than_it_is_given_is_refused(plain, template):
    """One whose text is long for every conversation would be rendered for hours."""
    grows = "messages[0].content.startswith('grow')"
    long = "{% if " + grows + " %}{{ 'a' * 3000000 }}{% endif %}" + template
    chat = ChatFormat(plain.replace(plain.inner, {"chat_template": long}))
    question, answer = ({"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"})
    grown = Row({"messages": [{**question, "content": "grow"}, answer]}, "a.jsonl, line 2")
    said = r"a.jsonl, line 2: .* writes 3,000,\d\d\d characters for a conversation of \d\d"
    with pytest.raises(BadInputError, match=said):
        encode_all(chat, [Row({"messages": [question, answer]}, "line 1"), grown], 64)
    asked = {**question, "content": "grow" * 15_000}  # a long question may have a long text
    assert len(chat.render([asked, answer], "here").text) > 3_000_000


def test_answers_without_a_word_are_counted(formats):
    rows = [
        Row({"prompt": "a", "completion": said}, f"line {number}")
        for number, said in enumerate(("b", "", " \n"), start=1)
    ]
    assert encode_all(formats[1], rows, 64).wordless == ("line 2", "line 3")


@pytest.mark.parametrize(
    ("end", "answer", "joined"),
    [
        ("ASSISTANT: ", "yes", ("line 1", "2")),  # as Vicuna's
        ("ASSISTANT:", " yes", ()),
        ("ASSISTANT:\n", "yes", ()),
    ],
)
def test_answers_whose_first_token_begins_in_the_template_are_told(end, answer, joined):
    """It is not learnt, and no prompt ends with half of it."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '" + end + "' + m['content'] }}"
        "{% else %}{{ 'USER: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + end + "' }}{% endif %}"
    )
    tokenizer = train_tokenizer(["it is yes and yes and yes USER ASSISTANT"] * 20, 300)
    chat = ChatFormat(tokenizer.replace(tokenizer.inner, {"chat_template": template}))
    row = Row({"prompt": "is it", "completion": answer}, "line 1")
    found = encode_all(chat, [row, Row({"prompt": "a", "completion": answer + answer}, "2")], 64)
    assert found.joined == joined
