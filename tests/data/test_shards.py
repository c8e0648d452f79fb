import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest

from outpace.data import parallel_encoding, shards
from outpace.data.parallel_encoding import Encoders
from outpace.data.shards import ensure_entry, entry_path
from outpace.data.sources import open_source
from outpace.data.tokenizer import Tokenizer
from outpace.records.errors import BadInputError


@pytest.fixture
def lines(tmp_path, library_texts):
    """A file of a few hundred short documents."""
    path = tmp_path / "x.jsonl"
    rows = [row for text in library_texts for row in text.split("\n\n") if row]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    return path, rows


def entry_of(tmp_path):
    (found,) = [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir()]
    return found


def all_ids(corpus):
    return [i for stream in corpus.streams for i in stream.read(0, len(stream)).tolist()]


def test_what_is_cached_is_not_tokenised_again(lines, prepare, tokenizer, monkeypatch, tmp_path):
    path, _ = lines
    told = []
    first = prepare(path, progress=lambda what, done, total: told.append((what, done, total)))
    assert told[-1] == ("tokenising", path.stat().st_size, path.stat().st_size)
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_: pytest.fail("tokenised again"))
    again = prepare(path)
    assert all_ids(again) == all_ids(first) and again.fingerprint == first.fingerprint
    assert prepare(path, cache_dir=tmp_path / "cache").vocab_needed <= tokenizer.vocab_size


@pytest.mark.parametrize("damage", ["flip", "cut", "index", "gone", "documents"])
def test_a_damaged_entry_is_made_again_and_said(lines, prepare, tmp_path, damage):
    path, _ = lines
    whole = all_ids(prepare(path))
    entry = entry_of(tmp_path)
    shard = entry / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[1001] ^= 4
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(data[:-2])
    elif damage == "index":
        (entry / "index.json").write_text("{")
    elif damage == "gone":
        shard.unlink()
    else:
        (entry / "train-documents.npy").write_bytes(b"\x93NUMPY")
    told = []
    assert all_ids(prepare(path, progress=lambda what, *_: told.append(what))) == whole
    assert told[0].endswith("; tokenising again") and told[-1] == "tokenising"
    told.clear()
    prepare(path, progress=lambda what, *_: told.append(what))
    assert told == []


PREPARE = """
import hashlib, sys
from pathlib import Path
from outpace.data.corpus import prepare
from outpace.data.tokenizer_files import load_tokenizer

path, cache, tokenizer = sys.argv[1:]
loaded, told = load_tokenizer(tokenizer), []
print("ready", flush=True)
sys.stdin.readline()
(stream,) = prepare(
    (path,), weights=None, text_field="text", tokenizer=loaded, cache_dir=Path(cache), split="all",
    eval_fraction=0.05, processes=1, progress=lambda what, *_: told.append(what),
).streams
ids = stream.read(0, len(stream))
print(hashlib.md5(ids.tobytes()).hexdigest(), bool(told))
"""


