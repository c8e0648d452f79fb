"""Costs of plans on this job's ranks, from memory accounts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from outpace.jobs.memory.trace_worker import AccountSummary, TraceRequest
from outpace.planner.fit.cost import Cost, Predict
from outpace.planner.pipeline.stages import representatives
from outpace.records.hardware import Accelerator
from outpace.records.memory import Kind
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

Account = Callable[[TraceRequest], AccountSummary]
_MIB = 1 << 20

# Memory that the allocator's rules do not model (other streams, kernels), as a fraction of the live
# tensors.
_SHARE = 0.05
# glibc keeps freed chunks of up to 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX) on its heap until the memory
# monitor releases them. If the model is large enough, they add up to about 100 MiB by then.
_HEAP_BYTES = 3 * 32 * _MIB
# Memory for code that is loaded later: for the optimizer, saving and exporting.
_LATER_CODE_BYTES = 32 * _MIB
# Largest micro-batch in tokens that is traced: 64 of the chunks in which a CPU computes logits (512
# tokens each), or 128 of a GPU's (4,096 tokens or more).
_MOST_TOKENS_CPU = 64 * 512
_MOST_TOKENS = 128 * 4096


def slack_bytes(tensor_bytes: int, device: torch.device) -> int:
    """Return the memory that a process needs beyond the tensors live at its peak."""
    share = round(_SHARE * tensor_bytes)
    if device.type != "cpu":
        return share
    return share + min(_HEAP_BYTES, tensor_bytes) + _LATER_CODE_BYTES


@dataclass(frozen=True)
class JobSite:
    """Environment of a job's ranks; `held_bytes`: memory that a process holds besides training."""

    device: torch.device
    accelerator: Accelerator | None
    ranks_per_host: int
    held_bytes: int


def predictor(
    account: Account, settings: TrainSettings, spec: ModelSpec, seq_len: int, site: JobSite
) -> Predict:
    """Return a function that predicts a plan's costs on its fullest rank, with slack."""
    known: dict[Plan, Cost] = {}

    def predict(plan: Plan) -> Cost:
        if plan not in known:
            cost = _predict_cost(account, settings, spec, plan, seq_len, site)
            slack = site.held_bytes + slack_bytes(cost.tensor_bytes, site.device)
            known[plan] = replace(cost, peak_memory_bytes=cost.peak_memory_bytes + slack)
        return known[plan]

    return predict


def accounts_to_ask(
    settings: TrainSettings, spec: ModelSpec, plan: Plan, seq_len: int, site: JobSite
) -> list[TraceRequest]:
    """Return requests to trace the ranks that may need the most memory."""
    return [
        TraceRequest(
            spec=spec,
            plan=plan,
            seq_len=seq_len,
            accumulation=plan.accumulation(settings.global_batch),
            rank=rank,
            settings=settings,
            accelerator=site.accelerator,
            ranks_per_host=site.ranks_per_host,
        )
        for rank in representatives(plan)
    ]


def account_of_samples(account: Account, ask: TraceRequest) -> AccountSummary:
    """Return a rank's traced memory; that of a large micro-batch is extrapolated from smaller ones.

    Tracing time grows with the number of chunks of logits. Once there are many chunks, each further
    sample adds the same memory and time.
    """
    tokens = _MOST_TOKENS_CPU if ask.accelerator is None else _MOST_TOKENS
    high = max(2, tokens // ask.seq_len)
    if ask.plan.micro_batch <= high:
        return account(ask)
    low = high // 2
    one, other = (account(_with_micro_batch(ask, samples)) for samples in (low, high))
    more = (ask.plan.micro_batch - low) / (high - low)

    def extrapolate(first: float, second: float) -> float:
        return first + (second - first) * more

    kinds = {**one.by_kind, **other.by_kind}
    timed = None not in (one.step_s, other.step_s)
    return AccountSummary(
        peak_memory_bytes=round(extrapolate(one.peak_memory_bytes, other.peak_memory_bytes)),
        needed_bytes=round(extrapolate(one.needed_bytes, other.needed_bytes)),
        by_kind={
            kind: round(extrapolate(one.by_kind.get(kind, 0), other.by_kind.get(kind, 0)))
            for kind in kinds
        },
        step_s=extrapolate(one.step_s or 0.0, other.step_s or 0.0) if timed else None,
    )


def _with_micro_batch(ask: TraceRequest, samples: int) -> TraceRequest:
    """Return the request with micro-batches of `samples`, and the same accumulation."""
    plan = ask.plan.model_copy(update={"micro_batch": samples})
    batch = plan.samples_per_pass * plan.data_parallel * ask.accumulation
    settings = ask.settings.model_copy(update={"global_batch": batch})
    return ask.model_copy(update={"plan": plan, "settings": settings})


def _predict_cost(
    account: Account,
    settings: TrainSettings,
    spec: ModelSpec,
    plan: Plan,
    seq_len: int,
    site: JobSite,
) -> Cost:
    asked = accounts_to_ask(settings, spec, plan, seq_len, site)
    found = [account_of_samples(account, ask) for ask in asked]
    saved = [_save_bytes(one, plan, site.device) for one in found]
    fullest = max(found, key=lambda one: one.needed_bytes)
    return Cost(
        peak_memory_bytes=max(fullest.needed_bytes, *saved),
        step_s=fullest.step_s,
        tensor_bytes=max(*(one.peak_memory_bytes for one in found), *saved),
        by_kind=fullest.by_kind,
    )


def _save_bytes(summary: AccountSummary, plan: Plan, device: torch.device) -> int:
    """Return the memory that saving a checkpoint needs: the state, and in CPU runs a copy of it."""
    kinds: tuple[Kind, ...] = ("weights", "optimizer state")
    state = sum(summary.by_kind.get(kind, 0) for kind in kinds)
    on_disk = "disk" in (plan.offload_optimizer, plan.offload_parameters)
    copied = device.type == "cpu" and not on_disk and plan.lora_rank is None
    return 2 * state if copied else state
