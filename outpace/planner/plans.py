"""The planner's answer: plans that fit, fastest first, each with its reasons, and what was not."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Literal

import numpy as np

from outpace.planner import memory
from outpace.planner.columns import MODES, Columns, Floats, of_plans
from outpace.planner.crossing import axis_links
from outpace.planner.device import dtype_of
from outpace.planner.estimate import Times, estimate, offloading
from outpace.planner.finalists import order, simulate_pipelines
from outpace.planner.hints import hint
from outpace.planner.interval import LEVEL, interval
from outpace.planner.job import Job
from outpace.planner.outline_flops import forward_flops
from outpace.planner.outlines import parameters
from outpace.planner.reasons import explain_plan, impossible, lacks, rejected_families
from outpace.planner.search import Found, fastest, fastest_accepted, fits, search
from outpace.planner.space import Wanted, to_plan
from outpace.planner.titles import title, varied_options
from outpace.records.errors import BadInputError
from outpace.records.estimate import Estimate, Insistence, OffloadingPart, Planned, Plans
from outpace.records.plan import Plan
from outpace.records.units import show_count

_FINALISTS = 2  # times as many as are shown


def plans(job: Job) -> Plans:
    """Every plan considered; raises BadInputError, naming what would do, if none fits."""
    began = time.perf_counter()
    wanted = job.wanted
    if wanted.trained and job.outline.untrained is not None:
        raise BadInputError(
            f"{job.outline.name} is planned for, but outpace does not train it: "
            f"{job.outline.untrained}."
        )
    used, found = _fastest(job)
    if not len(found.ranked):
        raise BadInputError(_infeasible(job, found))
    shown = found.ranked[: job.count]
    planned = [_describe_plan(used, found, int(place), rank) for rank, place in enumerate(shown)]
    return Plans(
        model=job.outline.name,
        parameters=parameters(job.outline),
        machine=job.cluster.name,
        nodes=job.cluster.nodes,
        idle_nodes=job.cluster.nodes - used.cluster.nodes,
        devices_per_node=job.cluster.fabric.per_node,
        nominal_memory_bytes=job.cluster.device.nominal_bytes,
        seq_len=wanted.seq_len,
        global_batch=wanted.global_batch,
        plans=tuple(planned),
        rejected=tuple(rejected_families(used, found)),
        insistences=tuple(_insistences(job, planned[0].estimate.step_time_s)),
        considered=found.considered,
        took_s=time.perf_counter() - began,
        source=job.cluster.source,
        notes=(
            *job.outline.notes,
            *job.cluster.notes,
            *_unsure(planned),
            *_adapters(planned),
            *_list_hints(used, found),
        ),
    )


def _unsure(planned: Sequence[Planned]) -> list[str]:
    """Return what plans rest on that the interval does not cover."""
    told = []
    if any(one.plan.precision == "fp8" for one in planned):
        told.append("fp8: what finding its scales takes is not counted; MFU is of fp8's own peak.")
    if any(one.plan.compile for one in planned):
        told.append("compile: its gain is counted in bytes and launches (docs/planner.md).")
    return told


def _adapters(planned: Sequence[Planned]) -> list[str]:
    """Return what takes less than training all weights, where these wait on the host."""
    if planned[0].plan.offload_parameters in (None, "none"):
        return []
    return [
        "Every step fetches the weights from the host, since training all of them does not fit. "
        "Adapters take far less: outpace memory with the same --model, --machine and --seq-len, "
        "and --micro-batch, --lora-rank 16 (and --base nf4), says whether they fit."
    ]


def _list_hints(job: Job, found: Found) -> list[str]:
    """Return what is not searched and would gain, where hints are asked for."""
    if not job.hints or job.wanted.on_host:
        return []
    best = to_plan(found.columns, int(found.ranked[0]))
    told = hint(job.question, job.wanted, job.checked_bytes, job.limit, best, _seconds(found))
    return [] if told is None else [told]


def _simulate_finalists(job: Job, found: Found) -> Found:
    """Simulate the finalists' pipelines, and rank them by the result.

    Two at least, that the fastest has another to be compared with.
    """
    times = simulate_pipelines(job.question, found.columns, found.times, found.ranked)
    ranked = order(times, found.ranked)[: max(2, job.count)]
    return replace(found, times=times, ranked=ranked)


def _search(job: Job) -> Found:
    count = _FINALISTS * max(2, job.count)
    return _simulate_finalists(
        job, search(job.question, job.wanted, job.checked_bytes, job.limit, count)
    )


def _fastest(job: Job) -> tuple[Job, Found]:
    """Search on all nodes; where nodes may stay idle, on those that are fastest."""
    best = job, _search(job)
    for nodes in _fewer(job) if job.idle else ():
        seconds = _seconds(best[1])
        if _least_s(job, nodes) >= seconds:
            break
        less = job.with_nodes(nodes)
        found = _search(less)
        if _seconds(found) < seconds:
            best = less, found
    return best


def _seconds(found: Found) -> float:
    return float(found.times.step_s[found.ranked[0]]) if len(found.ranked) else math.inf


def _fewer(job: Job) -> list[int]:
    """Fewer nodes that are worth a look, the most first.

    Halves again and again, powers of two, and those whose devices divide the global batch: all
    that are looked at of a machine are looked at of one twice as large.
    """
    nodes, each = job.cluster.nodes, job.cluster.fabric.per_node
    batch = job.wanted.global_batch
    halves = {nodes >> shift for shift in range(nodes.bit_length())}
    powers = {1 << shift for shift in range(nodes.bit_length())}
    even = {n for n in range(1, min(nodes, batch // each) + 1) if batch % (n * each) == 0}
    return sorted((n for n in halves | powers | even if 0 < n < nodes), reverse=True)


def _least_s(job: Job, nodes: int) -> float:
    """Return less than any plan's step on `nodes` nodes takes: its products at the best rate."""
    wanted = job.wanted
    flops = 3 * forward_flops(job.outline, wanted.seq_len, wanted.global_batch, attention=False)
    own = (wanted.keep.get("precision", wanted.precision),)
    names = wanted.vary.get("precision", own)
    rate = max(job.cluster.device.rate(dtype_of(name)) for name in names)
    return flops / (rate * nodes * job.cluster.fabric.per_node)


