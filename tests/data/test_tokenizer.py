import json

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from outpace.data import word_cache
from outpace.data.tokenizer import END_OF_TEXT, Tokenizer
from outpace.data.tokenizer_files import load_tokenizer
from outpace.data.tokenizer_training import train_tokenizer
from outpace.records.errors import BadInputError

TEXTS = [
    "Hello world", "", " ", "a\n\n  b\t\r\nc", "it's I'LL 12345 3.14 ½ Ⅷ x²", "Größe naïve ÇA",
    "中文字 かな 한글", "😀 emoji ‍", "\u1c80 new \u2c2f letters", f"before{END_OF_TEXT}after",
    "nb\xa0sp\u3000wide\x85next\x1cfs", "\u017f K ſ's", "...---!!! '''s", "\u180e x",
]  # fmt: skip


@settings(max_examples=50)
@given(text=st.text())
def test_text_comes_back(tokenizer, text):
    if END_OF_TEXT not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("left_out", [1, 2, 3])
def test_a_character_that_is_cut_is_left_out(tokenizer, left_out):
    ids = tokenizer.encode("and 😀")[:-left_out]
    assert tokenizer.decode(ids, cut=True) == "and "
    assert tokenizer.decode(ids) != "and "


@settings(max_examples=60)
@given(texts=st.lists(st.text() | st.text("ab '\n\t1sS.é中<|>"), max_size=5))
def test_many_texts_have_the_ids_of_each(tokenizer, texts):
    found = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in found] == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("pattern", word_cache.PATTERNS)
def test_remembered_words_are_the_tokenizers_own(library_texts, pattern):
    """With the pre-tokenizers of GPT-2, Qwen 2 and Llama 3, before and after words are known."""
    trained = train_tokenizer(library_texts[:2], 500).inner
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    remembered = word_cache.words_of(trained)
    assert remembered is not None
    for texts in (TEXTS, library_texts, TEXTS):
        expected = [trained.encode(text, add_special_tokens=False).ids for text in texts]
        assert [ids.tolist() for ids in remembered.encode_batch(texts)] == expected


@pytest.mark.parametrize("pattern", word_cache.PATTERNS)
def test_both_engines_agree_on_every_settled_character(pattern):
    own = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    sure = [
        c
        for c in map(chr, range(0x10000))
        if not word_cache._load_unicode_classes().unsure.match(c)
    ]
    assert 45_000 < len(sure) < 60_000
    for begin in range(0, len(sure), 500):
        text = "".join(f"a{c}1 {c}{c}.  {c}x'{c}\n" for c in sure[begin : begin + 500])
        assert word_cache._compile_unicode_pattern(pattern).findall(text) == [
            w for w, _ in own.pre_tokenize_str(text)
        ]


def test_words_are_forgotten_when_there_are_too_many(tokenizer, monkeypatch):
    monkeypatch.setattr(word_cache, "_MOST_WORDS", 20)
    remembered = word_cache.words_of(tokenizer.inner)
    texts = [" ".join(f"w{i}x{j}" for j in range(8)) for i in range(50)]
    for text in texts:
        assert remembered.encode_batch([text])[0].tolist() == tokenizer.encode(text)
        assert len(remembered._known) <= 40


def test_tokenizers_with_other_rules_are_left_to_themselves(tokenizer):
    for pre in (pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Metaspace()):
        inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
        inner.pre_tokenizer = pre
        assert word_cache.words_of(inner) is None
        other = Tokenizer(inner)
        assert not other.cuts_texts and tokenizer.cuts_texts
        found = other.encode_batch(["one two\nthree"])[0]
        assert found.tolist() == other.encode("one two\nthree")


def test_training_is_the_same_again(library_texts):
    first, second = (train_tokenizer(library_texts, 400) for _ in range(2))
    assert first.fingerprint == second.fingerprint and first.vocab_size == 400
    assert first.eos_token == END_OF_TEXT and first.mask_id is None


