import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from outpace.data.tokenizer import Tokenizer
from tests.data.text_files import A, B, C, tokens


@pytest.fixture(scope="module")
def characters():
    """BPE of a few letters, without a token for others."""
    inner = tokenizers.Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2, "c": 3}, []))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<eos>"])
    return Tokenizer(inner, "<eos>")


def test_characters_that_are_lost_are_told(tmp_path, prepare, characters):
    (tmp_path / "x.txt").write_text("abc xé é中 cab")
    for _ in range(2):  # the second time from the cache
        (hint,) = prepare(tmp_path / "x.txt", tokenizer=characters).hints
        assert "no token for 4 characters" in hint and "'é' (2 times), 'x' (once)" in hint
    (tmp_path / "x.txt").write_text("abc cab")
    assert prepare(tmp_path / "x.txt", tokenizer=characters).hints == ()


def test_much_that_is_unknown_is_told(tmp_path, prepare):
    words = {"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "x.txt").write_text("a b c d")
    (hint,) = prepare(tmp_path / "x.txt", tokenizer=Tokenizer(inner, "</s>")).hints
    assert hint.startswith("40.0% of the tokens of ")


def test_names_of_special_tokens_in_a_text_are_told(tmp_path, prepare, tokenizer, ids_of):
    (tmp_path / "x.txt").write_text(f"{A}<|endoftext|>{B}<|endoftext|>{C}")
    corpus = prepare(tmp_path / "x.txt")
    assert tokens(corpus) == [ids_of(A, B, C)]
    assert "'<|endoftext|>' (2 times)" in corpus.hints[0]
