"""Notes on parts of a plan that another trainer's configuration cannot express.

A format lists the fields of the plan that it has written. Every other field that differs from its
default becomes a note.
"""

from collections.abc import Callable, Collection, Mapping

from outpace.interop.export.request import ExportRequest, Note, Replacement, ScriptEdit, hosts
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Checkpointing, Plan, Strategy
from outpace.records.precisions import SHARD_DTYPES, Precision
from outpace.records.settings import TrainSettings

_SETTINGS = TrainSettings.model_fields
# Placeholder for values that users choose. No trainer accepts it as a number or a data set.
SET_ME = "SET_ME"
BETA1: float = _SETTINGS["beta1"].default
BETA2: float = _SETTINGS["beta2"].default
EPS = 1e-8
_CLIP: float = _SETTINGS["clip"].default

# Strategies that outpace implements, but that other trainers replace with an all-reduce.
_AS_REPLICAS: Mapping[Strategy, str] = {
    "dp": "one process that owns the parameters and sends them to workers",
    "ps": "parameter servers",
    "ring": "outpace's own ring all-reduce",
    "horovod": "Horovod's all-reduce",
}


def clip(plan: Plan) -> float:
    """Return the maximum gradient norm, or 0 (off) if the optimizer runs in the backward pass."""
    return 0.0 if plan.optimizer_in_backward else _CLIP


def replicas(request: ExportRequest, tool: str) -> list[str]:
    """Explain which strategy the export has instead of one that only outpace has."""
    plan = request.plan
    what = _AS_REPLICAS.get(plan.strategy)
    if what is None:
        return []
    written = f"replicas with an all-reduce on {request.workers} ranks"
    left = f"; the {plan.servers} server ranks are left out" if plan.servers else ""
    left += ", which run the optimizer" if plan.server_updates else ""
    behind = f", of {plan.worker_devices} devices each" if plan.worker_devices > 1 else ""
    return [
        Replacement(
            f"strategy {plan.strategy}: {what}{behind} cannot be expressed in {tool}. The export "
            f"has the closest equivalent instead: {written}{left}.",
            strategy="ddp", dp_replicate=request.workers, servers=0, server_updates=False,
            worker_devices=1,
        )
    ]  # fmt: skip


def sequential_stages(request: ExportRequest, tool: str, instead: str) -> list[str]:
    """Explain what replaces strategy mp, in which pipeline stages take turns.

    The tool's own pipelines overlap micro-batches.
    """
    if request.plan.strategy != "mp":
        return []
    return [
        f"strategy mp: a model split into stages that take turns cannot be expressed in {tool}. "
        f"The export has the closest equivalent instead: {instead}."
    ]


def pipelined_accumulation(request: ExportRequest, tool: str) -> list[str]:
    """Explain that the tool's pipeline processes all micro-batches of a step in one run."""
    plan = request.plan
    if plan.pp == 1 or request.accumulation == 1:
        return []
    return [
        Note(
            f"accumulation {request.accumulation}: {tool} passes all {request.passes} "
            "micro-batches of a step through one pipeline, whereas the plan has "
            f"{plan.pp_microbatches} at once. So the bubble is smaller than planned."
        )
    ]


def schedule(request: ExportRequest, tool: str, written: str) -> str:
    """Explain that the export has a different pipeline schedule than the plan."""
    plan = request.plan
    several = plan.stages_per_rank
    of = f" of {several} stages per rank" if several > 1 else ""
    return _format_replacement(f"schedule {plan.schedule}{of}", tool, written)


def sharding(request: ExportRequest, tool: str, written: str, stage: int) -> str:
    """Explain that the export shards as ZeRO stage `stage` does, unlike the plan."""
    plan = request.plan
    what = ("nothing", "optimizer state", "state and gradients", "parameters too")[request.stage]
    fields = {"zero": stage} if plan.strategy == "3d" else {"strategy": f"zero{stage}"}
    return Replacement(
        f"strategy {plan.strategy} shards {what} over {plan.dp_shard * plan.cp} ranks: {tool} "
        "cannot do so with the rest of this plan. The export has the closest equivalent instead: "
        f"{written}.",
        **fields,
    )


