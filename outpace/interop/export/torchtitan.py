"""torchtitan: a TOML file for releases up to 0.2, and a command line for 0.3.

From 0.3 on, torchtitan reads no TOML: a function selected by --module and --config creates the
configuration, and flags override it. The end of the TOML file lists these flags.
"""

import math
from typing import Any

from outpace.interop.export import unsupported
from outpace.interop.export.request import ExportedPlan, ExportRequest, ScriptEdit
from outpace.interop.export.texts import Placeholder, as_toml, comments, heading, torchrun
from outpace.records.model import ModelSpec, RopeScaling
from outpace.records.optimizers import OptimizerName
from outpace.records.plan import Plan
from outpace.records.precisions import COMPUTES_IN_FP16, PURE, WIDE

_TOOL = "torchtitan"
_FILE = "torchtitan.toml"
_SCHEDULES = {
    "mp": "GPipe",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_IMPLEMENTATIONS: dict[OptimizerName, str] = {
    "adamw-fused": "fused",
    "adamw-foreach": "foreach",
    "adamw-for-loop": "for-loop",
}
# (layers, hidden, heads, kv_heads, ffn, vocab) of the flavors in torchtitan 0.2.2.
_LLAMA3 = {
    (32, 4096, 32, 8, 14336, 128256): "8B",
    (80, 8192, 64, 8, 28672, 128256): "70B",
    (126, 16384, 128, 8, 53248, 128256): "405B",
}
_QWEN3 = {
    (28, 1024, 16, 8, 3072, 151936): "0.6B",
    (28, 2048, 16, 8, 6144, 151936): "1.7B",
    (36, 2560, 32, 8, 9728, 151936): "4B",
    (36, 4096, 32, 8, 12288, 151936): "8B",
    (40, 5120, 40, 8, 17408, 151936): "14B",
    (64, 5120, 64, 8, 25600, 151936): "32B",
}
# Functions in torchtitan 0.3 for the same models.
_CONFIGS = {
    ("llama3", "8B"): "llama3_8b",
    ("llama3", "70B"): "llama3_70b",
    ("llama3", "405B"): "llama3_405b",
    ("qwen3", "0.6B"): "qwen3_0_6b",
    ("qwen3", "1.7B"): "qwen3_1_7b",
    ("qwen3", "14B"): "qwen3_14b",
    ("qwen3", "32B"): "qwen3_32b",
}
_OWN_FLAVOR = "outpace"
_TIED_QWEN3 = ("0.6B", "1.7B", "4B")
# torchtitan's defaults for Llama models.
_LLAMA31_SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)
_SET_ME = Placeholder(unsupported.SET_ME)


def write(request: ExportRequest) -> ExportedPlan:
    """Export a plan to torchtitan, as its TOML, which supports all axes and pipeline schedules."""
    plan = request.plan
    notes = unsupported.replicas(request, _TOOL)
    if plan.strategy == "mp":
        notes += unsupported.sequential_stages(request, _TOOL, "GPipe with one micro-batch")
    model, missing = _model_table(request.spec)
    expressed = ["compile", "optimizer_in_backward"]
    if plan.offload_parameters == "cpu":
        expressed += ["offload_parameters", "offload_optimizer"]
    tables: dict[str, dict[str, Any]] = {
        "model": model,
        "training": _training_table(request, notes),
        "parallelism": _parallelism_table(request, notes),
        "activation_checkpoint": _checkpointing_table(request, notes),
        "compile": {"enable": plan.compile, "components": ["model"]},
        "optimizer": _optimizer_table(plan, notes),
        "lr_scheduler": {"warmup_steps": _SET_ME},
        "checkpoint": {"enable": True},
    }
    model["hf_assets_path"] = _SET_ME
    if plan.precision == "fp8":
        model["converters"] = ["float8"]
        tables["quantize.linear.float8"] = {"recipe_name": "tensorwise"}
    notes += missing
    if plan.pp > 1 and model["name"] == "qwen3":
        notes.append("pp: torchtitan 0.2 does not support pipelines for Qwen3; 0.3 does.")
    notes += unsupported.closing_notes(
        request,
        _TOOL,
        expressed,
        f"Replace each {unsupported.SET_ME}, at which torchtitan stops: "
        "hf_assets_path is the tokenizer's folder, dataset a name that torchtitan knows (c4), "
        "with dataset_path for your own files. Everything else has torchtitan's defaults.",
    )

    def compose() -> str:
        newer = comments(
            [("torchtitan 0.3 and later do not read TOML. With these, use:"),
             _command_for_0_3(request, tables)],
            bullet="# ",
        )  # fmt: skip
        return heading(f"{_TOOL} (0.2)", request.title, notes) + as_toml(tables) + "\n" + newer

    return ExportedPlan(
        compose=compose,
        file_name=_FILE,
        command=torchrun(
            request.workers, "torchtitan.train", "--job.config_file", _FILE, module=True
        ),
        notes=tuple(notes),
    )


