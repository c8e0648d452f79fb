"""Plans that `outpace network` compares by default, one or more per strategy."""

import math
from collections.abc import Iterator
from typing import Any

from outpace.planner.network.requirement import NetworkEntry, NetworkProblem
from outpace.planner.network.site import NetworkQuestion
from outpace.planner.plan_columns import of_plans
from outpace.records.errors import BadInputError
from outpace.records.optimizers import default_optimizer
from outpace.records.plan import Plan
from outpace.records.precisions import Precision

PRODUCT = "TP × PP × replicas"


class _PlanContext:
    """Values common to all plans: the request, the model and the machine."""

    def __init__(
        self, problem: NetworkProblem, asked: NetworkQuestion, precision: Precision
    ) -> None:
        self.problem, self.spec = problem, problem.spec
        self.per_node, self.world = problem.cluster.fabric.per_node, problem.cluster.devices
        self.micro_batch, self.tp, self.pp = asked.micro_batch, asked.tp, asked.pp
        self.global_batch = asked.global_batch or self.world * asked.micro_batch
        self.common: dict[str, Any] = {
            "precision": precision,
            "optimizer": default_optimizer(precision),
            "checkpointing": asked.checkpointing,
        }

    def fits(self, entry: NetworkEntry) -> bool:
        columns = of_plans([entry.plan], entry.global_batch, self.spec.layers)
        return bool(self.problem.fits(columns)[0])


def candidate_plans(
    problem: NetworkProblem, asked: NetworkQuestion, precision: Precision
) -> Iterator[NetworkEntry | tuple[str, str]]:
    """Yield one plan for each of several strategies, to compare the networks that they need.

    The strategies are DDP, ZeRO-1, ZeRO-2, ZeRO-3, ZeRO-3 without gradient accumulation, TP over
    all devices, PP over all devices, and TP × PP × replicas. The last is left out if it equals
    another entry. Each plan has the possible global batch that is nearest to the requested one. For
    an impossible strategy, its name and the reason are yielded instead.
    """
    context = _PlanContext(problem, asked, precision)
    world, micro_batch = context.world, context.micro_batch
    for title, strategy, axis in (
        ("DDP", "ddp", "dp_replicate"),
        ("ZeRO-1", "zero1", "dp_shard"),
        ("ZeRO-2", "zero2", "dp_shard"),
        ("ZeRO-3", "zero3", "dp_shard"),
    ):
        yield _make_entry(
            context, title, {"strategy": strategy, axis: world, "micro_batch": micro_batch}
        )
    whole = max(1, round(context.global_batch / world))
    if whole > micro_batch:
        values = {"strategy": "zero3", "dp_shard": world, "micro_batch": whole}
        yield _make_entry(context, "ZeRO-3, 1 pass", values)
    alone = [_tensor_parallel_entry(context), _pipeline_entry(context)] if world > 1 else []
    yield from alone
    product = _combined_entry(context)
    shown = {"replicas", *(one.title for one in alone if isinstance(one, NetworkEntry))}
    title = product.title if isinstance(product, NetworkEntry) else product[0]
    if world == 1 or title.removesuffix(f" {world}") not in shown:
        yield product


def _make_entry(
    context: _PlanContext, title: str, values: dict[str, Any]
) -> NetworkEntry | tuple[str, str]:
    """Return the plan's entry, or its title and the reason why it is impossible."""
    try:
        plan = Plan.parse({**context.common, **values}, title)
    except BadInputError as error:
        return title, str(error)
    per_pass = plan.samples_per_pass * plan.data_parallel
    batch = max(1, round(context.global_batch / per_pass)) * per_pass
    return NetworkEntry(title, plan, batch)


def _tensor_parallel_entry(context: _PlanContext) -> NetworkEntry | tuple[str, str]:
    shared = {name: getattr(context.spec, name) for name in ("heads", "kv_heads", "ffn")}
    odd = [f"{size} {name}" for name, size in shared.items() if size % context.world]
    if odd:
        return "TP", f"{context.world} devices cannot share {' and '.join(odd)} evenly"
    values = {"strategy": "tp", "tp": context.world, "micro_batch": context.micro_batch}
    return _make_entry(context, "TP", values)


def _pipeline_entry(context: _PlanContext) -> NetworkEntry | tuple[str, str]:
    if context.world > context.spec.layers:
        return "PP", f"{context.spec.layers} layers are fewer than {context.world} devices"
    count = max(context.world, round(context.global_batch / context.micro_batch))
    return _make_entry(
        context, "PP", {"strategy": "1f1b", "pp": context.world, "pp_microbatches": count,
                        "micro_batch": context.micro_batch}
    )  # fmt: skip


def _combined_entry(context: _PlanContext) -> NetworkEntry | tuple[str, str]:
    """Combine TP within a node, the fewest stages that fit, and replicas on all other devices."""
    spec, world = context.spec, context.world
    tp = context.tp or math.gcd(context.per_node, spec.heads, spec.kv_heads, spec.ffn)
    if world % tp:
        return PRODUCT, f"tp {tp} does not divide {world} devices"
    stages = [n for n in range(1, min(world // tp, spec.layers) + 1) if world // tp % n == 0]
    if context.pp:
        stages = [context.pp]
    found: NetworkEntry | tuple[str, str] = (PRODUCT, "no number of stages divides the devices")
    for pp in stages:
        if world % (tp * pp):
            return PRODUCT, f"tp {tp} × pp {pp} do not divide {world} devices"
        replicas = world // tp // pp
        samples = round(context.global_batch / (replicas * context.micro_batch))
        axis_values = {"tp": tp, "pp": pp, "dp_replicate": replicas}
        sizes = (("TP", tp), ("PP", pp), ("replicas", replicas))
        title = " × ".join(f"{name} {size}" for name, size in sizes if size > 1)
        found = _make_entry(context, title or "one device", {
            "strategy": "3d", "micro_batch": context.micro_batch,
            "pp_microbatches": max(pp, samples) if pp > 1 else 1, **axis_values,
        })  # fmt: skip
        if isinstance(found, NetworkEntry) and context.fits(found):
            return found
    return found
