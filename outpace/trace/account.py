"""Memory of any rank at any world size, traced from the real model code and plan."""

import gc
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from outpace.planner.memory.peak import plan_library_bytes
from outpace.records.hardware import Accelerator
from outpace.records.memory import MemoryAccount, Moment
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings
from outpace.trace.allocation_tracer import AllocationTracer
from outpace.trace.depth_extrapolation import (
    AllocationHistory,
    IrregularError,
    PartTrace,
    drop_temporaries,
    extend,
    to_part_trace,
    unroll,
)
from outpace.trace.device import Rules
from outpace.trace.fake import fake_tensors
from outpace.trace.offloading import OffloadScratch, offload_to_disk, separate_host_memory
from outpace.trace.reserve import events_of, peak_reserved_bytes
from outpace.trace.steps import Trainable, Workload, run_steps
from outpace.trace.world import lay_out, one_rank

# All layers between the first and the last do the same work. Three would do; one more is a margin.
_SHALLOW = 4
# All passes between the first and the last do the same work.
MOST_PASSES = 3
_POINTS = 400  # maximum number of points of a timeline


def account(
    spec: ModelSpec,
    plan: Plan,
    *,
    seq_len: int,
    accumulation: int = 1,
    rank: int = 0,
    settings: TrainSettings | None = None,
    accelerator: Accelerator | None = None,
    ranks_per_host: int = 8,
) -> MemoryAccount:
    """Trace the first two steps of `rank` under fake tensors and return the memory they use.

    `settings` configure the optimizer. Without an `accelerator`, the account is for a CPU. For an
    accelerator, the simulated allocator has its `usable_bytes`, minus the memory of contexts and
    collectives. Raises BadInputError if the plan cannot be applied.
    """
    settings = settings or TrainSettings()
    passes, rules = min(accumulation, MOST_PASSES), Rules(accelerator)
    work = Workload(spec, offload_to_disk(plan, rules), seq_len, passes, settings)
    traced = partial(record_parts, rank=rank, rules=rules, ranks_per_host=ranks_per_host)
    return summarise_parts(
        _record_or_extrapolate(work, traced), plan, rank, rules, accumulation / passes
    )


