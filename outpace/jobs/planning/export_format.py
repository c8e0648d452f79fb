"""Choice of a plan to export to another trainer, and estimate of the written configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from outpace.catalog.models import preset
from outpace.catalog.stacks import STACKS
from outpace.interop.export import ExportedPlan, export_plan
from outpace.planner.memory.framework_traits import (
    MEGATRON_BF16,
    MEGATRON_FP16,
    OUTPACE,
    FrameworkTraits,
)
from outpace.planner.model.adapters import AdapterSettings
from outpace.planner.plan_estimate import estimate_plan
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.acceptance import Acceptance
from outpace.records.errors import BadInputError, join_and
from outpace.records.estimate import Estimate, Plans, RankedPlan
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline
from outpace.records.plan import Plan
from outpace.records.precisions import COMPUTES_IN_BF16, COMPUTES_IN_FP16
from outpace.records.units import show_bytes, show_seconds

# No other trainer chunks the loss of a large vocabulary by itself.
_OTHERS = replace(OUTPACE, chunks_loss=False)
_TRAITS: Mapping[str, FrameworkTraits] = MappingProxyType({"outpace": OUTPACE})
# Formats and trainers with the software stack of another one: `fsdp` shards transformers' modules
# as accelerate does, and TRL's SFTTrainer is a subclass of Trainer.
_STACKS: Mapping[str, str] = MappingProxyType({"fsdp": "accelerate", "trl": "trainer"})

# Export formats of trainers that are not named after their format.
FORMAT_OF: Mapping[str, str] = MappingProxyType({"trainer": "fsdp", "trl": "fsdp"})
_SHORT = 128  # tokens; any length shows whether a model can be written


@dataclass(frozen=True)
class NamedModel:
    """A model, or its outline if outpace cannot build it, with the reference that the user gave."""

    reference: str
    model: ModelSpec | Outline


@dataclass(frozen=True)
class ExportChoice:
    """The plan chosen for export, its configuration, and the reason for the choice.

    `number` is the plan's position in the planner's answer, counted from 1. `estimate` is that of
    the written configuration; None if it cannot be estimated. `warning` names features that the
    format cannot express, or says that the plan does not fit; None if neither applies.
    """

    planned: RankedPlan
    number: int
    emitted: ExportedPlan
    estimate: Estimate | None
    why: str
    warning: str | None


def check_exportable(name: str, model: NamedModel, adapters: AdapterSettings | None) -> None:
    """Raise BadInputError if the format `name` cannot express this model or its adapters."""
    if adapters is not None and name != "outpace":
        raise BadInputError(
            f"{adapters.title}: configurations for {name} do not support adapters, so they would "
            "train all weights. Write the plan with --out plan.json, and train with outpace train "
            "--plan plan.json."
        )
    _export(name, Plan(micro_batch=1), model, 1, _SHORT)


def pick_plan(
    name: str, job: PlanningProblem, answer: Plans, model: NamedModel, chosen: int | None
) -> ExportChoice:
    """Choose plan number `chosen`, or the first plan if that is None, and write it in a format.

    `name` is the format. Plans are ranked from the best, and `answer` may be for another trainer if
    `chosen` is given. Raises BadInputError if no configuration can be written for the plan.
    """
    there = job.with_nodes(answer.nodes - answer.idle_nodes)
    if chosen is not None or name == "outpace":
        there = assign_trainer(name, there)
    number = chosen or 1
    planned = answer.plans[number - 1]
    label = f"Plan {number}"
    if chosen is None:
        of = f" of the plans that {name} can express" if job.wanted.accepts is not None else ""
        label += f", the {join_and(planned.roles)}{of}"
    return _build_choice(name, there, planned, model, number, f"{label}: {planned.title}.")


def list_alternatives(answer: Plans) -> list[str]:
    """Describe each plan after the first on one line."""
    return [
        f"Plan {number}{f', {join_and(one.roles)}' if one.roles else ''}: {one.title}: "
        f"{_format_figures(one.estimate)}."
        for number, one in enumerate(answer.plans[1:], 2)
    ]


@dataclass(frozen=True)
class _MissingFeatures:
    """Function that describes what a trainer's format cannot express of a plan, or returns "".

    Limits that come from the model itself are left out.
    """

    name: str
    model: NamedModel
    seq_len: int

    def __call__(self, plan: Plan, global_batch: int) -> str:
        try:
            written = _export(self.name, plan, self.model, global_batch, self.seq_len)
        except BadInputError as error:
            return str(error)
        missing = (one for one in written.differences if one not in self._model_differences)
        return " ".join(one.partition(" The export has ")[0] for one in missing)

    @cached_property
    def _model_differences(self) -> tuple[str, ...]:
        return _export(self.name, Plan(micro_batch=1), self.model, 1, self.seq_len).differences


def restrict_search(
    trainer: str, job: PlanningProblem, reference: str, spec: ModelSpec | None
) -> PlanningProblem:
    """Restrict the planning problem to plans that a trainer's configuration can express."""
    name = FORMAT_OF.get(trainer, trainer)
    if name == "outpace":
        return job
    model = NamedModel(reference, spec or _stand_in_model(job.outline))
    missing = _MissingFeatures(name, model, job.wanted.seq_len)
    return replace(job, wanted=replace(job.wanted, accepts=Acceptance(trainer, missing)))


