"""Tokenizers that transformers builds by a class of its own, beside what their files say."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

import outpace
from outpace.data.tokenizer_files import load_tokenizer
from outpace.data.tokenizer_training import train_tokenizer
from outpace.interop import tokenizer_class
from outpace.interop.tokenizer_class import cut_as_qwen2, export_difference, source_difference
from outpace.records.model_families import FAMILIES

TEXTS = ["In 1234 it's  2 good\n\n\nDON'T x=12345 été 中文字"] * 20


@pytest.fixture(scope="module")
def learnt():
    """Two tokenizers learnt of the same texts: cut as GPT-2 does, and as Qwen 2 does."""
    return (
        train_tokenizer(TEXTS, 320),
        train_tokenizer(TEXTS, 320, set_pattern=cut_as_qwen2),
    )


def _folder(path, tokenizer, kind, model_type=None):
    tokenizer.save(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("tokenizer_class")
    if kind is not None:
        config["tokenizer_class"] = kind
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def test_a_class_that_cuts_otherwise_than_the_files_is_said_with_a_text(tmp_path, learnt):
    from transformers import AutoTokenizer

    folder = _folder(tmp_path / "model", learnt[0], "Qwen2Tokenizer")
    said = source_difference(folder, load_tokenizer(str(folder)), tmp_path / "cache")
    theirs = AutoTokenizer.from_pretrained(folder)("12345 and 7")["input_ids"]
    ours = learnt[0].encode("12345 and 7")
    assert theirs != ours
    assert f"'12345 and 7' is {ours} here and {theirs} there" in said
    # As the sentence says: then both are the same.
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    assert load_tokenizer(str(folder)).encode("12345 and 7") == theirs
    assert source_difference(folder, load_tokenizer(str(folder)), tmp_path / "cache") is None


@pytest.mark.parametrize(
    ("kind", "model_type", "pattern"),
    [("Qwen2Tokenizer", "qwen2", 1), ("GPT2TokenizerFast", "gpt2", 0), ("LlamaTokenizer", None, 0),
     ("PreTrainedTokenizerFast", "llama", 0), (None, None, 0), ("NoSuchTokenizer", "llama", 0)],
)  # fmt: skip
def test_nothing_is_said_where_both_are_the_same(tmp_path, learnt, kind, model_type, pattern):
    folder = _folder(tmp_path / "model", learnt[pattern], kind, model_type)
    assert source_difference(folder, load_tokenizer(str(folder)), tmp_path / "cache") is None


def test_texts_that_begin_with_a_special_token_are_compared_as_conversations_do(tmp_path):
    """Llama's class puts a blank before the first word alone, these files before any."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "unk_token": "<unk>"}))
    said = source_difference(tmp_path, load_tokenizer(str(tmp_path)), tmp_path / "cache")
    assert said is not None and "'<unk>a' is" in said


def test_it_is_found_once(tmp_path, learnt, monkeypatch):
    folder = _folder(tmp_path / "model", learnt[0], None, "qwen2")
    tokenizer, cache = load_tokenizer(str(folder)), tmp_path / "cache"
    said = source_difference(folder, tokenizer, cache)
    monkeypatch.setattr(tokenizer_class, "call_isolated", None)
    assert said is not None and source_difference(folder, tokenizer, cache) == said
    (folder / "vocab.json").write_text("{}")  # which a class may read: it is looked at again
    monkeypatch.setattr(tokenizer_class, "call_isolated", lambda *_: None)
    assert source_difference(folder, tokenizer, cache) is None


def test_a_text_that_the_class_cannot_read_hides_no_other_and_is_not_kept(
    tmp_path, learnt, monkeypatch
):
    from transformers import Qwen2Tokenizer

    def fail(self, text, **options):
        if text in unread:
            raise ValueError("no such text")
        return encode(self, text, **options)

    encode, unread = Qwen2Tokenizer.__call__, ["A text"]
    monkeypatch.setattr(Qwen2Tokenizer, "__call__", fail)
    folder = _folder(tmp_path / "model", learnt[0], "Qwen2Tokenizer")
    tokenizer, cache = load_tokenizer(str(folder)), tmp_path / "cache"
    said = source_difference(folder, tokenizer, cache)
    assert said is not None and "'12345 and 7' is" in said
    same = _folder(tmp_path / "same", learnt[1], "Qwen2Tokenizer")
    tokenizer, cache = load_tokenizer(str(same)), tmp_path / "other"
    assert source_difference(same, tokenizer, cache) is None and not cache.exists()
    unread.clear()
    assert source_difference(same, tokenizer, cache) is None and cache.exists()


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_an_export_of_each_family_is_read_as_it_was_trained_or_said(tmp_path, learnt, model_type):
    from transformers import AutoTokenizer

    for tokenizer in learnt:
        folder = _folder(tmp_path / "model", tokenizer, "PreTrainedTokenizerFast", model_type)
        theirs = AutoTokenizer.from_pretrained(folder)
        same = all(theirs(text)["input_ids"] == tokenizer.encode(text) for text in TEXTS)
        assert same == (export_difference(tokenizer, model_type, tmp_path / "cache") is None)


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # the last is exported as Qwen 2
def test_a_tokenizer_learnt_for_an_exported_qwen2_is_read_as_it_was_trained(tmp_path, family):
    from transformers import AutoTokenizer

    spec = tmp_path / "q.toml"
    spec.write_text(
        f'family = "{family}"\nlayers = 1\nhidden = 8\nheads = 1\nvocab = 320\nmax_positions = 64\n'
        "qkv_bias = true\n"
    )
    data = tmp_path / "text.txt"
    data.write_text("\n\n".join(TEXTS))
    outpace.train(
        model=str(spec), data=[str(data)], seq_len=16, global_batch=1, steps=1, eval_batches=0,
        out=tmp_path / "run", cache_dir=tmp_path / "cache", threads=1, device="cpu",
    )  # fmt: skip
    model = tmp_path / "run" / "model"
    assert json.loads((model / "config.json").read_text())["model_type"] == "qwen2"
    theirs, ours = AutoTokenizer.from_pretrained(model), load_tokenizer(str(model))
    assert theirs(TEXTS[0])["input_ids"] == ours.encode(TEXTS[0])
