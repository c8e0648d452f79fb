import csv
import json
import os
import re
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from outpace.data.corpus import content_fingerprint, read_documents, unigram_entropy
from outpace.data.repeated_files import files_in_both, repeated_files
from outpace.data.rows import read_table
from outpace.data.sources import open_source
from outpace.data.text import pieces
from outpace.data.tokenizer import Tokenizer
from outpace.records.errors import BadInputError

A, B, C = "def a():\n    return 1\n", "Ein Stück Text.\n", "x = 'y'\n"


def tokens(corpus):
    return [stream.read(0, len(stream)).tolist() for stream in corpus.streams]


def write_lines(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "corpus"
    for name, text in {
        "b.txt": B,
        "a.md": A,
        "deep/er/c.py": C,
        ".hidden": "no",
        "b.txt~": "no",
        "a.md.bak": "no",
        ".git/x": "no",
        "deep/__pycache__/c.cpython-312.pyc": "\0no",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_a_folder_is_its_files_in_order_without_hidden_ones(folder, prepare, ids_of):
    assert tokens(prepare(folder)) == [ids_of(A, B, C)]


def test_a_glob_and_a_file(folder, prepare, ids_of):
    assert tokens(prepare(folder / "*.txt")) == [ids_of(B)]
    assert tokens(prepare(f"{folder}/**/*.py")) == [ids_of(C)]
    assert tokens(prepare(folder / "a.md")) == [ids_of(A)]


def test_a_glob_has_a_file_once_where_links_lead_in_a_circle(folder, prepare, ids_of):
    (folder / "deep" / "up").symlink_to("..")
    assert tokens(prepare(f"{folder}/**/*.py")) == [ids_of(C)]
    (folder / "deep" / "again.py").symlink_to("er/c.py")  # not a circle: it was put there
    assert tokens(prepare(f"{folder}/**/*.py")) == [ids_of(C, C)]


def test_json_lines(tmp_path, prepare, ids_of):
    path = write_lines(tmp_path / "x.jsonl", {"text": A}, {"text": ""}, {"text": B, "n": 1})
    path.write_text(path.read_text() + "\n\n")
    assert tokens(prepare(path)) == [ids_of(A, B)]
    path = write_lines(tmp_path / "y.jsonl", {"body": C})
    assert tokens(prepare(path, text_field="body")) == [ids_of(C)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oh no", r"x\.jsonl, line 2 is not JSON"),
        ('{"input_ids": [1]}', r"line 2 has no field 'text', but 'input_ids': .*already tokenised"),
        ('{"chosen": "x", "rejected": "y"}', r"line 2 has no field 'text', .*: .*DPO"),
        ('{"body": "x"}', r"line 2 has no field 'text', but 'body'\. Records before it have it"),
        ('["text"]', r"line 2 holds a list; each line must be an object"),
        ("[" * 5000 + "]" * 5000, r"line 2 is not JSON: it is nested too deeply\. Each line"),
        ('{"n": ' + "9" * 5000 + "}", r"line 2 is not JSON: it has a number with more than 4,300 "),
        ('{"text": 3}', r"line 2: 'text' is int, not text"),
        ('{"text": null}', r"line 2: 'text' is null, not text"),
        ('{"text": "ab\\ud800"}', r"line 2: 'text' has half of a surrogate pair.* at character 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, prepare, line, said):
    path = write_lines(tmp_path / "x.jsonl", {"text": A})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BadInputError, match=said):
        prepare(path)
    left = [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.suffix != ".lock"]
    assert left == []


def test_parquet(tmp_path, prepare, ids_of):
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": [A, B] * 700, "n": [1, 2] * 700}), path)
    assert tokens(prepare(path)) == [ids_of(*[A, B] * 700)]
    with pytest.raises(BadInputError, match=r"no column 'body', but 'text', 'n'"):
        prepare(path, text_field="body")
    with pytest.raises(BadInputError, match=r"row 1: 'n' is int, not text"):
        prepare(path, text_field="n")
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(BadInputError, match="not a readable Parquet file"):
        prepare(path)


def test_a_dataset_with_the_fingerprint_of_another_is_another(tmp_path, prepare, ids_of):
    """As `map` gives it where its function reads a file that has changed since."""
    import datasets

    for name, text in (("one", A), ("two", B)):
        found = datasets.Dataset.from_dict({"text": [text]})
        found._fingerprint = "same"
        found.save_to_disk(tmp_path / name)
        assert tokens(prepare(tmp_path / name)) == [ids_of(text)]


def test_saved_datasets_and_folders_for_datasets(tmp_path, prepare, ids_of, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    found = datasets.Dataset.from_dict({"text": [A, "", B]})
    found.save_to_disk(tmp_path / "flat")
    datasets.DatasetDict({"train": found, "test": found.select([2])}).save_to_disk(tmp_path / "two")
    assert tokens(prepare(tmp_path / "flat")) == [ids_of(A, B)]
    assert tokens(prepare(f"hf:{tmp_path / 'two'}")) == [ids_of(A, B)]
    assert prepare(tmp_path / "two").hints == ()  # its validation data are named
    (hint,) = prepare(tmp_path / "two", split="validation", eval_fraction=0.5).hints
    assert "'test' is not. To validate on one, name it: --eval-data hf:" in hint
    assert hint.endswith(f"{tmp_path / 'two'}::test")
    assert prepare(tmp_path / "flat", split="validation", eval_fraction=0.5).hints == ()
    assert tokens(prepare(f"hf:{tmp_path / 'two'}::test")) == [ids_of(B)]
    with pytest.raises(BadInputError, match=r"no split 'dev', but 'train', 'test'"):
        prepare(f"hf:{tmp_path / 'two'}::dev")
    with pytest.raises(BadInputError, match=r"no column 'body', but 'text'"):
        prepare(tmp_path / "flat", text_field="body")
    (tmp_path / "lines").mkdir()
    write_lines(tmp_path / "lines" / "train.jsonl", {"text": A}, {"text": C})
    assert tokens(prepare(f"hf:{tmp_path / 'lines'}")) == [ids_of(A, C)]
    with pytest.raises(BadInputError, match=r"cannot be opened"):
        prepare(f"hf:{tmp_path / 'lines'}:other:nosplit")
    with pytest.raises(BadInputError, match=r"expected hf:NAME"):
        prepare("hf:a:b:c:d")


def test_nanogpt(tmp_path, prepare):
    ids = np.arange(1000, dtype="<u2") * 60
    (tmp_path / "x.bin").write_bytes(ids.tobytes())
    corpus = prepare(tmp_path / "x.bin", tokenizer=None)
    assert tokens(corpus) == [ids.tolist()] and corpus.vocab_needed == 999 * 60 + 1
    train = prepare(tmp_path / "x.bin", tokenizer=None, split="train", eval_fraction=0.1)
    held = prepare(tmp_path / "x.bin", tokenizer=None, split="validation", eval_fraction=0.1)
    assert corpus.streams[0].document_starts is None  # the format does not say where they begin
    assert [*tokens(train)[0], *tokens(held)[0]] == ids.tolist() and len(held.streams[0]) == 100
    (tmp_path / "x.bin").write_bytes(ids.tobytes() + b"x")
    with pytest.raises(BadInputError, match="odd number of bytes"):
        prepare(tmp_path / "x.bin", tokenizer=None)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(BadInputError, match="is empty"):
        prepare(tmp_path / "x.bin", tokenizer=None)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what is resident")
def test_looking_through_all_ids_keeps_none_of_the_file_in_memory(tmp_path, prepare):
    path = tmp_path / "x.bin"
    (np.arange(20 << 20) % 50_000).astype("<u2").tofile(path)
    corpus = prepare(path, tokenizer=None)
    assert corpus.vocab_needed == 50_000
    assert resident_bytes(path) < 8 << 20, "of 40 MiB; the first MiB are looked at"


def test_counting_tokens_takes_little_memory(tmp_path, prepare):
    """The entropy of frequencies is told at a run's end: 64 MiB there would be its peak."""
    path = tmp_path / "x.bin"
    (np.arange(6 << 20) % 1000).astype("<u2").tofile(path)
    corpus = prepare(path, tokenizer=None)
    tracemalloc.start()
    try:
        assert unigram_entropy(corpus) == pytest.approx(np.log(1000), abs=1e-6)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20, "of 12 MiB of ids, 48 as int64"
    finally:
        tracemalloc.stop()


def resident_bytes(path):
    """How much of a mapped file counts as this process's memory."""
    entries = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    assert entries, "it is mapped"
    return sum(int(entry.split("Rss:")[1].split()[0]) << 10 for entry in entries)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what is resident")
def test_samples_from_all_over_a_file_keep_little_of_it_in_memory(tmp_path, prepare):
    """Peak memory would be the file's size, though the kernel can take its pages back."""
    path = tmp_path / "x.bin"
    ids = (np.arange(40 << 20) % 50_000).astype("<u2")
    ids.tofile(path)
    (stream,) = prepare(path, tokenizer=None).streams
    peak = 0
    for number, begin in enumerate(range(0, len(ids), 1 << 14)):
        found = stream.read(begin, 1025 if begin + 1025 <= len(ids) else len(ids) - begin)
        assert found[0] == ids[begin] and found[-1] == ids[begin + len(found) - 1]
        if number % 100 == 0:
            peak = max(peak, resident_bytes(path))
    assert 1 << 20 < peak < 24 << 20, "of 80 MiB"


HEADER = {"<u2": (20240520, 1), "<u4": (20240801, 7)}


def write_llmc(path, dtype, ids, count=None, version=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = HEADER[dtype][0], version or HEADER[dtype][1], len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype=dtype).tobytes())


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8"])
@pytest.mark.parametrize("largest", [4, 50_000, 65_000])
def test_ids_of_each_width(tmp_path, prepare, dtype, largest):
    ids = np.random.default_rng(0).integers(0, largest, 999)
    if dtype != "<u2" and largest > 4:
        ids[7] = 128_255  # Llama 3's last
    (tmp_path / "x.bin").write_bytes(ids.astype(dtype).tobytes())
    assert tokens(prepare(tmp_path / "x.bin", tokenizer=None)) == [ids.tolist()]


def test_short_and_dull_ids_of_16_bits_stay_so(tmp_path, prepare):
    for ids in ([1, 0, 2, 0], [0] * 64, [5, 1] * 64, [*b"ASCII text", 256] * 200):
        (tmp_path / "x.bin").write_bytes(np.array(ids, dtype="<u2").tobytes())
        assert tokens(prepare(tmp_path / "x.bin", tokenizer=None)) == [ids]


@pytest.mark.parametrize("dtype", ["<i4", "<i8"])
@pytest.mark.parametrize(("place", "value"), [(500, -100), (998, -1), (0, 1 << 30)])
def test_wide_ids_among_other_words_are_not_read_as_16_bits(tmp_path, prepare, dtype, place, value):
    """Negative numbers mark padding; every second id of 16 bits would be 0."""
    ids = np.random.default_rng(0).integers(0, 50_000, 999)
    ids[place] = value
    (tmp_path / "x.bin").write_bytes(ids.astype(dtype).tobytes())
    said = rf"holds ids of {8 * np.dtype(dtype).itemsize} bits, but its word {place:,} is {value:,}"
    with pytest.raises(BadInputError, match=said):
        prepare(tmp_path / "x.bin", tokenizer=None)


def test_padded_ids_of_16_bits_stay_so(tmp_path, prepare):
    ids = np.random.default_rng(0).integers(3, 50_000, (200, 64))
    ids[np.arange(64) >= np.arange(200)[:, None] % 60 + 3] = 0
    (tmp_path / "x.bin").write_bytes(ids.astype("<u2").tobytes())
    assert tokens(prepare(tmp_path / "x.bin", tokenizer=None)) == [ids.ravel().tolist()]


def packed(ids):
    """As lit-gpt's PackedDatasetBuilder writes: a mark, version, type and length, then ids."""
    return b"LITPKDS" + (1).to_bytes(8, "little") + b"\x04" + len(ids).to_bytes(8, "little") + ids


def litdata(ids, items=1):
    """As litdata's BinaryWriter writes: the number of items, where they begin and end, then ids."""
    begin, each = 4 * (items + 2), len(ids) // items
    offsets = [begin + each * item for item in range(items)] + [begin + len(ids)]
    return np.array([items, *offsets], dtype="<u4").tobytes() + ids


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (packed, "is a PackedDataset of lit-gpt"),
        (litdata, "is a chunk of litdata"),
        (lambda ids: litdata(ids, 2000), "is a chunk of litdata"),
        (lambda ids: b"GGUF\x03\0\0\0" + ids, "is a GGUF model"),
        (lambda ids: b"ab" + ids, "are ids of 32 bits behind a header"),
    ],
)
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_ids_behind_a_header_are_refused(tmp_path, prepare, write, said, dtype):
    """The header would be learned, and ids of 32 bits be read as twice as many of 16."""
    if dtype == "<u2" and "behind" in said:
        pytest.skip("nothing tells ids of 16 bits from a header")
    ids = np.random.default_rng(0).integers(0, 31_000, 4000).astype(dtype)
    (tmp_path / "x.bin").write_bytes(write(ids.tobytes()))
    with pytest.raises(BadInputError, match=said):
        prepare(tmp_path / "x.bin", tokenizer=None)


def test_shards_of_streaming_are_named(tmp_path, prepare):
    """MosaicML's MDS has litdata's header."""
    (tmp_path / "shard.00000.mds").write_bytes(litdata(b"hello world " * 99))
    with pytest.raises(BadInputError, match=r"is a chunk of litdata or streaming \(MDS\)"):
        prepare(tmp_path / "shard.00000.mds")


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("<f4", "floating-point numbers of 32 bits"),
        ("<f8", "floating-point numbers of 64 bits"),
        (">u2", "16 bits with the most significant byte first"),
        ("<u1", "holds ids of one byte"),
    ],
)
def test_ids_of_other_dtypes_are_refused(tmp_path, prepare, dtype, said):
    """Read as 16 bits, they would be other ids; all are below 65,536."""
    drawn = np.random.default_rng(0).zipf(1.3, 40_000)
    for largest in (200,) if dtype == "<u1" else (200, 50_000):
        ids = drawn % largest
        ids.astype(dtype).tofile(tmp_path / "x.bin")
        with pytest.raises(BadInputError, match=said):
            prepare(tmp_path / "x.bin", tokenizer=None)
        ids.astype("<u2").tofile(tmp_path / "x.bin")
        assert tokens(prepare(tmp_path / "x.bin", tokenizer=None)) == [ids.tolist()]