def checkpointing(
    request: ExportRequest, tool: str, written: str, mode: Checkpointing | None, every: int = 1
) -> str:
    """Explain that the export recomputes different blocks than the plan, or in a different mode.

    The export recomputes every `every`-th block in `mode`; None stands for a mode that plans do not
    have.
    """
    done = request.recomputed_blocks
    kind = "" if done.alike else " and others"
    blocks = f"{done.count} of {request.layers} blocks"
    sentence = _format_replacement(f"checkpointing {done.mode}{kind} in {blocks}", tool, written)
    if mode is None:
        return sentence
    return Replacement(sentence, checkpointing=mode, checkpoint_every=every, checkpoint_layers=())


def precision(plan: Plan, tool: str, written: str, name: Precision) -> str:
    """Explain that the configuration has a different precision, which outpace calls `name`."""
    return Replacement(
        _format_replacement(f"precision {plan.precision}", tool, written), precision=name
    )


def reduced_in_16_bits(plan: Plan, tool: str) -> list[str]:
    """Explain that the tool reduces gradients in 16 bits, whereas outpace reduces them in fp32."""
    if plan.precision not in SHARD_DTYPES:
        return []
    dtypes = SHARD_DTYPES[plan.precision]
    torchs = {"bf16": "bfloat16", "fp16": "float16"}[dtypes.gathered]
    return [
        ScriptEdit(
            f"precision {plan.precision}: {tool} gathers parameters and reduces gradients in "
            f"{dtypes.gathered}; outpace reduces in {dtypes.reduced}. To do the same in your "
            f"script, pass torch's MixedPrecisionPolicy(param_dtype=torch.{torchs}, "
            "reduce_dtype=torch.float32) to Accelerate's FullyShardedDataParallelPlugin."
        )
    ]


def weights_in_16_bits(plan: Plan) -> list[str]:
    """Explain how to train with 16-bit weights only, and how the optimizer then differs."""
    name = plan.precision
    return [
        ScriptEdit(f"precision {name}: load the model in {name[:4]} in the script."),
        f"precision {name}: the optimizer rounds to nearest, outpace's stochastically.",
    ]


def optimizer(plan: Plan, tool: str, written: str) -> str:
    """Explain that the export has fused AdamW instead of the plan's optimizer."""
    return Replacement(
        _format_replacement(f"optimizer {plan.optimizer}", tool, written), optimizer="adamw-fused"
    )


def _format_replacement(what: str, tool: str, written: str) -> str:
    return (
        f"{what}: {tool} does not have it. The export has the closest equivalent instead: "
        f"{written}."
    )


def experts(request: ExportRequest) -> list[str]:
    """Explain that the number of experts is part of the model, not of the plan."""
    if request.plan.ep == 1:
        return []
    return [
        Note(
            f"ep {request.plan.ep} divides experts among ranks, but their number, width and "
            "routing are part of the model, and only its dense dimensions are known here."
        )
    ]


def not_in_a_plan(request: ExportRequest, written: str, ranks: int | None = None) -> list[str]:
    """Return notes on settings that plans do not contain, and on the command's number of hosts."""
    nodes, each = hosts(request.workers if ranks is None else ranks)
    sentences: list[str] = [
        Note(
            "Data, tokenizer, learning rate and length of the run are not part of a plan: set them "
            f"yourself. {written}"
        )
    ]
    if nodes > 1:
        sentences.append(
            Note(
                f"A plan has ranks but no hosts: the command assumes {nodes} hosts of {each} "
                "devices."
            )
        )
    return sentences


