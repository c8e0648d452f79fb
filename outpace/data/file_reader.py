"""Reading of data files, with errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO

from outpace.records.errors import BadInputError

# Longest line to read. Once parsed, JSON can take thirty times as much memory.
LINE_BYTES = 64 << 20
# Size, mtime and ctime; `touch` can set mtime, but not ctime.
State = tuple[int, int, int]


def state_of(file: Path) -> State:
    """Return a file's size, mtime and ctime. Raises BadInputError if it cannot be read."""
    try:
        stat = file.stat()
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror or error}") from None
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of a file with their line numbers, counted from 1.

    Raises BadInputError for an unreadable file or a line longer than LINE_BYTES.
    """
    with readable(file) as stream:
        for number in count(1):
            line = stream.readline(LINE_BYTES + 1)
            if not line:
                return
            if len(line) > LINE_BYTES:
                raise BadInputError(
                    f"{file}, line {number} is longer than {LINE_BYTES >> 20} MiB, and each line "
                    "must fit in memory. Split it, or put a long text into its own file."
                )
            if line.strip():
                yield number, line


@contextmanager
def readable(file: Path) -> Iterator[BinaryIO]:
    """Open a file in binary mode. Raises BadInputError if it cannot be opened or read."""
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror or error}") from None
