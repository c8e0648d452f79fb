"""Files of tokens: their formats, and changes while they are read."""

import os
import pickle
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from outpace.data.corpus import Corpus, unigram_entropy
from outpace.data.stream import token_stream
from outpace.jobs.inputs.hints import foreign_id_hints
from outpace.records.errors import BadInputError
from tests.data.text_files import tokens

COUNT = 50_000


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(COUNT, dtype="<u2").tofile(path)
    return path


def read_later(stream, begin=COUNT - 10):
    time.sleep(0.15)  # a file is not looked at for each read
    return stream.read(begin, 10).tolist()


def change(path, action):
    """Change a file in its place, as programs do that open it for writing."""
    with path.open("r+b") as file:
        action(file)
    os.utime(path, (1, 1))  # whatever the clock's resolution is


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (lambda file: file.write(bytes(2 * COUNT)), "tokens.bin was overwritten while"),
        # A read of what is gone ends a process by a signal.
        (lambda file: file.truncate(1000), "tokens.bin was truncated to 1,000 bytes while"),
    ],
    ids=["over", "cut"],
)
def test_a_file_that_changes_under_a_run_is_told(path, action, said):
    stream = token_stream([path])
    copy = pickle.loads(pickle.dumps(stream))  # as in a loading process
    change(path, action)
    for one in (stream, copy):
        with pytest.raises(BadInputError, match=said):
            read_later(one)


@pytest.mark.parametrize("kind", ["touched", "longer", "replaced", "deleted"])
def test_a_file_whose_tokens_stay_is_read_on(path, kind):
    stream = token_stream([path])
    if kind == "touched":
        change(path, lambda file: None)
    elif kind == "longer":
        change(path, lambda file: (file.seek(0, 2), file.write(b"1234")))
    elif kind == "replaced":
        np.zeros(10, dtype="<u2").tofile(path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    else:
        path.unlink()
    for _ in range(2):
        assert read_later(stream) == [*range(COUNT - 10, COUNT)]


def test_ids_of_two_bytes_of_a_larger_vocabulary_are_told(path):
    """Those above 65,535 were written as others, which the model learns as such."""
    corpus = Corpus((token_stream([path]),), None, "key")
    (said,) = foreign_id_hints(corpus, SimpleNamespace(vocab_size=70_001))
    assert "ids of 2 bytes, up to 65,535, but the tokenizer has 70,001" in said
    assert not foreign_id_hints(corpus, SimpleNamespace(vocab_size=1 << 16))
    np.arange(COUNT, dtype="<u4").tofile(path)
    wide = Corpus((token_stream([path]),), None, "key")
    assert not foreign_id_hints(wide, SimpleNamespace(vocab_size=70_001))
    narrow = path.with_name("narrow.bin")
    np.arange(COUNT, dtype="<u2").tofile(narrow)
    both = Corpus((token_stream([path, narrow]),), None, "key")
    assert foreign_id_hints(both, SimpleNamespace(vocab_size=70_001)) == [said]


@pytest.mark.parametrize("dtype", [">u4", ">i8"])
def test_ids_with_the_most_significant_byte_first_are_refused(path, dtype):
    """They were read as twice as many ids of 16 bits, where the vocabulary has as many."""
    np.random.default_rng(0).integers(0, 128_000, 3000).astype(dtype).tofile(path)
    with pytest.raises(BadInputError, match=r"big-endian 32- or 64-bit ids\."):
        token_stream([path])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_file_of_a_few_ids_is_read(path, count):
    np.arange(300, 300 + count, dtype="<u2").tofile(path)
    assert token_stream([path]).read(0, count).tolist() == [*range(300, 300 + count)]


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
    said = rf"holds {8 * np.dtype(dtype).itemsize}-bit ids, but its word {place:,} is {value:,}"
    with pytest.raises(BadInputError, match=said):
        prepare(tmp_path / "x.bin", tokenizer=None)


def test_padded_ids_of_16_bits_stay_so(tmp_path, prepare):
    ids = np.random.default_rng(0).integers(3, 50_000, (200, 64))
    ids[np.arange(64) >= np.arange(200)[:, None] % 60 + 3] = 0
    (tmp_path / "x.bin").write_bytes(ids.astype("<u2").tobytes())
    assert tokens(prepare(tmp_path / "x.bin", tokenizer=None)) == [ids.ravel().tolist()]


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("<f4", "32-bit floating-point numbers"),
        ("<f8", "64-bit floating-point numbers"),
        (">u2", "big-endian 16-bit ids"),
        ("<u1", "holds one-byte ids"),
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
        (
            lambda b: b[:34] + b"\x09" + b[35:],
            "its sequences are not contiguous.* Write the .idx file again",
        ),
        (lambda b: b[:-8] + b"\xff" * 8, "its documents are negative or decrease"),
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
