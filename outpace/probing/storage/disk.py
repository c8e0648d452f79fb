"""An unlinked file of random pages that identify themselves, bypassing the page cache.

O_DIRECT times the disk itself: the kernel neither keeps pages nor delays writes. Caches of the
disk, a controller or a hypervisor may still have an effect.
"""

import errno
import mmap
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from outpace.probing.timing.measure import WrongResultError
from outpace.records.errors import BadInputError
from outpace.records.units import show_bytes
from outpace.training.direct_io import REFUSED, through_cache

PAGE_BYTES = 4096
BLOCK_PAGES = 1024  # pages of the largest block, after which the contents of pages repeat
_LEAST_PAGES = 16 * BLOCK_PAGES
_WORDS = PAGE_BYTES // 8
# A test may use at most this fraction of a disk's free space, because others may need it.
_TAKEN_SHARE = 0.5
_IN_MEMORY = ("tmpfs", "ramfs")


def nearest_directory(directory: Path) -> Path:
    """Return the directory, or its nearest existing parent."""
    whole = directory.absolute()
    return next(place for place in (whole, *whole.parents) if place.is_dir())


def in_memory(directory: Path) -> str | None:
    """Return the type of a file system that is in memory; None for other file systems.

    Recent kernels accept O_DIRECT on such file systems, and copy memory.
    """
    device = directory.stat().st_dev
    for mount in psutil.disk_partitions(all=True):
        if mount.fstype not in _IN_MEMORY:
            continue
        try:
            if Path(mount.mountpoint).stat().st_dev == device:
                return mount.fstype
        except OSError:
            continue
    return None


@contextmanager
def refusals(directory: Path) -> Iterator[None]:
    """Convert an OSError in this context to a BadInputError that names the directory."""
    try:
        yield
    except OSError as error:
        raise BadInputError(
            f"{directory} cannot be probed: {error.strerror or error}. Give a writable directory, "
            "on a disk with free space."
        ) from None


def require_room(directory: Path, nbytes: int) -> None:
    """Raise BadInputError if a probe would use more than half of the free space."""
    free = shutil.disk_usage(directory).free
    if nbytes > _TAKEN_SHARE * free:
        raise BadInputError(
            f"probing {directory} writes {show_bytes(nbytes)}, but the disk has only "
            f"{show_bytes(free)} left, of which a probe uses at most half. Free some space, or "
            "give another directory."
        )


class _LaneBuffers:
    """Page-aligned buffers of one thread, for writing and reading."""

    def __init__(self, contents: "np.ndarray[Any, np.dtype[np.uint64]]") -> None:
        # Anonymous mappings begin at a page, as O_DIRECT requires.
        outgoing, incoming = (mmap.mmap(-1, BLOCK_PAGES * PAGE_BYTES) for _ in range(2))
        self.outgoing, self.incoming = memoryview(outgoing), memoryview(incoming)
        self.sent = np.frombuffer(outgoing, dtype=np.uint64).reshape(BLOCK_PAGES, _WORDS)
        self.got = np.frombuffer(incoming, dtype=np.uint64).reshape(BLOCK_PAGES, _WORDS)
        self.sent[:] = contents


