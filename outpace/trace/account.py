"""The memory of any rank of any world, from the real model code and the real plan."""

import gc
import math
from collections.abc import Sequence

import numpy as np
import torch

from outpace.records.memory import MemoryAccount, Moment
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings
from outpace.trace.extend import Course, Irregular, Strip, course_of, extend, kinds_at, strip_of
from outpace.trace.fake import hollow
from outpace.trace.steps import STEPS, Workload, run_steps
from outpace.trace.watch import Segment, Watch
from outpace.trace.world import lay_out, one_rank

# From the second layer on all do the same, but for the last; a fourth one makes sure.
_SHALLOW = 4
# The middle ones of more passes do as the second does.
_MOST_PASSES = 3
_POINTS = 400  # of a timeline


def account(
    spec: ModelSpec,
    plan: Plan,
    *,
    seq_len: int,
    accumulation: int = 1,
    rank: int = 0,
    settings: TrainSettings | None = None,
    ranks_per_host: int = 8,
) -> MemoryAccount:
    """Trace the first two steps of `rank` under fake tensors.

    `settings` are the optimizer's. Raises BadInputError for a plan that cannot be applied.
    """
    settings = (settings or TrainSettings()).model_copy(update={"lr": 1e-3})
    passes = min(accumulation, _MOST_PASSES)
    work = Workload(spec, plan, seq_len, passes, settings)
    strips = _strips(work, rank, ranks_per_host)
    return summed_up(strips, plan, rank, accumulation / passes)


def _strips(work: Workload, rank: int, ranks_per_host: int) -> list[Strip]:
    """Of all layers: recorded, or extended where there are many of them."""
    depths = shallow_depths(work.spec, work.plan)
    if depths is None:
        return recorded(work, rank, ranks_per_host)
    low, high = depths
    shallow, deeper = (
        recorded(at_depth(work, depth), rank, ranks_per_host) for depth in (low, high)
    )
    try:
        return extend(shallow, deeper, (work.spec.layers - high) // (high - low))
    except Irregular:
        return recorded(work, rank, ranks_per_host)


def shallow_depths(spec: ModelSpec, plan: Plan) -> tuple[int, int] | None:
    """Two numbers of layers from which this many can be extended, if that is less work."""
    period = 1
    if plan.pp > 1 or spec.window_layers is not None:
        return None
    low = _SHALLOW + (spec.layers - _SHALLOW) % period
    high = low + period
    return (low, high) if spec.layers > high + low else None


def at_depth(work: Workload, layers: int) -> Workload:
    """The same with fewer layers."""
    spec = work.spec.model_copy(update={"layers": layers})
    return Workload(spec, work.plan, work.seq_len, work.accumulation, work.settings)


def recorded(work: Workload, rank: int, ranks_per_host: int) -> list[Strip]:
    """What a rank does in two steps, under fake tensors."""
    watch = Watch()
    collecting = gc.isenabled()
    gc.disable()  # when cycles are freed would depend on what ran before
    try:
        with one_rank(rank, work.plan.world_size, ranks_per_host) as ranks, hollow(), watch:
            run_steps(work, ranks, watch, lay_out)
            segments = watch.segments
    finally:
        if collecting:
            gc.enable()
    return strips_of(segments)


def strips_of(segments: Sequence[Segment]) -> list[Strip]:
    """Those in which something was done."""
    return [strip_of(segment) for segment in segments]


def summed_up(
    strips: Sequence[Strip], plan: Plan, rank: int, passes: float = 1.0
) -> MemoryAccount:
    """The account of what was done. `passes`: how often each pass of a step really comes."""
    course = course_of(strips)
    position = int(course.live_bytes.argmax())
    last = [strip for strip in strips if strip.step == STEPS]
    times = [passes if strip.part in ("forward", "backward") else 1.0 for strip in last]
    return MemoryAccount(
        source="traced",
        device="cpu",
        rank=rank,
        world_size=plan.world_size,
        peak=moment(course, position),
        timeline=tuple(_timeline(course)),
        activations_by_module=_activations(course, position),
        flops=round(sum(n * strip.flops for n, strip in zip(times, last, strict=True))),
        bytes_moved=round(sum(n * strip.bytes_moved for n, strip in zip(times, last, strict=True))),
    )


def moment(course: Course, position: int) -> Moment:
    """What lives after a change, and where that is."""
    entry = course.entries[course.origin[position]]
    strip = course.strips[course.strip_of[position]]
    block = course.block[position]
    return Moment(
        step=strip.step,
        part=strip.part,
        module=entry.module.replace("*", str(block)) if block >= 0 else entry.module,
        operator=entry.operator,
        by_kind=kinds_at(course, position),
    )


def _timeline(course: Course) -> list[Moment]:
    """The second step: of each stretch of it the moment with the most bytes."""
    steps = np.array([strip.step for strip in course.strips])
    of_step = np.flatnonzero(steps[course.strip_of] == STEPS)
    stretches = np.array_split(of_step, min(_POINTS, len(of_step)) or 1)
    tops = [part[course.live_bytes[part].argmax()] for part in stretches if len(part)]
    return [moment(course, int(position)) for position in tops]


def _activations(course: Course, position: int) -> dict[str, int]:
    """Bytes of activations that live at the peak, by the modules that made them, largest first."""
    sums: dict[str, int] = {}
    for origin, count in zip(*np.unique(course.origin[: position + 1], return_counts=True)):
        entry = course.entries[origin]
        if entry.kind == "activations":
            name = entry.made_in or "outside of modules"
            sums[name] = sums.get(name, 0) + entry.nbytes * int(count)
    held = {name: total for name, total in sums.items() if total > 0}
    return dict(sorted(held.items(), key=lambda pair: -pair[1]))
