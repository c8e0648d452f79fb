import numpy as np
import pytest

from outpace.records.errors import BadInputError
from tests.data.text_files import tokens


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
        (lambda ids: b"ab" + ids, "are 32-bit ids behind a header"),
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
        ("x.bin", b"A text. " * 250, "x.bin is text, or holds one-byte ids, judging"),
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
