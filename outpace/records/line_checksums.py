"""Logs with one record per line, each with the checksum of its text: metrics.jsonl and others.

With one checksum per line, lines can be appended, and a kill loses only the line it cut short.
"""

from pathlib import Path

import xxhash

from outpace.records.base import Record, refuse_pipe

CHECKSUM = "xxh3_64"  # entry of a line
_NAME = b'"%b"' % CHECKSUM.encode()
_HEX_DIGITS = 16
_LENGTH = len(b"," + _NAME + b':""}') + _HEX_DIGITS


class ChangedLineError(ValueError):
    """Raised if a line differs from what was written."""

    def __init__(self) -> None:
        super().__init__(
            "it was changed since outpace wrote it: its checksum does not match. If you did so on "
            f"purpose, remove its entry {_NAME.decode()}"
        )


def encode_line(record: Record) -> bytes:
    """Encode a record as a line of a log: JSON with its checksum as last entry, and a newline."""
    body = record.model_dump_json().encode(errors="surrogatepass")
    return b"%b,%b:%b}\n" % (body[:-1], _NAME, _checksum(body))


def strip_checksum(line: bytes) -> bytes:
    """Return a line's JSON without its checksum; a line without one is returned unchanged.

    Raises ChangedLineError if the checksum does not match the line.
    """
    line = line.strip()
    if _NAME not in line:
        return line
    body = line[:-_LENGTH] + b"}"
    if line != b"%b,%b:%b}" % (body[:-1], _NAME, _checksum(body)):
        raise ChangedLineError
    return body


def describe_changes(path: Path) -> str | None:
    """Say which lines of a log were changed since they were written, if any. Raises OSError."""
    changed = []
    refuse_pipe(path)
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            strip_checksum(line)
        except ChangedLineError:
            changed.append(number)
    if not changed:
        return None
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return (
        f"{path}, line {changed[0]}{more}, was changed since outpace wrote it: its checksum does "
        "not match"
    )


def _checksum(body: bytes) -> bytes:
    """Return the checksum of a line's JSON, as JSON."""
    return b'"%b"' % xxhash.xxh3_64_hexdigest(body).encode()