def test_a_tokenizer_for_masking_has_its_specials(library_texts):
    masked = train_tokenizer(library_texts, 300, masked=True)
    specials = (masked.mask_id, masked.pad_id, masked.cls_id, masked.sep_id)
    assert None not in specials and len(set(specials)) == 4


def test_what_no_tokenizer_can_be_learnt_from(library_texts):
    with pytest.raises(BadInputError, match=r"at least 257, not 256; use a model .* --tokenizer"):
        train_tokenizer(library_texts, 256)
    with pytest.raises(BadInputError, match="at least 262, not 261"):
        train_tokenizer(library_texts, 261, masked=True)
    with pytest.raises(BadInputError, match="no text to train"):
        train_tokenizer(["", ""], 300)


@pytest.mark.parametrize("masked", [False, True])
def test_a_saved_tokenizer_is_the_same_here_and_in_transformers(tmp_path, library_texts, masked):
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(library_texts, 400, masked=masked)
    tokenizer.save(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.fingerprint == tokenizer.fingerprint and again.eos_id == tokenizer.eos_id
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).eos_id == tokenizer.eos_id
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert theirs.eos_token_id == tokenizer.eos_id and theirs.mask_token_id == tokenizer.mask_id


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_gpt2s_two_files(tmp_path, names):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "he", "ll", "hell", "Ġw", "hello", END_OF_TEXT]
    (tmp_path / names[0]).write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (tmp_path / names[1]).write_text("#version: 0.2\nh e\nl l\nhe ll\nhell o\nĠ w\n")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 262 and tokenizer.eos_id == 261
    expected = ["hello", "Ġw", "o", "r"]
    assert tokenizer.encode("hello wor") == [tokens.index(token) for token in expected]
    assert tokenizer.decode(tokenizer.encode("hello wor")) == "hello wor"


