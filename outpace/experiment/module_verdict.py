"""The verdict on one plan for a user's module: what differs, and the likely cause."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite

from outpace.experiment.module_parity import (
    RankFindings,
    ReferenceFacts,
    ReferenceRun,
)
from outpace.parallel.parity.comparison import LOST_IN_SPLIT, MISSING, ComparisonLimits
from outpace.parallel.parity.counted_buffers import CURE_OF_COUNTS, explain_counted_attributes
from outpace.parallel.parity.cut_cause import (
    PLACED,
    batchnorm_cure,
    explain_cause,
    synchronised_cure,
)
from outpace.parallel.parity.moved_parameters import explain_writes
from outpace.parallel.parity.split_messages import SPLIT_LOSS, explain_parts
from outpace.parallel.parity.state_messages import (
    explain_state_after_resume,
    explain_state_as_cause,
    name_attributes,
)
from outpace.records.certificate import (
    ParityVerdict,
    TensorDifference,
)
from outpace.records.errors import first_names
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Plan

# in the order in which a step computes them
_KINDS = ("loss", "gradient", "norm", "parameter", "buffer")
_MOST_NAMED = 20


def verdict_of(
    plan: Plan,
    allowed: ComparisonLimits,
    found: Sequence[RankFindings],
    course: ReferenceRun,
    world: int,
) -> ParityVerdict:
    """Return the verdict on a plan that ran to its end.

    `found` has the differences that each rank found, `course` is the run in one process, and
    `allowed` the tolerance. The verdict lists the tensors that differ, and the likely cause.
    """
    whole = _merge_worst(one.whole for one in found)
    cut = _merge_worst(one.cut for one in found)
    unmatched = {key: why for one in found for key, why in one.unmatched.items()}
    held = set().union(*(one.held for one in found[:world]))
    for name in set(course.steps[0]["gradient"]) - held:
        whole["gradient", name, 1] = cut["gradient", name, 1] = None
        unmatched["gradient", name, 1] = MISSING
    wrong = {key: off for key, off in whole.items() if not _is_allowed(off, allowed)}
    by_cut = {key for key in wrong if key in cut and _is_allowed(cut[key], allowed)}
    faults = {key: off for key, off in wrong.items() if key not in by_cut}
    notes: dict[tuple[str, str, int], str] = {}
    for one in found:
        notes |= one.notes
    numbers = [off for off in whole.values() if off is not None and off < float("inf")]
    worst_key = max(whole, key=lambda key: _deviation(whole[key]))
    worst = max(numbers, default=0.0)
    note = _note_attributes(course, plan)
    if not wrong:
        return make_verdict(plan, allowed, worst=worst, worst_key=worst_key, cause=note)
    if not faults and course.facts.cut_cause == "places":
        return make_verdict(plan, allowed, reason=f"{PLACED}.", refused=True)
    only_buffers = not faults and all(kind.startswith("buffer") for kind, _, _ in wrong)
    counted = {*course.facts.counted} if only_buffers and plan.data_parallel > 1 else set()
    counts = {key: off for key, off in wrong.items() if key[1] in counted}
    if only_buffers and not counts:
        moved = first_names(sorted({name for _, name, _ in wrong}))
        numbers = [off for key, off in whole.items() if key not in wrong and off is not None]
        cause = (
            f"Buffers that each forward changes ({moved}) equal those of one process that splits "
            "the batch in the same way, but not those of one process with the whole batch"
        )
        cause = cause if note is None else f"{cause}. {note}"
        return make_verdict(plan, allowed, worst=max(numbers, default=0.0), cause=cause)
    named = faults or counts or wrong
    listed = sorted(named, key=lambda key: _cause_order(key, named[key]))
    differences = tuple(
        TensorDifference(kind=k, name=n, step=s, relative=named[k, n, s])
        for k, n, s in listed[:_MOST_NAMED]
    )
    attributes = set().union(*(one.attributes for one in found))
    if counts:
        known: str | None = _explain_counts(sorted({name for _, name, _ in counts}), plan)
    else:
        known = (
            _known_cause(plan, course.facts, listed) if faults else _explain_cut(course.facts, plan)
        )
    parts = [name for name, off in found[0].summed.items() if _is_allowed(off, allowed)]
    known = known or _explain_split(plan, listed, unmatched, parts, notes)
    cause = known or _guess_cause(plan, listed, unmatched, notes, attributes)
    largest = max(listed, key=lambda key: _deviation(named[key]))
    off = _deviation(named[largest])
    told = [listed[0]] if largest == listed[0] else [listed[0], largest]
    commas = ["", ","]  # "a is off by 0.1; the worst, b, is off by 0.9"
    first, *worst_of = [
        f"{key[0]} {key[1]} (step {key[2]}){comma} "
        f"{unmatched.get(key) or _format_deviation(named[key])}"
        for key, comma in zip(told, commas, strict=False)
    ]
    others = len(listed) - 1
    reason = first + (f", and {others} more" if others else "")
    reason += "".join(f"; the worst, {one}" for one in worst_of)
    return make_verdict(
        plan, allowed, worst=off if isfinite(off) else None, worst_key=largest,
        reason=f"{reason}. {cause}", cause=cause, differences=differences,
    )  # fmt: skip


def _note_attributes(course: ReferenceRun, plan: Plan) -> str | None:
    """Return a note on module attributes that would count only one rank's samples, or None."""
    names = sorted({*course.facts.counted} - course.state.keys() - course.unsaved.keys())
    if not names or plan.data_parallel == 1:
        return None
    said = explain_counted_attributes(names, plan.data_parallel)
    return said[0].upper() + said[1:]


