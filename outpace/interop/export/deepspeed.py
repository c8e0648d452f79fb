"""DeepSpeed: its JSON configuration and the command that launches it."""

from typing import Any

from outpace.interop.export import unsupported
from outpace.interop.export.request import ExportedPlan, ExportRequest, Note, ScriptEdit, hosts
from outpace.interop.export.texts import as_json
from outpace.records.optimizers import OptimizerName
from outpace.records.plan import Plan
from outpace.records.precisions import COMPUTES_IN_BF16, COMPUTES_IN_FP16, PURE, SHARD_DTYPES, WIDE

_TOOL = "DeepSpeed"
_FILE = "ds_config.json"
NVME = "/local_nvme"
_AUTO = "auto"  # the Trainer fills in the number
_OPTIMIZERS: dict[OptimizerName, str] = {"sgd": "SGD", "adafactor": "Adafactor", "muon": "Muon"}


def write(request: ExportRequest) -> ExportedPlan:
    """Export a plan to DeepSpeed, as its JSON configuration.

    DeepSpeed's pipelines are built in the user's script, so the export only has notes on them.
    """
    plan = request.plan
    notes = unsupported.replicas(request, _TOOL)
    config: dict[str, Any] = {
        "train_batch_size": request.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": request.passes,
        "gradient_clipping": unsupported.clip(plan),
        "zero_optimization": zero_optimization(request, notes),
        **_precision_config(plan, notes),
        "optimizer": _optimizer_config(plan, notes),
        **_activation_config(request, notes),
        **_parallelism_config(request, notes),
    }
    if config["optimizer"]["type"] not in ("AdamW", "Muon"):
        config["zero_allow_untested_optimizer"] = True
    if plan.compress_gradients == "bf16":
        config["communication_data_type"] = "bf16"
    elif plan.precision in SHARD_DTYPES and request.stage >= 2:
        config["communication_data_type"] = "fp32"
    notes += _pipeline_notes(request)
    notes += unsupported.no_sequence_parallel(plan, _TOOL)
    if plan.compile:
        notes.append(
            Note(
                "compile: the JSON has no setting for it. --torch_compile True enables it in the "
                "Trainer."
            )
        )
    notes += unsupported.closing_notes(
        request,
        _TOOL,
        _expressed_fields(plan),
        'transformers\' Trainer replaces each "auto" with its own arguments; a script that calls '
        "deepspeed.initialize() itself must do so. train.py stands for your script.",
    )
    return ExportedPlan(
        compose=lambda: as_json(config),
        file_name=_FILE,
        command=_launch_command(request),
        notes=tuple(notes),
    )


def _launch_command(request: ExportRequest) -> str:
    nodes, each = hosts(request.workers)
    where = f"--num_gpus {each}"
    if nodes > 1:
        where = f"--hostfile hostfile --num_nodes {nodes} --num_gpus {each}"
    plan = request.plan
    words = [
        f"--deepspeed {_FILE}",
        f"--per_device_train_batch_size {plan.micro_batch}",
        f"--gradient_accumulation_steps {request.passes}",
        f"--max_grad_norm {unsupported.clip(plan):g}",
    ]
    if plan.precision in COMPUTES_IN_BF16:
        words.append("--bf16 True")
    elif plan.precision in COMPUTES_IN_FP16:
        words.append("--fp16 True")
    if request.recomputed_blocks.count:
        words.append("--gradient_checkpointing True")
    if plan.compile:
        words.append("--torch_compile True")
    return " ".join([f"deepspeed {where} train.py", *words])


def _expressed_fields(plan: Plan) -> list[str]:
    said = ["compile", "offload_optimizer", "offload_parameters"]
    if plan.offload_activations == "cpu":
        said.append("offload_activations")
    if plan.compress_gradients == "bf16":
        said.append("compress_gradients")
    if plan.strategy == "zero1":
        said.append("bucket_mib")
    return [*said, *(["sequence_parallel"] if not plan.sequence_parallel else [])]


def stage_for(request: ExportRequest, notes: list[str]) -> int:
    """Return the ZeRO stage to export, which may differ from the plan's.

    Offloading and 16-bit weights may need a higher stage, and pipelines a lower one, which `notes`
    explain.
    """
    plan = request.plan
    stage: int = request.stage
    least = 0
    if plan.offload_optimizer != "none" or plan.precision in PURE:
        least = 1
    if plan.offload_parameters != "none" or plan.offload_optimizer == "disk":
        least = 3
    if plan.pp > 1 and max(stage, least) > 1:
        notes.append(
            f"ZeRO-{max(stage, least)} with a pipeline: DeepSpeed refuses it. The export has "
            "stage 1 instead."
        )
        return 1
    if least > stage:
        why = "offloading" if least == 3 or plan.offload_optimizer != "none" else plan.precision
        notes.append(f"DeepSpeed supports {why} only with ZeRO-{least}; the plan shards less.")
    return max(stage, least)


