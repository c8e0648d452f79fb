"""Megatron-LM: a shell script with the arguments of pretrain_gpt.py."""

from collections.abc import Sequence
from itertools import groupby

from outpace.catalog.stacks import STACKS
from outpace.interop.export import unsupported
from outpace.interop.export.request import ExportedPlan, ExportRequest, Note, hosts
from outpace.interop.export.texts import HEAD_MEANING, HEAD_NODE, heading, quote, torchrun
from outpace.records.model import ModelSpec, RopeScaling
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Plan
from outpace.records.precisions import COMPUTES_IN_FP16, PURE, WIDE, Precision

_TOOL = "Megatron-LM"
_FILE = "megatron.sh"
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
# --use-rope-scaling selects Llama 3.1's scaling; only its factor can be set.
_LLAMA_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
# Settings that a plan does not contain. The script stops with a message if one is not set.
_YOURS = {
    "DATA_PATH": "the prefix of your tokenized data, as preprocess_data.py writes it",
    "TOKENIZER": "the folder or name of a Hugging Face tokenizer",
    "LR": "the learning rate",
    "TRAIN_ITERS": "the number of steps",
    "WARMUP_ITERS": "the number of warm-up steps of the learning rate",
    "SAVE": "the folder for checkpoints",
    "SAVE_INTERVAL": "the number of steps between checkpoints",
}
# An argument with its values: one line of the script.
Argument = tuple[str, ...]


def write(request: ExportRequest) -> ExportedPlan:
    """Export a plan to Megatron-LM, as a shell script with its arguments.

    The script supports all axes, 1F1B pipelines (also interleaved) and ZeRO-1 to 3.
    """
    plan, spec = request.plan, request.spec
    notes = unsupported.replicas(request, _TOOL)
    notes += unsupported.sequential_stages(request, _TOOL, "a pipeline of all micro-batches, 1F1B")
    arguments = [
        *_parallelism_arguments(request, notes),
        *_sharding_arguments(request, notes),
        *_batch_arguments(request),
        *_precision_arguments(plan, notes),
        *_recompute_arguments(request, notes),
        *_offload_arguments(request, notes),
        *_model_arguments(request, notes),
        *_optimizer_arguments(request, notes),
        ("--tokenizer-type", "HuggingFaceTokenizer"),
        ("--tokenizer-model", "$TOKENIZER"),
        ("--vocab-size", str(spec.vocab)),
        ("--make-vocab-size-divisible-by", "1"),
        ("--data-path", "$DATA_PATH"),
        ("--save", "$SAVE"),
        ("--save-interval", "$SAVE_INTERVAL"),
        ("--distributed-backend", "nccl"),
    ]
    notes += unsupported.pipelined_accumulation(request, _TOOL)
    notes += unsupported.closing_notes(
        request,
        _TOOL,
        _expressed_fields(request),
        "The script stops unless the environment has the variables at its beginning. Everything "
        "else has Megatron-LM's defaults; to try it without data, use --mock-data and "
        "NullTokenizer.",
    )
    return ExportedPlan(
        compose=lambda: (
            "#!/bin/sh\n"
            + heading(_TOOL, request.title, notes)
            + _compose_script(request, arguments)
        ),
        file_name=_FILE,
        command=" ".join([*(f"{name}=…" for name in _required_variables(request)), "sh", _FILE]),
        notes=tuple(notes),
    )


def _required_variables(request: ExportRequest) -> dict[str, str]:
    several = hosts(request.workers)[0] > 1
    return ({HEAD_NODE: HEAD_MEANING} if several else {}) | _YOURS


def _compose_script(request: ExportRequest, arguments: Sequence[Argument]) -> str:
    lines = ["    " + " ".join(map(quote, argument)) for argument in arguments]
    start = torchrun(request.workers, "pretrain_gpt.py")
    checks = "".join(
        f': "${{{name}:?set it to {what}}}"\n'
        for name, what in _required_variables(request).items()
    )
    return checks + _connections_line(request) + " \\\n".join([start, *lines]) + "\n"


def _connections_line(request: ExportRequest) -> str:
    """Return the shell line that sets CUDA_DEVICE_MAX_CONNECTIONS as Megatron requires."""
    if _uses_fsdp(request):
        return "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron FSDP refuses 1\n"
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"