def test_a_directory_that_names_its_class_is_read_as_that_class(tmp_path):
    """Qwen 2's files look like GPT-2's, but it cuts numbers into digits."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "12", END_OF_TEXT]
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n1 2\n")
    assert tokens.index("12") in load_tokenizer(str(tmp_path)).encode("a12")
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END_OF_TEXT, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("a12") == [tokens.index(t) for t in "a12"]
    assert tokenizer.eos_token == END_OF_TEXT


@pytest.mark.parametrize("as_jinja", [False, True])
def test_saving_passes_on_what_a_directory_says(tmp_path, library_texts, as_jinja):
    from transformers import AutoTokenizer

    inner = train_tokenizer(library_texts[:1], 300).inner
    inner.add_special_tokens(["<s>", "</s>", "<fill>"])
    first, second = tmp_path / "first", tmp_path / "second"
    Tokenizer(inner).save(first)
    template = "{{ messages[0]['content'] }}!"
    config = {
        "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "pad_token": "<fill>",
        "eos_token": {"content": "</s>", "special": True}, "model_max_length": 77,
    }  # fmt: skip
    if as_jinja:
        (first / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (first / "special_tokens_map.json").unlink()  # whose roles would win
    (first / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(first))
    assert tokenizer.eos_token == "</s>" and tokenizer.pad_id == inner.token_to_id("<fill>")
    tokenizer.save(second)
    theirs = AutoTokenizer.from_pretrained(second, local_files_only=True)
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<s>", "</s>", "<fill>")
    assert theirs.model_max_length == 77
    said = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "hi!"


def test_gpt2s_own_files(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (
        gpt2.encode("The year's 2019.\n\n  Über")
        == gpt2.encode_batch(["The year's 2019.\n\n  Über"])[0].tolist()
    )
    assert (gpt2.vocab_size, gpt2.eos_id) == (50257, 50256)


@pytest.mark.parametrize("as_file", [False, True])
def test_berts_vocabulary(tmp_path, as_file):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "uber", "!"]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(tokens) + "\n")
    tokenizer = load_tokenizer(str(path if as_file else tmp_path))
    assert tokenizer.encode("The cats! Über dog") == [5, 6, 7, 9, 8, 1]
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.pad_id) == (2, 3, 4, 0)
    assert tokenizer.eos_id == 3 and tokenizer.cuts_texts
    assert tokenizer.inner.encode("the cat").ids == [2, 5, 6, 3]
    path.write_text("\n".join([*tokens, "The"]) + "\n")
    assert load_tokenizer(str(path)).encode("The the") == [10, 5]


def test_what_cannot_be_read_is_told(tmp_path):
    with pytest.raises(BadInputError, match=r"no tokenizer at .*: expected tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"the tokenizer .* cannot be read"):
        load_tokenizer(str(tmp_path))
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    inner.decoder = decoders.WordPiece()
    with pytest.raises(BadInputError, match=r"no end-of-text token; give it one of <\|endoftext"):
        Tokenizer(inner)


@pytest.mark.parametrize("role", ["eos_token", "mask_token", "cls_token", "sep_token"])
@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("<|nowhere|>", r"_token '<\|nowhere\|>' is not in its vocabulary"),
        ({"content": "<|nowhere|>"}, r"_token '<\|nowhere\|>' is not in its vocabulary"),
        (257, "_token is 257; it must be the token's text"),
        ({"content": 257}, "_token is .* it must be the token's text"),
    ],
)
def test_a_role_of_a_token_that_is_none_is_refused(tokenizer, tmp_path, role, token, said):
    """Another token took its place, also in the exported model."""
    tokenizer.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, role: token}))
    (tmp_path / "special_tokens_map.json").unlink()
    with pytest.raises(BadInputError, match=rf"its {role.removesuffix('_token')}{said}"):
        load_tokenizer(str(tmp_path))


def test_ids_are_of_one_type(tokenizer):
    assert {ids.dtype for ids in tokenizer.encode_batch(TEXTS)} == {np.dtype(np.uint32)}


def test_tokenizers_that_end_texts_differently_are_not_the_same(tokenizer):
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    inner.add_special_tokens(["<|end|>"])
    one, other = Tokenizer(inner), Tokenizer(inner, "<|end|>")
    assert one.eos_id != other.eos_id and one.fingerprint != other.fingerprint


def _with(tokenizer, folder, **changes):
    """A tokenizer's file with other rules."""
    told = {**json.loads(tokenizer.inner.to_str()), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return str(folder)


def test_a_pattern_that_gives_up_on_a_text_is_a_refusal(tokenizer, tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    steps = [split, json.loads(tokenizer.inner.to_str())["pre_tokenizer"]]
    sequence = {"type": "Sequence", "pretokenizers": steps}
    slow = load_tokenizer(_with(tokenizer, tmp_path, pre_tokenizer=sequence))
    assert slow.encode_batch(["river stone"])[0].size
    for encode in (slow.encode, lambda text: slow.encode_batch([text])):
        with pytest.raises(BadInputError, match=r"fails on a text of the data: .*retry-limit"):
            encode("a" * 5000 + "b")


def test_a_normalizer_that_grows_without_end_is_a_refusal(tokenizer, tmp_path):
    double = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee" * 8}
    grows = {"type": "Sequence", "normalizers": [double] * 20}
    with pytest.raises(BadInputError, match=r"cannot be read: (its process ended|it (asks|comp))"):
        load_tokenizer(_with(tokenizer, tmp_path, normalizer=grows))


@pytest.mark.parametrize("sign", ["A", " "])
def test_no_word_is_learnt_from_beyond_a_length(sign):
    learnt = train_tokenizer([f"a word {sign * 5000} and", "words"], 400)
    longest = max(map(len, learnt.inner.get_vocab()))
    assert 128 <= longest <= 257  # with the blank before it
    text = f"{sign * 777}b"
    assert learnt.decode(learnt.encode(text)) == text


@pytest.mark.parametrize("dropout", [None, 0.0, 0.1])
def test_merges_that_are_left_out_at_random_are_refused(tmp_path, dropout):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["some text to learn from, and more of it"] * 20, 280).inner.save(str(path))
    document = json.loads(path.read_text())
    document["model"]["dropout"] = dropout
    path.write_text(json.dumps(document))
    if not dropout:
        assert load_tokenizer(str(path)).encode("some text")
        return
    with pytest.raises(BadInputError, match=r"at random \(dropout 0.1\)"):
        load_tokenizer(str(path))


BERT_FLAGS = [
    {}, {"do_lower_case": False}, {"do_lower_case": True}, {"strip_accents": False},
    {"tokenize_chinese_chars": False},
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "stored", "flags"),
    [
        *(("BertTokenizerFast", lower, flags) for lower in (True, False) for flags in BERT_FLAGS),
        ("PreTrainedTokenizerFast", True, {"do_lower_case": False}),
        *(("GPT2Tokenizer", blank, {"add_prefix_space": not blank}) for blank in (True, False)),
        ("PreTrainedTokenizerFast", False, {"add_prefix_space": True}),
    ],
)
def test_texts_are_cut_as_transformers_cuts_them(tmp_path, kind, stored, flags):
    """tokenizer_config.json overrules tokenizer.json where transformers lets it."""
    text, roles = "Hello Été 中文 hello", {}
    if "add_prefix_space" in flags:
        inner = train_tokenizer(["hello Hello " * 9], 300).inner
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=stored)
        roles["eos_token"] = END_OF_TEXT
    else:
        known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "Hello", "Été", "ete",
                 "été", "Ete", "中", "文", "中文"]  # fmt: skip
        inner = tokenizers.Tokenizer(
            models.WordPiece({name: n for n, name in enumerate(known)}, unk_token="[UNK]")
        )
        inner.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=stored)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.add_special_tokens(known[:5])
    inner.save(str(tmp_path / "tokenizer.json"))
    told = {"tokenizer_class": kind, **roles, **flags}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = load_tokenizer(str(tmp_path))
    assert found.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_old_files_are_cut_by_the_models_own_pattern(tmp_path):
    """vocab.json and merges.txt are GPT-2's, but Qwen 2 cuts numbers into digits."""
    train_tokenizer(["12 12 12 12 house"] * 9, 300).inner.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = load_tokenizer(str(tmp_path)).encode("house 12")
    assert found == theirs.encode("house 12")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert load_tokenizer(str(tmp_path)).encode("house 12") != found


