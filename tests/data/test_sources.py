import json
import os

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from outpace.data.corpus import content_fingerprint, read_documents
from outpace.data.sources import open_source
from outpace.data.text import pieces
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
        ".git/x": "no",
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
        ('{"body": "x"}', r"line 2 has no field 'text', but 'body'\. Name it with --text-field"),
        ('["text"]', r"line 2 has no field 'text', but no fields"),
        ('{"text": 3}', r"line 2: 'text' is int, not text"),
        ('{"text": null}', r"line 2: 'text' is NoneType, not text"),
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


def test_saved_datasets_and_folders_for_datasets(tmp_path, prepare, ids_of, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    found = datasets.Dataset.from_dict({"text": [A, "", B]})
    found.save_to_disk(tmp_path / "flat")
    datasets.DatasetDict({"train": found, "test": found.select([2])}).save_to_disk(tmp_path / "two")
    assert tokens(prepare(tmp_path / "flat")) == [ids_of(A, B)]
    assert tokens(prepare(f"hf:{tmp_path / 'two'}")) == [ids_of(A, B)]
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
    with pytest.raises(BadInputError, match="has 8 bytes, not what it says"):
        prepare(tmp_path / "x.bin", tokenizer=None)


def test_the_standard_library_is_text_by_file():
    files = open_source("stdlib").files
    names = {file.name for file in files}
    assert {"argparse.py", "typing.py"} <= names and len(files) > 300
    assert not any({"test", "site-packages"} & set(file.parts) for file in files)


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
    with pytest.raises(BadInputError, match=r"too little to train on .* --eval-data"):
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
    (tmp_path / "other" / "x.txt").write_text("two")
    assert content_fingerprint((str(tmp_path / "other" / "x.txt"),), "text", cache) == seen[2]


def test_sources_take_turns_in_the_text_for_a_tokenizer(tmp_path):
    long = write_lines(tmp_path / "long.jsonl", *[{"text": "l" * 10}] * 6)
    short = write_lines(tmp_path / "short.jsonl", *[{"text": "s" * 5}] * 4)
    found = list(read_documents((str(long), str(short)), "text", "all", 0.1))
    assert "".join(text[0] for text in found) == "lsslssllll"


def test_text_for_a_tokenizer_is_there_even_when_the_split_has_no_document(tmp_path):
    (tmp_path / "x.txt").write_text("only one")
    for split in ("train", "validation"):
        assert list(read_documents((str(tmp_path / "x.txt"),), "text", split, 0.5)) == ["only one"]
