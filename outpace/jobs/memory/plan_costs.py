"""Costs of plans on this job's ranks, from memory accounts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from outpace.jobs.defaults import find_in_catalog
from outpace.jobs.memory.trace_worker import AccountSummary, TraceRequest
from outpace.planner.communication.volume import step_traffic
from outpace.planner.fit.cost import Cost, CostRates, Predict
from outpace.planner.model.flops import parameter_count
from outpace.planner.pipeline.stages import representatives
from outpace.records.hardware import Accelerator
from outpace.records.machine import Machine
from outpace.records.memory import Kind
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

Account = Callable[[TraceRequest], AccountSummary]
_MIB = 1 << 20

# What neither live tensors nor an allocator's rules show: other streams' pieces, kernels' own.
_SHARE = 0.05
# glibc keeps pieces of up to 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX) on its heap until the watch over
# the limit has it give them back; by then about 100 MiB are there, where a model has as much.
_HEAP_BYTES = 3 * 32 * _MIB
# Code that is loaded only for the optimizer, for saving and for exporting.
_LATER_CODE_BYTES = 32 * _MIB
# Shares of a datasheet's peaks that training reaches, and what is assumed where there is none.
_OF_PEAK, _OF_BANDWIDTH = 0.5, 0.7
_CORE_FLOPS_PER_S, _HOST_BYTES_PER_S = 40e9, 10e9
_SLOW_BYTES_PER_S = {"cpu": 1e9, "cuda": 20e9}
# Moments of AdamW in fp32, which are read and written once a step where they lie elsewhere.
_STATE_BYTES = 8


def slack_bytes(tensor_bytes: int, device: torch.device) -> int:
    """Return the memory of a process besides the tensors live at its peak."""
    share = round(_SHARE * tensor_bytes)
    if device.type != "cpu":
        return share
    return share + min(_HEAP_BYTES, tensor_bytes) + _LATER_CODE_BYTES


@dataclass(frozen=True)
class JobSite:
    """Surroundings of a job's ranks; `held_bytes` is what the process holds besides what it
    trains.
    """

    device: torch.device
    accelerator: Accelerator | None
    ranks_per_host: int
    held_bytes: int


def predictor(
    account: Account, settings: TrainSettings, spec: ModelSpec, seq_len: int, site: JobSite
) -> Predict:
    """Return a predictor of plans' costs for this model. The peak is the fullest rank's, with
    slack.
    """
    known: dict[Plan, Cost] = {}

    def predict(plan: Plan) -> Cost:
        if plan not in known:
            cost = _cost(account, settings, spec, plan, seq_len, site)
            slack = site.held_bytes + slack_bytes(cost.tensor_bytes, site.device)
            known[plan] = replace(cost, peak_memory_bytes=cost.peak_memory_bytes + slack)
        return known[plan]

    return predict


def accounts_to_ask(
    settings: TrainSettings, spec: ModelSpec, plan: Plan, seq_len: int, site: JobSite
) -> list[TraceRequest]:
    """Return the ranks whose accounts determine a plan's."""
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


def _cost(
    account: Account,
    settings: TrainSettings,
    spec: ModelSpec,
    plan: Plan,
    seq_len: int,
    site: JobSite,
) -> Cost:
    found = [account(ask) for ask in accounts_to_ask(settings, spec, plan, seq_len, site)]
    saved = [_save_bytes(one, plan, site.device) for one in found]
    fullest = max(found, key=lambda one: one.needed_bytes)
    return Cost(
        peak_memory_bytes=max(fullest.needed_bytes, *saved),
        tensor_bytes=max(*(one.peak_memory_bytes for one in found), *saved),
        flops=max(one.flops for one in found),
        bytes_moved=max(one.bytes_moved for one in found),
        slow_bytes=_sent_bytes(plan, spec, seq_len, settings.global_batch)
        + _offloaded_bytes(plan, spec),
        by_kind=fullest.by_kind,
    )


def _save_bytes(found: AccountSummary, plan: Plan, device: torch.device) -> int:
    """Return the host memory that saving needs: state, and a copy unless that is on disk
    already.
    """
    kinds: tuple[Kind, ...] = ("weights", "optimizer state")
    state = sum(found.by_kind.get(kind, 0) for kind in kinds)
    on_disk = "disk" in (plan.offload_optimizer, plan.offload_parameters)
    copied = device.type == "cpu" and not on_disk and plan.lora_rank is None
    return 2 * state if copied else state


def _sent_bytes(plan: Plan, spec: ModelSpec, seq_len: int, global_batch: int) -> int:
    """Return the bytes sent, by formula; recomputation adds a few."""
    plain = plan.model_copy(
        update={"checkpointing": "none", "checkpoint_every": 1, "checkpoint_layers": ()}
    )
    tally = step_traffic(plain, spec, global_batch=global_batch, seq_len=seq_len, rank=0)
    return 0 if tally is None else tally.bytes


def _offloaded_bytes(plan: Plan, spec: ModelSpec) -> int:
    """Return the bytes of offloaded optimizer state, both ways."""
    if plan.offload_optimizer == "none":
        return 0
    return 2 * _STATE_BYTES * parameter_count(spec) // (plan.dp_shard * plan.tp * plan.pp)


def rates(plan: Plan, machine: Machine, device: torch.device) -> CostRates:
    """Return the rates of one rank: from the catalog's entry for its device, else assumed."""
    slow = _SLOW_BYTES_PER_S.get(device.type, 1e9)
    if device.type == "cuda":
        known = find_in_catalog(machine, device)
        if known is not None:
            peaks = {str(dtype): rate for dtype, rate in known.peak.flops_per_s.items()}
            peak = peaks.get(plan.precision.split("-")[0], min(peaks.values()))
            return CostRates(_OF_PEAK * peak, _OF_BANDWIDTH * known.memory_bytes_per_s, slow)
        return CostRates(10e12, 500e9, slow)
    return CostRates(_CORE_FLOPS_PER_S * machine.host_cores, _HOST_BYTES_PER_S, slow)
