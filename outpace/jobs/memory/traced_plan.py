"""Estimates with traced memory: the real model under fake tensors, on the fullest rank."""

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.models import without_weights
from outpace.interop.models import open_model
from outpace.jobs.memory.query import account_of_fullest_rank, ask_of_module
from outpace.jobs.memory.trace_worker import TraceRequest, account_of, require_traced_kernels
from outpace.planner.pipeline.stages import representatives
from outpace.planner.problem import PlanningProblem
from outpace.records.errors import BadInputError
from outpace.records.estimate import RankedPlan
from outpace.records.memory import MemoryAccount
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings


def use_traced_memory(planned: RankedPlan, model: str, job: PlanningProblem) -> RankedPlan:
    """Return the plan with its memory from a trace instead of from the planner's formula.

    Raises BadInputError for plans and models that outpace cannot train.
    """
    if planned.untrained is not None:
        raise BadInputError(
            f"--depth trace runs the model as outpace trains it, but {planned.untrained}. "
            "Leave out --depth."
        )
    account = fullest(planned.plan, model, job)
    needed = account.device_bytes
    kinds = {str(kind): size for kind, size in account.peak.by_kind.items()}
    away = kinds.pop("offloaded", 0) * min(planned.plan.world_size, job.cluster.fabric.per_node)
    kinds["allocator and libraries"] = max(0, needed - sum(kinds.values()))
    changed = {"depth": "trace", "peak_memory_bytes": needed, "memory": kinds}
    if not planned.estimate.disk_offloaded_bytes:
        # Host memory need not peak at the same time as device memory.
        changed["host_offloaded_bytes"] = max(away, planned.estimate.host_offloaded_bytes)
    estimate = planned.estimate.model_copy(update=changed)
    return planned.model_copy(update={"estimate": estimate})


def fullest(
    plan: Plan, model: str, job: PlanningProblem, dropout: float | None = None
) -> MemoryAccount:
    """Trace the ranks of a plan, and return the memory of the one that needs the most.

    `dropout` replaces the model's. Raises BadInputError if the plan or model cannot be traced.
    """
    opened, wanted = open_model(without_weights(model)), job.wanted
    device = job.cluster.device
    accelerator = ACCELERATORS.get(device.name)
    require_traced_kernels(accelerator)
    if accelerator is not None and device.memory_bytes is not None:
        accelerator = accelerator.model_copy(update={"usable_bytes": device.memory_bytes})
    per_host = min(plan.world_size, job.cluster.fabric.per_node)
    said = {"model": model, "precision": plan.precision}
    if opened.build is not None:
        settings = TrainSettings.parse({**said, "seq_len": wanted.seq_len}, "plan")
        return account_of_fullest_rank(
            ask_of_module(opened.build, settings, plan, wanted.global_batch, accelerator, per_host)
        )
    assert opened.spec is not None
    own = opened.spec if dropout is None else opened.spec.model_copy(update={"dropout": dropout})
    settings = TrainSettings.parse(said, "plan")
    ask = TraceRequest(
        spec=own,
        plan=plan,
        seq_len=wanted.seq_len,
        accumulation=plan.accumulation(wanted.global_batch),
        rank=0,
        settings=settings,
        accelerator=accelerator,
        ranks_per_host=per_host,
    )
    accounts = [account_of(ask.model_copy(update={"rank": rank})) for rank in representatives(plan)]
    return max(accounts, key=lambda account: account.needed_bytes)
