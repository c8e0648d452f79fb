"""Anonymous resident memory of this process, and by how much it grows."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")


def anonymous_bytes() -> int | None:
    """Resident memory of this process that is no file's and not shared (RssAnon).

    It is what no kernel can take back. None where the kernel does not tell it apart.
    """
    try:
        _, resident, shared, *_ = _STATM.read_text(encoding="ascii").split()
    except OSError:
        return None
    return (int(resident) - int(shared)) * resource.getpagesize()


@contextmanager
def resident_growth(every_s: float = 0.002) -> Iterator[list[int]]:
    """Measure the largest growth of anonymous resident memory; empty where Linux does not tell.

    It is looked at again and again: the kernel keeps a record of all resident memory only,
    which has files in it.
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
