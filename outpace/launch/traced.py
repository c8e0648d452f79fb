"""An estimate with its memory traced: the real model under fake tensors, on its fullest rank."""

from outpace.catalog.accelerators import ACCELERATORS
from outpace.interop.models import open_model
from outpace.launch.tracing import Ask, account_of
from outpace.planner.columns import of_plans
from outpace.planner.job import Job
from outpace.planner.memory import peak_bytes
from outpace.planner.stages import representatives
from outpace.records.errors import BadInputError
from outpace.records.estimate import Planned
from outpace.records.memory import MemoryAccount
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings


def traced(planned: Planned, model: str, job: Job) -> Planned:
    """With the memory of a trace in place of the formula's.

    Raises BadInputError for plans and models that outpace does not train.
    """
    if planned.untrained is not None:
        raise BadInputError(
            f"--depth trace runs what outpace trains, but {planned.untrained}. Leave it out."
        )
    account = fullest(planned.plan, model, job)
    needed = account.needed_bytes + beside_tensors(planned.plan, job)
    kinds = {str(kind): size for kind, size in account.peak.by_kind.items()}
    away = kinds.pop("offloaded", 0) * min(planned.plan.world_size, job.cluster.fabric.per_node)
    kinds["allocator and libraries"] = max(0, needed - sum(kinds.values()))
    changed = {"depth": "trace", "peak_memory_bytes": needed, "memory": kinds}
    if not planned.estimate.disk_offloaded_bytes:
        # At the peak of the device's memory the host's need not be at its own.
        changed["host_offloaded_bytes"] = max(away, planned.estimate.host_offloaded_bytes)
    estimate = planned.estimate.model_copy(update=changed)
    return planned.model_copy(update={"estimate": estimate})


def fullest(plan: Plan, model: str, job: Job, dropout: float | None = None) -> MemoryAccount:
    """The traced account of the rank with the most, by default with the model's own dropout.

    Raises BadInputError where it cannot be traced.
    """
    opened = open_model(model)
    if opened.spec is None:
        raise BadInputError(f"{opened.name} is a model of one's own, which is not traced.")
    own = opened.spec if dropout is None else opened.spec.model_copy(update={"dropout": dropout})
    wanted = job.wanted
    settings = TrainSettings.parse({"model": model, "precision": plan.precision}, "plan")
    ask = Ask(
        spec=own,
        plan=plan,
        seq_len=wanted.seq_len,
        accumulation=plan.accumulation(wanted.global_batch),
        rank=0,
        settings=settings,
        accelerator=ACCELERATORS.get(job.cluster.device.name),
        ranks_per_host=min(plan.world_size, job.cluster.fabric.per_node),
    )
    accounts = [account_of(ask.model_copy(update={"rank": rank})) for rank in representatives(plan)]
    return max(accounts, key=lambda account: account.needed_bytes)


def beside_tensors(plan: Plan, job: Job) -> int:
    """Bytes that a trace does not see: contexts and buffers of libraries, by the formula."""
    wanted, kind = job.wanted, job.cluster.device.kind
    columns = of_plans([plan], wanted.global_batch, job.outline.layers)
    peak = peak_bytes(job.outline, wanted.seq_len, columns, kind)
    return round(float(job.required_bytes(columns)[0] - peak[0]))
