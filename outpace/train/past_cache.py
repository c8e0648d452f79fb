"""Files that are written and read past the system's cache, where a file system can (O_DIRECT).

What passes through the cache takes memory of its own size, page by page, from whatever computes
beside it, and a virtual machine may be slow to give it (docs/log.md).
"""

import errno
import fcntl
import io
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

_BLOCK_BYTES = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)

T = TypeVar("T")


class Writer(io.RawIOBase):
    """A new file, written block by block. What it has is whole once it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._block = mmap.mmap(-1, _BLOCK_BYTES)  # it begins at a page, as O_DIRECT asks
        self._used = self._written = 0
        self._file = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def writable(self) -> bool:
        """It is for nothing else."""
        return True

    def tell(self) -> int:
        """Bytes that it was given."""
        return self._written + self._used

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Take all of it."""
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            some = left[: _BLOCK_BYTES - self._used]
            self._block[self._used : self._used + len(some)] = some
            self._used, left = self._used + len(some), left[len(some) :]
            if self._used == _BLOCK_BYTES:
                self._put(self._used)
        return count

    def close(self) -> None:
        """Write what is left: whole pages as all before, the rest through the cache."""
        if self.closed:
            return
        try:
            self._put(self._used // mmap.PAGESIZE * mmap.PAGESIZE)
            _through_cache(self._file)
            self._put(self._used)
        finally:
            os.close(self._file)
            super().close()

    def _put(self, count: int) -> None:
        """Write so many bytes of the block, and move the rest to its beginning."""
        done = 0
        with memoryview(self._block) as block:
            while done < count:
                with block[done:count] as part:
                    done += _direct_or_not(self._file, partial(os.write, self._file, part))
        self._block.move(0, count, self._used - count)
        self._used, self._written = self._used - count, self._written + count


def blocks(path: Path, past_cache: bool = True) -> Iterator[memoryview]:
    """A file's contents, each block to be used before the next is asked for."""
    file = _opened(path, os.O_RDONLY) if past_cache else os.open(path, os.O_RDONLY)
    try:
        left = os.fstat(file).st_size
        block = mmap.mmap(-1, _BLOCK_BYTES)
        while left > 0:
            count = _direct_or_not(file, partial(os.readv, file, [block]))
            if count == 0:
                return  # somebody else cut it short
            with memoryview(block) as whole, whole[:count] as part:
                yield part
            left -= count
    finally:
        os.close(file)


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _direct_or_not(file: int, act: Callable[[], T]) -> T:
    """What `act` gives, through the cache where the file system refuses it past that."""
    try:
        return act()
    except OSError as error:
        if error.errno != errno.EINVAL or not _through_cache(file):
            raise
        return act()


def _through_cache(file: int) -> bool:
    """From now on; whether it was past it before."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)
