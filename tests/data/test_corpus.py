import os

import pytest
import tokenizers
import xxhash
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from outpace.data.corpus import content_fingerprint, read_documents
from outpace.data.hashes import cached_fingerprint
from outpace.data.sources import open_source
from outpace.data.tokenizer import Tokenizer
from outpace.records.errors import BadInputError
from tests.data.text_files import A, B, tokens, write_lines


def test_several_sources_are_streams_of_their_own(folder, prepare, ids_of):
    corpus = prepare(folder / "a.md", folder / "b.txt", weights=(1.0, 3.0))
    assert tokens(corpus) == [ids_of(A), ids_of(B)] and corpus.weights == (1.0, 3.0)
    assert corpus.fingerprint != prepare(folder / "a.md", folder / "b.txt").fingerprint


@pytest.mark.parametrize("split", ["train", "validation"])
def test_no_text_to_hold_out(tmp_path, prepare, split):
    path = write_lines(tmp_path / "x.jsonl", {"text": ""})
    with pytest.raises(BadInputError, match=r"too small to divide .* --eval-data"):
        prepare(path, split=split)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ((1.0,), "1 weights for 2 sources"),
        ((1.0, 0.0), "must be above 0"),
        ((1.0, float("nan")), "must be above 0"),
        ((1e-6, 1.0), "1e-06 is less than 1/100000 of the total 1"),
    ],
)
def test_weights_that_do_not_fit(folder, prepare, weights, said):
    with pytest.raises(BadInputError, match=said):
        prepare(folder / "a.md", folder / "b.txt", weights=weights)


def test_text_without_a_tokenizer(folder, prepare):
    with pytest.raises(BadInputError, match="needs a tokenizer"):
        prepare(folder, tokenizer=None)


def test_the_content_hash_follows_the_content(tmp_path):
    path, cache = tmp_path / "x.txt", tmp_path / "cache"
    path.write_text("one")
    os.utime(path, (1, 1))
    seen = [content_fingerprint((str(path),), "text", cache) for _ in range(2)]
    path.write_text("two")
    os.utime(path, (1, 1))  # same size, same time
    seen.append(content_fingerprint((str(path),), "text", cache))
    assert seen[0] == seen[1] != seen[2]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "y.md").write_text("two")
    for same in (tmp_path / "other" / "y.md", tmp_path / "other", f"{tmp_path}/*/*.md"):
        assert content_fingerprint((str(same),), "text", cache) == seen[2]


def test_sources_take_turns_in_the_text_for_a_tokenizer(tmp_path):
    long = write_lines(tmp_path / "long.jsonl", *[{"text": "l" * 10}] * 6)
    short = write_lines(tmp_path / "short.jsonl", *[{"text": "s" * 5}] * 4)
    found = list(read_documents((str(long), str(short)), "text", "all", 0.1))
    assert "".join(text[0] for text in found) == "lsslssllll"


def test_text_for_a_tokenizer_is_there_even_when_the_split_has_no_document(tmp_path):
    (tmp_path / "x.txt").write_text("only one")
    for split in ("train", "validation"):
        assert list(read_documents((str(tmp_path / "x.txt"),), "text", split, 0.5)) == ["only one"]


def test_documents_begin_with_the_token_that_the_tokenizer_puts_there(tmp_path, prepare):
    inner = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>"])
    texts = [{"text": text} for text in ("a b", "b", "<s>a")]  # the last begins with it by itself
    write_lines(tmp_path / "x.jsonl", *texts)
    bare = Tokenizer(inner, "</s>", {"bos_token": "<s>"})
    without = prepare(tmp_path / "x.jsonl", tokenizer=bare)
    assert tokens(without) == [[2, 3, 1, 3, 1, 0, 2, 1]]
    opened = tokenizers.Tokenizer.from_str(inner.to_str())
    opened.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    corpus = prepare(tmp_path / "x.jsonl", tokenizer=bare.replace(opened, {}))
    assert tokens(corpus) == [[0, 2, 3, 1, 0, 3, 1, 0, 2, 1]]
    assert corpus.fingerprint != without.fingerprint


@pytest.mark.parametrize("unknown", ["<unk>", "<s>"])
def test_a_run_whose_texts_had_two_opening_tokens_has_other_data(tmp_path, prepare, unknown):
    """Its positions are of other tokens. Where no text has the token, they are the same."""
    inner = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unknown))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>"])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(inner, "</s>", {"bos_token": "<s>"})

    def fingerprints(text):
        path = write_lines(tmp_path / f"{len(text)}.jsonl", {"text": "a b"}, {"text": text})
        content = cached_fingerprint(open_source(str(path)), "text", tmp_path / "cache")
        words = [content, f"{tokenizer.fingerprint}|opened", "all", "0.05", "None"]
        before = xxhash.xxh3_128_hexdigest("|".join(words).encode())
        return before, prepare(path, tokenizer=tokenizer, split="all").fingerprint

    before, now = fingerprints("b a")
    assert before == now
    before, now = fingerprints("<s>b a")
    assert before != now
