"""Which of the ranked plans is written for another trainer, and what is lost by it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.interop.emit import Emitted, dropped, emit
from outpace.planner.job import Job
from outpace.planner.plans import one
from outpace.records.errors import BadInputError
from outpace.records.estimate import Estimate, Planned, Plans
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.units import show_bytes


@dataclass(frozen=True)
class Picked:
    """A plan's number in the answer, what was written of it, and why this one.

    `warning` says what of it the format lacks, None where it says it wholly.
    """

    number: int
    emitted: Emitted
    why: str
    warning: str | None


def pick(name: str, job: Job, answer: Plans, spec: ModelSpec, chosen: int | None) -> Picked:
    """The `chosen` plan, else the first that format `name` can say wholly, else the first.

    Raises BadInputError where a configuration of the chosen one, or of any, cannot be written.
    """
    if chosen is not None:
        written = _written(name, job, answer.plans[chosen - 1], spec)
        why = f"Plan {chosen}, as --explain says: {answer.plans[chosen - 1].title}."
        return Picked(chosen, written, why, _warning(name, job, answer.plans[chosen - 1], written))
    tried = [_written(name, job, planned, spec) for planned in answer.plans]
    for number, (planned, written) in enumerate(zip(answer.plans, tried, strict=True), 1):
        if not written.lost:
            return Picked(number, written, _why(name, number, planned, tried), None)
    first = answer.plans[0]
    why = f"Plan 1, the fastest, as {name} can say none of the {len(tried)} wholly: {first.title}."
    return Picked(1, tried[0], why, _warning(name, job, first, tried[0]))


def _written(name: str, job: Job, planned: Planned, spec: ModelSpec) -> Emitted:
    wanted = job.wanted
    return emit(name, planned.plan, spec, global_batch=wanted.global_batch,
                seq_len=wanted.seq_len)  # fmt: skip


def _why(name: str, number: int, planned: Planned, tried: Sequence[Emitted]) -> str:
    if number == 1:
        return f"Plan 1, the fastest: {planned.title}."
    first = " ".join(tried[0].lost)
    before = "plan 1" if number == 2 else f"plans 1 to {number - 1}"
    return (
        f"Plan {number}, the first that {name} can say wholly: {planned.title}. It cannot say "
        f"{before}: {first} --explain 1 writes plan 1 all the same."
    )


def _warning(name: str, job: Job, planned: Planned, written: Emitted) -> str | None:
    """What is lost, and the memory without it where that can be reckoned."""
    if not written.lost:
        return None
    rests = f"the plan rests on what {name} cannot say. {' '.join(written.lost)}"
    left = dropped(written.lost)
    more = len(written.lost) > len(left)
    differs = " What is written in another way changes time and memory too." if more else ""
    other = _without(job, planned.plan, left)
    if other is None:
        return f"{rests}{differs}"
    has = "" if other.memory_bytes is None else f" of {show_bytes(other.memory_bytes)}"
    with_ = " and ".join(f"{name}={value}" for name, value in left.items())
    verdict = "fits" if other.fits else "does NOT fit"
    return (
        f"{rests} With {with_} a device needs {show_bytes(other.peak_memory_bytes)}"
        f"{has}, as planned {show_bytes(planned.estimate.peak_memory_bytes)}: it {verdict}."
        f"{differs}"
    )


def _without(job: Job, plan: Plan, left: Mapping[str, Any]) -> Estimate | None:
    """The plan's estimate with some settings at their defaults; None where that is no plan."""
    if not left:
        return None
    # A program that cannot be told to chunk the loss does not do so by itself, as outpace does.
    habits = replace(job.habits, chunks_loss=job.habits.chunks_loss and "loss" not in left)
    try:
        values = {**plan.model_dump(), **left}
        return one(replace(job, habits=habits), Plan.parse(values, "plan")).estimate
    except BadInputError:
        return None