def test_special_tokens_that_would_be_cut_are_refused(tmp_path):
    train_tokenizer(["a house"] * 9, 300).save(tmp_path)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**told, "split_special_tokens": True})
    )
    with pytest.raises(BadInputError, match="has split_special_tokens: true"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("number", [7, 5000])
@pytest.mark.parametrize("kind", ["template", "roberta"])
def test_ids_that_a_post_processor_adds_are_the_tokens_own(tmp_path, kind, number):
    """Of a tokenizer learnt anew the post-processor keeps the old one's ids."""
    learnt = train_tokenizer(["a house"] * 9, 300)
    name = learnt.eos_token
    for wrong in (False, True):
        chosen = number if wrong else learnt.eos_id
        learnt.inner.post_processor = (
            tokenizers.processors.TemplateProcessing(
                single=f"{name} $A", special_tokens=[(name, chosen)]
            )
            if kind == "template"
            else tokenizers.processors.RobertaProcessing((name, chosen), (name, chosen))
        )
        learnt.save(tmp_path / "saved")
        if not wrong:
            assert load_tokenizer(str(tmp_path / "saved")).inner.encode("a").ids[0] == chosen
            continue
        with pytest.raises(BadInputError, match=f"under the id {number}, but that token's id is"):
            load_tokenizer(str(tmp_path / "saved"))