def test_two_processes_at_once_make_one_entry(lines, prepare, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    given = (lines[0], tmp_path / "cache", tmp_path / "tokenizer")
    command = [sys.executable, "-c", PREPARE, *map(str, given)]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for one in both:
        assert one.stdout.readline() == "ready\n"
    for one in both:
        one.stdin.write("go\n")
        one.stdin.flush()
    found = [one.communicate(timeout=600)[0].split() for one in both]
    assert found[0][0] == found[1][0]
    assert sorted(worked for _, worked in found) == ["False", "True"]
    stream = prepare(lines[0]).streams[0]
    assert found[0][0] == hashlib.md5(stream.read(0, len(stream)).tobytes()).hexdigest()
    assert entry_of(tmp_path)


@pytest.mark.root
def test_a_full_disk_is_told_and_nothing_is_left(lines, prepare, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=False
    )
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        with pytest.raises(BadInputError, match=r"is full. Free some space, .* --cache-dir"):
            prepare(lines[0], cache_dir=small)
        assert [p.name for p in (small / "tokens").iterdir() if p.suffix != ".lock"] == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_what_a_killed_process_left_is_cleared(lines, prepare, tokenizer, tmp_path):
    prepare(lines[0])
    entry = entry_of(tmp_path)
    whole = {p.name for p in entry.iterdir()}
    entry.rename(entry.with_name(f"{entry.name}.1.tmp"))
    prepare(lines[0])
    assert {p.name for p in entry_of(tmp_path).iterdir()} == whole


def test_tokens_go_to_the_next_shard_when_one_is_full(
    lines, prepare, monkeypatch, tmp_path, ids_of
):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(shards, "_BUFFERED_TOKENS", 1700)
    corpus = prepare(lines[0])
    whole = ids_of(*lines[1])
    assert all_ids(corpus) == whole
    assert len(list(entry_of(tmp_path).glob("train-*.bin"))) == -(-len(whole) // 1000)
    assert corpus.streams[0].read(990, 2020).tolist() == whole[990:3010]


def test_splits_are_disjoint_complete_and_the_same_again(lines, prepare, ids_of):
    path, rows = lines
    parts = {split: all_ids(prepare(path, split=split)) for split in ("train", "validation", "all")}
    assert parts["all"] == ids_of(*rows)
    assert len(parts["train"]) + len(parts["validation"]) == len(parts["all"])
    assert 0.02 < len(parts["validation"]) / len(parts["all"]) < 0.11

    def documents(ids):
        end = ids_of("")[0]
        return "".join(map(chr, ids)).split(chr(end))[:-1]

    assert sorted(documents(parts["train"]) + documents(parts["validation"])) == sorted(
        documents(parts["all"])
    )
    assert not set(documents(parts["train"])) & set(documents(parts["validation"]))
    again = prepare(path, split="validation", processes=1)
    assert all_ids(again) == parts["validation"]


@pytest.mark.parametrize("eval_fraction", [0.01, 0.05, 0.5, 0.9])
def test_of_few_documents_the_end_is_held_out(tmp_path, prepare, library_texts, eval_fraction):
    path = tmp_path / "x.txt"
    path.write_text(library_texts[0], encoding="utf-8")
    train, held, whole = (
        all_ids(prepare(path, split=split, eval_fraction=eval_fraction))
        for split in ("train", "validation", "all")
    )
    assert train + held == whole
    assert len(held) == pytest.approx(len(whole) * eval_fraction, abs=1)


def test_helpers_encode_as_it_is_done_here(tokenizer, library_texts):
    batches = [library_texts[:3], [""], library_texts[3:], ["a", "", "b"]] * 2
    with Encoders(tokenizer, 2, alone_characters=0) as encoders:
        futures = [encoders.submit(batch) for batch in batches]
        for batch, future in zip(batches, futures, strict=True):
            assert [ids.tolist() for ids in future.result()] == [
                tokenizer.encode(text) for text in batch
            ]
        assert encoders.helped == len(batches)


def test_a_helper_that_dies_is_done_without(tokenizer, library_texts):
    with Encoders(tokenizer, 2, alone_characters=0) as encoders:
        encoders.submit(library_texts).result()
        for helper in encoders._helpers.values():
            os.kill(helper._process.pid, signal.SIGKILL)
        for _ in range(4):
            found = encoders.submit(library_texts[:1]).result()
            assert found[0].tolist() == tokenizer.encode(library_texts[0])


def test_helpers_change_nothing_in_the_shards(lines, tokenizer, tmp_path, monkeypatch):
    indices = []
    for alone, processes in ((1 << 30, 1), (0, 3)):
        monkeypatch.setattr(
            shards, "Encoders", lambda t, n, a=alone: parallel_encoding.Encoders(t, n, a)
        )
        monkeypatch.setattr(shards, "_BATCH_CHARACTERS", 10_000)
        source = open_source(str(lines[0]))
        entry = entry_path(tmp_path / str(alone), "x", tokenizer, 0.1, "text")
        indices.append(
            ensure_entry(entry, source, tokenizer, "text", 0.1, processes, lambda *_: None)
        )
    assert indices[0] == indices[1]
