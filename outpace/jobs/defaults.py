"""Defaults of a run: device, layout, length and folder, derived from the settings."""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import torch

from outpace.catalog.accelerators import find_accelerator
from outpace.interop.models import names_code
from outpace.jobs.micro_batch import resolve_micro_batches
from outpace.records.axes import ProductSchedule, count_servers, fill_axes, schedule_of
from outpace.records.compiled import COMPILED, graph_obstacle
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator
from outpace.records.machine import Machine
from outpace.records.optimizers import OPTIMIZER_TRAITS, default_optimizer
from outpace.records.plan import AXES, POWERSGD_LEAST_START, Axis, Plan, Strategy
from outpace.records.precisions import LEVELS, Precision
from outpace.records.ranks import Ranks
from outpace.records.run import RUN_FILE
from outpace.records.settings import DEFAULT_SEQ_LEN, TrainSettings
from outpace.training.precision import default_precision
from outpace.training.schedule import warmup_steps

DEFAULT_STEPS = 70
# Samples of a default evaluation, independent of the global batch so that runs are comparable.
DEFAULT_EVAL_SAMPLES = 128
DEFAULT_TASK_EPOCHS = 3.0  # as for BERT (arXiv 1810.04805, §A.3) and in run_glue
RANDOM_LR = 1e-3
STORED_LR = 5e-5  # as in transformers.Trainer
LORA_LR = 2e-4  # Dettmers et al., arXiv 2305.14314, table 9: 7B and 13B

_MANY_PASSES = 10  # how often a step may read the data without a note


def resolve_device(settings: TrainSettings, ranks: Ranks) -> torch.device:
    """Return this rank's device. Raises BadInputError if the machine does not have it."""
    choice = settings.device
    if choice == "auto":
        if torch.cuda.is_available():
            choice = "cuda"
        elif torch.backends.mps.is_available() and ranks.world_size == 1:
            choice = "mps"
        else:
            choice = "cpu"
    if choice == "cuda":
        return _select_cuda_device(ranks)
    if choice == "mps" and not torch.backends.mps.is_available():
        raise BadInputError("--device mps: this machine has no Metal device. Use --device cpu.")
    if choice == "mps" and ranks.world_size > 1:
        raise BadInputError("--device mps trains on a single process. Use --nproc 1.")
    for name in ("pin_memory", "memory_snapshot"):
        if getattr(settings, name):
            flag = "--" + name.replace("_", "-")
            raise BadInputError(f"{flag} needs a CUDA device, but the device is {choice}.")
    return torch.device(choice)


