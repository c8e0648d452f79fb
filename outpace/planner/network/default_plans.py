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


class _Study:
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
        """Return whether a plan is known to fit on a device."""
        columns = of_plans([entry.plan], entry.global_batch, self.spec.layers)
        return bool(self.problem.fits(columns)[0])


def candidate_plans(
    problem: NetworkProblem, asked: NetworkQuestion, precision: Precision
) -> Iterator[NetworkEntry | tuple[str, str]]:
    """Yield plans of DDP, ZeRO-1, -2 and -3, ZeRO-3 in one pass, TP, PP, and TP × PP × replicas.

    TP and PP alone use all devices; a combination that equals another entry is left out. Each plan
    has the possible global batch that is nearest to the requested one. For an impossible strategy,
    its name and the reason are yielded instead.
    """
    study = _Study(problem, asked, precision)
    world, micro_batch = study.world, study.micro_batch
    for title, strategy, axis in (
        ("DDP", "ddp", "dp_replicate"),
        ("ZeRO-1", "zero1", "dp_shard"),
        ("ZeRO-2", "zero2", "dp_shard"),
        ("ZeRO-3", "zero3", "dp_shard"),
    ):
        yield _entry(study, title, {"strategy": strategy, axis: world, "micro_batch": micro_batch})
    whole = max(1, round(study.global_batch / world))
    if whole > micro_batch:
        values = {"strategy": "zero3", "dp_shard": world, "micro_batch": whole}
        yield _entry(study, "ZeRO-3, 1 pass", values)
    alone = [_tensor(study), _pipeline(study)] if world > 1 else []
    yield from alone
    product = _product(study)
    shown = {"replicas", *(one.title for one in alone if isinstance(one, NetworkEntry))}
    title = product.title if isinstance(product, NetworkEntry) else product[0]
    if world == 1 or title.removesuffix(f" {world}") not in shown:
        yield product


def _entry(study: _Study, title: str, values: dict[str, Any]) -> NetworkEntry | tuple[str, str]:
    try:
        plan = Plan.parse({**study.common, **values}, title)
    except BadInputError as error:
        return title, str(error)
    per_pass = plan.samples_per_pass * plan.data_parallel
    batch = max(1, round(study.global_batch / per_pass)) * per_pass
    return NetworkEntry(title, plan, batch)


def _tensor(study: _Study) -> NetworkEntry | tuple[str, str]:
    shared = {name: getattr(study.spec, name) for name in ("heads", "kv_heads", "ffn")}
    odd = [f"{size} {name}" for name, size in shared.items() if size % study.world]
    if odd:
        return "TP", f"{study.world} devices cannot share {' and '.join(odd)} evenly"
    values = {"strategy": "tp", "tp": study.world, "micro_batch": study.micro_batch}
    return _entry(study, "TP", values)


def _pipeline(study: _Study) -> NetworkEntry | tuple[str, str]:
    if study.world > study.spec.layers:
        return "PP", f"{study.spec.layers} layers are fewer than {study.world} devices"
    count = max(study.world, round(study.global_batch / study.micro_batch))
    return _entry(study, "PP", {"strategy": "1f1b", "pp": study.world, "pp_microbatches": count,
                                "micro_batch": study.micro_batch})  # fmt: skip


def _product(study: _Study) -> NetworkEntry | tuple[str, str]:
    """Combine TP within a node, the fewest stages that fit, and replicas on all other devices."""
    spec, world = study.spec, study.world
    tp = study.tp or math.gcd(study.per_node, spec.heads, spec.kv_heads, spec.ffn)
    if world % tp:
        return PRODUCT, f"tp {tp} does not divide {world} devices"
    stages = [n for n in range(1, min(world // tp, spec.layers) + 1) if world // tp % n == 0]
    if study.pp:
        stages = [study.pp]
    found: NetworkEntry | tuple[str, str] = (PRODUCT, "no number of stages divides the devices")
    for pp in stages:
        if world % (tp * pp):
            return PRODUCT, f"tp {tp} × pp {pp} do not divide {world} devices"
        replicas = world // tp // pp
        samples = round(study.global_batch / (replicas * study.micro_batch))
        axis_values = {"tp": tp, "pp": pp, "dp_replicate": replicas}
        sizes = (("TP", tp), ("PP", pp), ("replicas", replicas))
        title = " × ".join(f"{name} {size}" for name, size in sizes if size > 1)
        found = _entry(study, title or "one device", {
            "strategy": "3d", "micro_batch": study.micro_batch,
            "pp_microbatches": max(pp, samples) if pp > 1 else 1, **axis_values,
        })  # fmt: skip
        if isinstance(found, NetworkEntry) and study.fits(found):
            return found
    return found
