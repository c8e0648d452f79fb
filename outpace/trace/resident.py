"""Anonymous resident memory of this process, and its growth."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")


def anonymous_bytes() -> int | None:
    """Return this process's resident bytes that are neither file-backed nor shared (RssAnon).

    The kernel cannot reclaim them. Returns None if it does not report them.
    """
    try:
        _, resident, shared, *_ = _STATM.read_text(encoding="ascii").split()
    except OSError:
        return None
    return (int(resident) - int(shared)) * resource.getpagesize()


@contextmanager
def resident_growth(every_s: float = 0.002) -> Iterator[list[int]]:
    """Yield a list that holds the largest growth of anonymous resident memory; empty if unknown.

    A thread polls it, since the peak that the kernel records includes file-backed pages.
    """
    before = anonymous_bytes()
    grown: list[int] = []
    if before is None:
        yield grown
        return
    grown.append(0)
    over = threading.Event()

    def poll() -> None:
        while not over.wait(every_s):
            grown[0] = max(grown[0], (anonymous_bytes() or before) - before)

    poller = threading.Thread(target=poll, name="resident", daemon=True)
    poller.start()
    try:
        yield grown
    finally:
        over.set()
        poller.join()