def zero_optimization(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    """Return the zero_optimization section of DeepSpeed's JSON.

    It has the ZeRO stage and offloading. With ZeRO-3 and replicas of sharded groups, it also has
    hpZ, by which ranks gather parameters only within their group.
    """
    plan = request.plan
    stage = stage_for(request, notes)
    values: dict[str, Any] = {"stage": stage, **_default_zero_options(stage)}
    if stage and plan.dp_replicate > 1 and plan.dp_shard > 1:
        if stage == 3:
            values["zero_hpz_partition_size"] = plan.dp_shard
        instead = f"parameters are gathered within {plan.dp_shard} ranks (hpZ)"
        notes.append(
            f"dp_replicate {plan.dp_replicate}: DeepSpeed shards the rest of the state over all "
            f"{plan.data_parallel} data-parallel ranks{'; ' + instead if stage == 3 else ''}."
        )
    if plan.strategy == "zero1":
        values["reduce_bucket_size"] = plan.bucket_mib * 2**20 // 4
    if stage == 0:
        return values
    state = plan.offload_optimizer if plan.offload_optimizer != "none" else plan.offload_parameters
    if plan.pp > 1 and "disk" in (state, plan.offload_parameters):
        notes.append("offloading to disk with a pipeline: DeepSpeed refuses it.")
    elif state != "none":
        values["offload_optimizer"] = _offload_device(state)
    if plan.offload_parameters != "none":
        if stage == 3:
            values["offload_param"] = _offload_device(plan.offload_parameters)
        else:
            notes.append("offload_parameters: DeepSpeed offloads parameters only with ZeRO-3.")
    if "disk" in (state, plan.offload_parameters):
        notes.append(Note(f"offloading to disk: replace {NVME} with your own directory."))
    return values


def _default_zero_options(stage: int) -> dict[str, bool]:
    overlaps = {"overlap_comm": True} if stage else {}
    saves = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return overlaps | saves


def _offload_device(where: str) -> dict[str, Any]:
    if where == "disk":
        return {"device": "nvme", "nvme_path": NVME}
    return {"device": "cpu", "pin_memory": True}


def _precision_config(plan: Plan, notes: list[str]) -> dict[str, Any]:
    name = plan.precision
    if name in WIDE:
        if name != "fp32":
            notes.append(unsupported.precision(plan, _TOOL, "fp32", "fp32"))
        return {}
    if name in ("bf16", "fp16"):
        notes.append(
            Note(
                f"precision {name}: DeepSpeed keeps weights in {name} and fp32 copies in the "
                "optimizer, whereas outpace's weights are in fp32 (DeepSpeed's are, too, with "
                '"torch_autocast").'
            )
        )
    if name == "fp8":
        notes.append(unsupported.precision(plan, _TOOL, "bf16", "bf16"))
    if name == "bf16-pure":
        notes.append("precision bf16-pure: DeepSpeed rounds to nearest, outpace stochastically.")
        pure = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        return {"bf16": {"enabled": True, **pure}}
    if name == "fp16-pure":
        notes.append(
            "precision fp16-pure: unlike outpace, DeepSpeed scales the loss, and stores the "
            "optimizer's moments in a different dtype."
        )
        return {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
    if name in COMPUTES_IN_FP16:
        return {"fp16": {"enabled": True, "loss_scale": 0}}
    return {"bf16": {"enabled": True}}


def _optimizer_config(plan: Plan, notes: list[str]) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": _AUTO, "weight_decay": _AUTO}
    kind = _OPTIMIZERS.get(plan.optimizer, "AdamW")
    if plan.optimizer == "sgd":
        params["momentum"] = unsupported.BETA1
    if kind == "AdamW":
        params |= {"betas": _AUTO, "eps": _AUTO}
        if plan.optimizer != "adamw-fused":
            params["torch_adam"] = True
        if plan.optimizer not in ("adamw-fused", "adamw-for-loop"):
            notes.append(unsupported.optimizer(plan, _TOOL, "torch's AdamW"))
    return {"type": kind, "params": params}


def _activation_config(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    done, plan = request.recomputed_blocks, request.plan
    if done.mode == "none" and plan.offload_activations != "cpu":
        return {}
    if done.mode == "none":
        notes.append("offload_activations cpu: DeepSpeed offloads only the inputs of checkpoints.")
    elif not request.recomputes_all:
        notes.append(
            unsupported.checkpointing(request, _TOOL, "its checkpointing of whole blocks", "full")
        )
    notes.append(
        Note(
            "activation_checkpointing configures deepspeed.checkpointing, which transformers does "
            "not use: there, --gradient_checkpointing True recomputes all blocks."
        )
    )
    count = done.count or request.layers
    return {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": plan.offload_activations == "cpu",
            "number_checkpoints": count,
        }
    }


def _parallelism_config(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    plan = request.plan
    values: dict[str, Any] = {}
    if plan.tp > 1:
        values["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.cp > 1:
        values |= {"data_parallel_size": plan.data_parallel, "sequence_parallel_size": plan.cp}
        notes.append(
            f"cp {plan.cp}: DeepSpeed splits attention by heads, with an all-to-all (Ulysses) "
            "instead of a ring."
        )
        notes.append(ScriptEdit(f"cp {plan.cp}: the script has to split sequences."))
    if plan.ep > 1:
        values["expert_parallel"] = {"enabled": True, "autoep_size": plan.ep}
    return values


def _pipeline_notes(request: ExportRequest) -> list[str]:
    plan = request.plan
    if plan.pp == 1:
        return []
    sentences: list[str] = [
        ScriptEdit(
            f"pp {plan.pp}: the script has to split the model with "
            f"deepspeed.pipe.PipelineModule(layers, num_stages={plan.pp}); the JSON has no "
            "setting for it."
        )
    ]
    if plan.schedule != "1f1b" or plan.stages_per_rank > 1:
        sentences.append(unsupported.schedule(request, _TOOL, "1F1B with one stage per rank"))
    return sentences + unsupported.pipelined_accumulation(request, _TOOL)