def _record_or_extrapolate(
    work: Workload, traced: Callable[[Workload], list[PartTrace]]
) -> list[PartTrace]:
    """Trace the whole model, if possible by extrapolating from the traces of two shallower models.

    Some work is divided by bytes instead of layers, such as DDP's first broadcast. The extrapolated
    trace may then free storages that it never allocated. In this case, all layers are traced.
    """
    depths = shallow_depths(work.spec, work.plan)
    if depths is None:
        return traced(work)
    low, high = depths
    shallow, deeper = (traced(at_depth(work, depth)) for depth in depths)
    try:
        traces = extend(shallow, deeper, (work.spec.layers - high) // (high - low), high - low)
        deque(events_of(unroll(traces)), maxlen=0)
        return traces
    except IrregularError:
        return traced(work)


def shallow_depths(spec: ModelSpec, plan: Plan) -> tuple[int, int] | None:
    """Return two smaller layer counts to extrapolate from.

    Return None if extrapolation is not possible or saves nothing.
    """
    period = plan.checkpoint_every
    if plan.pp > 1 or plan.checkpoint_layers or spec.window_layers is not None:
        return None
    low = _SHALLOW + (spec.layers - _SHALLOW) % period
    high = low + period
    return (low, high) if spec.layers > high + low else None


def at_depth(work: Workload, layers: int) -> Workload:
    """Return the same workload for a model with `layers` layers."""
    spec = work.spec.model_copy(update={"layers": layers})
    return Workload(spec, work.plan, work.seq_len, work.accumulation, work.settings)


def record_parts(work: Trainable, rank: int, rules: Rules, ranks_per_host: int) -> list[PartTrace]:
    """Record one rank's allocations and frees in two steps under fake tensors.

    `rules` say how the traced device differs from a CPU.
    """
    watch = AllocationTracer(rules)
    collecting = gc.isenabled()
    gc.disable()  # otherwise, the time at which cycles are freed would depend on earlier work
    try:
        with one_rank(rank, work.plan.world_size, ranks_per_host) as ranks, fake_tensors(), watch:
            with separate_host_memory(watch, rules), work.dropout_context(rules):
                run_steps(work, ranks, watch, lay_out, rules, OffloadScratch(watch))
            segments = watch.segments
    finally:
        if collecting:
            gc.enable()
    traces = [to_part_trace(segment) for segment in segments]
    if rules.builds_on_host(work.plan):
        traces[0] = drop_temporaries(traces[0])
    return traces


def summarise_parts(
    traces: Sequence[PartTrace], plan: Plan, rank: int, rules: Rules, passes: float = 1.0
) -> MemoryAccount:
    """Summarise traces in a MemoryAccount.

    `passes` is the ratio of the passes in a whole step to those that were traced.
    """
    history = unroll(traces)
    position = int(history.live_bytes.argmax())
    last = [trace for trace in traces if trace.step == traces[-1].step]
    times = [passes if trace.part in ("forward", "backward") else 1.0 for trace in last]
    return MemoryAccount(
        source="traced",
        device=rules.device,
        rank=rank,
        world_size=plan.world_size,
        peak=_describe_moments(history, [position])[0],
        timeline=tuple(_timeline(history)),
        activations_by_module=_activation_bytes(history, position),
        reserved_bytes=_reserved_bytes(history, plan, rules),
        library_bytes=None if rules.accelerator is None else plan_library_bytes(plan),
        flops=round(sum(n * trace.flops for n, trace in zip(times, last, strict=True))),
        bytes_moved=round(sum(n * trace.bytes_moved for n, trace in zip(times, last, strict=True))),
    )


def _reserved_bytes(history: AllocationHistory, plan: Plan, rules: Rules) -> int | None:
    if rules.accelerator is None:
        return None
    capacity_bytes = max(0, rules.accelerator.usable_bytes - plan_library_bytes(plan))
    return peak_reserved_bytes(events_of(history), capacity_bytes)


def _describe_moments(history: AllocationHistory, positions: Sequence[int]) -> list[Moment]:
    found = []
    for position, by_kind in zip(positions, history.by_kind(positions), strict=True):
        entry = history.entries[history.origin[position]]
        trace, block = history.traces[history.trace_of[position]], history.block[position]
        module = entry.module.replace("*", str(block)) if block >= 0 else entry.module
        found.append(
            Moment(
                step=trace.step,
                part=trace.part,
                module=module,
                operator=entry.operator,
                by_kind=by_kind,
            )
        )
    return found


def _timeline(history: AllocationHistory) -> list[Moment]:
    """Divide the last step into up to `_POINTS` intervals, and return each one's peak of memory."""
    steps = np.array([trace.step for trace in history.traces])
    of_step = np.flatnonzero(steps[history.trace_of] == steps[-1])
    stretches = np.array_split(of_step, min(_POINTS, len(of_step)) or 1)
    tops = [int(part[history.live_bytes[part].argmax()]) for part in stretches if len(part)]
    return _describe_moments(history, tops)


def _activation_bytes(history: AllocationHistory, position: int) -> dict[str, int]:
    """Return the bytes of live activations by the module that created them, largest first.

    `position` is the index of a change in the history.
    """
    sums: dict[str, int] = {}
    for origin, count in zip(
        *np.unique(history.origin[: position + 1], return_counts=True), strict=True
    ):
        entry = history.entries[origin]
        if entry.kind == "activations":
            name = entry.made_in or "outside modules"
            sums[name] = sums.get(name, 0) + entry.nbytes * int(count)
    held = {name: total for name, total in sums.items() if total > 0}
    return dict(sorted(held.items(), key=lambda pair: -pair[1]))
