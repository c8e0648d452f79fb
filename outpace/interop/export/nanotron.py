"""nanotron: the YAML for its run_train.py."""

from typing import Any

from outpace.interop.export import unsupported
from outpace.interop.export.request import ExportedPlan, ExportRequest, Note
from outpace.interop.export.texts import as_yaml, heading, torchrun
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.precisions import PURE, WIDE

_TOOL = "nanotron"
_FILE = "nanotron.yaml"
_SEED = 42
_INIT = 0.02
_CHECKPOINT_STEPS = 1000


def write(request: ExportRequest) -> ExportedPlan:
    """Export a plan to nanotron, as its YAML.

    The YAML supports data, tensor, pipeline, context and expert parallelism, and ZeRO-1.
    """
    plan = request.plan
    notes = unsupported.replicas(request, _TOOL)
    notes += unsupported.sequential_stages(request, _TOOL, "a pipeline of all micro-batches")
    values = {
        "general": {"project": "outpace", "run": f"{request.spec.family}_%date", "seed": _SEED},
        "checkpoints": {
            "checkpoints_path": "checkpoints",
            "checkpoint_interval": _CHECKPOINT_STEPS,
        },
        "parallelism": _parallelism_section(request, notes),
        "tokens": {
            "sequence_length": request.seq_len,
            "train_steps": unsupported.SET_ME,
            "micro_batch_size": plan.micro_batch,
            "batch_accumulation_per_replica": request.passes,
        },
        "model": _model_section(request, notes),
        "tokenizer": {"tokenizer_name_or_path": unsupported.SET_ME},
        "optimizer": _optimizer_section(request, notes),
        "data_stages": [
            {
                "name": "training",
                "start_training_step": 1,
                "data": {"dataset": unsupported.SET_ME, "num_loading_workers": 1, "seed": _SEED},
            }
        ],
    }
    notes += unsupported.pipelined_accumulation(request, _TOOL)
    notes += unsupported.closing_notes(
        request,
        _TOOL,
        _expressed_fields(plan),
        f"Replace each {unsupported.SET_ME}, which nanotron does not accept: dataset is a mapping "
        "(dataset_folder for a Nanoset), or null for synthetic data.",
    )
    return ExportedPlan(
        compose=lambda: heading(_TOOL, request.title, notes) + as_yaml(values),
        file_name=_FILE,
        command="CUDA_DEVICE_MAX_CONNECTIONS=1 "
        + torchrun(request.workers, "run_train.py", "--config-file", _FILE),
        notes=tuple(notes),
    )


def _expressed_fields(plan: Plan) -> tuple[str, ...]:
    return ("sequence_parallel", *(["bucket_mib"] if plan.strategy == "ddp" else []))