CUT_ALIKE = "one process that splits the batch in the same way gets the same result"


def _explain_counts(names: Sequence[str], plan: Plan) -> str:
    """Explain that buffers count rank 0's samples only, in a plan that is otherwise correct."""
    return (
        "Loss, gradients and parameters are equal. In each rank, the forward counts or averages "
        f"only the rank's own samples in {first_names(names)} ({CUT_ALIKE}). Rank 0's values are "
        f"used, which cover 1/{plan.data_parallel} of each batch. {CURE_OF_COUNTS}"
    )


def _explain_cut(facts: ReferenceFacts, plan: Plan) -> str:
    """Explain that a plan's results differ because the module depends on how a batch is split.

    The same difference occurs in one process that splits the batch.
    """
    if facts.written:
        what = f"writes to {first_names(facts.written)}"
    elif facts.state_of_ranks.found:
        what = f"or the loss changes {name_attributes(facts.state_of_ranks.names)}"
    elif facts.moved and not facts.cut_cause:
        what = f"changes {first_names(facts.moved)}, which affects the loss or its gradient,"
    else:
        cure = batchnorm_cure(plan, 2) if facts.has_batchnorm else ""
        if facts.shared_norms and plan.data_parallel > 1:
            cure = synchronised_cure(facts.shared_norms, "one micro-batch per step")
        return f"The batch is split, and {CUT_ALIKE}: {explain_cause(facts.cut_cause, cure)}"
    return (
        f"The forward {what} with each micro-batch, so splitting the batch changes the result: "
        f"{CUT_ALIKE}. To train as on the whole batch, use one process and one micro-batch per step"
    )


def _format_deviation(relative: float | None) -> str:
    if relative is None:
        return MISSING
    if relative == float("inf"):
        return "is NaN, or is not zero although it is zero in one process"
    return f"is off by {relative:.2g} of its scale"


def _deviation(relative: float | None) -> float:
    return float("inf") if relative is None else relative


def _is_allowed(relative: float | None, allowed: ComparisonLimits) -> bool:
    return relative is not None and relative <= allowed.relative


def _merge_worst(
    several: Iterator[dict[tuple[str, str, int], float | None]],
) -> dict[tuple[str, str, int], float | None]:
    """Return each tensor's largest relative difference on any rank, by (kind, name, step)."""
    merged: dict[tuple[str, str, int], float | None] = {}
    for one in several:
        for key, off in one.items():
            if key not in merged or _deviation(off) > _deviation(merged[key]):
                merged[key] = off
    return merged


def _cause_order(key: tuple[str, str, int], off: float | None) -> tuple[bool, int, int, float]:
    """Return a sort key that orders differing tensors by when training computes them.

    Among tensors of the same step and kind, the one with the largest difference comes first.
    """
    kind, _, step = key
    resumed = kind.endswith(" after resuming")
    kind = kind.removesuffix(" after resuming")
    return resumed, step, _KINDS.index(kind), -_deviation(off)


def _known_cause(
    plan: Plan, facts: ReferenceFacts, listed: Sequence[tuple[str, str, int]]
) -> str | None:
    """Explain a difference by what training in one process showed, or return None."""
    if listed[0][0].endswith(" after resuming"):
        state = facts.state if plan.world_size == 1 else facts.state_of_ranks
        return explain_state_after_resume(state) if state.found else None
    if facts.written:
        why = (
            "micro-batches and ranks do so in a different order, or for different samples, than "
            "one process"
        )
        said = explain_writes(facts.written, plan.strategy, why).removesuffix(".")
        return said[0].upper() + said[1:]
    kept = explain_state_as_cause([facts.state_of_ranks])
    if kept is None and facts.cut_cause_fixed and plan.data_parallel > 1:
        why = explain_cause(facts.cut_cause_fixed)
        return f"Ranks share BatchNorm's statistics, but nothing else in the forward: {why}"
    return kept