def fastest_plans(job: Job, count: int) -> tuple[list[tuple[Plan, float]], int]:
    """The `count` fastest plans with seconds of a step, of one kind or many; and of how many."""
    columns, considered = fastest(job.question, job.wanted, job.checked_bytes, job.limit, count)
    places = np.arange(len(columns))
    times = simulate_pipelines(job.question, columns, estimate(job.question, columns), places)
    ranked = sorted(places, key=lambda place: times.step_s[place])
    return [(to_plan(columns, int(p)), float(times.step_s[p])) for p in ranked], considered


def fastest_plan(job: Job, accepts: Callable[[Plan], bool]) -> tuple[Planned | None, int]:
    """The fastest plan that fits and that `accepts` takes, and of how many."""
    plan, considered = fastest_accepted(
        job.question, job.wanted, job.checked_bytes, job.limit, accepts
    )
    if plan is None:
        return None, considered
    named = ", ".join([title(plan), *varied_options(plan, job.wanted.vary)])
    return estimate_plan(job, plan).model_copy(update={"title": named}), considered


def estimate_plan(job: Job, plan: Plan) -> Planned:
    """One plan, whether it fits or not. Raises BadInputError where it does not divide the batch."""
    columns = of_plans([plan], job.wanted.global_batch, job.outline.layers)
    times = estimate(job.question, columns)
    times = simulate_pipelines(job.question, columns, times, np.array([0]))
    return Planned(
        title=title(plan),
        plan=plan,
        identity=plan.identity(job.wanted.global_batch),
        estimate=_estimate(job, columns, times, job.required_bytes(columns), 0),
        why="as given",
        untrained=job.outline.untrained or plan.training_obstacle,
        placement=axis_links(job.cluster, plan),
    )


def _describe_plan(job: Job, found: Found, place: int, rank: int) -> Planned:
    plan = to_plan(found.columns, place)
    return Planned(
        title=", ".join([title(plan), *varied_options(plan, job.wanted.vary)]),
        plan=plan,
        identity=plan.identity(job.wanted.global_batch),
        estimate=_estimate(job, found.columns, found.times, found.needs, place),
        why=explain_plan(job, found, place, rank),
        untrained=job.outline.untrained or plan.training_obstacle,
        placement=axis_links(job.cluster, plan),
    )


def _estimate(job: Job, columns: Columns, times: Times, needs: Floats, place: int) -> Estimate:
    wanted, device = job.wanted, job.cluster.device
    seconds = float(times.step_s[place])
    samples = wanted.global_batch
    tokens = samples * wanted.seq_len
    row = columns.take([place])
    ranks = int(row.ranks[0] + row.servers[0])
    forward = forward_flops(job.outline, wanted.seq_len, samples)
    full = row.modes[0, MODES.index("full")] + row.modes[0, MODES.index("attention")]
    peak = device.peak_flops_per_s.get(dtype_of(to_plan(row, 0).precision))
    mfu = None if peak is None else 3 * forward / seconds / peak / ranks
    low, high = interval(job.cluster.calibrated, job.cluster.guessed)
    by_kind = memory.anatomy(job.outline, wanted.seq_len, row, device.kind, habits=job.habits)
    kinds: dict[str, int] = {
        str(name): round(float(values[0])) for name, values in by_kind.items() if values[0] >= 0.5
    }
    away = kinds.pop("offloaded", 0)
    inside = sum(kinds.values())
    host = round(float(job.offloads(row)[0])) if away else 0
    kinds["allocator and libraries"] = max(0, round(float(needs[place])) - inside)
    budget = None if job.tokens is None else job.tokens / tokens * seconds
    return Estimate(
        depth="estimate",
        step_time_s=seconds,
        low_s=seconds * low,
        high_s=seconds * high,
        level=LEVEL,
        tokens_per_s=tokens / seconds,
        samples_per_s=None if job.outline.vocab else job.wanted.global_batch / seconds,
        mfu=mfu,
        hfu=None if mfu is None else mfu * (1 + float(full) / 3),
        peak_memory_bytes=inside + kinds["allocator and libraries"],
        memory_bytes=device.memory_bytes,
        memory=kinds,
        host_offloaded_bytes=host,
        host_memory_bytes=job.cluster.host_bytes,
        disk_offloaded_bytes=max(0, round(float(job.offloaded_total_bytes(row)[0])) - host)
        if away
        else 0,
        parts_s={f.name: float(getattr(times, f.name)[place]) for f in fields(times)},
        offloading=_offloading(job, row) if away else (),
        ranks=ranks,
        tokens=job.tokens,
        time_s=budget,
        cost=None if budget is None or job.price is None else budget / 3600 * ranks * job.price,
    )


