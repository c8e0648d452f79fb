"""outpace's own format: a plan file for PlanFile.load, and the command that trains with it."""

from typing import Any

from outpace.catalog.models import PRESETS
from outpace.interop.export.request import HOST, ExportedPlan, ExportRequest, Note
from outpace.interop.export.texts import quote, torchrun
from outpace.records.axes import SPLITS
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline
from outpace.records.plan import AXES, Plan, PlanFile
from outpace.records.settings import TrainSettings

_FILE = "plan.json"
_SPEC = "model.json"
_FOLDER = "path/to/hf-model"


def write(request: ExportRequest) -> ExportedPlan:
    """Export a plan as outpace's own JSON, with the `outpace train` command that applies it."""
    plan = request.plan
    notes: list[str] = []
    model = request.reference or _find_preset(request.model)
    if model is None:
        model = _SPEC
        notes.append(Note(f"The model is not a preset: save its ModelSpec as {_SPEC}."))
    if plan.lora_rank is not None and model in (_SPEC, *PRESETS):
        model = _FOLDER
        notes.append(
            Note(f"Adapters need trained weights: replace {_FOLDER} with your model's folder.")
        )
    untrained = isinstance(request.model, Outline) and request.model.untrained
    if untrained:
        notes.append(Note(f"{untrained}: it plans this model but does not train it."))
    why_not = plan.training_obstacle
    if why_not is not None:
        notes.append(f"{why_not}. The command leaves it out.")
    if plan.precision == "fp64":
        notes.append("precision fp64 is for proofs: `outpace verify` supports it, train does not.")
    notes.append(
        Note(
            "Data, learning rate and length of the run are not part of a plan: give --data, --lr "
            "and --steps; otherwise, outpace's defaults apply."
        )
    )
    file = PlanFile.from_plan(plan, request.seq_len, request.global_batch)
    return ExportedPlan(
        compose=lambda: file.model_dump_json(indent=2) + "\n",
        file_name=_FILE,
        command=_estimate_command(model) if untrained else _train_command(request, model),
        notes=tuple(notes),
    )


def _estimate_command(model: str) -> str:
    words = ["--model", model, "--machine", "$MACHINE", "--plan", _FILE]
    return " ".join(["outpace", "estimate", *map(quote, words)])


def _find_preset(spec: ModelSpec | Outline) -> str | None:
    return next((name for name, preset in PRESETS.items() if preset.spec == spec), None)


def _train_command(request: ExportRequest, model: str) -> str:
    plan = request.plan
    words = ["--model", model]
    words += ["--seq-len", str(request.seq_len), "--global-batch", str(request.global_batch)]
    words += _plan_flags(plan)
    ranks = plan.world_size
    if ranks <= HOST:
        many = ["--nproc", str(ranks)] if ranks > 1 else []
        return " ".join(["outpace", "train", *map(quote, [*many, *words])])
    return torchrun(ranks, "outpace", "train", *words, module=True)


def _plan_flags(plan: Plan) -> list[str]:
    """Return the flags of `outpace train` for a plan.

    Strategy, micro-batch, optimizer, precision and the strategy's axes are always given; other
    fields only if they differ from their default.
    """
    words = ["--strategy", plan.strategy, "--micro-batch", str(plan.micro_batch)]
    words += ["--optimizer", plan.optimizer]
    if plan.precision != "fp64":
        words += ["--precision", plan.precision]
    for axis in AXES:
        if axis in SPLITS[plan.strategy]:
            words += [f"--{_to_kebab_case(axis)}", str(getattr(plan, axis))]
    if plan.pp > 1 or plan.pp_microbatches > 1:
        words += ["--pp-microbatches", str(plan.pp_microbatches)]
    if plan.strategy == "3d" and plan.pp > 1:
        words += ["--pp-schedule", plan.pp_schedule]
    written = {"strategy", "micro_batch", "optimizer", "precision", "pp_microbatches"}
    written |= {"pp_schedule", *AXES}
    for name, field in Plan.model_fields.items():
        value = getattr(plan, name)
        if name in written or name not in TrainSettings.model_fields or value == field.default:
            continue
        words += _format_flag(name, value)
    if plan.optimizer_in_backward:
        words += ["--clip", "0"]
    return words


def _format_flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{_to_kebab_case(name)}" if value else f"--no-{_to_kebab_case(name)}"]
    if isinstance(value, tuple):
        return [f"--{_to_kebab_case(name)}", ",".join(map(str, value))]
    return [f"--{_to_kebab_case(name)}", f"{value:g}" if isinstance(value, float) else str(value)]


def _to_kebab_case(name: str) -> str:
    return name.replace("_", "-")
