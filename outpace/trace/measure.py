"""Measured memory of two real steps on this rank, to compare with a trace."""

import gc

from outpace.nn.scratch_files import Scratch
from outpace.parallel import Layout, LayoutRequest, apply
from outpace.parallel.layout import Batch
from outpace.records.memory import MemoryAccount
from outpace.records.ranks import Ranks
from outpace.trace.account import summarise_parts
from outpace.trace.allocation_tracer import AllocationTracer
from outpace.trace.allocations import Allocations
from outpace.trace.depth_extrapolation import to_part_trace
from outpace.trace.device import Rules
from outpace.trace.resident import resident_growth
from outpace.trace.steps import Trainable, run_steps


def measure(work: Trainable, ranks: Ranks) -> MemoryAccount:
    """Run two real steps on the CPU, twice, and return the memory they use.

    All ranks of the plan must call this. The first run gives `resident_bytes`, the growth of the
    process's anonymous resident memory. The second run records allocations, and this needs memory
    itself. This run gives the tensors that are live at the peak, and `allocated_bytes`, the peak of
    torch's allocator.
    """
    rules = Rules()
    with resident_growth() as grown:
        run_steps(work, ranks, AllocationTracer(), _lay_out, rules, Scratch())
    gc.collect()  # otherwise, garbage of the first run would be freed during the second
    allocations = Allocations()
    watch = AllocationTracer(freed_elsewhere=allocations.note_free)
    with allocations, watch:
        run_steps(work, ranks, watch, _lay_out, rules, Scratch())
        segments = watch.segments
    account = summarise_parts(
        [to_part_trace(segment) for segment in segments], work.plan, ranks.rank, rules
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
