"""Detection of file types by suffix and by first bytes."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal

from outpace.records.errors import BadInputError
from outpace.records.misplaced_content import COMPRESSED

Form = Literal["text", "json", "csv", "tsv", "parquet", "tokens"]
# File formats by suffix, ignoring case. Any other file is plain text.
_FORMS: Mapping[str, Form] = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".jsonlines": "json", ".jl": "json",
    ".csv": "csv", ".tsv": "tsv",
    ".tab": "tsv", ".parquet": "parquet", ".pq": "parquet", ".bin": "tokens", ".idx": "tokens",
}  # fmt: skip
_IMAGE, _MEDIA = "an image", "sound or video"
# First bytes of other file types. A text may begin with the name of a format, so signatures that
# are only a name include the version or the zero byte that follows.
_SIGNATURES = {
    **{begin: f"compressed with {name}" for begin, name in COMPRESSED.items()},
    b"PK\x03\x04": "a ZIP archive", b"PAR1": "a Parquet file", b"ARROW1\x00": "an Arrow file",
    b"\x93NUMPY": "a NumPy array", b"%PDF-": "a PDF document", b"\x89HDF": "an HDF5 file",
    b"SQLite format 3\x00": "an SQLite database", b"FEA1\x00": "a Feather file of version 1",
    b"\x80\x02]q": "a pickle", b"\x80\x02}q": "a pickle", b"\x80\x03]q": "a pickle",
    b"\x80\x03}q": "a pickle", b"\x80\x04\x95": "a pickle", b"\x80\x05\x95": "a pickle",
    b"\x80\x02\x8a\nl\xfc\x9cF": "a file of torch.save",
    b"MMIDIDX": "a Megatron index", b"Obj\x01": "an Avro file",
    b"TNTIDX": "a fairseq index", b"LITPKDS": "a PackedDataset of lit-gpt, with a header",
    **{b"GGUF%c" % version: "a GGUF model" for version in range(4)}, b"lmgg": "a GGML model",
    b"\x04\x22\x4d\x18": "compressed with LZ4", b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\xd0\xcf\x11\xe0": "an old Office document",
    b"\x89PNG": _IMAGE, b"\xff\xd8\xff": _IMAGE, b"GIF8": _IMAGE, b"II*\x00": _IMAGE,
    b"MM\x00*": _IMAGE,
    **{b"ID3%c" % version: _MEDIA for version in (2, 3, 4)},
    b"OggS\x00": _MEDIA, b"fLaC": _MEDIA, b"\x1aE\xdf\xa3": _MEDIA,
}  # fmt: skip
_RIFF = {b"WEBP": _IMAGE, b"WAVE": _MEDIA, b"AVI ": _MEDIA}


def form_of(file: Path) -> Form:
    """Return the format of a file, judging by its suffix."""
    return _FORMS.get(file.suffix.lower(), "text")


def advice_on_binary(kind: str) -> str:
    """Return advice for a file type that `binary_kind` returned."""
    if kind not in (_IMAGE, _MEDIA):
        return "Unpack or convert it, or leave it out."
    return (
        "Leave it out; or to train on such files, give --model FILE.py:build instead of --data, "
        "where build returns your module, its loss and a dataset that reads them."
    )


def binary_kind(head: bytes) -> str | None:
    """Name the type of a binary file by its first bytes; None if they are not recognised."""
    # An Arrow stream starts with a marker and the length of its schema.
    length = int.from_bytes(head[4:8], "little")
    if head.startswith(b"\xff\xff\xff\xff") and length % 8 == 0 and 0 < length < 1 << 20:
        return "an Arrow stream, as datasets writes it (name the folder of save_to_disk)"
    if head.startswith(b"RIFF") and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[257:262] == b"ustar":
        return "a tar archive"
    length = int.from_bytes(head[:8], "little")
    if head[8:10] == b'{"' and 2 < length < 1 << 27:
        return "a safetensors file"
    # TFRecord: a record's length and its checksum, a serialised Example, the next record's length.
    if head[12:13] == b"\n" and 0 < length < 1 << 31 and not any(head[length + 20 : length + 24]):
        return "a TFRecord file"
    return next((kind for sign, kind in _SIGNATURES.items() if head.startswith(sign)), None)


def require_tokens(file: Path, head: bytes) -> None:
    """Refuse a .bin file whose first bytes identify another file type."""
    kind = binary_kind(head) or chunk_kind(file, head)
    if kind is not None:
        raise BadInputError(
            f"{file} is {kind}, not token ids. Write them as uint16 or uint32 without a "
            "header, as numpy's tofile does, or as Megatron's .bin with its .idx."
        )


def chunk_kind(file: Path, head: bytes) -> str | None:
    """Describe a chunk of litdata or a shard of MosaicML's streaming; None for other files."""
    if not _is_litdata_chunk(head, file.stat().st_size):
        return None
    return "a chunk of litdata or streaming (MDS), with the offsets of its items in front"


def _is_litdata_chunk(head: bytes, size: int) -> bool:
    """Return whether a file begins like a chunk of litdata.

    A chunk begins with 32-bit integers: the number of items, the offset of each item, and the
    offset at which the last item ends.
    """
    words = [int.from_bytes(head[at : at + 4], "little") for at in range(0, len(head) - 3, 4)]
    if len(words) < 3 or not words[0]:
        return False
    offsets = words[1 : 2 + words[0]]
    whole = len(offsets) == words[0] + 1
    begin = 4 * (words[0] + 2)
    rising = all(one <= following for one, following in pairwise(offsets))
    return offsets[0] == begin and rising and (not whole or offsets[-1] == size)
