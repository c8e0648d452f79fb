"""Lines of text files, and checks that the files are intact UTF-8."""

import codecs
import shlex
from collections.abc import Iterator
from pathlib import Path

from outpace.data.file_kinds import advice_on_binary, binary_kind, chunk_kind
from outpace.data.file_reader import LINE_BYTES, readable
from outpace.records.errors import BadInputError

# Suffixes of files in which programs store token ids, with or without a header.
_RAW_SUFFIXES = (".npy", ".npz", ".dat", ".raw", ".ids", ".tokens", ".tok")
# Limits on NULs in a block of text: a file that exceeds both has holes or is not text.
_NUL_SHARE, _FEW_NULS = 1 / 16, 15
_HOLE_SHARE = 0.8  # in ASCII text as UTF-32, three of four bytes are NUL
# Length of the beginning to decode, and the fraction of its characters that must be printable.
_PRINTABLE_BYTES, _PRINTABLE = 4096, 0.95


def require_text(file: Path, block: bytes) -> None:
    """Refuse a file whose first block shows that it is not UTF-8 text, even if it decodes.

    UTF-16 and UTF-32 without a byte order mark decode as UTF-8 if the text is Latin, Greek or
    Cyrillic. Each character then has a byte that is a control character, which no text contains.
    """
    if (kind := binary_kind(block) or chunk_kind(file, block)) is not None:
        raise BadInputError(
            f"{file} is {kind}, not text. {advice_on_binary(kind)}{_advise_on_ids(file)}"
        )
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return  # decoding will report it with its position
    if block.count(0) > _HOLE_SHARE * len(block):
        raise BadInputError(describe_nuls(str(file), block))
    controls = len(block) - len(block.translate(None, bytes([*range(9), *range(14, 27)])))
    if block.count(0) and controls * 16 > len(block):
        encoding = _detect_wide_encoding(block)
        remedy = (
            "so it is a binary file. Give its texts as .txt, .jsonl or Parquet, or leave it out."
            if encoding is None
            else f"as in {encoding}. Convert it, as with iconv -f {encoding} -t UTF-8, or leave it "
            "out."
        )
        raise BadInputError(
            f"{file} is not UTF-8 text: {controls:,} of its first {len(block):,} bytes are control "
            f"characters, the first at offset {block.find(0)}, {remedy}{_advise_on_ids(file)}"
        )


def _detect_wide_encoding(block: bytes) -> str | None:
    """Return the UTF-16 or UTF-32 encoding in which a block without a byte order mark is text.

    Returns None if there is no such encoding.
    """
    for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        text = block[:_PRINTABLE_BYTES].decode(encoding, errors="replace")
        printable = sum(sign.isprintable() or sign in "\n\r\t" for sign in text)
        latin = sum(sign < "\u0600" for sign in text)
        if min(printable, latin) > _PRINTABLE * len(text):
            return encoding
    return None


def _advise_on_ids(file: Path) -> str:
    if file.suffix.lower() not in _RAW_SUFFIXES:
        return ""
    return " If it holds ids of tokens, write them with numpy's tofile into a file named .bin."


def require_whole(file: Path, block: bytes, offset: int) -> None:
    """Refuse a text file with runs of NULs; `offset` is where this block begins."""
    if block.count(0) > max(_FEW_NULS, _NUL_SHARE * len(block)):
        raise BadInputError(describe_nuls(str(file), block, offset))


def describe_nuls(where: str, block: bytes, offset: int = 0) -> str:
    """Say where a text has NUL characters, and what to do about them."""
    return (
        f"{where} has {block.count(0):,} NUL characters, the first at offset "
        f"{offset + block.find(0):,}: it was probably truncated by a copy or a download, or it is "
        "not text. Fetch it again, or leave it out."
    )


def require_line_ends(file: Path, line: bytes) -> None:
    """Refuse a file that reads as one line because its lines end in carriage returns only."""
    if b"\r" in line.rstrip(b"\r\n") and not line.endswith(b"\n"):
        raise BadInputError(
            f"{file} has lines that end with carriage returns only, as on old systems. Convert it, "
            f"as with tr '\\r' '\\n' < {shlex.quote(str(file))}."
        )


def lines_of(file: Path) -> Iterator[str]:
    """Yield a text's lines with their line ends. Raises BadInputError if it is not UTF-8."""
    offset = 0
    with readable(file) as stream:
        while line := stream.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise BadInputError(
                    f"{file} has a line longer than {LINE_BYTES >> 20} MiB at offset {offset}"
                )
            if not offset:
                require_text(file, line)
                require_line_ends(file, line)
            require_whole(file, line, offset)
            mark = len(codecs.BOM_UTF8) if not offset and line.startswith(codecs.BOM_UTF8) else 0
            try:
                yield line[mark:].decode()
            except UnicodeDecodeError as error:
                raise BadInputError(
                    f"{file} is not UTF-8 text: byte {line[mark + error.start]:#04x} at offset "
                    f"{offset + mark + error.start}. Convert it."
                ) from None
            offset += len(line)