@pytest.mark.parametrize(
    ("name", "begin"), [("x.wet", "WARC/1.0\r\n"), ("x.rtf", "{\\rtf1 "), ("x.ps", "%!PS-Adobe\n")]
)
def test_further_markup_is_said(tmp_path, prepare, name, begin):
    (tmp_path / name).write_text(f"{begin}Some text.")
    (hint,) = prepare(tmp_path / name).hints
    assert "whose markup is trained on with the text" in hint


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_llmc(tmp_path, prepare, dtype):
    ids = np.random.default_rng(0).integers(0, 50_000, 999)
    write_llmc(tmp_path / "x.bin", dtype, ids)
    assert tokens(prepare(tmp_path / "x.bin", tokenizer=None)) == [ids.tolist()]
    for changed, said in (
        ({"count": 1000}, "says 1000 tokens .* cut short"),
        ({"version": 3}, r"magic number 20240\d+, version 3.* not one with tokens"),
    ):
        write_llmc(tmp_path / "x.bin", dtype, ids, **changed)
        with pytest.raises(BadInputError, match=said):
            prepare(tmp_path / "x.bin", tokenizer=None)


@pytest.mark.parametrize("reference", ["shards", "shards/*.bin"])
def test_shards_of_tokens_follow_each_other(tmp_path, prepare, reference):
    (tmp_path / "shards").mkdir()
    for n in (0, 1):
        write_llmc(tmp_path / "shards" / f"fineweb_train_00000{n}.bin", "<u2", [n * 100 + 1, 300])
    write_llmc(tmp_path / "shards" / "fineweb_val_000000.bin", "<u2", [7, 7])
    corpus = prepare(tmp_path / reference, tokenizer=None)
    assert tokens(corpus) == [[1, 300, 101, 300]]
    assert "fineweb_val_000000.bin is left out" in corpus.hints[0]
    assert tokens(prepare(tmp_path / "shards" / "*_val_*", tokenizer=None)) == [[7, 7]]


