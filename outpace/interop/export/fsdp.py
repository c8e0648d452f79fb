"""transformers' Trainer: TrainingArguments as JSON, with FSDP2 if the plan shards."""

from dataclasses import dataclass
from typing import Any

from outpace.interop.export import unsupported
from outpace.interop.export.accelerate import axes
from outpace.interop.export.request import ExportedPlan, ExportRequest, fold_pipeline
from outpace.interop.export.texts import as_json, torchrun
from outpace.records.model import ModelSpec
from outpace.records.model_families import FAMILY_TRAITS
from outpace.records.optimizers import OptimizerName
from outpace.records.plan import Plan
from outpace.records.precisions import MASTERS, PURE, WIDE, Precision

_TOOL = "TrainingArguments"
_FILE = "training_arguments.json"
_OPTIMIZERS: dict[OptimizerName, str] = {
    "adamw-fused": "adamw_torch_fused",
    "adamw-foreach": "adamw_torch",
    "adamw-for-loop": "adamw_torch",
    "adamw-8bit": "adamw_torch_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}


@dataclass(frozen=True)
class _WrittenAxes:
    """Sizes of the axes to export and their batch, after ranks of the pipeline became shards."""

    sizes: dict[str, int]
    micro_batch: int
    accumulation: int

    @property
    def ranks(self) -> int:
        ranks = 1
        for size in self.sizes.values():
            ranks *= size
        return ranks

    @property
    def shards(self) -> bool:
        """Whether parameters are sharded, which needs FSDP."""
        return self.sizes["dp_shard_size"] * self.sizes["cp_size"] > 1


def write(request: ExportRequest) -> ExportedPlan:
    """Export a plan to transformers' Trainer, as the JSON of its TrainingArguments.

    Sizes of tp, cp and sharded replicas are environment variables in the command.
    """
    plan = request.plan
    notes = unsupported.replicas(request, _TOOL)
    written = _axes_without_pipeline(request, notes)
    values: dict[str, Any] = {
        "output_dir": "trainer_output",
        "per_device_train_batch_size": written.micro_batch,
        "gradient_accumulation_steps": written.accumulation,
        "max_grad_norm": unsupported.clip(plan),
        "optim": _optimizer_name(plan, notes),
        **_precision_arguments(plan, notes),
        **_checkpointing_arguments(request, written, notes),
    }
    if plan.compile:
        values["torch_compile"] = True
    if plan.empty_cache:
        values["torch_empty_cache_steps"] = 1
    if written.shards or plan.offload_parameters == "cpu":
        values["fsdp"] = True
        values["fsdp_config"] = _fsdp_config(request, written, notes)
    elif written.ranks > 1:
        values["ddp_bucket_cap_mb"] = plan.bucket_mib
    if plan.ep > 1:
        notes.append(
            f"ep {plan.ep} is not exported: Trainer has no expert parallelism, and shards experts "
            "like all other parameters."
        )
    notes += unsupported.remaining_options(plan, _TOOL, _expressed_fields(request, written))
    notes += unsupported.not_in_a_plan(
        request,
        "Add learning_rate, num_train_epochs or max_steps, and output_dir to this file; "
        "otherwise, TrainingArguments' defaults apply. train.py stands for your script, which "
        "reads it (HfArgumentParser).",
        written.ranks,
    )
    return ExportedPlan(
        compose=lambda: as_json(values),
        file_name=_FILE,
        command=_environment_prefix(written, request.stage)
        + torchrun(written.ranks, "train.py", _FILE),
        notes=tuple(notes),
    )


def _axes_without_pipeline(request: ExportRequest, notes: list[str]) -> _WrittenAxes:
    """Return the plan's axes for FSDP, in which the ranks of a pipeline become shards."""
    plan = request.plan
    sizes = axes(request, _TOOL, notes)
    if plan.pp == 1:
        return _WrittenAxes(sizes, plan.micro_batch, request.accumulation)
    ranks, micro, accumulation = fold_pipeline(request, plan.pp)
    sizes["dp_shard_size"] *= ranks
    which = f"strategy {plan.strategy}" if plan.strategy != "3d" else f"pp {plan.pp}"
    left = f"; {plan.pp - ranks} of each {plan.pp} ranks are left out" if ranks < plan.pp else ""
    notes.append(
        f"{which}: the Trainer has no pipeline. The export has FSDP over its ranks instead, with "
        f"micro-batch {micro} and accumulation {accumulation} for the same global batch{left}."
    )
    return _WrittenAxes(sizes, micro, accumulation)


def _environment_prefix(written: _WrittenAxes, stage: int) -> str:
    """Return the environment variables that set Accelerate's axes, to put before the command.

    Returns "" if plain FSDP or DDP is enough, as for plans without tp, cp and sharded replicas.
    """
    sizes = written.sizes
    groups = sizes["dp_replicate_size"] > 1 and written.shards
    if sizes["tp_size"] * sizes["cp_size"] == 1 and not groups:
        return ""
    words = ["ACCELERATE_USE_PARALLELISM_CONFIG=true"]
    words += [f"PARALLELISM_CONFIG_{name.upper()}={size}" for name, size in sizes.items()]
    return " ".join(words) + " "


def _optimizer_name(plan: Plan, notes: list[str]) -> str:
    name = _OPTIMIZERS.get(plan.optimizer)
    if plan.optimizer in ("adamw-foreach", "adamw-for-loop"):
        notes.append(f"optimizer {plan.optimizer}: torch chooses the implementation there.")
    if name is None:
        notes.append(unsupported.optimizer(plan, _TOOL, "adamw_torch_fused"))
    return name or "adamw_torch_fused"


def _precision_arguments(plan: Plan, notes: list[str]) -> dict[str, bool]:
    name = plan.precision
    if name in WIDE and name != "fp32":
        notes.append(unsupported.precision(plan, _TOOL, "fp32", "fp32"))
    elif name in PURE:
        notes += unsupported.weights_in_16_bits(plan)
    elif name == "fp8":
        notes.append(unsupported.precision(plan, _TOOL, "bf16", "bf16"))
    elif name in MASTERS:
        by_autocast: Precision = "bf16" if name == "bf16-master" else "fp16"
        notes.append(unsupported.precision(plan, _TOOL, f"{name[:4]} by autocast", by_autocast))
    return {"bf16": name in ("bf16", "bf16-master", "fp8"), "fp16": name in ("fp16", "fp16-master")}


def _checkpointing_arguments(
    request: ExportRequest, written: _WrittenAxes, notes: list[str]
) -> dict[str, Any]:
    """Return the Trainer's arguments for activation checkpointing.

    Returns {} if no block is recomputed. It also does so if FSDP's own setting, which recomputes
    all blocks, is used instead.
    """
    done = request.recomputed_blocks
    if done.count == 0:
        return {}
    every = done.every or max(1, round(request.layers / done.count))
    if done.mode != "full" or not done.alike or done.every is None:
        notes.append(unsupported.checkpointing(request, _TOOL, "full recomputation", "full", every))
    offloads = request.plan.offload_activations == "cpu"
    if written.shards and every == 1 and not offloads:
        return {}  # it is in fsdp_config
    kwargs: dict[str, Any] = {"every_n_layers": every} if every > 1 else {}
    if offloads:
        kwargs["offload"] = True
    return {
        "activation_checkpointing": True,
        **({"activation_checkpointing_kwargs": kwargs} if kwargs else {}),
    }


def _fsdp_config(request: ExportRequest, written: _WrittenAxes, notes: list[str]) -> dict[str, Any]:
    plan, done = request.plan, request.recomputed_blocks
    if request.stage == 1:
        notes.append(unsupported.sharding(request, _TOOL, "FSDP that keeps parameters (ZeRO-2)", 2))
    if plan.strategy == "cp":
        notes.append("strategy cp keeps whole parameters: FSDP shards them over cp's ranks.")
    notes += unsupported.reduced_in_16_bits(plan, _TOOL)
    keeps = request.stage in (1, 2) or plan.strategy == "cp"
    every = done.every or (max(1, round(request.layers / done.count)) if done.count else 1)
    own = done.count > 0 and every == 1 and plan.offload_activations != "cpu"
    # transformers knows the blocks of models that outpace does not build.
    model, wrapped = request.model, {}
    if isinstance(model, ModelSpec):
        wrapped["transformer_layer_cls_to_wrap"] = [FAMILY_TRAITS[model.family].block_class]
    return {
        "version": 2,
        "reshard_after_forward": not keeps,
        "cpu_offload": plan.offload_parameters == "cpu",
        "activation_checkpointing": own,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **wrapped,
        "state_dict_type": "SHARDED_STATE_DICT",
    }


def _expressed_fields(request: ExportRequest, written: _WrittenAxes) -> list[str]:
    plan = request.plan
    said = ["compile", "empty_cache"]
    if plan.offload_parameters == "cpu":
        said += ["offload_parameters", "offload_optimizer"]
    if plan.offload_activations == "cpu" and request.recomputed_blocks.count:
        said.append("offload_activations")
    if not written.shards:
        said.append("bucket_mib")
    return [*said, *(["sequence_parallel"] if not plan.sequence_parallel else [])]