def _describe_compression(plan: Plan) -> str | None:
    if plan.compress_gradients == "none":
        return None
    of = ""
    if plan.compress_gradients == "powersgd":
        start = "" if plan.powersgd_start is None else f", from step {plan.powersgd_start}"
        of = f" of rank {plan.powersgd_rank}{start}"
    return (
        f"compress_gradients {plan.compress_gradients}{of}: gradients are all-reduced as they are"
    )


def _describe_lora(plan: Plan) -> str | None:
    if plan.lora_rank is None:
        return None
    targets = "+".join(plan.lora_targets)
    base = ", on a base in nf4 (bitsandbytes)" if plan.base == "nf4" else ""
    return (
        f"lora_rank {plan.lora_rank} (alpha {plan.lora_alpha or plan.lora_rank:g}, targets "
        f"{targets}, dropout {plan.lora_dropout:g}{base}): the script has to add adapters"
    )


def _describe_buckets(plan: Plan) -> str | None:
    buckets = plan.strategy in ("ddp", "zero1", "ring")
    if not buckets or plan.bucket_mib == Plan.model_fields["bucket_mib"].default:
        return None
    return f"bucket_mib {plan.bucket_mib}: the tool chooses the size of buckets"


def _describe_if_set(name: str, meaning: str) -> Callable[[Plan], str | None]:
    return lambda plan: f"{name}: {meaning}" if getattr(plan, name) else None


def _describe_offload(name: str, meaning: str) -> Callable[[Plan], str | None]:
    def describe(plan: Plan) -> str | None:
        where = getattr(plan, name)
        return None if where == "none" else f"{name} {where}: {meaning}"

    return describe


_SENTENCES: Mapping[str, Callable[[Plan], str | None]] = {
    "sequence_parallel": lambda plan: (
        "sequence_parallel off: tp splits sequences between its layers as well"
        if plan.tp > 1 and not plan.sequence_parallel
        else None
    ),
    "offload_activations": _describe_offload(
        "offload_activations", "activations stay on the device"
    ),
    "offload_parameters": _describe_offload("offload_parameters", "parameters stay on the device"),
    "offload_optimizer": _describe_offload(
        "offload_optimizer", "optimizer state stays on the device"
    ),
    "empty_cache": _describe_if_set("empty_cache", "cached memory is kept between a step's phases"),
    "compile": _describe_if_set("compile", "blocks are not compiled"),
    "optimizer_in_backward": _describe_if_set(
        "optimizer_in_backward", "the step comes after the backward, and gradients are kept"
    ),
    "loss": lambda plan: (
        "loss chunked: logits of the whole vocabulary are in memory at once"
        if plan.loss == "chunked"
        else None
    ),
    "compress_gradients": _describe_compression,
    "bucket_mib": _describe_buckets,
    "lora_rank": _describe_lora,
}


def remaining_options(plan: Plan, tool: str, expressed: Collection[str]) -> list[str]:
    """Return a sentence for each non-default option that the configuration does not express.

    `expressed` names the fields of the plan that it does express.
    """
    found = {name: say(plan) for name, say in _SENTENCES.items() if name not in expressed}
    return [
        Replacement(
            f"{sentence}. {tool} has no setting for it.", **{name: Plan.model_fields[name].default}
        )
        for name, sentence in found.items()
        if sentence
    ]


def no_sequence_parallel(plan: Plan, tool: str) -> list[str]:
    """Explain that a tool's tensor parallelism does not split sequences."""
    if plan.tp == 1 or not plan.sequence_parallel:
        return []
    return [f"sequence_parallel: in {tool}, tp does not split sequences between its matmuls."]


def splits_backward(plan: Plan) -> bool:
    """Return whether the pipeline schedule delays the gradients of weights (zero bubble)."""
    found = SCHEDULES.get(plan.schedule)
    return found is not None and found.splits_backward


def closing_notes(
    request: ExportRequest, tool: str, expressed: Collection[str], advice: str
) -> list[str]:
    """Return the last notes: options without a setting, experts, and what users must set."""
    return [
        *remaining_options(request.plan, tool, expressed),
        *experts(request),
        *not_in_a_plan(request, advice),
    ]
