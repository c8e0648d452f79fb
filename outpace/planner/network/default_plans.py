"""The plans that `outpace network` compares by default: one for each strategy."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outpace.planner.network.requirement import states_bytes
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

# A title, the plan, and the global batch nearest to what was asked for that it divides.
Entry = tuple[str, Plan, int]
PRODUCT = "TP × PP × DP"


@dataclass(frozen=True)
class NetworkStudy:
    """Values shared by all plans.

    `global_batch`: approximate samples per step; `common`: precision, checkpointing; `axes`: the
    requested tp and pp.
    """

    spec: ModelSpec
    nodes: int
    per_node: int
    global_batch: int
    micro_batch: int
    common: Mapping[str, Any]
    axes: Mapping[str, int]
    memory_bytes: int | None

    @property
    def world(self) -> int:
        """Number of all devices."""
        return self.nodes * self.per_node


def candidate_plans(study: NetworkStudy) -> Iterator[Entry | tuple[str, str]]:
    """DDP, ZeRO-1/2/3 with the same micro-batch, ZeRO-3 with all samples at once, TP, PP, and both.

    TP and PP alone are over all devices; a product that comes out as one of the others is left out.

    A pair of two texts is a strategy with the reason why it is not possible.
    """
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
    shown = {"DP", *(title for title, plan, *_ in alone if isinstance(plan, Plan))}
    if world == 1 or product[0].removesuffix(str(world)) not in shown:
        yield product


def _entry(study: NetworkStudy, title: str, values: dict[str, Any]) -> Entry | tuple[str, str]:
    try:
        plan = Plan.parse({**study.common, **values}, title)
    except BadInputError as error:
        return title, str(error)
    per_pass = plan.samples_per_pass * plan.data_parallel
    return title, plan, max(1, round(study.global_batch / per_pass)) * per_pass


def _tensor(study: NetworkStudy) -> Entry | tuple[str, str]:
    shared = {name: getattr(study.spec, name) for name in ("heads", "kv_heads", "ffn")}
    odd = [f"{size} {name}" for name, size in shared.items() if size % study.world]
    if odd:
        return "TP", f"{study.world} devices cannot share {' and '.join(odd)} evenly"
    values = {"strategy": "tp", "tp": study.world, "micro_batch": study.micro_batch}
    return _entry(study, "TP", values)


def _pipeline(study: NetworkStudy) -> Entry | tuple[str, str]:
    if study.world > study.spec.layers:
        return "PP", f"{study.spec.layers} layers are fewer than {study.world} devices"
    count = max(study.world, round(study.global_batch / study.micro_batch))
    return _entry(study, "PP", {"strategy": "1f1b", "pp": study.world, "pp_microbatches": count,
                                "micro_batch": study.micro_batch})  # fmt: skip


def _product(study: NetworkStudy) -> Entry | tuple[str, str]:
    """TP within a node; the fewest stages whose states fit a device; the rest are replicas."""
    spec, world = study.spec, study.world
    tp = study.axes.get("tp") or math.gcd(study.per_node, spec.heads, spec.kv_heads, spec.ffn)
    if world % tp:
        return PRODUCT, f"tp {tp} does not divide {world} devices"
    stages = [n for n in range(1, min(world // tp, spec.layers) + 1) if world // tp % n == 0]
    if study.axes.get("pp"):
        stages = [study.axes["pp"]]
    found: Entry | tuple[str, str] = (PRODUCT, "no number of stages divides the devices")
    for pp in stages:
        if world % (tp * pp):
            return PRODUCT, f"tp {tp} × pp {pp} do not divide {world} devices"
        replicas = world // tp // pp
        samples = round(study.global_batch / (replicas * study.micro_batch))
        axis_values = {"tp": tp, "pp": pp, "dp_replicate": replicas}
        title = " × ".join(f"{name}{size}" for name, size in
                           (("TP", tp), ("PP", pp), ("DP", replicas)) if size > 1)  # fmt: skip
        found = _entry(study, title or "one device", {
            "strategy": "3d", "micro_batch": study.micro_batch,
            "pp_microbatches": max(pp, samples) if pp > 1 else 1, **axis_values,
        })  # fmt: skip
        made, room = found[1], study.memory_bytes
        if isinstance(made, Plan) and room and states_bytes(made, spec) <= room:
            return found
    return found