class PageFile:
    """An unlinked file in `directory`, whose content reveals wrong reads and writes.

    It is filled with up to `most_pages` pages, for about `fill_s` seconds; `pages` is their number.
    A page's first word is its salted number, and the second rises with every write. So no two pages
    are equal, no page is written twice with the same content, and a page that was not written or is
    in the wrong place is detected. `direct`: whether O_DIRECT works here. There are `lanes`
    threads, each with its own buffers. Raises OSError.
    """

    def __init__(self, directory: Path, most_pages: int, fill_s: float, lanes: int) -> None:
        random = np.random.default_rng()
        shape = (BLOCK_PAGES, _WORDS)
        self._contents = random.integers(0, 1 << 64, shape, dtype=np.uint64)
        self._salt = secrets.randbits(62)
        self._writes = 0
        self._counting = threading.Lock()
        self._lanes = [_LaneBuffers(self._contents) for _ in range(lanes)]
        self.descriptor, self.direct = _open_unlinked(directory)
        self.pages = 0
        try:
            if self.direct:
                self._try_direct()
            self._fill(most_pages, fill_s)
        except BaseException:
            self.close()
            raise

    def _try_direct(self) -> None:
        """Turn O_DIRECT off if a write fails: some file systems accept the flag but refuse I/O."""
        try:
            self.write(0, 0, 1)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            through_cache(self.descriptor)
            self.direct = False

    def _fill(self, most_pages: int, fill_s: float) -> None:
        begin_s = time.perf_counter()
        while self.pages < most_pages and (
            self.pages < _LEAST_PAGES or time.perf_counter() - begin_s < fill_s
        ):
            self.write(0, self.pages, BLOCK_PAGES)
            self.pages += BLOCK_PAGES
        os.fsync(self.descriptor)

    def write(self, lane: int, page: int, pages: int) -> int:
        """Write pages from `page` on; return the number of this write. Raises OSError."""
        own, first = self._lanes[lane], page % BLOCK_PAGES
        with self._counting:
            self._writes += 1
            number = self._writes
        stamps = own.sent[first : first + pages]
        stamps[:, 0] = self._page_stamps(page, pages)
        stamps[:, 1] = number
        part = own.outgoing[first * PAGE_BYTES : (first + pages) * PAGE_BYTES]
        require_whole(os.pwritev(self.descriptor, [part], page * PAGE_BYTES), len(part))
        return number

    def read(self, lane: int, page: int, pages: int) -> None:
        """Read pages from `page` on. Raises OSError, and WrongResultError for wrong pages."""
        own = self._lanes[lane]
        part = own.incoming[: pages * PAGE_BYTES]
        require_whole(os.preadv(self.descriptor, [part], page * PAGE_BYTES), len(part))
        if not np.array_equal(own.got[:pages, 0], self._page_stamps(page, pages)):
            raise WrongResultError(
                f"reading pages {page} to {page + pages - 1} returned other pages"
            )

    def find_error(self, lane: int, page: int, pages: int, write: int | None = None) -> str | None:
        """Read pages, and describe how they differ from what was written; None if they are right.

        With `write`, the pages must be from the write with this number.
        """
        self.forget()
        self.read(lane, page, pages)
        got, first = self._lanes[lane].got[:pages], page % BLOCK_PAGES
        if not np.array_equal(got[:, 2:], self._contents[first : first + pages, 2:]):
            return f"pages {page} to {page + pages - 1} differ from the written data"
        if write is not None and not bool((got[:, 1] == write).all()):
            return f"pages {page} to {page + pages - 1} are from an earlier write"
        return None

    def _page_stamps(self, page: int, pages: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        return np.arange(self._salt + page, self._salt + page + pages, dtype=np.uint64)

    def wait_until_written(self) -> None:
        """Wait until written data is on the disk, if O_DIRECT is not used."""
        if not self.direct:
            os.fdatasync(self.descriptor)
            self.forget()

    def forget(self) -> None:
        """Ask the kernel to drop the file from its cache, unless O_DIRECT avoids the cache."""
        if not self.direct:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file, which deletes it; so does the end of the process."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def open_nameless(directory: Path) -> int:
    """Return the descriptor of a new unlinked file. Raises OSError."""
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno())


def _open_unlinked(directory: Path) -> tuple[int, bool]:
    """Open a new unlinked file; return its descriptor, and whether it uses O_DIRECT."""
    nameless = open_nameless(directory)
    if in_memory(directory) is not None:
        return nameless, False
    try:
        # Some file systems that accept the flag on opening refuse to set it on an open descriptor
        return os.open(f"/proc/self/fd/{nameless}", os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in (*REFUSED, errno.ENOENT):
            raise
        return os.dup(nameless), False
    finally:
        os.close(nameless)


def require_whole(moved: int, wanted: int) -> None:
    """Raise OSError if a read or write moved another number of bytes than wanted."""
    if moved != wanted:
        raise OSError(errno.EIO, f"{moved} bytes were moved instead of {wanted}")
