"""Measured memory of two real steps on this rank, to compare with a trace."""

import gc

from outpace.nn.scratch_files import Scratch
from outpace.parallel import Layout, LayoutRequest, apply
from outpace.parallel.layout import Batch
from outpace.records.memory import MemoryAccount
from outpace.records.ranks import Ranks
from outpace.trace.account import summarise_strips
from outpace.trace.allocation_tracer import AllocationTracer
from outpace.trace.allocations import Allocations
from outpace.trace.depth_extrapolation import strip_of
from outpace.trace.device import Rules
from outpace.trace.resident import resident_growth
from outpace.trace.steps import Trainable, run_steps


def measure(work: Trainable, ranks: Ranks) -> MemoryAccount:
    """Train two real steps on the CPU, twice. All ranks of the plan must call this.

    The first run is not instrumented, and gives `resident_bytes`, the growth of the process's
    anonymous resident memory. The second is instrumented, which itself takes memory, and gives the
    tensors live at the peak, and `allocated_bytes`, the allocator's own peak.
    """
    rules = Rules()
    with resident_growth() as grown:
        run_steps(work, ranks, AllocationTracer(), _lay_out, rules, Scratch())
    gc.collect()  # otherwise, garbage would be freed during the steps
    allocations = Allocations()
    watch = AllocationTracer(freed_elsewhere=allocations.note_free)
    with allocations, watch:
        run_steps(work, ranks, watch, _lay_out, rules, Scratch())
        segments = watch.segments
    account = summarise_strips(
        [strip_of(segment) for segment in segments], work.plan, ranks.rank, rules
    )
    return account.model_copy(
        update={
            "source": "measured",
            "allocated_bytes": allocations.peak_bytes,
            "resident_bytes": grown[0] if grown else None,
        }
    )


def _lay_out(request: LayoutRequest, _: Batch) -> Layout:
    return apply(request)