def test_shards_of_megatron_keep_their_documents(tmp_path, prepare):
    (tmp_path / "of").mkdir()
    for name, documents in (("a", [[1, 2], [3]]), ("b", [[4], [5, 6]])):
        write_megatron(tmp_path / "of" / name, 8, "<u2", [np.array(d) for d in documents])
    corpus = prepare(tmp_path / "of", tokenizer=None)
    assert tokens(corpus) == [[1, 2, 3, 4, 5, 6]] and documents_of(corpus) == [0, 0, 1, 2, 3, 3]


def documents_of(corpus):
    (stream,) = corpus.streams
    return stream.documents(0, len(stream)).tolist()


def write_megatron(path, code, dtype, documents):
    """As Megatron-LM's IndexedDatasetBuilder lays it out: a sequence for each document."""
    path.with_suffix(".bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    sizes = np.array([len(d) for d in documents], dtype="<i4")
    pointers = np.concatenate(([0], np.cumsum(sizes[:-1]))).astype("<i8") * np.dtype(dtype).itemsize
    borders = np.arange(len(documents) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
        + len(sizes).to_bytes(8, "little") + len(borders).to_bytes(8, "little")
        + sizes.tobytes() + pointers.tobytes() + borders.tobytes()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")],
)
@pytest.mark.parametrize("named", ["x-0.5_text", "x-0.5_text.bin", "x-0.5_text.idx"])
def test_megatron(tmp_path, prepare, code, dtype, named):
    documents = [np.array([1, 2, 3]), np.array([100]), np.array([7, 8])]
    write_megatron(tmp_path / "x-0.5_text.bin", code, dtype, documents)
    corpus = prepare(tmp_path / named, tokenizer=None)
    assert tokens(corpus) == [[1, 2, 3, 100, 7, 8]] and corpus.vocab_needed == 101
    assert corpus.streams[0].documents(1, 5).tolist() == [0, 0, 1, 2, 2]
    assert documents_of(corpus) == [0, 0, 0, 1, 2, 2]
    train, held = (
        prepare(tmp_path / named, tokenizer=None, split=split, eval_fraction=0.5)
        for split in ("train", "validation")
    )
    assert documents_of(train) == [0, 0, 0] and documents_of(held) == [0, 1, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b[:20], "not a readable Megatron index"),
        (lambda b: b"X" + b[1:], "does not begin with MMIDIDX"),
        (lambda b: b[:17] + b"\x06" + b[18:], "dtype 6 is not supported"),
        (lambda b: b[:34] + b"\x09" + b[35:], "do not follow each other"),
        (lambda b: b[:-8] + b"\xff" * 8, "documents do not follow"),
        # Files merged with the documents of the first alone: all others would be one document.
        (lambda b: b[:26] + b"\x02" + b[27:-8], "2 sequences, but its documents belong to other"),
        (lambda b: b[:26] + b"\x00" + b[27:-24], "documents belong to other sequences .none"),
        (lambda b: b[:18] + b"\xff" * 7 + b[25:], "not a readable Megatron index"),
    ],
)
def test_a_damaged_megatron_index(tmp_path, prepare, change, said):
    write_megatron(tmp_path / "x", 8, "<u2", [np.array([1, 2, 3]), np.array([4])])
    idx = tmp_path / "x.idx"
    idx.write_bytes(change(idx.read_bytes()))
    with pytest.raises(BadInputError, match=said):
        prepare(tmp_path / "x.bin", tokenizer=None)


