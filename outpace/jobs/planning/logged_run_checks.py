"""Checks of a logged run against flags, model, machine and layout."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from outpace.planner.hardware.device import dtype_of
from outpace.planner.model.outline import parameters
from outpace.planner.model.outline_flops import forward_flops
from outpace.planner.problem import PlanningProblem
from outpace.records.errors import BadInputError
from outpace.records.estimate import Estimate
from outpace.records.plan import Plan
from outpace.records.precisions import PRECISION_TRAITS, PrecisionTraits
from outpace.records.training_log import LoggedRun, ObservedRun
from outpace.records.units import show_bytes, show_seconds

# Memory predictions have errors too (docs/results/accuracy.md): a run that is predicted to exceed
# the device's memory slightly may have fit.
_MEMORY_ERROR = 1.2
# A batch derived from a rate, or rounded to three digits, is not exact.
_BATCH_ERROR = 0.05
# Step times in a log include evaluations and checkpoints; rates cover only some steps.
_CLOCK_ERROR = 1.5
# A probe's best matmul is not a peak: other programs may have slowed it down.
_PROBE_ERROR = 2.0
# Trainers pad embeddings to suit their layout.
_PARAMETERS_ERROR = 0.05
_ASSUMED = ("precision", "checkpointing", "optimizer")


@dataclass(frozen=True)
class Answers:
    """Values that flags give for logged runs. `source` is the flag from which `layout` comes."""

    source: str
    layout: Mapping[str, Any]
    seq_len: int | None
    global_batch: int | None
    precision: str | None


def check_contradictions(logged: LoggedRun, answers: Answers) -> None:
    """Raise BadInputError if a flag contradicts the log."""
    own = logged.plan is not None and logged.plan.lora_rank
    if own or logged.adapters or answers.layout.get("lora_rank"):
        _refuse_adapters(logged)
    told = logged.model_dump() if logged.plan is None else logged.plan.model_dump()
    given = [
        (f"{name}={it} with {answers.source}", name, it) for name, it in answers.layout.items()
    ]
    if answers.precision is not None:
        given.append((f"--precision {answers.precision}", "precision", answers.precision))
    for flag, name, value in given:
        if told.get(name) not in (None, value) and not _has_same_matmul_dtype(logged, name, value):
            _refuse_flag(logged, f"{name}={told[name]}", flag)
    if answers.seq_len is not None and logged.seq_len not in (None, answers.seq_len):
        _refuse_flag(
            logged, f"sequences of {logged.seq_len} tokens", f"--seq-len {answers.seq_len}"
        )
    asked, batch = answers.global_batch, logged.global_batch
    if asked is not None and batch is not None and abs(asked / batch - 1) > _BATCH_ERROR:
        _refuse_flag(logged, f"{batch} sequences per step", f"--global-batch {asked}")


def _has_same_matmul_dtype(logged: LoggedRun, name: str, value: object) -> bool:
    traits: Mapping[Any, PrecisionTraits] = PRECISION_TRAITS
    if name != "precision" or logged.precision is None or value not in traits:
        return False
    return traits[value].matmuls == traits[logged.precision].matmuls


def _refuse_flag(logged: LoggedRun, in_log: str, flag: str) -> None:
    raise BadInputError(
        f"{logged.log} says {in_log}, but you gave {flag}. Leave out the flag, or pass the log "
        "that matches it."
    )


def _refuse_adapters(logged: LoggedRun) -> NoReturn:
    raise BadInputError(
        f"{logged.log}: a run with adapters (lora_rank) or frozen weights cannot correct a "
        "machine yet. Pass the log of a run that trained all weights."
    )


def check_model(logged: LoggedRun, question: PlanningProblem, plan: Plan, model: str) -> None:
    """Raise BadInputError if the log is from another model, or some weights were frozen."""
    outline = question.outline
    known = parameters(outline)
    error = 0.0 if logged.trainer == "outpace" else _PARAMETERS_ERROR
    told = logged.parameters
    trained = logged.trainable_parameters
    if told is None and trained is not None and trained > (1 + error) * known:
        told = trained
    if told is not None and abs(told / known - 1) > error:
        _refuse_model(logged, f"{told:,} parameters", f"{model} has {known:,}")
    layers = (outline.layers, *(stack.layers for stack in outline.stacks))
    if logged.layers is not None and logged.layers not in layers:
        _refuse_model(logged, f"{logged.layers} layers", f"{model} has {outline.layers}")
    if logged.hidden is not None and logged.hidden != outline.hidden:
        _refuse_model(logged, f"a hidden size of {logged.hidden}", f"{model} has {outline.hidden}")
    # Under FSDP, Trainer counts the weights of one rank.
    if trained is not None and not any(
        abs(trained * ranks / known - 1) <= error for ranks in (1, plan.dp_shard, plan.world_size)
    ):
        _refuse_adapters(logged)


def _refuse_model(logged: LoggedRun, in_log: str, in_model: str) -> NoReturn:
    raise BadInputError(
        f"{logged.log} is from a model with {in_log}, but --model {in_model}. Pass the model that "
        "was trained."
    )


def check_micro_batch(logged: LoggedRun, plan: Plan, answers: Answers, global_batch: int) -> None:
    """Raise BadInputError if the micro-batch is neither stated nor implied."""
    if logged.plan is not None or logged.micro_batch is not None or "micro_batch" in answers.layout:
        return
    ranks = plan.dp_replicate * plan.dp_shard
    if global_batch != ranks:
        raise BadInputError(
            f"{logged.log} does not state how many of the {global_batch} sequences per step each "
            f"of {ranks} data-parallel {'rank' if ranks == 1 else 'ranks'} processed at once. Pass "
            "--layout micro_batch=N, the batch size per device."
        )


def list_assumed(logged: LoggedRun, plan: Plan, answers: Answers) -> dict[str, str]:
    """Return the plan's settings that neither the log nor a flag states, by name."""
    if logged.plan is not None or answers.source == "--plan":
        return {}
    told = {name for name in _ASSUMED if getattr(logged, name, None) is not None}
    told |= answers.layout.keys() | ({"precision"} if answers.precision else set())
    return {name: str(getattr(plan, name)) for name in _ASSUMED if name not in told}