def _explain_split(
    plan: Plan,
    listed: Sequence[tuple[str, str, int]],
    unmatched: Mapping[tuple[str, str, int], str],
    parts: Collection[str],
    notes: Mapping[tuple[str, str, int], str],
) -> str | None:
    """Explain a wrong loss or gradient by the tensor-parallel layouts, or return None.

    A layout can leave parts of a gradient on different ranks without adding them up; `parts` names
    the parameters for which this happened. It is not the cause if a tensor of the first step exists
    on no rank or only on ranks (`unmatched`).
    """
    kind, _, step = listed[0]
    if plan.tp == 1 or kind not in ("loss", "gradient"):
        return None
    if any(key in unmatched for key in listed if key[0] == kind and key[2] == step):
        return None
    if kind == "loss":
        return SPLIT_LOSS.removesuffix(".")
    off = {name for kind, name, at in listed if kind == "gradient" and at == step == 1}
    found = [name for name in parts if name in off]
    times = f"is {plan.tp} times one process's"
    repeated = sorted(name for name in off if notes.get(("gradient", name, 1)) == times)
    said = explain_parts(found, len(found) < len(off), plan.tp, repeated)
    return None if said is None else said.removesuffix(".")


def _guess_cause(
    plan: Plan,
    listed: Sequence[tuple[str, str, int]],
    unmatched: Mapping[tuple[str, str, int], str],
    notes: Mapping[tuple[str, str, int], str],
    attributes: Collection[str],
) -> str:
    kind = listed[0][0]
    if kind.endswith(" after resuming"):
        said = (
            "Without an interruption the result is right, so the checkpoint lacks something that "
            "the module needs, such as another rank's buffers, or state outside of buffers"
        )
        if not attributes:
            return said
        named = name_attributes(sorted(attributes))
        return f"{said}. Steps change {named}. If later steps read it, register it as a buffer"
    explained = next((f"{key[1]} {notes[key]}" for key in listed if key in notes), None)
    if kind == "loss" and plan.pp > 1:
        return (
            "The loss reads something that stages do not send, such as parameters of another "
            "stage, or a term that blocks store as an attribute"
        )
    if kind == "gradient":
        apart = [key for key in listed if key[0] == "gradient" and key in unmatched]
        lost = [key[1] for key in apart if unmatched[key] == MISSING]
        if lost:
            schedule = SCHEDULES.get(plan.schedule)
            have = "has" if len(lost) == 1 else "have"
            said = f"{first_names(lost)} {have} a gradient in one process, but on no rank"
            splits = schedule is not None and schedule.splits_backward
            return f"{said}. {LOST_IN_SPLIT.removesuffix('.')}" if splits else said
        if apart:
            return f"The gradient of {apart[0][1]} {unmatched[apart[0]]}"
        if explained is not None:
            return f"The gradient of {explained}"
        return "The gradients of all ranks do not add up to those of one process"
    if kind == "loss":
        return (
            "The loss on the ranks differs from that of one process with the same samples and "
            "weights"
        )
    if kind == "buffer":
        return (
            "Gradients are right, but buffers are not: they depend on each rank's samples, or have "
            "been updated more than once"
        )
    return f"Gradients are right, but {kind} is not: not all parameters are updated or clipped"


def make_verdict(
    plan: Plan,
    allowed: ComparisonLimits,
    *,
    worst: float | None = None,
    worst_key: tuple[str, str, int] | None = None,
    reason: str | None = None,
    refused: bool = False,
    cause: str | None = None,
    differences: tuple[TensorDifference, ...] = (),
) -> ParityVerdict:
    """Return a verdict on a plan: failed if there is a `reason` for that, otherwise passed."""
    named = None if worst_key is None else f"{worst_key[0]} {worst_key[1]} (step {worst_key[2]})"
    return ParityVerdict(
        strategy=plan.strategy,
        mesh=plan.mesh,
        precision=allowed.precision,
        passed=reason is None,
        worst_relative_difference=worst,
        worst_tensor=named,
        tolerance=allowed.relative,
        reason=reason,
        refused=refused,
        cause=cause,
        differences=differences,
    )