def _model_table(spec: ModelSpec) -> tuple[dict[str, Any], list[str]]:
    """Return the model's name and flavor in torchtitan, and notes.

    If torchtitan has no such flavor, the notes say how to add it and what the flavor cannot
    express.
    """
    size = (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.ffn, spec.vocab)
    qwen = spec.family == "qwen3"
    name, flavors = ("qwen3", _QWEN3) if qwen else ("llama3", _LLAMA3)
    flavor = flavors.get(size) if spec.family in ("llama", "qwen3") else None
    differs = _note_missing_features(spec, qwen)
    if flavor is not None and not differs and _is_published(spec, flavor, qwen):
        return {"name": name, "flavor": flavor}, []
    kind = "Qwen3ModelArgs" if qwen else "TransformerModelArgs"
    words = ", ".join(f"{key}={value}" for key, value in _model_arguments(spec, qwen).items())
    which = "no model of these dimensions" if flavor is None else f"another model as its {flavor}"
    sentences: list[str] = [
        ScriptEdit(
            f"torchtitan has {which}. Add flavor {_OWN_FLAVOR} to {name}_args: {kind}({words}), "
            f"whose MLP is {spec.ffn} wide."
        )
    ]
    if spec.family not in ("llama", "qwen3"):
        sentences.append(
            f"family {spec.family}: torchtitan has no such architecture. The export has the "
            "closest one instead: its Llama."
        )
    return {"name": name, "flavor": _OWN_FLAVOR}, [*sentences, *differs]


def _is_published(spec: ModelSpec, flavor: str, qwen: bool) -> bool:
    """Return whether a flavor of the same dimensions also matches the model's other settings."""
    if qwen:
        tied = flavor in _TIED_QWEN3
        return (spec.head_dim, spec.rope_theta, spec.tied, spec.norm_eps) == (128, 1e6, tied, 1e-6)
    return (spec.rope_theta, spec.norm_eps, spec.rope_scaling) == (5e5, 1e-5, _LLAMA31_SCALING)


def _model_arguments(spec: ModelSpec, qwen: bool) -> dict[str, Any]:
    """Return the arguments of torchtitan's model dataclass (0.2.2, models/*/model/args.py)."""
    arguments: dict[str, Any] = {
        "dim": spec.hidden,
        "n_layers": spec.layers,
        "n_heads": spec.heads,
        "n_kv_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
        "norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "max_seq_len": spec.max_positions,
    }
    if qwen:
        return arguments | {
            "head_dim": spec.head_dim,
            "hidden_dim": spec.ffn,
            "enable_weight_tying": spec.tied,
        }
    multiple, multiplier = _mlp_multiples(spec)
    # torchtitan scales rotary frequencies of every model; a factor of 1 leaves them unchanged.
    scaling = spec.rope_scaling or _LLAMA31_SCALING.model_copy(update={"factor": 1.0})
    return arguments | {
        "multiple_of": multiple,
        "ffn_dim_multiplier": multiplier,
        "rope_scaling_args": f"RoPEScalingArgs(scaling_factor={scaling.factor}, "
        f"low_freq_factor={scaling.low_freq_factor}, "
        f"high_freq_factor={scaling.high_freq_factor}, "
        f"original_max_position_embeddings={scaling.original_max_positions})",
    }


