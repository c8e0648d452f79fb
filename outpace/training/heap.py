"""glibc's heap: keep freed memory for the next step, and touch pages ahead of their use."""

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

# glibc's constants from malloc.h, and the value that disables trimming (mallopt(3)).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _NEVER = -1, -4, -1
_PIECE_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20


def c_library() -> ctypes.CDLL | None:
    """Return the system's C library on Linux; None elsewhere."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def keep_freed(environment: Mapping[str, str]) -> bool:
    """Make glibc keep freed memory; return whether it does.

    By default, glibc returns large blocks to the system immediately, so each step pays for the same
    pages again: 10 to 17 % of its time (docs/development/log.md). A configuration of glibc in
    `environment` is left unchanged.
    """
    own = [name for name in environment if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    library = c_library()
    if own or library is None or not hasattr(library, "mallopt"):
        return False
    # The order matters: take everything from the heap, and return nothing.
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, _NEVER))


class PagePrefaulter:
    """Thread that touches `nbytes` of the heap for later allocations.

    The first touch of a page is the expensive part of an allocation: on a virtual machine whose
    host reclaims free memory, it takes 0.2 to 1.4 s per GB (docs/development/log.md). An idle core
    can do it while modules load. An equal amount of memory beyond it is marked for huge pages, if
    the system supports them, but not touched. Nothing happens without `keep_freed` or enough
    memory.

    Touched memory stays allocated until it is handed over, because free memory may be returned to
    the system (`malloc_trim`).
    """

    def __init__(self, nbytes: int, environment: Mapping[str, str]) -> None:
        self._ended, self._handed_over = threading.Event(), threading.Event()
        self._pieces: list[int] = []
        self._held: list[int] = []
        self._touching = threading.Lock()
        library = c_library() if keep_freed(environment) else None
        if library is not None:
            self._heap = _Heap(library)
            room = self._heap.next_room(2 * nbytes)
            self._pieces = self._heap.pieces(nbytes // _PIECE_BYTES)
            # This follows touching, since malloc's headers between pieces would each take a huge
            # page.
            self._heap.prefer_huge_pages(room)
        self._thread = threading.Thread(target=self._touch, daemon=True)

    def start(self) -> Self:
        """Start the thread; call `end` before the memory is needed."""
        self._thread.start()
        return self

    @contextmanager
    def pause(self) -> Iterator[int]:
        """Yield the resident bytes not in use yet; nothing more is touched inside this context."""
        with self._touching:
            yield len(self._held) * _PIECE_BYTES

    def hand_over(self) -> None:
        """Free the touched memory for use, and free further memory as soon as it is touched."""
        self._handed_over.set()
        with self._touching:
            while self._held:
                self._heap.free(self._held.pop())

    def end(self) -> None:
        """Hand over the memory, and stop after the current piece."""
        self._ended.set()
        self.hand_over()

    def wait(self) -> None:
        """Wait until the last piece is touched."""
        self._thread.join()

    def _touch(self) -> None:
        # A freed piece must not be reallocated, since it would be the same one.
        for piece in self._pieces:
            with self._touching:
                if not self._ended.is_set():
                    ctypes.memset(piece, 0, _PIECE_BYTES)  # releases Python's GIL
                if self._handed_over.is_set():
                    self._heap.free(piece)
                else:
                    self._held.append(piece)


class _Heap:
    """Allocation functions of a C library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._malloc, self.free, self._madvise = library.malloc, library.free, library.madvise
        self._malloc.restype, self._malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self.free.restype, self.free.argtypes = None, [ctypes.c_void_p]
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def next_room(self, nbytes: int) -> range:
        """Return the addresses that malloc will return next; empty if there are too few."""
        start = self._malloc(nbytes)
        if start is None:
            return range(0)
        self.free(start)
        return range(start, start + nbytes)

    def prefer_huge_pages(self, room: range) -> None:
        """Request huge pages where they fit completely inside `room`."""
        first = -(-room.start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        whole = (room.stop - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if whole > 0:
            self._madvise(first, whole, mmap.MADV_HUGEPAGE)  # refused without huge pages

    def pieces(self, count: int) -> list[int]:
        """Return the available pieces, at most `count`."""
        found = [self._malloc(_PIECE_BYTES) for _ in range(count)]
        return [piece for piece in found if piece is not None]