def _select_cuda_device(ranks: Ranks) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise BadInputError("--device cuda: no CUDA device is visible. Use --device cpu.")
    if ranks.local_rank >= count:
        raise BadInputError(
            f"this host has {ranks.local_world_size} processes, but {count} CUDA devices, and each "
            f"process needs its own. Use --nproc {count} or --device cpu. If a launcher shows each "
            "process only its own device (srun --gpus-per-task), make it show all of the host's "
            "(--gpus-per-node)."
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def with_axes_that_fit(
    settings: TrainSettings, ranks: Ranks, origins: Mapping[str, str], say: Callable[[str], None]
) -> TrainSettings:
    """Return the settings of a resumed run, without its old layout if that does not fit the ranks.

    A checkpoint can be loaded into any layout. Settings that the user passes now are kept.
    """
    laid_out: dict[str, int | None] = {axis: getattr(settings, axis) for axis in AXES}
    given = {axis: size for axis, size in laid_out.items() if size is not None}
    if not settings.resume or not given or any(origins.get(axis) != RUN_FILE for axis in given):
        return settings
    strategy = settings.strategy or _strategy_of_axes(settings, ranks.world_size)
    try:
        fill_axes(strategy, ranks.world_size - count_servers(
            strategy, ranks.world_size, settings.servers), laid_out)  # fmt: skip
    except BadInputError:
        dropped: dict[str, None] = dict.fromkeys(given)
        for name in ("strategy", "micro_batch", "pp_schedule", "pp_microbatches"):
            if getattr(settings, name) is not None and origins.get(name) == RUN_FILE:
                dropped[name] = None
        changed = settings.model_copy(update=dropped)
        was = " × ".join(f"{axis} {size}" for axis, size in given.items())
        now = changed.strategy or _strategy_of_axes(changed, ranks.world_size)
        say(
            f"the run's layout was {was}, which is not possible on {ranks.world_size} "
            f"process{'es' if ranks.world_size > 1 else ''}; the run resumes with {now}"
        )
        return changed
    return settings


def resolve_plan(
    settings: TrainSettings,
    ranks: Ranks,
    device: torch.device,
    machine: Machine,
    custom_model: bool = False,
) -> Plan:
    """Return the plan that the settings request. Raises BadInputError if it is impossible.

    `custom_model`: whether a live module is trained instead of the settings' model.
    """
    strategy = settings.strategy or _strategy_of_axes(settings, ranks.world_size)
    if settings.pp_schedule not in (None, strategy) and strategy != "3d":
        raise BadInputError(
            f"--pp-schedule {settings.pp_schedule}: strategy {strategy} has its own schedule, or "
            f"none. Use --strategy {settings.pp_schedule}, or set the axes: --pp and others."
        )
    precision = resolve_precision(settings, device, machine, custom_model)
    axes: dict[str, int | None] = {axis: getattr(settings, axis) for axis in AXES}
    servers = count_servers(strategy, ranks.world_size, settings.servers)
    sizes = fill_axes(strategy, ranks.world_size - servers, axes)
    schedule = schedule_of(strategy, sizes["pp"], _pipeline_schedule(settings))
    shared = {
        name: getattr(settings, name) for name in Plan.model_fields if hasattr(settings, name)
    }
    plan = Plan.parse(
        {
            **shared,
            **resolve_offload(settings),
            "strategy": strategy,
            **sizes,
            "servers": servers,
            **resolve_micro_batches(settings, schedule, sizes),
            "precision": precision,
            "compile": bool(settings.compile),
            "optimizer": settings.optimizer or default_optimizer(precision),
            "pp_schedule": _pipeline_schedule(settings),
            "powersgd_start": None,  # set once the run's length is known
        },
        "plan",
    )
    parts = plan.accumulation(settings.global_batch)  # raises if sizes do not divide evenly
    if plan.optimizer_in_backward and parts > 1:
        raise BadInputError(
            f"--optimizer-in-backward: a gradient is complete only after {parts} micro-batches, "
            f"and must be kept until then. Use --micro-batch {plan.micro_batch * parts}, or leave "
            "out --optimizer-in-backward."
        )
    if settings.compile is None and device.type == "cuda":
        return _compile_by_default(plan)
    return plan


def _compile_by_default(plan: Plan) -> Plan:
    """Enable compilation if it is the strategy's default and the rest of the plan allows it."""
    known = COMPILED.get(plan.strategy)
    if known is None or not known.by_default:
        return plan
    try:
        return Plan.parse({**plan.model_dump(), "compile": True}, "plan")
    except BadInputError:
        return plan


def takes_cuda_graphs(
    settings: TrainSettings,
    plan: Plan,
    device: torch.device,
    custom_model: bool,
    dropout: float = 0.0,
) -> bool:
    """Return whether to replay passes as CUDA graphs; by default, only in compiled runs.

    Graphs need additional memory, so they are off by default under a memory limit. `dropout` is the
    model's dropout probability. Raises BadInputError if graphs are requested but not possible.
    """
    obstacle = graph_obstacle(plan, dropout)
    if device.type != "cuda":
        obstacle = f"the device is {device.type}"
    elif custom_model:
        obstacle = "a custom model may do something different in each pass"
    if settings.cuda_graphs is None:
        tight = settings.memory_limit is not None or settings.memory_budget is not None
        return obstacle is None and plan.compile and not tight
    if settings.cuda_graphs and obstacle is not None:
        raise BadInputError(f"--cuda-graphs: {obstacle}. Leave out --cuda-graphs.")
    return settings.cuda_graphs


def resolve_precision(
    settings: TrainSettings, device: torch.device, machine: Machine, custom_model: bool = False
) -> Precision:
    """Return the requested precision (Apex levels resolved), or else the device's default."""
    asked = settings.precision
    if asked is None:
        keeps = keeps_masters(settings) and not custom_model
        return default_precision(device, machine, keeps_masters=keeps)
    return LEVELS.get(asked) or cast(Precision, asked)


def keeps_masters(settings: TrainSettings) -> bool:
    """Return whether a run may use 16-bit weights over master weights by default.

    A custom model may rely on fp32 weights, and offloading does not support master weights.
    """
    elsewhere = set(resolve_offload(settings).values()) != {"none"}
    return not elsewhere and not names_code(settings.model)


def resolve_offload(settings: TrainSettings) -> dict[str, str]:
    """Return where parameters and optimizer state are offloaded to, by the name of the setting.

    `offload` is the default of both.
    """
    both = settings.offload or "none"
    return {
        name: getattr(settings, name) or both
        for name in ("offload_parameters", "offload_optimizer")
    }


def with_powersgd_start(plan: Plan, settings: TrainSettings, total_steps: int) -> Plan:
    """Return the plan with the first step at which PowerSGD compresses gradients.

    This is the step in the settings, or the one that torch recommends: after a tenth of the run,
    but not before the peak of the learning rate. Other plans are returned unchanged. Raises
    BadInputError if the run ends before this step.
    """
    if plan.compress_gradients != "powersgd" or plan.world_size == 1:
        return plan
    advised = max(total_steps // 10, warmup_steps(settings, total_steps), POWERSGD_LEAST_START)
    start = settings.powersgd_start or advised
    if start >= total_steps:
        raise BadInputError(
            f"--compress-gradients powersgd starts after {start} steps, but the run has "
            f"{total_steps}, so nothing would be compressed. Train for more steps, or start "
            f"earlier with --powersgd-start, at least {POWERSGD_LEAST_START}."
        )
    return plan.model_copy(update={"powersgd_start": start})


def _pipeline_schedule(settings: TrainSettings) -> ProductSchedule:
    return settings.pp_schedule or "1f1b"


def _strategy_of_axes(settings: TrainSettings, world_size: int) -> Strategy:
    """Return the strategy that the given axes imply; `ddp` without axes, `single` on 1 process."""
    if world_size == 1:
        return "single"
    given = {axis for axis in AXES if getattr(settings, axis) not in (None, 1)}
    alone: dict[Axis, Strategy] = {
        "pp": _pipeline_schedule(settings),
        "dp_replicate": "ddp",
        "dp_shard": "zero3",
        "cp": "cp",
        "tp": "tp",
    }
    if len(given) == 1:
        return alone[given.pop()]
    if given == {"dp_replicate", "dp_shard"}:
        return "hsdp"
    return "3d" if given else "ddp"


def note_passes(global_batch: int, samples: int) -> str | None:
    """Describe how many times each step reads the data; None if fewer than ten."""
    passes = global_batch / max(samples, 1)
    if passes < _MANY_PASSES:
        return None
    return (
        f"each step reads the {samples:,} samples of the data {passes:,.0f} times "
        f"(--global-batch {global_batch})"
    )


def resolve_lr(settings: TrainSettings, stored: bool) -> float:
    """Return the peak learning rate: --lr, or the default for LoRA, `stored` or random weights."""
    if settings.lr is not None:
        return settings.lr
    if settings.lora_rank is not None:
        lr = LORA_LR
    else:
        lr = STORED_LR if stored else RANDOM_LR
    return lr if settings.optimizer is None else lr * OPTIMIZER_TRAITS[settings.optimizer].lr_factor


def resolve_seq_len(settings: TrainSettings, positions: int | None) -> int:
    """Return the tokens per sample. Raises BadInputError if they exceed the model's positions."""
    if settings.seq_len is None:
        return min(DEFAULT_SEQ_LEN, positions or DEFAULT_SEQ_LEN)
    if positions is not None and settings.seq_len > positions:
        raise BadInputError(
            f"--seq-len {settings.seq_len} is longer than the model's {positions} positions. "
            f"Use --seq-len {positions} or less, or a model with more positions."
        )
    return settings.seq_len


def resolve_steps(settings: TrainSettings, samples: int, seq_len: int | None) -> int:
    """Return the number of steps for --steps, --tokens, or --epochs of `samples` samples."""
    if settings.tokens is not None:
        if seq_len is None:
            raise BadInputError(
                "--tokens needs data that consists of tokens. Use --steps or --epochs."
            )
        return math.ceil(settings.tokens / (settings.global_batch * seq_len))
    epochs = settings.epochs
    if settings.task != "pretrain" and settings.steps is None:
        epochs = epochs or DEFAULT_TASK_EPOCHS
    if epochs is not None:
        return max(1, math.ceil(epochs * samples / settings.global_batch))
    return settings.steps or DEFAULT_STEPS


def resolve_out(settings: TrainSettings, model: str) -> Path:
    """Return the run's directory: --out, or a new one named after the model."""
    if settings.out is not None:
        return settings.out
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(model).name)
    base = Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def find_in_catalog(machine: Machine, device: torch.device) -> Accelerator | None:
    """Return the catalog's entry for a CUDA device, with the device's memory; None if unknown."""
    if device.type != "cuda":
        return None
    present = machine.devices[device.index or 0]
    known = find_accelerator(present.name, present.memory_bytes)
    if known is None or present.memory_bytes is None:
        return known
    return known.model_copy(update={"usable_bytes": present.memory_bytes})


def peak_flops_per_s(plan: Plan, machine: Machine, device: torch.device) -> float | None:
    """Return the peak dense FLOP/s of all devices together in the plan's dtype; None if unknown."""
    known = find_in_catalog(machine, device)
    if known is None:
        return None
    dtype = plan.precision.split("-")[0]
    if dtype == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = "tf32"
    rates: Mapping[str, float] = {str(key): rate for key, rate in known.peak.flops_per_s.items()}
    peak = rates.get(dtype)
    return None if peak is None else peak * plan.world_size
