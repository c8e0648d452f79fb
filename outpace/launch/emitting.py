"""Which plan is written for another trainer, what of it is lost, and what was written takes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from outpace.interop.emit import Emitted, emit
from outpace.planner.habits import MEGATRON_BF16, MEGATRON_FP16, OUTPACE, Habits
from outpace.planner.job import Job
from outpace.planner.plans import estimate_plan, fastest_plan
from outpace.records.errors import BadInputError
from outpace.records.estimate import Estimate, Planned, Plans
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline
from outpace.records.plan import Plan
from outpace.records.units import show_bytes, show_seconds, show_share

# No other trainer takes a large vocabulary's logits in chunks by itself, as outpace does.
_OTHERS = replace(OUTPACE, chunks_loss=False)
_HABITS: Mapping[str, Habits] = MappingProxyType({"outpace": OUTPACE})


@dataclass(frozen=True)
class Named:
    """A model, or its outline where outpace knows no more, and what the user named it by."""

    reference: str
    model: ModelSpec | Outline


@dataclass(frozen=True)
class Picked:
    """A plan, what was written of it, and why this one.

    `number` is its place in the answer, None where it is not among the plans that are shown.
    `estimate` is of what was written, None where that is no plan that can be reckoned with.
    `warning` says what of the plan the format lacks, None where it says it wholly.
    """

    planned: Planned
    number: int | None
    emitted: Emitted
    estimate: Estimate | None
    why: str
    warning: str | None


def pick(name: str, job: Job, answer: Plans, model: Named, chosen: int | None) -> Picked:
    """The `chosen` plan, else the fastest of all that format `name` can express.

    Where it can express none, the first of the answer. Raises BadInputError where a configuration
    of the chosen one, or of any, cannot be written.
    """
    there = replace(job.with_nodes(answer.nodes - answer.idle_nodes), habits=_habits(name, job))
    if chosen is not None:
        planned = answer.plans[chosen - 1]
        return _picked(name, there, planned, model, chosen, f"Plan {chosen}: {planned.title}.")
    first = answer.plans[0]
    # What the format lacks of the model itself, whatever the plan.
    of_model = set(_write(name, there, Plan(micro_batch=1), model, 1).lost)

    def expresses(plan: Plan) -> bool:
        try:
            return set(_write(name, there, plan, model).lost) <= of_model
        except BadInputError:
            return False

    found, considered = fastest_plan(there, expresses)
    if found is None:
        why = f"Plan 1, the fastest, as {name} can express none of those that fit: {first.title}."
        return _picked(name, there, first, model, 1, why)
    same = [number for number, other in enumerate(answer.plans, 1) if other.plan == found.plan]
    number = same[0] if same else None
    why = _why(name, there, found, answer, considered, number, model)
    return _picked(name, there, found, model, number, why)


def _habits(name: str, job: Job) -> Habits:
    """What the trainer that is written for holds in memory."""
    if name == "megatron":
        precision = job.wanted.keep.get("precision", job.wanted.precision)
        if precision.startswith(("bf16", "fp8")):
            return MEGATRON_BF16
        return MEGATRON_FP16 if precision.startswith("fp16") else _OTHERS
    return _HABITS.get(name, _OTHERS)


def _write(
    name: str, job: Job, plan: Plan, model: Named, global_batch: int | None = None
) -> Emitted:
    wanted = job.wanted
    return emit(
        name, plan, model.model, global_batch=global_batch or wanted.global_batch,
        seq_len=wanted.seq_len, reference=model.reference,
    )  # fmt: skip


def _picked(
    name: str, job: Job, planned: Planned, model: Named, number: int | None, why: str
) -> Picked:
    written = _write(name, job, planned.plan, model)
    estimate, known = _as_written(job, planned.plan, written)
    return Picked(
        planned, number, written, estimate, why, _warning(name, planned, written, estimate, known)
    )


def _why(
    name: str, job: Job, found: Planned, answer: Plans, considered: int, number: int | None,
    model: Named,
) -> str:  # fmt: skip
    """Why this plan, and what it costs beside the fastest."""
    first = answer.plans[0]
    if number == 1:
        return f"Plan 1, the fastest: {found.title}."
    which = "Written" if number is None else f"Plan {number}"
    slower = found.estimate.step_time_s / first.estimate.step_time_s - 1
    lost = " ".join(_write(name, job, first.plan, model).lost)
    cannot = f"{name} cannot express plan 1 ({first.title}): {lost}"
    if not lost:  # of what it holds beside the plan there is more than outpace holds
        cannot = f"Plan 1 ({first.title}) does not fit as {name} runs it."
    return (
        f"{which}, the fastest of {considered:,} that {name} can express: {found.title}; "
        f"{show_share(max(slower, 0.0))} slower than plan 1. {cannot} --explain 1 writes plan 1 "
        "all the same."
    )


def _as_written(job: Job, plan: Plan, written: Emitted) -> tuple[Estimate | None, bool]:
    """The estimate of what the configuration describes, and whether that is all known."""
    described, known = written.written(plan)
    if described is None:
        return None, False
    try:
        return estimate_plan(job, described).estimate, known
    except BadInputError:
        return None, False


def _warning(
    name: str, planned: Planned, written: Emitted, estimate: Estimate | None, known: bool
) -> str | None:
    """What is lost, and whether what is written instead fits."""
    if not written.lost:
        return None
    rests = f"the plan rests on what {name} cannot express. {' '.join(written.lost)}"
    more = "" if known else " What is written in another way may change time and memory too."
    if estimate is None:
        return f"{rests}{more}"
    has = "" if estimate.memory_bytes is None else f" of {show_bytes(estimate.memory_bytes)}"
    return (
        f"{rests} As written, a device needs {show_bytes(estimate.peak_memory_bytes)}{has}, as "
        f"planned {show_bytes(planned.estimate.peak_memory_bytes)}: it "
        f"{'fits' if estimate.fits else 'does NOT fit'}.{more}"
    )


def figures(estimate: Estimate) -> str:
    """Time and memory of what was written, in a sentence."""
    has = "" if estimate.memory_bytes is None else f" of {show_bytes(estimate.memory_bytes)}"
    low, high = show_seconds(estimate.low_s), show_seconds(estimate.high_s)
    return (
        f"As written: {show_seconds(estimate.step_time_s)} a step ({low} to {high} with "
        f"{estimate.level * 100:.0f} %), {estimate.tokens_per_s:,.0f} tokens/s, "
        f"{show_bytes(estimate.peak_memory_bytes)}{has} a device."
    )
