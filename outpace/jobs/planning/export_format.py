"""The plan to export for another trainer, what the export loses, and the result's cost."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from outpace.catalog.stacks import STACKS
from outpace.interop.export import ExportedPlan, export_plan
from outpace.planner.memory.framework_traits import (
    MEGATRON_BF16,
    MEGATRON_FP16,
    OUTPACE,
    FrameworkTraits,
)
from outpace.planner.plan import estimate_plan, fastest_plan
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.alternatives import EQUAL
from outpace.records.errors import BadInputError, join_and
from outpace.records.estimate import Estimate, Plans, RankedPlan
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline
from outpace.records.plan import Plan
from outpace.records.precisions import COMPUTES_IN_BF16, COMPUTES_IN_FP16
from outpace.records.units import show_bytes, show_seconds, show_share

# No other trainer splits the logits of a large vocabulary into chunks by itself.
_OTHERS = replace(OUTPACE, chunks_loss=False)
_HABITS: Mapping[str, FrameworkTraits] = MappingProxyType({"outpace": OUTPACE})
# Formats and trainers that build on another one: fully_shard over transformers' modules, and TRL's
# SFTTrainer, which is a Trainer.
_STACKS: Mapping[str, str] = MappingProxyType({"fsdp": "accelerate", "trl": "trainer"})

_ALIKE = 5e-4  # displayed as 0.0 %


@dataclass(frozen=True)
class NamedModel:
    """A model (or its outline, if outpace cannot build it) and the user's name for it."""

    reference: str
    model: ModelSpec | Outline


@dataclass(frozen=True)
class ExportChoice:
    """The exported plan, the configuration written, and why this plan was chosen.

    `number` is its position in the answer; None if not listed. `estimate` is for the written
    configuration; None if it cannot be estimated. `warning` names the parts of the plan that the
    format cannot express; None if there are none.
    """

    planned: RankedPlan
    number: int | None
    emitted: ExportedPlan
    estimate: Estimate | None
    why: str
    warning: str | None


def pick_plan(
    name: str, job: PlanningProblem, answer: Plans, model: NamedModel, chosen: int | None
) -> ExportChoice:
    """Choose the `chosen` plan, or the recommended one, or the fastest that `name` can express.

    The recommended plan is chosen if it fits, the format can express it, and that trainer runs it
    about as fast as the fastest plan. It is also chosen if the format can express no plan at all.
    Raises BadInputError if no configuration can be written for the chosen plan, or for any.
    """
    if job.wanted.adapters is not None and name != "outpace":
        raise BadInputError(
            f"{job.wanted.adapters.title}: configurations for {name} do not support adapters, so "
            "they would train all weights. Write the plan with --out plan.json, and train with "
            "outpace train --plan plan.json."
        )
    there = assign_trainer(name, job.with_nodes(answer.nodes - answer.idle_nodes))
    if chosen is not None:
        planned = answer.plans[chosen - 1]
        return _pick(name, there, planned, model, chosen, f"Plan {chosen}: {planned.title}.")
    first = answer.plans[0]
    # Features of the model that the format lacks, whatever the plan.
    of_model = set(_write(name, there, Plan(micro_batch=1), model, 1).differences)

    def expresses(plan: Plan) -> bool:
        try:
            return set(_write(name, there, plan, model).differences) <= of_model
        except BadInputError:
            return False

    found, considered = fastest_plan(there, expresses)
    label = f"Plan 1, the {join_and(first.roles)}"
    if found is None:
        why = f"{label}, since {name} can express none of the plans that fit: {first.title}."
        return _pick(name, there, first, model, 1, why)
    lost = "" if expresses(first.plan) else _describe_loss(name, there, first.plan, model)
    obstacle = _find_obstacle(name, there, first, found, lost)
    if obstacle is None:
        return _pick(name, there, first, model, 1, _reason_for_first(name, there, first, found))
    same = [number for number, other in enumerate(answer.plans, 1) if other.plan == found.plan]
    number = same[0] if same else None
    which = "Written" if number is None else f"Plan {number}"
    why = (
        f"{which}, the fastest of {considered:,} that {name} can express: "
        f"{found.title}{_compare_with_fastest(found, answer)}. {obstacle} --explain 1 writes plan "
        "1 anyway."
    )
    return _pick(name, there, found, model, number, why)


def assign_trainer(name: str, job: PlanningProblem) -> PlanningProblem:
    """Return the planning problem with `name` as the trainer."""
    return replace(job, traits=_framework_traits(name, job), stack=STACKS[_STACKS.get(name, name)])


def _framework_traits(name: str, job: PlanningProblem) -> FrameworkTraits:
    """Return how the target trainer uses memory."""
    if name == "megatron":
        precision = job.wanted.keep.get("precision", job.wanted.precision)
        if precision in COMPUTES_IN_BF16:
            return MEGATRON_BF16
        return MEGATRON_FP16 if precision in COMPUTES_IN_FP16 else _OTHERS
    return _HABITS.get(name, _OTHERS)


def _write(
    name: str, job: PlanningProblem, plan: Plan, model: NamedModel, global_batch: int | None = None
) -> ExportedPlan:
    wanted = job.wanted
    return export_plan(
        name, plan, model.model, global_batch=global_batch or wanted.global_batch,
        seq_len=wanted.seq_len, reference=model.reference,
    )  # fmt: skip


