"""Costs of plans on this job's ranks: memory by accounts, time by the planner's model."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from outpace.jobs.machine_file import find_probe, used_machine
from outpace.jobs.memory.trace_worker import AccountSummary, TraceRequest
from outpace.planner.fit.cost import Cost, Predict
from outpace.planner.pipeline.stages import representatives
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator
from outpace.records.machine import Machine
from outpace.records.memory import Kind
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

if TYPE_CHECKING:
    from outpace.planner.step_time.adapters import Adapters

Account = Callable[[TraceRequest], AccountSummary]
_MIB = 1 << 20

# What neither live tensors nor an allocator's rules show: other streams' pieces, kernels' own.
_SHARE = 0.05
# glibc keeps pieces of up to 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX) on its heap until the watch over
# the limit has it give them back; by then about 100 MiB are there, where a model has as much.
_HEAP_BYTES = 3 * 32 * _MIB
# Code that is loaded only for the optimizer, for saving and for exporting.
_LATER_CODE_BYTES = 32 * _MIB
# Of a number in 4 bits, with a scale of 8 for each 64 and one of 32 for each 256 of these.
_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


def slack_bytes(tensor_bytes: int, device: torch.device) -> int:
    """Return the memory of a process besides the tensors live at its peak."""
    share = round(_SHARE * tensor_bytes)
    if device.type != "cpu":
        return share
    return share + min(_HEAP_BYTES, tensor_bytes) + _LATER_CODE_BYTES


@dataclass(frozen=True)
class JobSite:
    """Environment of a job's ranks; `held_bytes` is the memory that the process holds besides the
    training's.
    """

    device: torch.device
    accelerator: Accelerator | None
    ranks_per_host: int
    held_bytes: int


def predictor(
    account: Account,
    settings: TrainSettings,
    spec: ModelSpec,
    seq_len: int,
    site: JobSite,
    machine: Machine,
) -> Predict:
    """Return a predictor of plans' costs for this model. The peak is that of the fullest rank, with
    slack.
    """
    known: dict[Plan, Cost] = {}
    # Most runs ask for no plan's cost, and would wait for the planner to be loaded.
    timer = cache(lambda: step_timer(settings, spec, seq_len, site, machine))

    def predict(plan: Plan) -> Cost:
        if plan not in known:
            cost = _cost(account, settings, spec, plan, seq_len, site)
            cost = replace(cost, step_s=timer()(plan))
            slack = site.held_bytes + slack_bytes(cost.tensor_bytes, site.device)
            known[plan] = replace(cost, peak_memory_bytes=cost.peak_memory_bytes + slack)
        return known[plan]

    return predict


def accounts_to_ask(
    settings: TrainSettings, spec: ModelSpec, plan: Plan, seq_len: int, site: JobSite
) -> list[TraceRequest]:
    """Return the ranks whose accounts determine that of a plan."""
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
        step_s=math.nan,
        tensor_bytes=max(*(one.peak_memory_bytes for one in found), *saved),
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


def step_timer(
    settings: TrainSettings, spec: ModelSpec, seq_len: int, site: JobSite, machine: Machine
) -> Callable[[Plan], float]:
    """Return the planner's time of a plan's step, on this machine as probed or as detected."""
    from outpace.planner.calibration.cluster import of_host, of_probe
    from outpace.planner.calibration.fit_rates import steps_s
    from outpace.planner.model.outline import classifier_outline, outline
    from outpace.planner.plan_batch import of_plans
    from outpace.planner.step_time.setup import StepTimeQuestion

    ranks = site.ranks_per_host
    used = used_machine(machine, site.device)
    probed = find_probe(used)
    try:
        cluster = of_host(used, ranks) if probed is None else of_probe(probed, ranks)
    except BadInputError:  # an accelerator of which nothing is known: as its host, which is slower
        cluster = of_host(machine.model_copy(update={"devices": ()}), ranks)
    model = outline(spec, settings.model)
    if settings.task == "classify":
        model = classifier_outline(model)
    question = StepTimeQuestion(model, seq_len, cluster.device, cluster.fabric)

    def step_s(plan: Plan) -> float:
        asked = replace(question, adapters=adapters_of(plan, spec))
        columns = of_plans([plan], settings.global_batch, model.layers)
        return float(steps_s(asked, columns)[0])

    return step_s


def adapters_of(plan: Plan, spec: ModelSpec) -> "Adapters | None":
    """Return a plan's adapters as the planner has them; None where all weights are trained."""
    from outpace.planner.step_time.adapters import Adapters, Target

    if plan.lora_rank is None:
        return None
    heads = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    of = {"qkv": heads, "out": {"out": 1}, "up": {"up": 1, **({"gate": 1} if spec.gated else {})},
          "down": {"down": 1}}  # fmt: skip
    targets = {}
    for name, parts in of.items():
        on = [part for part in parts if {part, "all"} & set(plan.lora_targets)]
        if on:
            share = sum(parts[part] for part in on) / sum(parts.values())
            targets[name] = Target(len(on), share)
    return Adapters(plan.lora_rank, targets, _NF4_BYTES if plan.base == "nf4" else None)