def _offloading(job: Job, row: Columns) -> tuple[OffloadingPart, ...]:
    """Copies and steps of a plan that offloads."""
    found = offloading(job.question, row)
    plan = to_plan(row, 0)
    sent: list[tuple[Literal["weights", "activations", "optimizer"], str]] = [
        ("weights", plan.offload_parameters),
        ("activations", plan.offload_activations),
        ("optimizer", plan.offload_optimizer),
    ]
    parts = [
        OffloadingPart(
            what=what,
            nbytes=round(float(getattr(found, f"{what}_bytes")[0])),
            exposed_s=float(getattr(found, f"{what}_s")[0]),
        )
        for what, place in sent
        if place != "none"
    ]
    if found.host_step_s[0]:
        parts.append(OffloadingPart(what="host step", exposed_s=float(found.host_step_s[0])))
    if found.disk_bytes[0]:
        nbytes = round(float(found.disk_bytes[0]))
        parts.append(OffloadingPart(what="disk", nbytes=nbytes, exposed_s=float(found.disk_s[0])))
    return tuple(parts)


def _insistences(job: Job, fastest_s: float) -> list[Insistence]:
    """Return the cost of each option that the user insists on: the time without it."""
    rows = []
    wanted = job.wanted
    asked: list[tuple[str, Wanted]] = [
        (f"{name}={value}", replace(wanted, keep={k: v for k, v in wanted.keep.items()
                                                  if k != name}))
        for name, value in wanted.keep.items()
    ]  # fmt: skip
    if wanted.most_tp is not None:
        asked.append((f"max-tp {wanted.most_tp}", replace(wanted, most_tp=None)))
    for setting, freer in asked:
        _, found = _fastest(replace(job, wanted=freer, count=1))
        if len(found.ranked):
            free_s = _seconds(found)
            rows.append(Insistence(setting=setting, slowdown=max(0.0, fastest_s / free_s - 1)))
    return rows


def _infeasible(job: Job, found: Found) -> str:
    """Explain why nothing fits, and name the smallest machine that would do."""
    if not found.smallest:
        return impossible(job.wanted)
    needs = {name: float(found.needs[spot]) for name, spot in found.smallest.items()}
    place = found.smallest[min(needs, key=lambda name: needs[name])]
    more = _fewest_nodes(lambda nodes: _fits_on(job, nodes))
    return (
        f"{job.outline.name} ({show_count(parameters(job.outline))} parameters) does not fit: its "
        f"smallest plan ({title(to_plan(found.columns, place))}) "
        f"{lacks(job, found.columns, place)}. "
        + (f"It fits on {more} nodes of {job.cluster.name}." if more else
           "Use devices with more memory, a shorter --seq-len, or a smaller model.")
    )  # fmt: skip


_MOST_NODES = 4096


def _fewest_nodes(fits: Callable[[int], bool]) -> int | None:
    """The fewest nodes that are enough, if more never are too many."""
    enough = 1
    while not fits(enough):
        enough *= 2
        if enough > _MOST_NODES:
            return None
    less = enough // 2
    while enough - less > 1:
        middle = (less + enough) // 2
        if fits(middle):
            enough = middle
        else:
            less = middle
    return enough


def _fits_on(job: Job, nodes: int) -> bool:
    """Return whether `nodes` nodes are enough, with a global batch that they can share out."""
    if nodes <= job.cluster.nodes:
        return False
    other = job.with_nodes(nodes)
    world = other.wanted.world
    batch = math.ceil(job.wanted.global_batch / world) * world
    wanted = replace(other.wanted, global_batch=batch)
    return fits(wanted, other.checked_bytes, job.limit)


def throughput(job: Job, nodes: int) -> Planned | None:
    """Return the best plan on `nodes` nodes; None where none fits."""
    used, found = _fastest(replace(job.with_nodes(nodes), count=2))
    if not len(found.ranked):
        return None
    return _describe_plan(used, found, int(found.ranked[0]), 0)