def test_megatron_with_a_cut_bin_or_negative_ids(tmp_path, prepare):
    write_megatron(tmp_path / "x", 4, "<i4", [np.array([1, -2, 3])])
    with pytest.raises(BadInputError, match=r"token id -2; ids begin at 0"):
        prepare(tmp_path / "x.bin", tokenizer=None)
    (tmp_path / "x.bin").write_bytes(b"12345678")
    with pytest.raises(BadInputError, match="has 8 bytes, which contradicts the index"):
        prepare(tmp_path / "x.bin", tokenizer=None)


def test_the_standard_library_is_text_by_file():
    files = open_source("stdlib").files
    names = {file.name for file in files}
    assert {"argparse.py", "typing.py"} <= names and len(files) > 300
    assert not any({"test", "site-packages"} & set(file.parts) for file in files)


def test_the_standard_library_is_no_table_of_characters():
    """What a small model learns of it is to look like Python: codecs' tables were a seventh."""
    table = re.compile(r"""^\s*(0x|\d|['"]\\|u'|\\[ux])""")
    files = open_source("stdlib").files
    assert not any("encodings" in file.parts for file in files)
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert sum(table.match(line) is not None for line in lines) < 0.01 * len(lines)


def test_several_sources_are_streams_of_their_own(folder, prepare, ids_of):
    corpus = prepare(folder / "a.md", folder / "b.txt", weights=(1.0, 3.0))
    assert tokens(corpus) == [ids_of(A), ids_of(B)] and corpus.weights == (1.0, 3.0)
    assert corpus.fingerprint != prepare(folder / "a.md", folder / "b.txt").fingerprint


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "no such file or folder, and as a pattern it matches no file"),
        ("empty.txt", b"", "is empty"),
        ("lines.jsonl", b"\n", "holds no text"),
        ("bad.txt", b"abc\xff", "byte 0xff at offset 3"),
        ("cut.txt", "über €".encode()[:-1], "byte 0xe2 at offset 6"),
        ("far.txt", b"x" * (1 << 20) + b"\n\xc3(", f"byte 0xc3 at offset {(1 << 20) + 1}"),
        ("over.txt", b"y" * ((1 << 20) - 1) + b"\xc3(", f"byte 0xc3 at offset {(1 << 20) - 1}"),
        ("late.txt", b"ab\ncd\n" * 600_000 + b"\x80", "byte 0x80 at offset 3600000"),
    ],
)
def test_bad_text_is_told_with_its_place(tmp_path, prepare, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=said):
        prepare(tmp_path / name)


def test_json_lines_in_another_encoding(tmp_path, prepare):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(BadInputError, match="line 2 is not UTF-8 text: byte 0xe9 at its offset 10"):
        prepare(path)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_no_text_to_hold_out(tmp_path, prepare, split):
    path = write_lines(tmp_path / "x.jsonl", {"text": ""})
    with pytest.raises(BadInputError, match=r"too small to divide .* --eval-data"):
        prepare(path, split=split)


def test_an_unreadable_file_is_told_as_itself(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("text")
    found = open_source(str(path))
    path.unlink()
    with pytest.raises(BadInputError, match=r"x\.txt cannot be read: No such file"):
        list(pieces(found, "text"))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ((1.0,), "1 weights for 2 sources"),
        ((1.0, 0.0), "must be above 0"),
        ((1.0, float("nan")), "must be above 0"),
        ((1e-6, 1.0), "1e-06 is less than 1/100000 of all weights"),
    ],
)
def test_weights_that_do_not_fit(folder, prepare, weights, said):
    with pytest.raises(BadInputError, match=said):
        prepare(folder / "a.md", folder / "b.txt", weights=weights)


def test_a_byte_order_mark_is_no_text(tmp_path, prepare, ids_of):
    (tmp_path / "x.txt").write_text(A + "\ufeff" + B, encoding="utf-8-sig")
    assert tokens(prepare(tmp_path / "x.txt")) == [ids_of(A + "\ufeff" + B)]


def test_a_file_that_grows_while_it_is_read_is_told(tmp_path, prepare):
    path = tmp_path / "x.txt"
    path.write_text(A)

    def grow(*_):
        with path.open("a") as stream:
            stream.write(B)

    with pytest.raises(BadInputError, match=r"x\.txt changed while it was being read"):
        prepare(path, progress=grow)
    assert [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.suffix != ".lock"] == []


ROWS = [{"text": A, "n": 1}, {"text": B, "n": 2}, {"text": 'quoted "x", y\nz', "n": 3}]


