"""The memory that two real steps take on this rank, beside what a trace says of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outpace.nn.scratch import Scratch
from outpace.parallel import apply
from outpace.records.memory import MemoryAccount
from outpace.records.ranks import Ranks
from outpace.trace.account import summed_up
from outpace.trace.allocations import Allocations
from outpace.trace.device import Rules
from outpace.trace.extend import strip_of
from outpace.trace.steps import Workload, run_steps
from outpace.trace.watch import Watch

_STATUS = Path("/proc/self/status")


def measure(work: Workload, ranks: Ranks) -> MemoryAccount:
    """Train two real steps on the CPU; collective over the ranks of the plan.

    The anatomy is of the tensors that live at the peak, `allocated_bytes` the allocator's own peak,
    and `resident_bytes` by how much the process's anonymous resident memory grew.
    """
    watch, rules = Watch(), Rules()
    with grown_resident() as grown, Allocations() as allocations, watch:
        run_steps(work, ranks, watch, lambda request, _: apply(request), rules, Scratch())
        segments = watch.segments
    account = summed_up([strip_of(segment) for segment in segments], work.plan, ranks.rank, rules)
    return account.model_copy(
        update={
            "source": "measured",
            "allocated_bytes": allocations.peak_bytes,
            "resident_bytes": grown[0] if grown else None,
        }
    )


@contextmanager
def grown_resident(every_s: float = 0.002) -> Iterator[list[int]]:
    """By how many bytes anonymous resident memory grows at most; empty where Linux does not tell.

    It is looked at again and again: the kernel keeps a record of all resident memory only,
    which has files in it.
    """
    before = resident_bytes()
    grown: list[int] = []
    if before is None:
        yield grown
        return
    grown.append(0)
    over = threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            grown[0] = max(grown[0], (resident_bytes() or before) - before)

    looking = threading.Thread(target=look, name="resident", daemon=True)
    looking.start()
    try:
        yield grown
    finally:
        over.set()
        looking.join()


def resident_bytes() -> int | None:
    """Anonymous resident memory of this process (RssAnon): no files, no shared memory."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None