def _mlp_multiples(spec: ModelSpec) -> tuple[int, float]:
    """Return multiple_of and ffn_dim_multiplier that give the MLP's width in torchtitan.

    torchtitan multiplies two thirds of 4 × dim by the multiplier, and rounds up to the multiple.
    """
    multiple = math.gcd(spec.ffn, 1024)
    return multiple, round((spec.ffn - multiple / 2) / int(8 * spec.hidden / 3), 6)


def _note_missing_features(spec: ModelSpec, qwen: bool) -> list[str]:
    found = []
    if spec.tied and not qwen:
        found.append(
            f"tied: torchtitan's Llama has a separate head, {spec.vocab * spec.hidden:,} "
            "parameters more."
        )
    if not qwen and spec.head_dim * spec.heads != spec.hidden:
        found.append(
            f"head_dim {spec.head_dim}: torchtitan's Llama uses dim / n_heads, "
            f"{spec.hidden // spec.heads}."
        )
    if qwen and spec.rope_scaling is not None:
        found.append("rope_scaling: torchtitan's Qwen3 does not scale rotary frequencies.")
    if spec.sliding_window is not None:
        found.append(
            f"sliding_window {spec.sliding_window}: torchtitan's attention has none, and sees the "
            "whole sequence."
        )
    biased = [name for name in ("qkv_bias", "out_bias", "mlp_bias") if getattr(spec, name)]
    if biased:
        found.append(f"{', '.join(biased)}: torchtitan's matmuls have no biases.")
    usual = {"norm": "rmsnorm", "positions": "rotary", "activation": "silu", "gated": True,
             "causal": True, "qk_norm": qwen, "dropout": 0.0}  # fmt: skip
    other = [f"{name} {getattr(spec, name)}" for name, value in usual.items()
             if getattr(spec, name) != value]  # fmt: skip
    if other:
        found.append(f"{', '.join(other)}: torchtitan's model does not have it.")
    return found