def check_possible(question: PlanningProblem, run: ObservedRun, planned: Estimate) -> None:
    """Raise BadInputError for a logged run that cannot have happened on the machine.

    Its step may be too fast, its memory more than the device has, or its layout too large.
    """
    device = question.cluster.device
    most = device.nominal_bytes or device.memory_bytes
    peak = run.peak_memory_bytes
    if most is not None and peak is not None and run.memory_kind != "resident" and peak > most:
        raise BadInputError(
            f"{run.log}: the run used {show_bytes(peak)} of a device's memory, but {device.name} "
            f"has {show_bytes(most)}. Pass the machine that it ran on with --machine."
        )
    _check_speed(question, run)
    limit = planned.memory_bytes
    if limit is not None and planned.peak_memory_bytes > _MEMORY_ERROR * limit:
        raise BadInputError(
            f"{run.log}: {question.outline.name} in this layout does not fit: it needs "
            f"{show_bytes(planned.peak_memory_bytes)}, but {device.name} has {show_bytes(limit)}. "
            "Did the run use LoRA or quantized weights? Such runs cannot correct a machine yet. "
            "Did it use recomputation (--layout checkpointing=full), more devices (--nodes, "
            "--devices-per-node), or another model (--model)? Nothing is corrected."
        )


def check_clock(logged: LoggedRun, run: ObservedRun) -> None:
    """Raise BadInputError if batch and sequence length contradict the log's step times.

    Together with batch and sequence length, the logged throughput implies a step time, which must
    agree with the logged step time or with the timestamps of the log's lines.
    """
    tokens = run.global_batch * run.seq_len
    if logged.tokens_per_s_per_device is not None:
        rate = logged.tokens_per_s_per_device
        by_rate_s = tokens / (rate * run.plan.world_size)
        told = f"{rate:,.6g} tokens per second on each of {run.plan.world_size} devices"
    elif logged.samples_per_s is not None:
        by_rate_s = run.global_batch / logged.samples_per_s
        told = f"{logged.samples_per_s:,.6g} samples per second"
    else:
        return
    least, most = logged.clock_step_s or (0.0, math.inf)
    if logged.step_time_s is not None:
        least = most = logged.step_time_s
    if least / _CLOCK_ERROR <= by_rate_s <= most * _CLOCK_ERROR:
        return
    clock_s = least if by_rate_s < least else most
    raise BadInputError(
        f"{run.log}: at {told}, a step of {run.global_batch} sequences of {run.seq_len} tokens "
        f"takes {show_seconds(by_rate_s)}, but by the log's clock it took "
        f"{show_seconds(clock_s)}. Pass the batch of a whole step, over all devices and "
        "accumulated micro-batches, with --global-batch, the length with --seq-len, or the "
        "number of devices (--nodes, --devices-per-node). Nothing is corrected."
    )


def _check_speed(question: PlanningProblem, run: ObservedRun) -> None:
    """Raise BadInputError if the step would need more than the device's peak FLOP/s.

    Only half of attention is counted, as for causal masks.
    """
    plan, device = run.plan, question.cluster.device
    dtype = dtype_of(plan.precision)
    best = device.peak_flops_per_s.get(dtype)
    if best is None:
        best = _PROBE_ERROR * device.rate(dtype)
    forward = sum(
        forward_flops(run.outline, run.seq_len, run.global_batch, attention=attention) / 2
        for attention in (False, True)
    )
    mfu = 3 * forward / run.step_time_s / best / plan.world_size
    if mfu <= 1:
        return
    devices = f"{plan.world_size} device{'' if plan.world_size == 1 else 's'}"
    raise BadInputError(
        f"{run.log}: {show_seconds(run.step_time_s)} per step is not possible: "
        f"{run.global_batch} sequences of {run.seq_len} tokens of {run.outline.name} on "
        f"{devices} would need {mfu:,.1f} times the peak of {device.name} in {dtype}, "
        f"{best / 1e12:,.0f} TFLOP/s. Was it another model (--model), shorter "
        "sequences (--seq-len), a smaller batch (--global-batch), more devices (--nodes, "
        "--devices-per-node), another precision, or a resumed run? Nothing is corrected."
    )