def _parallelism_section(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    plan = request.plan
    split = plan.sequence_parallel and plan.tp > 1
    return {
        "dp": plan.data_parallel,
        "pp": plan.pp,
        "tp": plan.tp,
        "pp_engine": _pipeline_engine(request, notes),
        "tp_mode": "REDUCE_SCATTER" if split else "ALL_REDUCE",
        "tp_linear_async_communication": split,
        "recompute_layer": _recomputes_layers(request, notes),
        "context_parallel_size": plan.cp,
        "expert_parallel_size": plan.ep,
    }


def _pipeline_engine(request: ExportRequest, notes: list[str]) -> str:
    plan = request.plan
    all_forward = plan.schedule in ("mp", "gpipe", "loopedbfs")
    engine = "afab" if all_forward else "1f1b"
    if plan.pp > 1 and (plan.stages_per_rank > 1 or unsupported.splits_backward(plan)):
        notes.append(unsupported.schedule(request, _TOOL, f"{engine} with one stage per rank"))
    return engine


def _recomputes_layers(request: ExportRequest, notes: list[str]) -> bool:
    done = request.recomputed_blocks
    some = done.count < request.spec.layers
    if done.count and (done.mode != "full" or not done.alike or some):
        notes.append(unsupported.checkpointing(request, _TOOL, "all blocks in full", "full"))
    return done.count > 0


def _optimizer_section(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    plan = request.plan
    stage = min(request.stage, 1)
    if request.stage > 1:
        notes.append(unsupported.sharding(request, _TOOL, "zero_stage 1", 1))
    elif stage and plan.dp_replicate > 1:
        notes.append(
            f"dp_shard {plan.dp_shard}: nanotron shards over all {plan.data_parallel} "
            "data-parallel ranks."
        )
    factory: dict[str, Any] = {
        "name": "adamW",
        "adam_beta1": unsupported.BETA1,
        "adam_beta2": unsupported.BETA2,
        "adam_eps": unsupported.EPS,
        "torch_adam_is_fused": plan.optimizer == "adamw-fused",
    }
    if plan.optimizer == "sgd":
        factory = {"name": "sgd"}
        notes.append("optimizer sgd: nanotron's SGD has no setting for momentum.")
    elif plan.optimizer != "adamw-fused" and plan.optimizer != "adamw-for-loop":
        notes.append(unsupported.optimizer(plan, _TOOL, "AdamW"))
    return {
        "zero_stage": stage,
        "weight_decay": unsupported.SET_ME,
        "clip_grad": unsupported.clip(plan) or None,
        "accumulate_grad_in_fp32": plan.precision not in PURE,
        "optimizer_factory": factory,
        "learning_rate_scheduler": {
            "learning_rate": unsupported.SET_ME,
            "lr_warmup_steps": unsupported.SET_ME,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine",
            "min_decay_lr": unsupported.SET_ME,
        },
    }


def _model_section(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    return {
        "ddp_bucket_cap_mb": request.plan.bucket_mib,
        "dtype": _model_dtype(request.plan, notes),
        "init_method": {"std": _INIT},
        "make_vocab_size_divisible_by": 1,
        "model_config": _model_config(request, notes),
    }


def _model_dtype(plan: Plan, notes: list[str]) -> str:
    if plan.precision in WIDE:
        if plan.precision != "fp32":
            notes.append(unsupported.precision(plan, _TOOL, "float32", "fp32"))
        return "float32"
    if plan.precision == "bf16":
        notes.append(
            Note(
                "precision bf16: nanotron keeps weights in bfloat16 and fp32 copies in the "
                "optimizer, whereas outpace's weights are in fp32."
            )
        )
    elif plan.precision == "bf16-pure":
        notes.append("precision bf16-pure: nanotron rounds to nearest, outpace stochastically.")
    elif plan.precision != "bf16-master":
        notes.append(unsupported.precision(plan, _TOOL, "bfloat16", "bf16"))
    return "bfloat16"


def _model_config(request: ExportRequest, notes: list[str]) -> dict[str, Any]:
    spec = request.spec
    rotary = spec.positions == "rotary" and spec.norm == "rmsnorm" and spec.gated
    if not rotary:
        return _starcoder_config(spec, notes)
    # nanotron's Llama has no biases or windows, and its attention does not split sequences.
    qwen = spec.qkv_bias or spec.sliding_window is not None or request.plan.cp > 1
    if spec.kv_heads < request.plan.tp:
        notes.append(
            f"tp {request.plan.tp}: nanotron needs at least that many key and value heads, but "
            f"there are {spec.kv_heads}."
        )
    values: dict[str, Any] = {
        "is_qwen2_config" if qwen else "is_llama_config": True,
        "hidden_act": spec.activation,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": max(spec.max_positions, request.seq_len),
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_interleaved": False,
        "tie_word_embeddings": spec.tied,
        "vocab_size": spec.vocab,
        "attention_bias": spec.qkv_bias,
    }
    if request.plan.cp > 1:
        values |= {"_attn_implementation": "llama3_ring_attention", "ring_attn_heads_k_stride": 1}
    if spec.sliding_window is not None:
        values["sliding_window_size"] = spec.sliding_window
    notes += _note_missing_features(spec)
    return values


def _note_missing_features(spec: ModelSpec) -> list[str]:
    found = {
        f"head_dim {spec.head_dim}": spec.head_dim * spec.heads != spec.hidden,
        "qk_norm": spec.qk_norm,
        "rope_scaling": spec.rope_scaling is not None,
        "window_layers": spec.window_layers is not None,
        "biases of the output projection or the MLP": spec.out_bias or spec.mlp_bias,
        f"dropout {spec.dropout:g}": spec.dropout > 0,
    }
    return [Note(f"{name}: nanotron's model has none.") for name, there in found.items() if there]


def _starcoder_config(spec: ModelSpec, notes: list[str]) -> dict[str, Any]:
    notes.append(
        f"family {spec.family}: nanotron has no such architecture. The export has the closest one "
        "instead: its StarCoder2 (LayerNorm, GELU, rotary positions, causal attention)."
    )
    return {
        "is_starcoder2_config": True,
        "activation_function": "gelu_pytorch_tanh",
        "attn_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        "grouped_query": True,
        "multi_query": False,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "layer_norm_epsilon": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_kv_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
    }
