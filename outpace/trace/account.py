"""Memory of any rank of any world size, from the real model code and the real plan."""

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
    AllocationCourse,
    IrregularError,
    Strip,
    course_of,
    drop_temporaries,
    extend,
    strip_of,
)
from outpace.trace.device import Rules
from outpace.trace.fake import fake_tensors
from outpace.trace.offloading import OffloadScratch, offload_to_disk, separate_host_memory
from outpace.trace.reserve import events_of, peak_reserved_bytes
from outpace.trace.steps import Trainable, Workload, run_steps
from outpace.trace.world import lay_out, one_rank

# All layers from the second to the last but one do the same. A fourth layer is for safety.
_SHALLOW = 4
# With more passes than this, the middle passes do the same as the second.
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
    """Trace the first two steps of `rank` under fake tensors.

    `settings`: the optimizer's settings. Without an `accelerator`, memory is that of a CPU.
    Otherwise, the allocator has the accelerator's `usable_bytes`, minus contexts and buffers of
    collectives. Raises BadInputError for a plan that cannot be applied.
    """
    settings = settings or TrainSettings()
    passes, rules = min(accumulation, MOST_PASSES), Rules(accelerator)
    work = Workload(spec, offload_to_disk(plan, rules), seq_len, passes, settings)
    traced = partial(record_strips, rank=rank, rules=rules, ranks_per_host=ranks_per_host)
    return summarise_strips(_strips(work, traced), plan, rank, rules, accumulation / passes)


def _strips(work: Workload, traced: Callable[[Workload], list[Strip]]) -> list[Strip]:
    """Return the strips of the whole model: recorded, or extended from two shallower models.

    Work that is split by bytes rather than by layers, such as DDP's first broadcast, may not
    extend: storages would be freed that were never allocated. In this case, all layers are
    recorded.
    """
    depths = shallow_depths(work.spec, work.plan)
    if depths is None:
        return traced(work)
    low, high = depths
    shallow, deeper = (traced(at_depth(work, depth)) for depth in depths)
    try:
        strips = extend(shallow, deeper, (work.spec.layers - high) // (high - low), high - low)
        deque(events_of(course_of(strips)), maxlen=0)
        return strips
    except IrregularError:
        return traced(work)


def shallow_depths(spec: ModelSpec, plan: Plan) -> tuple[int, int] | None:
    """Return two smaller layer counts from which to extrapolate; None if this saves nothing."""
    period = plan.checkpoint_every
    if plan.pp > 1 or plan.checkpoint_layers or spec.window_layers is not None:
        return None
    low = _SHALLOW + (spec.layers - _SHALLOW) % period
    high = low + period
    return (low, high) if spec.layers > high + low else None


def at_depth(work: Workload, layers: int) -> Workload:
    """Return the same training run with this many layers."""
    spec = work.spec.model_copy(update={"layers": layers})
    return Workload(spec, work.plan, work.seq_len, work.accumulation, work.settings)


def record_strips(work: Trainable, rank: int, rules: Rules, ranks_per_host: int) -> list[Strip]:
    """Record what a rank allocates and frees in two steps, under fake tensors."""
    watch = AllocationTracer(rules)
    collecting = gc.isenabled()
    gc.disable()  # otherwise, earlier work would determine when cycles are freed
    try:
        with one_rank(rank, work.plan.world_size, ranks_per_host) as ranks, fake_tensors(), watch:
            with separate_host_memory(watch, rules), work.functions(rules):
                run_steps(work, ranks, watch, lay_out, rules, OffloadScratch(watch))
            segments = watch.segments
    finally:
        if collecting:
            gc.enable()
    strips = [strip_of(segment) for segment in segments]
    if rules.builds_on_host(work.plan):
        strips[0] = drop_temporaries(strips[0])
    return strips


def summarise_strips(
    strips: Sequence[Strip], plan: Plan, rank: int, rules: Rules, passes: float = 1.0
) -> MemoryAccount:
    """Summarise recorded strips in an account. `passes`: how often each pass runs in a step."""
    course = course_of(strips)
    position = int(course.live_bytes.argmax())
    last = [strip for strip in strips if strip.step == strips[-1].step]
    times = [passes if strip.part in ("forward", "backward") else 1.0 for strip in last]
    return MemoryAccount(
        source="traced",
        device=rules.device,
        rank=rank,
        world_size=plan.world_size,
        peak=_moments(course, [position])[0],
        timeline=tuple(_timeline(course)),
        activations_by_module=_activations(course, position),
        reserved_bytes=_reserved_bytes(course, plan, rules),
        library_bytes=None if rules.accelerator is None else plan_library_bytes(plan),
        flops=round(sum(n * strip.flops for n, strip in zip(times, last, strict=True))),
        bytes_moved=round(sum(n * strip.bytes_moved for n, strip in zip(times, last, strict=True))),
    )


def _reserved_bytes(course: AllocationCourse, plan: Plan, rules: Rules) -> int | None:
    if rules.accelerator is None:
        return None
    capacity_bytes = max(0, rules.accelerator.usable_bytes - plan_library_bytes(plan))
    return peak_reserved_bytes(events_of(course), capacity_bytes)


def _moments(course: AllocationCourse, positions: Sequence[int]) -> list[Moment]:
    """Return the live memory after the changes at `positions`, and the parts of the step there."""
    found = []
    for position, by_kind in zip(positions, course.by_kind(positions), strict=True):
        entry = course.entries[course.origin[position]]
        strip, block = course.strips[course.strip_of[position]], course.block[position]
        module = entry.module.replace("*", str(block)) if block >= 0 else entry.module
        found.append(
            Moment(
                step=strip.step,
                part=strip.part,
                module=module,
                operator=entry.operator,
                by_kind=by_kind,
            )
        )
    return found


def _timeline(course: AllocationCourse) -> list[Moment]:
    """Return the moment with the most memory in each stretch of the last step."""
    steps = np.array([strip.step for strip in course.strips])
    of_step = np.flatnonzero(steps[course.strip_of] == steps[-1])
    stretches = np.array_split(of_step, min(_POINTS, len(of_step)) or 1)
    tops = [int(part[course.live_bytes[part].argmax()]) for part in stretches if len(part)]
    return _moments(course, tops)


def _activations(course: AllocationCourse, position: int) -> dict[str, int]:
    """Return activations live at the peak: bytes by the module that made them, largest first."""
    sums: dict[str, int] = {}
    for origin, count in zip(
        *np.unique(course.origin[: position + 1], return_counts=True), strict=True
    ):
        entry = course.entries[origin]
        if entry.kind == "activations":
            name = entry.made_in or "outside modules"
            sums[name] = sums.get(name, 0) + entry.nbytes * int(count)
    held = {name: total for name, total in sums.items() if total > 0}
    return dict(sorted(held.items(), key=lambda pair: -pair[1]))
