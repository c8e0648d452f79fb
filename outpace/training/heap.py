"""glibc's heap: keep freed memory for the next step, and touch pages before they are used."""

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

# Parameters from malloc.h, and the value that disables trimming (mallopt(3)).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _NEVER = -1, -4, -1
_CHUNK_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20


def c_library() -> ctypes.CDLL | None:
    """Return the system's C library on Linux; None elsewhere."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def keep_freed(environment: Mapping[str, str]) -> bool:
    """Make glibc keep freed memory, unless `environment` configures glibc; return whether it does.

    By default, glibc returns large blocks to the system immediately. Each step then pays for page
    faults of the same memory again: 10 to 17 % of its time (docs/development/log.md).
    """
    own = [name for name in environment if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    library = c_library()
    if own or library is None or not hasattr(library, "mallopt"):
        return False
    # Allocate everything on the heap rather than by mmap, and never trim the heap.
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, _NEVER))


class PagePrefaulter:
    """Thread that touches `nbytes` of the heap for later allocations.

    The first touch of a page is the expensive part of an allocation. On a virtual machine whose
    host reclaims free memory, it takes 0.2 to 1.4 s per GB (docs/development/log.md). An idle core
    can do it while modules load. The next `nbytes` of the heap are marked for huge pages, if the
    system supports them, but not touched. Nothing happens if glibc does not keep freed memory
    (`keep_freed`), or if memory does not suffice.

    Touched memory stays allocated until `hand_over`, because free memory may be returned to the
    system (`malloc_trim`).
    """

    def __init__(self, nbytes: int, environment: Mapping[str, str]) -> None:
        self._ended, self._handed_over = threading.Event(), threading.Event()
        self._chunks: list[int] = []
        self._held: list[int] = []
        self._touching = threading.Lock()
        library = c_library() if keep_freed(environment) else None
        if library is not None:
            self._heap = _Heap(library)
            room = self._heap.next_room(2 * nbytes)
            self._chunks = self._heap.allocate_chunks(nbytes // _CHUNK_BYTES)
            # After the allocations, since malloc's header of each one would take a huge page.
            self._heap.prefer_huge_pages(room)
        self._thread = threading.Thread(target=self._touch_chunks, daemon=True)

    def start(self) -> Self:
        """Start the thread; call `end` before the memory is needed."""
        self._thread.start()
        return self

    @contextmanager
    def pause(self) -> Iterator[int]:
        """Pause touching in the context; yield the touched bytes that are not in use yet."""
        with self._touching:
            yield len(self._held) * _CHUNK_BYTES

    def hand_over(self) -> None:
        """Free the touched memory for use, and from now on, each chunk once it is touched."""
        self._handed_over.set()
        with self._touching:
            while self._held:
                self._heap.free(self._held.pop())

    def end(self) -> None:
        """Hand over the memory, and stop after the current chunk."""
        self._ended.set()
        self.hand_over()

    def wait(self) -> None:
        """Wait until the last chunk is touched."""
        self._thread.join()

    def _touch_chunks(self) -> None:
        # All chunks are allocated beforehand: malloc would return a freed chunk again.
        for chunk in self._chunks:
            with self._touching:
                if not self._ended.is_set():
                    ctypes.memset(chunk, 0, _CHUNK_BYTES)  # releases Python's GIL
                if self._handed_over.is_set():
                    self._heap.free(chunk)
                else:
                    self._held.append(chunk)


class _Heap:
    """malloc, free and madvise of a C library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._malloc, self.free, self._madvise = library.malloc, library.free, library.madvise
        self._malloc.restype, self._malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self.free.restype, self.free.argtypes = None, [ctypes.c_void_p]
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def next_room(self, nbytes: int) -> range:
        """Return the addresses of the `nbytes` that malloc is going to use next.

        The range is empty if there is too little memory.
        """
        start = self._malloc(nbytes)
        if start is None:
            return range(0)
        self.free(start)
        return range(start, start + nbytes)

    def prefer_huge_pages(self, room: range) -> None:
        """Request huge pages for those that lie completely inside `room`."""
        first = -(-room.start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        whole = (room.stop - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if whole > 0:
            self._madvise(first, whole, mmap.MADV_HUGEPAGE)  # fails if there are none: harmless

    def allocate_chunks(self, count: int) -> list[int]:
        found = [self._malloc(_CHUNK_BYTES) for _ in range(count)]
        return [chunk for chunk in found if chunk is not None]
