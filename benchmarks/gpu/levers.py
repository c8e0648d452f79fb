"""Each option for one GPU, on a model that takes little time: does it run with the same loss?"""

from functools import partial
from statistics import median
from typing import Any

from gpu.check import Check
from gpu.shapes import little
from gpu.training import train_little

_PLAIN = "plain"
_LEVERS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "fp16": {"precision": "fp16"},
    "bf16-master": {"precision": "bf16-master"},
    "bf16-master, accumulation": {"precision": "bf16-master", "micro_batch": 2},
    "bf16-pure": {"precision": "bf16-pure"},
    "fp16-master": {"precision": "fp16-master"},
    "O2": {"precision": "O2"},
    "fp8": {"precision": "fp8"},
    "fp8, compiled": {"precision": "fp8", "compile": True},
    "compiled": {"compile": True},
    "compiled, checkpointing full": {"compile": True, "checkpointing": "full"},
    "compiled, checkpointing selective": {"compile": True, "checkpointing": "selective"},
    "loss chunked": {"loss": "chunked"},
    "loss plain": {"loss": "plain"},
    "accumulation": {"micro_batch": 2},
    "checkpointing full": {"checkpointing": "full"},
    "checkpointing selective": {"checkpointing": "selective"},
    "checkpointing attention": {"checkpointing": "attention"},
    "activations in host memory": {"offload_activations": "cpu"},
    "activations in host memory, checkpointing full": {"offload_activations": "cpu",
                                                       "checkpointing": "full"},
    "optimizer in host memory": {"offload_optimizer": "cpu"},
    "optimizer on disk": {"offload_optimizer": "disk"},
    "parameters in host memory": {"offload": "cpu"},
    "parameters on disk": {"offload_parameters": "disk"},
    "adamw-foreach": {"optimizer": "adamw-foreach"},
    "adamw-for-loop": {"optimizer": "adamw-for-loop"},
    "adamw-bf16": {"optimizer": "adamw-bf16"},
    "adamw-8bit": {"optimizer": "adamw-8bit"},
    "adamw-4bit": {"optimizer": "adamw-4bit"},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
    "sgd": {"optimizer": "sgd"},
    "sgd, fp16": {"optimizer": "sgd", "precision": "fp16"},
    "optimizer in backward": {"optimizer_in_backward": True, "clip": 0.0},
    "empty cache": {"empty_cache": True},
    "workers 2": {"workers": 2},
    "dropout": {"dropout": 0.1},
    "memory": {"memory": True},
    "memory snapshot": {"memory_snapshot": True},
    "profile": {"profile": True},
    "evaluation and sample": {"measure_only": False, "eval_batches": 2, "sample_tokens": 8},
    "checkpoints": {"measure_only": False, "save_every": 2},  # with later steps in flight
    "lora": {"lora_rank": 8},
    "qlora": {"lora_rank": 8, "base": "nf4"},
}  # fmt: skip
# These models differ from the plain run's, so their losses differ too.
_MODELS: dict[str, dict[str, Any]] = {
    "window": {"family": "mistral", "sliding_window": 32},
    "gpt2 family": {"family": "gpt2", "kv_heads": 4},
}
_ON_A_CPU = ("fp32", "bf16-master", "bf16-master, accumulation", "accumulation",
             "checkpointing full", "muon", "lora", "evaluation and sample",
             "checkpoints")  # fmt: skip


def levers(check: Check) -> None:
    """Run the plain case first, then each option, and compare."""
    plain = check.row(_PLAIN, 5.0, partial(_run, check, _PLAIN, {}, None))
    beside = None if plain is None else plain["losses"]
    for name, changes in _LEVERS.items():
        if not check.small or name in _ON_A_CPU:
            check.row(name, 5.0, partial(_run, check, name, changes, beside))
    for name, changes in _MODELS.items():
        model = little(check, **changes)
        check.row(name, 5.0, partial(_run, check, name, {"model": model}, None))
    if check.cuda:
        check.row("memory limit", 5.0, lambda: _limited(check))


def _run(
    check: Check, name: str, changes: dict[str, Any], beside: list[float] | None
) -> dict[str, Any]:
    """Run briefly; `beside`: losses of the plain run from the same weights on the same data."""
    run = train_little(
        check, name, **{"precision": "bf16", "compile": False, **changes}
    )  # fmt: skip
    off = None
    if beside is not None:
        off = max(abs(one / other - 1) for one, other in zip(run.losses, beside, strict=True))
    return {
        "losses": run.losses,
        "off": off,
        "step_time_s": median(line["step_time_s"] for line in run.lines[2:]),
        "took_s": run.took_s,
        "peak_bytes": run.peak_bytes,
    }


def _limited(check: Check) -> dict[str, Any]:
    """Check that a run ends at a memory limit that is too low, and reports what would fit."""
    from outpace.records.errors import OutOfMemoryError

    try:
        train_little(check, "memory limit", precision="bf16", memory_limit="64MiB")
    except OutOfMemoryError as error:
        return {"ended": True, "message": str(error)[:400]}
    raise RuntimeError("the run reached its end within a limit of 64 MiB")