def _training_table(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    plan = request.plan
    values: dict[str, Any] = {
        "dataset": _SET_ME,
        "local_batch_size": plan.samples_per_pass,
        "global_batch_size": request.global_batch,
        "seq_len": request.seq_len,
        "max_norm": unsupported.clip(plan) or float("inf"),
        "steps": _SET_ME,
        "enable_cpu_offload": False,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    if plan.precision in WIDE:
        values["mixed_precision_param"] = "float32"
    if plan.precision in PURE:
        values["dtype"] = "bfloat16"
    if plan.precision == "bf16-pure":
        notes.append("precision bf16-pure: torchtitan rounds to nearest, outpace stochastically.")
    elif plan.precision in WIDE and plan.precision != "fp32":
        notes.append(unsupported.precision(plan, _TOOL, "float32", "fp32"))
    elif plan.precision in COMPUTES_IN_FP16:
        notes.append(unsupported.precision(plan, _TOOL, "bfloat16", "bf16"))
    if plan.offload_parameters == "cpu":
        values["enable_cpu_offload"] = True
        if request.stage == 0:
            notes.append("offload_parameters cpu: torchtitan 0.2 offloads only what it shards.")
    return values


def _parallelism_table(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    plan = request.plan
    replicate, shard = plan.dp_replicate, plan.dp_shard
    if replicate > 1 and shard == plan.cp == 1 and plan.tp * plan.pp > 1:
        notes.append(
            f"dp_replicate {replicate} with tp or pp: torchtitan supports whole replicas only "
            "without other axes. The export has shards over these ranks instead."
        )
        replicate, shard = 1, replicate
    if plan.strategy == "cp":
        notes.append("strategy cp keeps whole parameters: torchtitan shards them over cp's ranks.")
    values: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": _reshard_policy(request, notes),
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
        "expert_parallel_degree": plan.ep,
    }
    if plan.ep > 1 and plan.expert_tp > 1:  # its default is 1
        values["expert_tensor_parallel_degree"] = plan.expert_tp
    if plan.pp > 1:
        values |= _pipeline_settings(request)
    return values


def _reshard_policy(request: ExportRequest, notes: list[str]) -> str:
    plan = request.plan
    if request.stage == 1:
        notes.append(unsupported.sharding(request, _TOOL, "shards without resharding (ZeRO-2)", 2))
    if request.stage in (1, 2) or plan.strategy == "cp":
        return "never"
    return "always" if request.stage == 3 else "default"


def _pipeline_settings(request: ExportRequest) -> dict[str, Any]:
    plan = request.plan
    values: dict[str, Any] = {
        "pipeline_parallel_schedule": _SCHEDULES[plan.schedule],
        "pipeline_parallel_microbatch_size": plan.micro_batch,
    }
    counts = request.split_layers(plan.stages)
    if len(set(counts)) == 1:
        return values | {
            "pipeline_parallel_layers_per_stage": counts[0],
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    parts, begin = [], 0
    for count in counts:
        parts.append([f"layers.{index}" for index in range(begin, begin + count)])
        begin += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return values | {"module_fqns_per_model_part": parts}


def _checkpointing_table(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    done = request.recomputed_blocks
    if done.mode == "none":
        return {"mode": "none"}
    if done.mode == "selective":
        if done.count < request.spec.layers or not done.alike:
            notes.append(unsupported.checkpointing(request, _TOOL, "selective in all", "selective"))
        return {"mode": "selective", "selective_ac_option": "op"}
    full = done.mode == "full" and done.alike
    if done.count == request.spec.layers:
        if not full:
            notes.append(unsupported.checkpointing(request, _TOOL, "full in all blocks", "full"))
        return {"mode": "full"}
    every = done.every or max(2, round(request.spec.layers / done.count))
    if not full or done.every is None:
        notes.append(
            unsupported.checkpointing(
                request, _TOOL, f"full in every {every}th block", "full", every
            )
        )
    return {"mode": "selective", "selective_ac_option": str(every)}


def _optimizer_table(plan: Plan, notes: list[str]) -> dict[str, Any]:
    if plan.optimizer not in _IMPLEMENTATIONS:
        notes.append(unsupported.optimizer(plan, _TOOL, "AdamW"))
    return {
        "name": "AdamW",
        "lr": _SET_ME,
        "implementation": _IMPLEMENTATIONS.get(plan.optimizer, "fused"),
        "early_step_in_backward": plan.optimizer_in_backward,
    }


def _command_for_0_3(request: ExportRequest, tables: dict[str, dict[str, Any]]) -> str:
    name, flavor = tables["model"]["name"], tables["model"]["flavor"]
    words = ["--module", name, "--config", _CONFIGS.get((name, flavor), f"{name}_{_OWN_FLAVOR}")]
    plain = {
        table: {
            key: value
            for key, value in values.items()
            if isinstance(value, int | float | str) and key != "dataset"
        }
        for table, values in tables.items()
        if table in ("training", "parallelism")
    }
    for table, values in plain.items():
        for key, value in values.items():
            if isinstance(value, bool):
                words += [f"--{table}.{key}"] if value else []
            else:
                words += [f"--{table}.{key}", str(value)]
    if request.plan.pp > 1:
        words.append("--training.disable_cuda_graphs")
    if request.plan.tp > 1 and not request.plan.sequence_parallel:
        words.append("--parallelism.no-enable_sequence_parallel")
    if request.plan.compile:
        words.append("--compile.enable")
    done = tables["activation_checkpoint"]["mode"]
    words.append(f"activation_checkpoint:{done}")
    return torchrun(request.workers, "torchtitan.train", *words, module=True)
