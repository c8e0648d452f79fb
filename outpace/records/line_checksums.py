"""Logs of one JSON record and its checksum per line, such as metrics.jsonl.

Lines can be appended, and a killed process loses at most the line that it was writing.
"""

from pathlib import Path

import xxhash

from outpace.records.base import Record, refuse_pipe

CHECKSUM = "xxh3_64"  # key of the checksum in a line
_NAME = b'"%b"' % CHECKSUM.encode()
_HEX_DIGITS = 16
_LENGTH = len(b"," + _NAME + b':""}') + _HEX_DIGITS


class ChangedLineError(ValueError):
    """Raised if a line of a log was changed, so that its checksum does not match."""

    def __init__(self) -> None:
        super().__init__(
            "it was changed since outpace wrote it: its checksum does not match. If you changed it "
            f"on purpose, remove its entry {_NAME.decode()}"
        )


def encode_line(record: Record) -> bytes:
    """Encode a record as a log line: JSON with the checksum as its last entry, and a newline."""
    body = record.model_dump_json().encode(errors="surrogatepass")
    return b"%b,%b:%b}\n" % (body[:-1], _NAME, _checksum(body))


def strip_checksum(line: bytes) -> bytes:
    """Verify a line's checksum, if it has one, and return its JSON without the checksum.

    Raises ChangedLineError if the checksum does not match.
    """
    line = line.strip()
    if _NAME not in line:
        return line
    body = line[:-_LENGTH] + b"}"
    if line != b"%b,%b:%b}" % (body[:-1], _NAME, _checksum(body)):
        raise ChangedLineError
    return body


def describe_changes(path: Path) -> str | None:
    """Name the lines of a log that do not match their checksums; None if all do. Raises OSError."""
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
    """Return the checksum of a line's JSON, quoted as a JSON string."""
    return b'"%b"' % xxhash.xxh3_64_hexdigest(body).encode()
