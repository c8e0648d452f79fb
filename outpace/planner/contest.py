"""The plans that `outpace network` compares where it is given none: one for each strategy."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from outpace.planner.network import states_bytes
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

# A title, the plan, and the global batch nearest to what was asked for that it divides.
Entry = tuple[str, Plan, int]
_PRODUCT = "TP × PP × DP"


def entries(
    spec: ModelSpec,
    *,
    nodes: int,
    per_node: int,
    global_batch: int,
    micro_batch: int,
    common: Mapping[str, Any],
    axes: Mapping[str, int],
    memory_bytes: int | None,
) -> Iterator[Entry | tuple[str, str]]:
    """DDP, ZeRO-1/2/3 with the same micro-batch, ZeRO-3 with all samples at once, TP, PP, and both.

    TP and PP alone are over all devices; a product that comes out as one of the others is left out.

    `common` is what all plans have (precision, checkpointing); `axes` what was asked of tp and pp.
    A pair of two texts is a strategy with the reason why it cannot be.
    """
    world = nodes * per_node
    for title, strategy, axis in (
        ("DDP", "ddp", "dp_replicate"),
        ("ZeRO-1", "zero1", "dp_shard"),
        ("ZeRO-2", "zero2", "dp_shard"),
        ("ZeRO-3", "zero3", "dp_shard"),
    ):
        yield _entry(title, global_batch, {"strategy": strategy, axis: world,
                                           "micro_batch": micro_batch, **common})  # fmt: skip
    whole = max(1, round(global_batch / world))
    if whole > micro_batch:
        values = {"strategy": "zero3", "dp_shard": world, "micro_batch": whole, **common}
        yield _entry("ZeRO-3, 1 pass", global_batch, values)
    alone = []
    if world > 1:
        alone.append(_tensor(spec, world, global_batch, micro_batch, common))
        alone.append(_pipeline(spec, world, global_batch, micro_batch, common))
    yield from alone
    product = _product(spec, nodes, per_node, global_batch, micro_batch, common, axes, memory_bytes)
    shown = {"DP", *(title for title, plan, *_ in alone if isinstance(plan, Plan))}
    if world == 1 or product[0].removesuffix(str(world)) not in shown:
        yield product


def _entry(title: str, global_batch: int, values: dict[str, Any]) -> Entry | tuple[str, str]:
    try:
        plan = Plan.parse(values, title)
    except BadInputError as error:
        return title, str(error)
    per_pass = plan.samples_per_pass * plan.data_parallel
    return title, plan, max(1, round(global_batch / per_pass)) * per_pass


def _tensor(
    spec: ModelSpec, world: int, global_batch: int, micro_batch: int, common: Mapping[str, Any]
) -> Entry | tuple[str, str]:
    shared = {name: getattr(spec, name) for name in ("heads", "kv_heads", "ffn")}
    odd = [f"{size} {name}" for name, size in shared.items() if size % world]
    if odd:
        return "TP", f"{world} devices cannot share {' and '.join(odd)} evenly"
    values = {"strategy": "tp", "tp": world, "micro_batch": micro_batch, **common}
    return _entry("TP", global_batch, values)


def _pipeline(
    spec: ModelSpec, world: int, global_batch: int, micro_batch: int, common: Mapping[str, Any]
) -> Entry | tuple[str, str]:
    if world > spec.layers:
        return "PP", f"{spec.layers} layers are fewer than {world} devices"
    count = max(world, round(global_batch / micro_batch))
    return _entry("PP", global_batch, {"strategy": "1f1b", "pp": world, "pp_microbatches": count,
                                       "micro_batch": micro_batch, **common})  # fmt: skip


def _product(
    spec: ModelSpec,
    nodes: int,
    per_node: int,
    global_batch: int,
    micro_batch: int,
    common: Mapping[str, Any],
    axes: Mapping[str, int],
    memory_bytes: int | None,
) -> Entry | tuple[str, str]:
    """TP within a node; the fewest stages whose states fit a device; the rest are replicas."""
    world = nodes * per_node
    tp = axes.get("tp") or math.gcd(per_node, spec.heads, spec.kv_heads, spec.ffn)
    if world % tp:
        return _PRODUCT, f"tp {tp} does not divide {world} devices"
    stages = [n for n in range(1, min(world // tp, spec.layers) + 1) if world // tp % n == 0]
    if axes.get("pp"):
        stages = [axes["pp"]]
    found: Entry | tuple[str, str] = (_PRODUCT, "no number of stages divides the devices")
    for pp in stages:
        if world % (tp * pp):
            return _PRODUCT, f"tp {tp} × pp {pp} do not divide {world} devices"
        replicas = world // tp // pp
        count = max(pp, round(global_batch / (replicas * micro_batch))) if pp > 1 else 1
        axis_values = {"tp": tp, "pp": pp, "dp_replicate": replicas}
        title = " × ".join(f"{name}{size}" for name, size in
                           (("TP", tp), ("PP", pp), ("DP", replicas)) if size > 1)  # fmt: skip
        found = _entry(title or "one device", global_batch, {
            "strategy": "3d", "micro_batch": micro_batch, "pp_microbatches": count,
            **axis_values, **common,
        })  # fmt: skip
        made = found[1]
        if isinstance(made, Plan) and memory_bytes and states_bytes(made, spec) <= memory_bytes:
            return found
    return found
