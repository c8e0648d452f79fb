"""Hugging Face Accelerate: the YAML of `accelerate launch --config_file`."""

from typing import Any, Literal

from outpace.interop.export import deepspeed, unsupported
from outpace.interop.export.request import ExportedPlan, ExportRequest, Note, ScriptEdit, hosts
from outpace.interop.export.texts import HEAD, as_yaml, heading
from outpace.records.plan import Checkpointing, Plan
from outpace.records.precisions import PURE, WIDE

_TOOL = "Accelerate"
_FILE = "accelerate.yaml"
Kind = Literal["NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM"]


def write(request: ExportRequest) -> ExportedPlan:
    """Export a plan to Accelerate, as the YAML of `accelerate launch`.

    The YAML selects FSDP2 or DDP, Megatron-LM for a plan with a pipeline, or DeepSpeed for a plan
    that offloads.
    """
    plan = request.plan
    notes = unsupported.replicas(request, _TOOL)
    kind = _choose_distributed_type(request)
    nodes, _ = hosts(request.workers)
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": nodes,
        "num_processes": request.workers,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": _mixed_precision(plan, kind, notes),
        "use_cpu": False,
    }
    if plan.precision == "fp8":
        values["fp8_config"] = {"backend": "AO"}
    if kind == "FSDP":
        values["fsdp_config"] = _fsdp_config(request, notes)
    elif kind == "DEEPSPEED":
        values["deepspeed_config"] = _deepspeed_config(request, notes)
    elif kind == "MEGATRON_LM":
        values["megatron_lm_config"] = _megatron_config(request, notes)
    if kind in ("FSDP", "MULTI_GPU"):
        values |= _parallelism_config(request, kind, notes)
    if plan.compile:
        values["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_use_regional_compilation": True,
        }
    notes += _script_edits(request, kind)
    notes += unsupported.closing_notes(
        request, _TOOL, _expressed_fields(plan, kind), "train.py stands for your script."
    )
    return ExportedPlan(
        compose=lambda: heading(_TOOL, request.title, notes) + as_yaml(values),
        file_name=_FILE,
        command=_launch_command(request, kind),
        notes=tuple(notes),
    )


def _choose_distributed_type(request: ExportRequest) -> Kind:
    plan = request.plan
    if plan.pp > 1:
        return "MEGATRON_LM"
    alone = plan.tp == plan.cp == 1
    offloads = plan.offload_optimizer != "none" or plan.offload_parameters != "none"
    only_there = (
        request.stage == 1
        or plan.offload_parameters == "disk"
        or (plan.offload_optimizer != "none" and plan.offload_parameters != "cpu")
        or (offloads and request.stage == 0)
        or plan.precision == "fp16-master"
    )
    if alone and only_there:
        return "DEEPSPEED"
    if request.stage or plan.cp > 1 or (plan.tp > 1 and plan.dp_replicate > 1):
        return "FSDP"
    return "MULTI_GPU" if request.workers > 1 else "NO"


def _launch_command(request: ExportRequest, kind: Kind) -> str:
    words = ["accelerate", "launch", "--config_file", _FILE]
    if hosts(request.workers)[0] > 1:
        rank = '"${MACHINE_RANK:?set it to the number of this host, from 0}"'
        words += ["--machine_rank", rank, "--main_process_ip", f'"{HEAD}"']
        words += ["--main_process_port", "29500"]
    steps = ""
    if kind in ("FSDP", "MULTI_GPU", "NO"):
        steps = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={request.passes} "
    return steps + " ".join([*words, "train.py"])