def write_table(path, delimiter, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("name", ["UP.JSONL", "a.ndjson", "lines.json", "a.Json"])
def test_json_is_rows_under_each_of_its_suffixes(tmp_path, prepare, ids_of, name):
    path = write_lines(tmp_path / name, *ROWS)
    assert tokens(prepare(path)) == [ids_of(*(row["text"] for row in ROWS))]


@pytest.mark.parametrize("name", ["list.json", "list.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_list_is_rows_whatever_it_is_called(tmp_path, prepare, ids_of, name, indent, mark):
    (tmp_path / name).write_text(mark + json.dumps(ROWS, indent=indent), encoding="utf-8")
    assert tokens(prepare(tmp_path / name)) == [ids_of(*(row["text"] for row in ROWS))]


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.jsonl.bak"])
@pytest.mark.parametrize("listed", [False, True])
def test_rows_under_the_name_of_a_text_are_refused(tmp_path, prepare, ids_of, name, listed):
    path = write_lines(tmp_path / name, *ROWS)
    if listed:
        path.write_text(json.dumps(ROWS))
    with pytest.raises(
        BadInputError, match=r"contains JSON \(an object per line.* Rename it to \.jsonl"
    ):
        prepare(path)
    path.write_text("{\n  int a;\n}\n{ b }\n")
    assert tokens(prepare(path)) == [ids_of(path.read_text())]


def test_a_long_list_is_read_a_record_at_a_time(tmp_path, prepare, ids_of):
    texts = [f"orchard {n} \u00e9 " * 3000 for n in range(80)]  # over 4 MB: several blocks
    (tmp_path / "x.json").write_text(json.dumps([{"text": text} for text in texts]))
    assert tokens(prepare(tmp_path / "x.json")) == [ids_of(*texts)]


def test_an_object_in_a_file_of_its_own_is_a_row(tmp_path, prepare, ids_of):
    (tmp_path / "of").mkdir()
    for name, text in (("1.json", A), ("2.json", B)):
        (tmp_path / "of" / name).write_text(json.dumps({"text": text}, indent=1))
    assert tokens(prepare(tmp_path / "of" / "1.json")) == [ids_of(A)]
    assert tokens(prepare(tmp_path / "of")) == [ids_of(A, B)]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.json", '[{"text": "a"}, {"text": "b" "c"}]', r"item 2, line 1, is not JSON: .*column"),
        ("x.jsonl", '[\n{"text": "a"}\n{"text": "b"}]', r"item 2 .*a comma .* line 3, not '{'"),
        ("x.json", '[{"text": "a"},', r"item 2, line 1, is not JSON"),
        ("x.json", '[{"text": "a"}]\n\n[{"text": "b"}]', r"x\.json, line 3: .* the list \('\['\)"),
        (
            "x.jsonl",
            '[{"text": "a"}] {"text": "b"}',
            r"line 1: there is more text after .* \('{'\), as in",
        ),
        ("x.json", '[{"text": "a"}]]', r"more text after the end of the list \('\]'\)"),
        ("x.json", '[{"text": "a"},\n{"text": "b"\n', r"line 2, is not JSON: .* at column 13"),
        (
            "x.json",
            f'[{{"text": "{"a" * (1 << 20)}"}}, {{"text": "b" 1}}]',
            r"item 2, line 1, is not JSON: .* at column 1048605$",
        ),
        ("x.jsonl", '{"text": "a"}\n{"text": "b"\n', r"line 2 is not JSON: .* at column 13"),
        ("x.jsonl", '{"text": "a"}\n{"text": "b\r\n', r"line 2 .*: Unterminated .* column 10"),
        ("x.json", '[{"text": "a"}, "b"]', r"item 2, line 1, is a str; each must be an object"),
        ("x.jsonl", '{"text": "a\tb"}\n', r"line 1 is not JSON: Invalid control character at col"),
        (
            "x.jsonl",
            '{"text": "a"}\n{"text": "b',
            r"line 2 is not JSON: Unterminated string at c",
        ),
        ("x.csv", 'text,n\n"a,1\nb,2\n', r"x\.csv, line 3: unexpected end of data"),
        ("x.csv", "text,n\na,1\nb\n", r"x\.csv, line 3 has 1 columns, but the header has 2: 'te"),
        ("x.tsv", "body\tn\na\t1\n", r"x\.tsv, line 2 has no field 'text', but 'body', 'n'"),
        ("x.csv", b"text\n\xff\n", r"x\.csv is not UTF-8 text: byte 0xff at offset 5"),
    ],
)
def test_rows_that_cannot_be_read_are_told_with_their_place(tmp_path, prepare, name, content, said):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInputError, match=said):
        prepare(path)


@pytest.mark.parametrize(("name", "delimiter"), [("t.csv", ","), ("T.CSV", ","), ("t.tsv", "\t")])
def test_tables_are_rows(tmp_path, prepare, ids_of, name, delimiter):
    rows = ROWS if delimiter == "," else [{"text": "one word", "n": 1}, {"text": 'a "b"', "n": 2}]
    if delimiter == ",":
        write_table(tmp_path / name, delimiter, rows)
    else:
        (tmp_path / name).write_text(
            "text\tn\n" + "".join(f"{r['text']}\t{r['n']}\n" for r in rows)
        )
    assert tokens(prepare(tmp_path / name)) == [ids_of(*(row["text"] for row in rows))]


def test_cells_between_tabs_are_quoted_where_all_of_them_say_so(tmp_path, prepare, ids_of):
    rows = [{"text": 'he said "no"', "n": 1}, {"text": "plain", "n": 2}]
    write_table(tmp_path / "x.tsv", "\t", rows)
    assert '""no""' in (tmp_path / "x.tsv").read_text()
    assert tokens(prepare(tmp_path / "x.tsv")) == [ids_of('he said "no"', "plain")]
    for glue in (
        ['"" is doubled, he said', '"No," he said.', '"yes"'],
        ['"I came.', 'He left."', '"a" b'],
    ):
        (tmp_path / "y.tsv").write_text("text\n" + "\n".join(glue) + "\n")
        assert tokens(prepare(tmp_path / "y.tsv")) == [ids_of(*glue)]