def _stand_in_model(outline: Outline) -> ModelSpec:
    """Return a model with as many layers as the outline, to find out what a format can express."""
    return preset("llama-3-8b").model_copy(update={"layers": outline.layers})


def assign_trainer(name: str, job: PlanningProblem) -> PlanningProblem:
    """Return the planning problem with `name` as the trainer."""
    return replace(job, traits=_framework_traits(name, job), stack=STACKS[_STACKS.get(name, name)])


def _framework_traits(name: str, job: PlanningProblem) -> FrameworkTraits:
    if name == "megatron":
        precision = job.wanted.keep.get("precision", job.wanted.precision)
        if precision in COMPUTES_IN_BF16:
            return MEGATRON_BF16
        return MEGATRON_FP16 if precision in COMPUTES_IN_FP16 else _OTHERS
    repeats = STACKS[_STACKS.get(name, name)].repeats_matmuls
    return replace(_TRAITS.get(name, _OTHERS), repeats_matmuls=repeats)


def _export(
    name: str, plan: Plan, model: NamedModel, global_batch: int, seq_len: int
) -> ExportedPlan:
    return export_plan(
        name, plan, model.model, global_batch=global_batch, seq_len=seq_len,
        reference=model.reference,
    )  # fmt: skip


def _build_choice(
    name: str,
    job: PlanningProblem,
    planned: RankedPlan,
    model: NamedModel,
    number: int,
    why: str,
) -> ExportChoice:
    wanted = job.wanted
    written = _export(name, planned.plan, model, wanted.global_batch, wanted.seq_len)
    estimate, known = _estimate_written(job, planned.plan, written)
    warning = _format_warning(name, planned, written, estimate, known)
    return ExportChoice(planned, number, written, estimate, why, warning)


def _estimate_written(
    job: PlanningProblem, plan: Plan, written: ExportedPlan
) -> tuple[Estimate | None, bool]:
    """Estimate the written configuration; also return whether the estimate covers all of it.

    The estimate is None if the configuration is not a plan that can be estimated.
    """
    described, known = written.written_plan(plan)
    if described is None:
        return None, False
    try:
        return estimate_plan(job, described).estimate, known
    except BadInputError:
        return None, False


def _format_warning(
    name: str, planned: RankedPlan, written: ExportedPlan, estimate: Estimate | None, known: bool
) -> str | None:
    if not written.differences:
        if estimate is None or estimate.fits:
            return None
        return (
            f"the plan does NOT fit when {name} runs it: a device needs {_format_memory(estimate)}."
        )
    rests = f"the plan uses features that {name} cannot express. {' '.join(written.differences)}"
    more = "" if known else " What is written instead may change time and memory, too."
    if estimate is None:
        return f"{rests}{more}"
    return (
        f"{rests} {_describe_condition(written)}, a device needs {_format_memory(estimate)}, "
        "compared with "
        f"{show_bytes(planned.estimate.peak_memory_bytes)} as planned: it "
        f"{'fits' if estimate.fits else 'does NOT fit'}.{more}"
    )


def _describe_condition(written: ExportedPlan) -> str:
    match len(written.edits):
        case 0:
            return "As written"
        case 1:
            return "After this edit to the script"
        case several:
            return f"After these {several} edits to the script"


def figures(estimate: Estimate, written: ExportedPlan) -> str:
    """Describe the predicted time and memory of the written configuration in a sentence."""
    low, high = show_seconds(estimate.low_s), show_seconds(estimate.high_s)
    interval = f" ({low} to {high} with {estimate.level * 100:.0f} % probability)"
    return f"{_describe_condition(written)}: {_format_figures(estimate, interval)}."


def _format_figures(estimate: Estimate, interval: str = "") -> str:
    return (
        f"{show_seconds(estimate.step_time_s)} per step{interval}, "
        f"{estimate.tokens_per_s:,.0f} tokens/s, {_format_memory(estimate)} per device"
    )


def _format_memory(estimate: Estimate) -> str:
    has = "" if estimate.memory_bytes is None else f" of {show_bytes(estimate.memory_bytes)}"
    return f"{show_bytes(estimate.peak_memory_bytes)}{has}"