def _uses_fsdp(request: ExportRequest) -> bool:
    """Return whether to use Megatron FSDP: for ZeRO-2 and 3 without a pipeline."""
    return request.stage > 1 and request.plan.pp == 1


def _stages_per_rank(request: ExportRequest, notes: list[str]) -> int:
    plan = request.plan
    several = plan.stages_per_rank
    if plan.pp == 1:
        return 1
    known = plan.schedule in ("1f1b", "interleaved", "mp")
    if several > 1 and request.passes % plan.pp > 0:
        notes.append(
            f"schedule {plan.schedule}: Megatron-LM interleaves only a multiple of {plan.pp} "
            f"micro-batches, but there are {request.passes}. The export has 1F1B instead."
        )
        return 1
    if not known:
        of = f"interleaved 1F1B with {several} stages per rank" if several > 1 else "1F1B"
        notes.append(unsupported.schedule(request, _TOOL, of))
    elif SCHEDULES[plan.schedule].splits_backward:
        notes.append(unsupported.schedule(request, _TOOL, "interleaved 1F1B"))
    return several


def _parallelism_arguments(request: ExportRequest, notes: list[str]) -> list[Argument]:
    plan = request.plan
    found: list[Argument] = [
        ("--tensor-model-parallel-size", str(plan.tp)),
        ("--pipeline-model-parallel-size", str(plan.pp)),
        *_stage_arguments(request, notes),
        ("--context-parallel-size", str(plan.cp)),
        ("--expert-model-parallel-size", str(plan.ep)),
    ]
    if plan.ep > 1:  # the default, allgather, sends every token to all ranks
        found.append(("--moe-token-dispatcher-type", STACKS["megatron"].dispatcher))
    if plan.expert_tp != plan.tp:  # defaults to tp
        found.append(("--expert-tensor-parallel-size", str(plan.expert_tp)))
    if plan.tp > 1 and plan.sequence_parallel:
        found.append(("--sequence-parallel",))
    if plan.cp > 1:
        found.append(("--cp-comm-type", "p2p"))
        if request.seq_len % (2 * plan.cp):
            notes.append(
                f"cp {plan.cp}: {_TOOL} needs a multiple of {2 * plan.cp} for --seq-length, not "
                f"{request.seq_len}."
            )
    return found


def _stage_arguments(request: ExportRequest, notes: list[str]) -> list[Argument]:
    """Return the arguments that assign layers to pipeline stages.

    Equal stages need at most their number of layers, and unequal ones a layout of all stages.
    """
    plan = request.plan
    if plan.pp == 1:
        return []
    virtual = _stages_per_rank(request, notes)
    counts = request.split_layers(plan.pp * virtual)
    if len(set(counts)) > 1:
        return [("--pipeline-model-parallel-layout", _format_layout(counts))]
    return [] if virtual == 1 else [("--num-layers-per-virtual-pipeline-stage", str(counts[0]))]


def _format_layout(counts: Sequence[int]) -> str:
    """Format the number of layers of each stage as Megatron does: "Et*3|(t*4|)*2,t*3,L"."""
    first, *middle, last = counts
    parts = [f"Et*{first}|"]
    for count, alike in groupby(middle):
        number = len(list(alike))
        parts.append(f"(t*{count}|)*{number}," if number > 1 else f"t*{count}|")
    return "".join([*parts, f"t*{last},L"])


