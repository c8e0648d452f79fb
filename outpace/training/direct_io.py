"""Reading and writing of files without the page cache (O_DIRECT), if the file system supports it.

The page cache would take memory from the computation, as much as is read or written, and a virtual
machine may be slow to provide that memory (docs/development/log.md).
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

# Errors with which file systems refuse O_DIRECT, when a file is opened or used.
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
_BLOCK_BYTES = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


def _make_block() -> mmap.mmap:
    """Return a page-aligned buffer, as O_DIRECT requires."""
    return mmap.mmap(-1, _BLOCK_BYTES)


class DirectWriter:
    """Writer of a new file in blocks. Once closed, the file is complete and on disk."""

    def __init__(self, path: Path) -> None:
        self._block = _make_block()
        self._used = self._written = 0
        self._file: int | None = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_file()

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._written + self._used

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all bytes of `data`, and return their number."""
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            some = left[: _BLOCK_BYTES - self._used]
            self._block[self._used : self._used + len(some)] = some
            self._used, left = self._used + len(some), left[len(some) :]
            if self._used == _BLOCK_BYTES:
                self._write_block(self._used)
        return count

    def flush(self) -> None:
        """Do nothing: a block is written once it is full, and the last one by `close`."""

    def close(self) -> None:
        """Write the remaining data to disk and close the file.

        O_DIRECT writes only whole pages, so the last, incomplete one goes through the page cache.
        """
        if self._file is None:
            return
        try:
            self._write_block(self._used // mmap.PAGESIZE * mmap.PAGESIZE)
            through_cache(self._file)
            self._write_block(self._used)
            os.fsync(self._file)
        finally:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_block(self, count: int) -> None:
        """Write the first `count` bytes of the block, and move the rest to its start."""
        assert self._file is not None
        done = 0
        with memoryview(self._block) as block:
            while done < count:
                with block[done:count] as part:
                    done += _call_with_fallback(self._file, partial(os.write, self._file, part))
        self._block.move(0, count, self._used - count)
        self._used, self._written = self._used - count, self._written + count


def blocks(path: Path, past_cache: bool) -> Iterator[memoryview]:
    """Yield a file's contents in blocks, each of which is valid until the next one.

    `past_cache`: bypass the page cache, if the file system supports it.
    """
    file = _open_direct(path, os.O_RDONLY) if past_cache else os.open(path, os.O_RDONLY)
    try:
        left = os.fstat(file).st_size
        block = _make_block()
        while left > 0:
            count = _call_with_fallback(file, partial(os.readv, file, [block]))
            if count == 0:
                return  # truncated by another process
            with memoryview(block) as whole, whole[:count] as part:
                yield part
            left -= count
    finally:
        os.close(file)


def through_cache(file: int) -> bool:
    """Disable O_DIRECT for a file. Return whether the file had it."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return os.open(path, flags, 0o666)


def _call_with_fallback(file: int, act: Callable[[], int]) -> int:
    """Call `act` and return its result; if the file system refuses O_DIRECT, retry without it."""
    try:
        return act()
    except OSError as error:
        if error.errno not in REFUSED or not through_cache(file):
            raise
        return act()