def _describe_loss(name: str, job: PlanningProblem, plan: Plan, model: NamedModel) -> str:
    """Describe what the format cannot express of a plan, or why it cannot be written."""
    try:
        return " ".join(_write(name, job, plan, model).differences)
    except BadInputError as error:
        return str(error)


def _pick(
    name: str,
    job: PlanningProblem,
    planned: RankedPlan,
    model: NamedModel,
    number: int | None,
    why: str,
) -> ExportChoice:
    written = _write(name, job, planned.plan, model)
    estimate, known = _estimate_written(job, planned.plan, written)
    return ExportChoice(
        planned, number, written, estimate, why, _warning(name, planned, written, estimate, known)
    )


def _find_obstacle(
    name: str, job: PlanningProblem, first: RankedPlan, found: RankedPlan, lost: str
) -> str | None:
    """Return why the recommended plan is not written; None if nothing prevents that.

    `found` is the fastest plan that the format can express; `lost` describes what it cannot express
    of `first`.
    """
    if lost:
        return f"{name} cannot express plan 1 ({first.title}): {lost}"
    own = estimate_plan(job, first.plan).estimate
    if not own.fits:
        has = "" if own.memory_bytes is None else f" of {show_bytes(own.memory_bytes)}"
        return (
            f"Plan 1 ({first.title}) does not fit when {name} runs it: it needs "
            f"{show_bytes(own.peak_memory_bytes)}{has}."
        )
    slower = own.step_time_s / found.estimate.step_time_s
    if slower > EQUAL:
        return f"Plan 1 ({first.title}) is {show_share(slower - 1)} slower when {name} runs both."
    return None


def _reason_for_first(name: str, job: PlanningProblem, first: RankedPlan, found: RankedPlan) -> str:
    """Explain that the recommended plan is written, and compare it with the fastest."""
    label = f"Plan 1, the {join_and(first.roles)}: {first.title}"
    slower = estimate_plan(job, first.plan).estimate.step_time_s / found.estimate.step_time_s - 1
    if found.plan == first.plan or slower < _ALIKE:
        return f"{label}."
    return (
        f"{label}; {show_share(slower)} slower, when {name} runs both, than the fastest that "
        f"{name} can express ({found.title})."
    )


def _compare_with_fastest(found: RankedPlan, answer: Plans) -> str:
    """Compare the written plan with the fastest, after a semicolon; "" if it is the fastest."""
    fastest = answer.plan_for("fastest") or answer.plans[0]
    if found.plan == fastest.plan:
        return ""
    slower = found.estimate.step_time_s / fastest.estimate.step_time_s - 1
    how = "as fast as" if slower < _ALIKE else f"{show_share(slower)} slower than"
    return f"; {how} plan {answer.plans.index(fastest) + 1}, the {join_and(fastest.roles)}"


def _estimate_written(
    job: PlanningProblem, plan: Plan, written: ExportedPlan
) -> tuple[Estimate | None, bool]:
    """Estimate the written configuration, and return whether the estimate covers all of it."""
    described, known = written.written_plan(plan)
    if described is None:
        return None, False
    try:
        return estimate_plan(job, described).estimate, known
    except BadInputError:
        return None, False


def _warning(
    name: str, planned: RankedPlan, written: ExportedPlan, estimate: Estimate | None, known: bool
) -> str | None:
    """Describe what is lost, and whether the plan that is written instead fits."""
    if not written.differences:
        return None
    rests = f"the plan uses features that {name} cannot express. {' '.join(written.differences)}"
    more = "" if known else " What is written instead may change time and memory, too."
    if estimate is None:
        return f"{rests}{more}"
    has = "" if estimate.memory_bytes is None else f" of {show_bytes(estimate.memory_bytes)}"
    return (
        f"{rests} {_describe_condition(written)}, a device needs "
        f"{show_bytes(estimate.peak_memory_bytes)}{has}, compared with "
        f"{show_bytes(planned.estimate.peak_memory_bytes)} as planned: it "
        f"{'fits' if estimate.fits else 'does NOT fit'}.{more}"
    )


def _describe_condition(written: ExportedPlan) -> str:
    """Describe when a configuration trains as estimated: unchanged, or after edits to a script."""
    match len(written.edits):
        case 0:
            return "As written"
        case 1:
            return "After this edit of the script"
        case several:
            return f"After these {several} edits of the script"


def figures(estimate: Estimate, written: ExportedPlan) -> str:
    """Describe the time and memory of the written configuration in a sentence."""
    has = "" if estimate.memory_bytes is None else f" of {show_bytes(estimate.memory_bytes)}"
    low, high = show_seconds(estimate.low_s), show_seconds(estimate.high_s)
    return (
        f"{_describe_condition(written)}: {show_seconds(estimate.step_time_s)} per step "
        f"({low} to {high} with {estimate.level * 100:.0f} % probability), "
        f"{estimate.tokens_per_s:,.0f} tokens/s, "
        f"{show_bytes(estimate.peak_memory_bytes)}{has} per device."
    )