@pytest.mark.parametrize("text", ["two\nlines", 'a\n\n"b"\tc', "a\tb", "a\r\nb", "plain", ""])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("columns", [["text"], ["n", "text"]])
def test_cells_between_tabs_hold_what_was_written(tmp_path, text, quoting, columns):
    """One column with line breaks alone could be texts of one line each, too."""
    with (tmp_path / "x.tsv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=quoting)
        writer.writerows([columns, *([text] * len(columns) for _ in range(2))])
    if columns == ["text"] and quoting == csv.QUOTE_MINIMAL and text in ("two\nlines", "a\r\nb"):
        with pytest.raises(BadInputError, match=r"x.tsv, line 2: .* one text or several\. Write"):
            read_table(str(tmp_path / "x.tsv"))
    else:
        rows = read_table(str(tmp_path / "x.tsv")).rows
        assert [row.values for row in rows] == [dict.fromkeys(columns, text)] * 2


def test_a_cell_may_be_long(tmp_path, prepare, ids_of):
    text = "many words " * 40_000
    write_table(tmp_path / "x.csv", ",", [{"text": text}])
    assert tokens(prepare(tmp_path / "x.csv")) == [ids_of(text)]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("text", ["Plain english text. " * 9, "Обычный русский текст. " * 9])
@pytest.mark.parametrize("name", ["x.txt", "x.csv", "x.jsonl", "x.json"])
def test_text_of_two_bytes_a_character_is_refused(tmp_path, prepare, encoding, text, name):
    content = {"csv": f"text\n{text}\n", "json": json.dumps([{"text": text}])}
    content["jsonl"] = json.dumps({"text": text}) + "\n"
    found = content.get(name[2:], text)
    (tmp_path / name).write_bytes(found.encode(encoding))
    with pytest.raises(BadInputError, match=r"is not UTF-8 text|is not JSON"):
        prepare(tmp_path / name)


def test_a_null_in_a_text_is_one_of_it_and_said(tmp_path, prepare, ids_of):
    (tmp_path / "x.txt").write_text(A + "\0" + B)
    found = prepare(tmp_path / "x.txt")
    assert tokens(found) == [ids_of(A + "\0" + B)]
    assert [hint for hint in found.hints if "x.txt has 1 NUL characters" in hint]
    write_lines(tmp_path / "x.jsonl", {"text": A + "\0" + B})
    for _ in range(2):  # the second time from the cache
        assert "has 1 NUL characters" in prepare(tmp_path / "x.jsonl").hints[0]


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.csv", "x.json"])
def test_a_file_with_holes_is_refused_with_their_place(tmp_path, prepare, name):
    """As a disk leaves a file whose end it had not written when its power was cut."""
    rows = "".join(json.dumps({"text": f"{A} {n}"}) + "\n" for n in range(9))
    whole = {"x.jsonl": rows, "x.csv": "text\n", "x.json": json.dumps([{"text": A}])}
    head = whole.get(name, A * 60_000).encode()
    (tmp_path / name).write_bytes(head + bytes(1 << 19))
    with pytest.raises(BadInputError, match=r"NUL characters, the first at offset|, not '.x00'"):
        prepare(tmp_path / name)
    (tmp_path / name).write_bytes(bytes(1 << 19))
    with pytest.raises(BadInputError, match="NUL characters, the first at offset 0: a copy or"):
        prepare(tmp_path / name)


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("key", ["data", "rows", "train", "examples", "it's"])
def test_rows_within_an_object_are_named_with_a_command_that_takes_them_out(
    tmp_path, prepare, ids_of, name, indent, key
):
    path = tmp_path / name
    path.write_text(json.dumps({"version": 1, key: [{"text": A}, {"text": B}]}, indent=indent))
    with pytest.raises(BadInputError, match="is a list of 2 objects: if these are the rows") as no:
        prepare(path)
    command = str(no.value).partition("write them with ")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert tokens(prepare(tmp_path / "rows.jsonl")) == [ids_of(A, B)]
    if key == "data":
        with pytest.raises(BadInputError, match=r"'data' is list, not text\. Its 'data' is a list"):
            prepare(path, text_field="data")


@pytest.mark.parametrize(
    "values",
    [
        {"0": {"text": A, "n": 1}, "1": {"text": B, "n": 2}},
        {"columns": ["text", "n"], "index": [0, 1], "data": [[A, 1], [B, 2]]},
    ],
)
def test_a_file_of_whole_rows_in_another_orientation_is_named(tmp_path, prepare, values):
    """As pandas writes with orient='index' and orient='split'."""
    (tmp_path / "x.json").write_text(json.dumps(values))
    with pytest.raises(BadInputError, match=r"has no field 'text'.* values are 2 whole rows"):
        prepare(tmp_path / "x.json")


@pytest.mark.parametrize("values", [{"text": [A, B], "n": [1, 2]}, {"text": {"0": A, "1": B}}])
def test_a_file_of_columns_is_named(tmp_path, prepare, values):
    (tmp_path / "x.json").write_text(json.dumps(values))
    with pytest.raises(BadInputError, match="values are columns of 2 rows: write one object per"):
        prepare(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "x.jsonl",
            '{"text": "a"}\n{"text": "b", "text": "c"}\n',
            "line 2: an object has the key",
        ),
        ("x.json", '{"text": "b", "text": "c"}', "line 1: an object has the key 'text' twice"),
        ("x.json", '{\n"text": "b",\n"text": "c"\n}', "x.json: an object has the key 'text' twice"),
        (
            "x.json",
            '[{"text": "a"},\n{"text": "b", "text": "c"}]',
            "item 2, line 2: .* twice",
        ),
        ("x.jsonl", '{"text": "a", "m": {"k": 1, "k": 2, "k": 3}}', "the key 'k' 3 times"),
        ("x.csv", "text,n,text\na,1,b\n", "line 1: the header has the column 'text' twice"),
        ("x.tsv", "text\tn\ttext\na\t1\tb\n", "line 1: the header has the column 'text' twice"),
    ],
)
def test_a_name_that_stands_twice_is_refused(tmp_path, prepare, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInputError, match=said):
        prepare(tmp_path / name)


def test_two_columns_of_one_name_in_a_parquet_file_are_refused(tmp_path, prepare):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(BadInputError, match="the header has the column 'text' twice"):
        prepare(tmp_path / "x.parquet")


def tf_record(example):
    """A record between its length, with a checksum, and its own checksum."""
    return len(example).to_bytes(8, "little") + b"\x81\x82\x83\x84" + example + b"\x85\x86\x87\x88"


