"""Anonymous resident memory of this process, and its growth."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")


def anonymous_bytes() -> int | None:
    """Return this process's resident memory that is neither file-backed nor shared (RssAnon).

    The kernel cannot reclaim such memory. Returns None if the kernel does not report it.
    """
    try:
        _, resident, shared, *_ = _STATM.read_text(encoding="ascii").split()
    except OSError:
        return None
    return (int(resident) - int(shared)) * resource.getpagesize()


@contextmanager
def resident_growth(every_s: float = 0.002) -> Iterator[list[int]]:
    """Measure the largest growth of anonymous resident memory. The result is empty if unknown.

    Memory is polled, since the kernel's recorded peak is of all resident memory, including files.
    """
    before = anonymous_bytes()
    grown: list[int] = []
    if before is None:
        yield grown
        return
    grown.append(0)
    over = threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            grown[0] = max(grown[0], (anonymous_bytes() or before) - before)

    looking = threading.Thread(target=look, name="resident", daemon=True)
    looking.start()
    try:
        yield grown
    finally:
        over.set()
        looking.join()