def _mixed_precision(plan: Plan, kind: Kind, notes: list[str]) -> str:
    name = plan.precision
    if name in WIDE:
        if name != "fp32":
            notes.append(unsupported.precision(plan, _TOOL, "fp32", "fp32"))
        return "no"
    if name in PURE:
        notes += unsupported.weights_in_16_bits(plan)
        return "no"
    if name == "fp16-master" and kind != "DEEPSPEED":
        notes.append(unsupported.precision(plan, _TOOL, "fp16 by autocast", "fp16"))
    if kind in ("DEEPSPEED", "MEGATRON_LM") and name in ("bf16", "fp16"):
        notes.append(
            Note(
                f"precision {name}: {'DeepSpeed' if kind == 'DEEPSPEED' else 'Megatron-LM'} keeps "
                f"weights in {name} and fp32 copies in the optimizer, whereas outpace's weights "
                "are in fp32."
            )
        )
    if name == "bf16-master" and kind in ("MULTI_GPU", "NO"):
        notes.append(unsupported.precision(plan, _TOOL, "bf16 by autocast", "bf16"))
    return name[:4] if name.startswith(("fp16", "bf16")) else name


def _fsdp_config(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    plan, done = request.plan, request.recomputed_blocks
    again = request.stage == 3 or (request.stage == 0 and plan.cp == 1)
    if request.stage == 1:
        notes.append(unsupported.sharding(request, _TOOL, "FSDP that keeps parameters (ZeRO-2)", 2))
    if plan.strategy == "cp":
        notes.append("strategy cp keeps whole parameters: FSDP shards them over cp's ranks.")
    notes += unsupported.reduced_in_16_bits(plan, _TOOL)
    offloads = plan.offload_activations == "cpu"
    if offloads and done.mode == "none":
        notes.append("offload_activations cpu: FSDP offloads only the inputs of recomputed blocks.")
    if done.count and not request.recomputes_all:
        notes.append(unsupported.checkpointing(request, _TOOL, "all blocks in full", "full"))
    if plan.offload_parameters == "disk":
        notes.append(
            "offload_parameters disk: Accelerate does not support it together with tp or cp."
        )
    if plan.offload_optimizer != "none" and plan.offload_parameters != "cpu":
        notes.append("offload_optimizer: FSDP offloads state only together with parameters.")
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": again,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": plan.offload_parameters == "cpu",
        "fsdp_activation_checkpointing": done.count > 0,
        "fsdp_activation_checkpointing_offload": offloads and done.count > 0,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def axes(request: ExportRequest, tool: str, notes: list[str]) -> dict[str, int]:
    """Return the sizes of Accelerate's ParallelismConfig, by name.

    Accelerate does not combine whole replicas with tp or cp: their ranks become shards, which a
    note explains.
    """
    plan = request.plan
    replicate, shard = plan.dp_replicate, plan.dp_shard
    if replicate > 1 and shard == 1 and plan.tp * plan.cp > 1:
        notes.append(
            f"dp_replicate {replicate} with tp or cp: {tool} supports whole replicas only without "
            "other axes. The export has shards over these ranks instead."
        )
        replicate, shard = 1, replicate
    notes += unsupported.no_sequence_parallel(plan, tool)
    return {
        "dp_replicate_size": replicate,
        "dp_shard_size": shard,
        "tp_size": plan.tp,
        "cp_size": plan.cp,
    }


def _parallelism_config(request: ExportRequest, kind: Kind, notes: list[str]) -> dict[str, Any]:
    plan = request.plan
    if kind == "MULTI_GPU" and plan.tp == 1:
        return {}
    sizes = axes(request, _TOOL, notes)
    values: dict[str, Any] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    if plan.cp > 1:
        values["parallelism_config_cp_comm_strategy"] = "alltoall"
    return {"parallelism_config": values}


def _deepspeed_config(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    plan = request.plan
    zero = deepspeed.zero_optimization(request, notes)
    values: dict[str, Any] = {
        "gradient_accumulation_steps": request.passes,
        "gradient_clipping": unsupported.clip(plan),
        "zero_stage": zero["stage"],
        "zero3_init_flag": zero["stage"] == 3,
        "zero3_save_16bit_model": zero["stage"] == 3,
    }
    for name in ("offload_optimizer", "offload_param"):
        place = zero.get(name, {"device": "none"})
        values[f"{name}_device"] = place["device"]
        if "nvme_path" in place:
            values[f"{name}_nvme_path"] = place["nvme_path"]
    return values


def _megatron_config(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    plan, done = request.plan, request.recomputed_blocks
    tool = f"{_TOOL} with Megatron-LM"
    if request.stage > 1:
        notes.append(unsupported.sharding(request, tool, "the distributed optimizer (ZeRO-1)", 1))
    if request.stage and plan.dp_replicate > 1:
        notes.append(f"dp_shard {plan.dp_shard}: {tool} shards over all data-parallel ranks.")
    if plan.schedule != "1f1b" or plan.stages_per_rank > 1:
        notes.append(unsupported.schedule(request, tool, "1F1B with one stage per rank"))
    # Megatron requires all stages except the last to be equal.
    each = -(-request.layers // plan.pp)
    last = request.layers - each * (plan.pp - 1)
    values: dict[str, Any] = {
        "megatron_lm_tp_degree": plan.tp,
        "megatron_lm_pp_degree": plan.pp,
        "megatron_lm_context_parallel_size": plan.cp,
        "megatron_lm_expert_model_parallel_size": plan.ep,
        "megatron_lm_num_micro_batches": request.passes,
        "megatron_lm_sequence_parallelism": plan.sequence_parallel and plan.tp > 1,
        "megatron_lm_use_distributed_optimizer": request.stage > 0,
        "megatron_lm_gradient_clipping": unsupported.clip(plan),
        "megatron_lm_recompute_activations": done.mode == "selective",
    }
    if 0 < last < each:
        values["megatron_lm_decoder_last_pipeline_num_layers"] = last
    if done.mode in ("full", "attention"):
        values |= {
            "megatron_lm_recompute_granularity": "full",
            "megatron_lm_recompute_method": "uniform",
            "megatron_lm_recompute_num_layers": 1,
        }
    if done.count and not request.recomputes_all:
        selective = done.mode == "selective"
        written = "its selective one" if selective else "all blocks in full"
        kind: Checkpointing | None = None if selective else "full"
        notes.append(unsupported.checkpointing(request, tool, written, kind))
    if plan.offload_optimizer != "none" or plan.offload_parameters != "none":
        values["megatron_lm_optimizer_cpu_offload"] = True
        values["megatron_lm_use_precision_aware_optimizer"] = True
        notes.append(
            "offloading: Megatron-LM can offload only optimizer state, and only to host memory."
        )
    notes += unsupported.pipelined_accumulation(request, tool)
    return values


def _script_edits(request: ExportRequest, kind: Kind) -> list[str]:
    plan = request.plan
    samples = f"{plan.micro_batch} sample{'s' if plan.micro_batch > 1 else ''}"
    batch = f"The script's data loader yields {samples} at once"
    makes = f"{batch}; it creates AdamW and clips gradients at {unsupported.clip(plan):g}."
    if plan.optimizer != "adamw-fused":
        makes = f"{batch}, and it creates the optimizer: the plan's is {plan.optimizer}."
    sentences: list[str] = [ScriptEdit(makes)]
    done = request.recomputed_blocks
    if kind in ("NO", "MULTI_GPU", "DEEPSPEED") and done.count:
        if not request.recomputes_all:
            sentences.append(
                unsupported.checkpointing(request, _TOOL, "full recomputation", "full")
            )
        sentences.append(
            ScriptEdit(
                "checkpointing: call the model's gradient_checkpointing_enable() in the script; "
                "the configuration has no setting for it."
            )
        )
    if plan.compress_gradients != "none" and kind == "MULTI_GPU":
        sentences.append(
            ScriptEdit(
                "compress_gradients: use DistributedDataParallelKwargs(comm_hook=…) in the script."
            )
        )
    return sentences


def _expressed_fields(plan: Plan, kind: Kind) -> list[str]:
    said = ["compile"]
    if kind == "MEGATRON_LM":
        said += ["sequence_parallel", "offload_optimizer", "offload_parameters"]
    if kind in ("DEEPSPEED", "FSDP"):
        said += ["offload_optimizer", "offload_parameters"]
    if kind == "FSDP" and plan.offload_activations == "cpu":
        said.append("offload_activations")
    if kind in ("FSDP", "MULTI_GPU") and not plan.sequence_parallel:
        said.append("sequence_parallel")
    return said