def _sharding_arguments(request: ExportRequest, notes: list[str]) -> list[Argument]:
    plan = request.plan
    found: list[Argument] = []
    over = plan.data_parallel * plan.cp
    if over > 1:
        found.append(("--overlap-grad-reduce",))
    if request.stage == 0:
        if plan.bucket_mib and over > 1:
            found.append(("--ddp-bucket-size", str(plan.bucket_mib * 2**20 // 4)))
        return found
    found.append(("--use-distributed-optimizer",))
    if plan.dp_replicate > 1:
        found.append(("--num-distributed-optimizer-instances", str(plan.dp_replicate)))
    if over > 1:
        found.append(("--overlap-param-gather",))
    if not _uses_fsdp(request):
        if request.stage > 1:
            notes.append(
                unsupported.sharding(request, _TOOL, "the distributed optimizer (ZeRO-1)", 1)
            )
        return found
    return [
        *found,
        ("--use-megatron-fsdp",),
        ("--data-parallel-sharding-strategy", _STRATEGIES[request.stage]),
        ("--no-gradient-accumulation-fusion",),
        ("--ckpt-format", "fsdp_dtensor"),
    ]


def _batch_arguments(request: ExportRequest) -> list[Argument]:
    return [
        ("--micro-batch-size", str(request.plan.micro_batch)),
        ("--global-batch-size", str(request.global_batch)),
        ("--seq-length", str(request.seq_len)),
        ("--train-iters", "$TRAIN_ITERS"),
    ]


def _precision_arguments(plan: Plan, notes: list[str]) -> list[Argument]:
    name = plan.precision
    if name in WIDE:
        if name != "fp32":
            notes.append(unsupported.precision(plan, _TOOL, "fp32", "fp32"))
        return []
    if name in ("bf16", "fp16"):
        notes.append(
            Note(
                f"precision {name}: Megatron-LM keeps weights in {name} and fp32 copies in the "
                "optimizer, whereas outpace's weights are in fp32."
            )
        )
    elif name in PURE:
        kept: Precision = "bf16-master" if name == "bf16-pure" else "fp16-master"
        notes.append(
            unsupported.precision(plan, _TOOL, f"{name[:4]} with fp32 copies of weights", kept)
        )
    found: list[Argument] = [("--fp16",) if name in COMPUTES_IN_FP16 else ("--bf16",)]
    if name == "fp8":
        found += [("--fp8-format", "hybrid"), ("--fp8-recipe", "tensorwise")]
    if plan.compress_gradients == "bf16" and name in ("bf16", "fp8"):
        found.append(("--grad-reduce-in-bf16",))
    return found


def _recompute_arguments(request: ExportRequest, notes: list[str]) -> list[Argument]:
    done, layers = request.recomputed_blocks, request.spec.layers
    if done.mode == "none":
        return []
    if done.mode == "full":
        full: Argument = ("--recompute-granularity", "full")
        if done.count == layers and done.alike:
            return [full, ("--recompute-method", "uniform"), ("--recompute-num-layers", "1")]
        stages = request.plan.pp * request.plan.stages_per_rank
        each = max(1, round(done.count / stages))
        notes.append(
            unsupported.checkpointing(
                request, _TOOL, f"the first {each} blocks of each stage, full", None
            )
        )
        return [full, ("--recompute-method", "block"), ("--recompute-num-layers", str(each))]
    modules = ("layernorm",) if done.mode == "selective" else ("layernorm", "mlp")
    notes.append(
        unsupported.checkpointing(
            request, _TOOL, f"recomputation of {' and '.join(modules)} in all blocks", None
        )
    )
    return [("--recompute-granularity", "selective"), ("--recompute-modules", *modules)]


def _offload_arguments(request: ExportRequest, notes: list[str]) -> list[Argument]:
    plan = request.plan
    found: list[Argument] = []
    if _offloads_state(request):
        found += [("--optimizer-cpu-offload",), ("--use-precision-aware-optimizer",)]
        if plan.offload_optimizer == "disk":
            notes.append("offload_optimizer disk: Megatron-LM offloads to host memory only.")
        if request.stage == 0:
            found.append(("--use-distributed-optimizer",))
    if _offloads_activations(request):
        # One layer must stay on the device, since its activations are needed immediately.
        found.append(("--cpu-offloading-num-layers", str(request.spec.layers - 1)))
    if plan.empty_cache:
        found.append(("--empty-unused-memory-level", "1"))
    return found


def _offloads_state(request: ExportRequest) -> bool:
    plan = request.plan
    return plan.offload_optimizer != "none" or plan.offload_parameters == "cpu"


def _offloads_activations(request: ExportRequest) -> bool:
    plan = request.plan
    alone = plan.pp == 1 and request.recomputed_blocks.mode == "none" and request.spec.layers > 1
    return plan.offload_activations == "cpu" and alone


def _expressed_fields(request: ExportRequest) -> list[str]:
    plan = request.plan
    said = ["sequence_parallel", "empty_cache"]
    if _offloads_state(request):
        said.append("offload_optimizer")
    if _offloads_activations(request):
        said.append("offload_activations")
    if plan.compress_gradients == "bf16" and plan.precision in ("bf16", "fp8"):
        said.append("compress_gradients")
    if request.stage == 0 and plan.data_parallel > 1:
        said.append("bucket_mib")
    return said


def _model_arguments(request: ExportRequest, notes: list[str]) -> list[Argument]:
    spec = request.spec
    found: list[Argument] = [
        ("--num-layers", str(spec.layers)),
        ("--hidden-size", str(spec.hidden)),
        ("--ffn-hidden-size", str(spec.ffn)),
        ("--num-attention-heads", str(spec.heads)),
        ("--kv-channels", str(spec.head_dim)),
        ("--max-position-embeddings", str(max(spec.max_positions, request.seq_len))),
        ("--normalization", "RMSNorm" if spec.norm == "rmsnorm" else "LayerNorm"),
        ("--norm-epsilon", f"{spec.norm_eps:g}"),
        ("--attention-dropout", f"{spec.dropout:g}"),
        ("--hidden-dropout", f"{spec.dropout:g}"),
        *_position_arguments(spec, notes),
    ]
    if spec.kv_heads < spec.heads:
        found += [("--group-query-attention",), ("--num-query-groups", str(spec.kv_heads))]
    if spec.gated and spec.activation == "silu":
        found.append(("--swiglu",))
    elif spec.activation == "gelu":
        found.append(("--no-bias-gelu-fusion",))  # the fused kernel uses tanh
    if not spec.tied:
        found.append(("--untie-embeddings-and-output-weights",))
    if not (spec.out_bias or spec.mlp_bias):
        found.append(("--disable-bias-linear",))
        if spec.qkv_bias:
            found.append(("--add-qkv-bias",))
    if spec.qk_norm:
        found.append(("--qk-layernorm",))
    if spec.sliding_window is not None:
        found.append(("--window-size", f"{spec.sliding_window - 1},0"))
    notes += _note_missing_features(spec)
    return found


def _position_arguments(spec: ModelSpec, notes: list[str]) -> list[Argument]:
    if spec.positions == "learned":
        return [("--position-embedding-type", "learned_absolute")]
    found: list[Argument] = [
        ("--position-embedding-type", "rope"),
        ("--rotary-base", str(round(spec.rope_theta))),
    ]
    if spec.rope_scaling is not None:
        factor = spec.rope_scaling.factor
        found += [("--use-rope-scaling",), ("--rope-scaling-factor", f"{factor:g}")]
        if spec.rope_scaling != RopeScaling.model_validate({**_LLAMA_SCALING, "factor": factor}):
            notes.append(
                Note(
                    "rope_scaling: Megatron-LM uses only its factor; the other values are those "
                    "of Llama 3.1."
                )
            )
    return found


def _note_missing_features(spec: ModelSpec) -> list[str]:
    biases = {spec.out_bias, spec.mlp_bias}
    found = {
        "attention in both directions (pretrain_bert.py has it)": not spec.causal,
        "norms after the sub-layers": not spec.norm_first,
        "token types": spec.segments > 0,
        f"a gated MLP with {spec.activation}": spec.gated and spec.activation != "silu",
        f"activation {spec.activation} without a gate": not spec.gated
        and spec.activation == "silu",
        "biases in only some of the linear layers": len(biases) > 1
        or (any(biases) and not spec.qkv_bias),
        "window_layers": spec.window_layers is not None,
    }
    return [Note(f"{name}: pretrain_gpt.py has none.") for name, there in found.items() if there]


def _optimizer_arguments(request: ExportRequest, notes: list[str]) -> list[Argument]:
    plan = request.plan
    name = "adam"
    if plan.optimizer == "sgd":
        name = "sgd"
    elif plan.optimizer == "muon" and request.stage == 0 and not _offloads_state(request):
        name = "muon"
    elif plan.optimizer != "adamw-fused":
        notes.append(unsupported.optimizer(plan, _TOOL, "its fused AdamW"))
    found: list[Argument] = [
        ("--optimizer", name),
        ("--lr", "$LR"),
        ("--lr-warmup-iters", "$WARMUP_ITERS"),
        ("--clip-grad", f"{unsupported.clip(plan):g}"),
    ]
    if name == "sgd":
        found.append(("--sgd-momentum", f"{unsupported.BETA1:g}"))
    if name == "muon":
        found.append(("--ckpt-format", "torch"))
    return found