@pytest.mark.parametrize(
    ("name", "head", "said"),
    [
        ("x.jsonl.gz", b"\x1f\x8b\x08\x00", "is compressed with gzip, not text"),
        ("x.jsonl", b"\x1f\x8b\x08\x00", "is compressed with gzip, not text"),
        ("x.zip", b"PK\x03\x04abcd", "is a ZIP archive"),
        ("x.tar", b"a.txt".ljust(257, b"\0") + b"ustar" + b"word " * 999, "is a tar archive, not"),
        ("x.bin", b"A text. " * 250, "x.bin is text, or holds ids of one byte, by the"),
        ("x.arrow", b"\xff\xff\xff\xff\x98\x00\x00\x00", "is an Arrow stream, as datasets writes"),
        ("x.avro", b"Obj\x01\x04\x14", "is an Avro file"),
        ("x.pdf", b"%PDF-1.7\nplain ascii", "is a PDF document"),
        (
            "x.png",
            b"\x89PNG\r\n\x1a\n\0\0",
            "is an image, not text. Leave it out; or to train",
        ),
        ("x.jpg", b"\xff\xd8\xff\xe0\0\x10JFIF", "is an image, not text"),
        ("x.webp", b"RIFF\x24\0\0\0WEBPVP8 ", "is an image, not text"),
        ("x.mp3", b"ID3\x04\0\0\0\0\0\x23", "is sound or video, not text"),
        ("x.db", b"SQLite format 3\0\x10\0", "is an SQLite database, not text"),
        ("x.wav", b"RIFF\x24\0\0\0WAVEfmt ", "is sound or video, not text"),
        ("x.bin", b"\x93NUMPY\x01\x00", r"is a NumPy array, not token ids.* numpy's tofile"),
        ("x.npy", b"\x93NUMPY\x01\x00", r"is a NumPy array, not text.* tofile into .* named .bin"),
        ("x.npy", b"\x01\x01\x02\x00" * 99, r"as in UTF-16.* ids of tokens, write .* named .bin"),
        ("x.dat", b"\0\1\2\x0f\x9d\3" * 99, r"so it is a binary file.* ids of .* named .bin"),
        ("x.txt", "Text.\n".encode("utf-16-be") * 99, "as in UTF-16BE. Convert it"),
        ("x.safetensors", (70).to_bytes(8, "little") + b'{"a":{"dtype":', "is a safetensors file"),
        ("x.bin", (70).to_bytes(8, "little") + b'{"a":{"dtype":', "is a safetensors file, not to"),
        ("x.tfrecord", tf_record(b"\n\x04text") * 9, "is a TFRecord file, not text"),
        ("x.bin", tf_record(b"\n\x04text") * 9, "is a TFRecord file, not token ids"),
        ("x.pkl", b"\x80\x02]q\x00", "is a pickle, not text"),
        ("x.pt", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "is a file of torch.save"),
        ("x.feather", b"FEA1\0\0\0\0", "is a Feather file of version 1"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path, prepare, name, head, said):
    (tmp_path / name).write_bytes(head)
    with pytest.raises(BadInputError, match=said):
        prepare(tmp_path / name)


@pytest.mark.parametrize("begin", ["GGUF", "ID3", "SQLite format 3", "ARROW1", "OggS"])
def test_a_text_may_begin_with_the_name_of_a_format(tmp_path, prepare, ids_of, begin):
    (tmp_path / "x.txt").write_text(f"{begin} is a format.\n")
    assert tokens(prepare(tmp_path / "x.txt")) == [ids_of(f"{begin} is a format.\n")]


@pytest.mark.parametrize("reference", ["", "*"])
def test_files_beside_shards_are_not_read_and_named(tmp_path, prepare, ids_of, reference):
    write_lines(tmp_path / "train-0.jsonl", {"text": A})
    write_lines(tmp_path / "train-1.JSONL", {"text": B})
    write_lines(tmp_path / "val.jsonl", {"text": C})
    (tmp_path / "README.md").write_text("# The data\n" * 99)
    (tmp_path / "stats.json").write_text(json.dumps({"rows": 2}, indent=1))
    corpus = prepare(tmp_path / reference)
    assert tokens(corpus) == [ids_of(A, B)]
    (hint,) = corpus.hints
    assert all(name in hint for name in ("README.md", "stats.json", "val.jsonl")), hint


def test_folders_and_names_of_texts_say_splits(tmp_path, prepare, ids_of):
    for split, text in (("train", A), ("test", B), ("validation", C)):
        (tmp_path / "rows" / split).mkdir(parents=True)
        write_lines(tmp_path / "rows" / split / "0.jsonl", {"text": text})
        (tmp_path / "texts" / split / "pos").mkdir(parents=True)
        (tmp_path / "texts" / split / "pos" / "1.txt").write_text(text)
        (tmp_path / "names").mkdir(exist_ok=True)
        (tmp_path / "names" / f"wiki.{split}.tokens").write_text(text)
    for name in ("rows", "texts", "names"):
        corpus = prepare(tmp_path / name)
        assert tokens(corpus) == [ids_of(A)]
        assert "are left out" in corpus.hints[0]
    assert tokens(prepare(tmp_path / "rows" / "test")) == [ids_of(B)]
    (tmp_path / "rows" / "train").rename(tmp_path / "rows" / "part-0")  # as rows of no split
    corpus = prepare(tmp_path / "rows")
    assert tokens(corpus) == [ids_of(A)] and "are left out" in corpus.hints[0]
    assert tokens(prepare(tmp_path / "rows" / "*" / "*.jsonl")) == [ids_of(A)]
    (tmp_path / "texts" / "main.py").write_text(A)  # source code, of which tests are part
    assert len(tokens(prepare(tmp_path / "texts"))[0]) == len(ids_of(A, A, B, C))


@pytest.mark.parametrize(
    ("name", "begin", "kind"),
    [
        ("page.txt", "\ufeff<!-- saved -->\n<!DOCTYPE html>\n<html><p>", "HTML"),
        ("page.html", "<html lang=en><body>", "HTML"),
        ("feed.txt", '<?xml version="1.0"?><feed>', "XML"),
        ("rows.yaml", "rows:\n", "YAML"),
        ("rows.txt", "---\n# two\n- text: one\n  label: a\n", "YAML"),
        ("notes.ipynb", '{\n "cells": [\n  {"source": ["x"', "JSON"),
        ("code.txt", "{\n  int a;\n}", None),
        ("notes.md", "- Author: someone\n- Title: words\n", None),
        ("page.md", "---\ntitle: words\n---\n<html> is a tag", None),
        ("text.txt", "<i>not</i> a page", None),
        # Each of these took time exponential in its number of lines, comments or spaces.
        ("blank.txt", "\n" * 200, None),
        ("spaces.txt", " \r\n \t\n" * 100, None),
        ("dashes.txt", "---\n# a\n\n" * 60, None),
        ("comments.txt", "<!-- a --> \n" * 100, None),
        ("comments.html", "<!-- a --> \n" * 100 + "<html>", "HTML"),
        ("blank.yml.txt", "\n" * 200 + "- a: one\n  b: two\n", "YAML"),
    ],
)
def test_marks_of_a_markup_language_are_said_to_be_learnt(tmp_path, prepare, name, begin, kind):
    (tmp_path / name).write_text(begin + " words and more words. " * 200)
    hints = prepare(str(tmp_path / name)).hints
    said = f"{tmp_path / name} is {kind}, whose markup is trained on with the text."
    assert any(hint.startswith(said) for hint in hints) is (kind is not None), hints
    (tmp_path / "plain.txt").write_text("plain words. " * 400)
    hints = prepare(str(tmp_path)).hints
    assert any("1 of 2 files of" in hint for hint in hints) is (kind is not None), hints


def test_rows_beside_texts_are_not_read_and_named(folder, prepare, ids_of):
    write_lines(folder / "index.jsonl", {"n": 1})
    corpus = prepare(folder)
    assert tokens(corpus) == [ids_of(A, B, C)] and "index.jsonl" in corpus.hints[0]
    (folder / "z.json").write_text(C)  # as source code has some
    assert tokens(prepare(folder)) == [ids_of(A, B, C, C)]
    (folder / "z.json").write_text('{\n "name": "a program"\n}')
    assert not any("markup" in hint for hint in prepare(folder).hints)


def test_outputs_within_the_data_are_no_data_and_their_neighbours_are(folder, prepare, ids_of):
    key = "0f" * 16
    for name in ("tokenizers/bert/tokenizer.json", "tokens/mine/index.json"):
        (folder / "deep" / name).parent.mkdir(parents=True)
        (folder / "deep" / name).write_text("{}")
    (folder / "hashes").mkdir()
    (folder / "hashes" / "essay.md").write_text(A)
    read = [A, B, C, "{}", "{}", A]
    corpus = prepare(folder)
    assert tokens(corpus) == [ids_of(*read)] and not corpus.hints
    (folder / "cache" / "tokens" / key).mkdir(parents=True)
    (folder / "cache" / "tokens" / key / "index.json").write_text("{}")
    (folder / "cache" / "tokens" / f"{key}.lock").touch()
    (folder / "cache" / "specs").mkdir()
    (folder / "cache" / "specs" / f"{key}.json").write_text("{}")
    (folder / "cache" / "essay.txt").write_text(B)
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text('{"settings": {}, "origins": {}, "plan": {}}')
    corpus = prepare(folder)
    (hint,) = corpus.hints
    assert "cache/specs, cache/tokens, run are left out, because they are runs or caches" in hint
    assert tokens(corpus) == [ids_of(A, B, B, C, "{}", "{}", A)]
    (folder / "cache" / "essay.txt").unlink()
    with pytest.raises(BadInputError, match="contains only runs or a cache"):
        prepare(folder / "cache")


def test_a_named_pipe_for_a_run_is_not_waited_for(folder, prepare, ids_of):
    os.mkfifo(folder / "deep" / "run.json")
    assert tokens(prepare(folder)) == [ids_of(A, B, C)]


def test_an_empty_folder(tmp_path, prepare):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadInputError, match="no files below"):
        prepare(tmp_path / "nothing")


def test_text_without_a_tokenizer(folder, prepare):
    with pytest.raises(BadInputError, match="needs a tokenizer"):
        prepare(folder, tokenizer=None)


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("lines", "txt"),
        ("lines", "jsonl"),
        ("one line", "txt"),
        ("one line", "jsonl"),
        ("one word", "txt"),
        ("blank lines", "txt"),
    ],
)
def test_a_long_document_has_the_ids_of_the_whole(
    tmp_path, prepare, ids_of, library_texts, kind, suffix
):
    text = "\n".join(library_texts) + "é中\n" * 10
    text = {
        "lines": text,
        "one line": text.replace("\n", " "),
        "one word": "-".join(text.split()),
        "blank lines": text + "\n  \n" * 9,
    }[kind]
    text = text * (3_000_000 // len(text) + 1)
    path = tmp_path / f"long.{suffix}"
    if suffix == "txt":
        path.write_text(text, encoding="utf-8")
    else:
        write_lines(path, {"text": text})
    parts = list(pieces(open_source(str(path)), "text"))
    assert (len(parts) > 2) == (kind != "one word")
    assert "".join(part.text for part in parts) == text
    assert sum(part.consumed for part in parts) == path.stat().st_size
    assert tokens(prepare(path)) == [ids_of(text)]


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


def test_documents_begin_with_the_token_that_the_tokenizer_puts_there(tmp_path, prepare):
    inner = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    write_lines(tmp_path / "x.jsonl", {"text": "a b"}, {"text": "b"})
    bare = Tokenizer(inner, "</s>", {"bos_token": "<s>"})
    without = prepare(tmp_path / "x.jsonl", tokenizer=bare)
    assert tokens(without) == [[2, 3, 1, 3, 1]]
    opened = tokenizers.Tokenizer.from_str(inner.to_str())
    opened.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    corpus = prepare(tmp_path / "x.jsonl", tokenizer=bare.replace(opened, {}))
    assert tokens(corpus) == [[0, 2, 3, 1, 0, 3, 1]]
    assert corpus.fingerprint != without.fingerprint


@pytest.mark.parametrize("copy", ["symlink_to", "hardlink_to", "copied"])
def test_a_file_that_is_twice_in_a_folder_is_found(tmp_path, copy):
    """Its rows were learned twice; as two --data it was told."""
    rows = '{"text": "a"}\n'
    (tmp_path / "a.jsonl").write_text(rows)
    (tmp_path / "b.jsonl").write_text(rows.replace("a", "b"))
    assert repeated_files(open_source(str(tmp_path))) == []
    again = tmp_path / "b (1).jsonl"
    if copy == "copied":
        again.write_text((tmp_path / "b.jsonl").read_text())
    else:
        getattr(again, copy)(tmp_path / "b.jsonl")
    (found,) = repeated_files(open_source(str(tmp_path)))
    assert found in (again, tmp_path / "b.jsonl")
    for name in ("x.py", "y.py"):  # source trees repeat files
        (tmp_path / name).write_text("x = 1\n" * 99)
    assert repeated_files(open_source(str(tmp_path))) == []


@pytest.mark.parametrize("pattern", ["", "*.jsonl"])
def test_links_that_lead_nowhere_are_told(tmp_path, pattern):
    """A folder of a cache that was fetched in part was learned without the rest."""
    reference = str(tmp_path / pattern)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert open_source(reference).hints == ()
    (tmp_path / "b.jsonl").symlink_to("../blobs/gone")
    (hint,) = open_source(reference).hints
    assert "b.jsonl is not read: a link leads to a missing file" in hint


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "b.jsonl"])
def test_data_of_nothing_but_links_that_lead_nowhere_are_refused_with_the_link(tmp_path, pattern):
    (tmp_path / "b.jsonl").symlink_to("../blobs/gone")
    with pytest.raises(BadInputError, match=r"b\.jsonl is a link to \.\./blobs/gone, which"):
        open_source(str(tmp_path / pattern))


def test_files_in_both_hold_the_same_from_begin_to_end(tmp_path):
    long = bytearray(b"a" * (3 << 16))
    contents = {"__init__.py": b"", "same.py": b"x = 1\n", "ends.py": bytes(long)}
    for name, content in contents.items():
        for folder in ("train", "held"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_bytes(content)
    held = tmp_path / "held"
    long[len(long) // 2] = ord("b")
    (held / "ends.py").write_bytes(bytes(long))
    train = open_source(str(tmp_path / "train"))
    assert files_in_both(train, open_source(str(held))) == [held / "same.py"]
    (held / "ends.py").write_bytes(contents["ends.py"])
    assert files_in_both(train, open_source(str(held))) == [held / "ends.py", held / "same.py"]


def test_an_index_beside_other_tokens_is_not_in_both(tmp_path):
    for folder, first in (("train", 1), ("held", 2)):
        (tmp_path / folder).mkdir()
        np.arange(first, first + 8, dtype="uint16").tofile(tmp_path / folder / "part.bin")
        (tmp_path / folder / "part.idx").write_bytes(b"MMIDIDX\0\0" + bytes(30))
    train, held = (open_source(str(tmp_path / folder)) for folder in ("train", "held"))
    assert files_in_both(train, held) == []
