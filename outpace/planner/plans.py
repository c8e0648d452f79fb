"""The planner's answer: plans that fit, fastest first, each with its reasons, and what was not."""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from outpace.planner import memory
from outpace.planner.batches import nearest_batches
from outpace.planner.columns import MODES, OFFLOADS, Bools, Columns, Floats, of_plans
from outpace.planner.crossing import crossing
from outpace.planner.device import dtype_of
from outpace.planner.estimate import Question, Times, estimate
from outpace.planner.finalists import order, played
from outpace.planner.hints import hint
from outpace.planner.machines import Cluster
from outpace.planner.outline_flops import forward_flops
from outpace.planner.outlines import parameters
from outpace.planner.search import FAMILIES, Found, family, fits, search
from outpace.planner.space import Wanted, layouts, to_plan
from outpace.records.errors import BadInputError
from outpace.records.estimate import Estimate, Insistence, Planned, Plans, Rejected
from outpace.records.outline import Outline
from outpace.records.plan import Plan
from outpace.records.units import show_bytes, show_count, show_seconds, show_share

LEVEL = 0.9
_FINALISTS = 2  # times as many as are shown
_ALIKE = 5e-4  # what would be shown as 0.0 %
# Words for where the time goes.
PARTS: Mapping[str, str] = {
    "products_s": "matrix products",
    "attention_s": "attention",
    "memory_s": "memory-bound operations",
    "host_s": "waiting for host and slowest stage",
    "bubble_s": "pipeline bubble",
    "tensor_s": "tensor-parallel exchange",
    "context_s": "context-parallel exchange",
    "pipeline_s": "sends between stages",
    "expert_s": "exchange of tokens among experts",
    "data_s": "gradients and parameters",
    "optimizer_s": "optimizer",
    "offload_s": "offloading",
    "loading_s": "waiting for data",
}


@dataclass(frozen=True)
class Job:
    """A model, a batch and a machine, and what is asked of the answer.

    `idle`: nodes may stay idle, where fewer are faster or all cannot be used. `host_bytes`: a
    node's host memory, all of which may be offloaded to; None: not known. `hints`: whether to say
    what a setting that is not searched would gain.
    """

    outline: Outline
    cluster: Cluster
    wanted: Wanted
    tokens: int | None = None
    price: float | None = None  # of a device and hour
    count: int = 5
    idle: bool = False
    host_bytes: int | None = None
    hints: bool = False

    @property
    def limit(self) -> float:
        """Bytes of a device's memory, as its driver leaves it; the largest number: not known."""
        return float(self.cluster.device.memory_bytes or sys.float_info.max)

    def on(self, nodes: int) -> "Job":
        """The same on so many nodes."""
        cluster = replace(self.cluster, nodes=nodes)
        return replace(self, cluster=cluster, wanted=replace(self.wanted, world=cluster.devices))

    @property
    def question(self) -> Question:
        """What times are reckoned from."""
        return Question(
            self.outline,
            self.wanted.seq_len,
            self.cluster.device,
            self.cluster.fabric,
            loader_tokens_per_s=self.cluster.loader_tokens_per_s,
        )

    def needs(self, columns: Columns) -> Floats:
        """Bytes of each plan's fullest rank."""
        return memory.reserved_bytes(
            self.outline, self.wanted.seq_len, columns, self.cluster.device.kind
        )

    def asks(self, columns: Columns) -> Floats:
        """`needs`, but just above the limit where a node's host cannot take what is offloaded.

        Such a plan does not fit, and is nearer to it than those that are too large for a device.
        """
        needs = self.needs(columns)
        if self.host_bytes is None:
            return needs
        away = np.flatnonzero((needs <= self.limit) & _on_host(columns))
        if len(away):
            short = self.offloads(columns.take(away)) > self.host_bytes
            needs[away[short]] = np.nextafter(self.limit, np.inf)
        return needs

    def offloads(self, columns: Columns) -> Floats:
        """Bytes of a node's host memory that its ranks offload to, of each plan."""
        host = OFFLOADS.index("cpu")
        # What goes to a disk, or to the host of a device that is the host, takes none of it.
        kept = {
            name: np.where(getattr(columns, name) == host, host, 0)
            for name in ("offload_activations", "offload_parameters", "offload_optimizer")
        }
        return self.away(replace(columns, **kept))

    def away(self, columns: Columns) -> Floats:
        """Bytes that the ranks of a node keep on its host or its disks, of each plan."""
        device = self.cluster.device.kind
        each = memory.anatomy(self.outline, self.wanted.seq_len, columns, device)["offloaded"]
        found: Floats = each * np.minimum(self.cluster.fabric.per_node, columns.ranks)
        return found


def _on_host(columns: Columns) -> Bools:
    """Which plans offload to the host's memory."""
    host = OFFLOADS.index("cpu")
    found: Bools = (
        (columns.offload_activations == host)
        | (columns.offload_parameters == host)
        | (columns.offload_optimizer == host)
    )
    return found


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
    planned = [_planned(used, found, int(place), rank) for rank, place in enumerate(shown)]
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
        rejected=tuple(_rejected(used, found)),
        insistences=tuple(_insistences(job, planned[0].estimate.step_time_s)),
        considered=found.considered,
        took_s=time.perf_counter() - began,
        source="probed" if job.cluster.probed else "catalog",
        notes=(*job.outline.notes, *job.cluster.notes, *_hinted(used, found)),
    )


def _hinted(job: Job, found: Found) -> list[str]:
    """What is not searched and would gain, where it is asked for."""
    if not job.hints or job.wanted.on_host:
        return []
    best = to_plan(found.columns, int(found.ranked[0]))
    told = hint(job.question, job.wanted, job.asks, job.limit, best, _seconds(found))
    return [] if told is None else [told]


def _played(job: Job, found: Found) -> Found:
    """The finalists' pipelines played, and ranked by what came out.

    Two at least, that the fastest has another to be compared with.
    """
    times = played(job.question, found.columns, found.times, found.ranked)
    ranked = order(times, found.ranked)[: max(2, job.count)]
    return replace(found, times=times, ranked=ranked)


def _searched(job: Job) -> Found:
    count = _FINALISTS * max(2, job.count)
    return _played(job, search(job.question, job.wanted, job.asks, job.limit, count))


def _fastest(job: Job) -> tuple[Job, Found]:
    """What is found on all nodes; where nodes may stay idle, on those that are fastest."""
    best = job, _searched(job)
    for nodes in _fewer(job) if job.idle else ():
        seconds = _seconds(best[1])
        if _least_s(job, nodes) >= seconds:
            break
        less = job.on(nodes)
        found = _searched(less)
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
    """Less than any plan's step on so many nodes takes: its products at the best rate."""
    wanted = job.wanted
    flops = 3 * forward_flops(job.outline, wanted.seq_len, wanted.global_batch, attention=False)
    own = (wanted.keep.get("precision", wanted.precision),)
    names = wanted.vary.get("precision", own)
    rate = max(job.cluster.device.rate(dtype_of(name)) for name in names)
    return flops / (rate * nodes * job.cluster.fabric.per_node)


def one(job: Job, plan: Plan) -> Planned:
    """One plan, whether it fits or not. Raises BadInputError where it does not divide the batch."""
    columns = of_plans([plan], job.wanted.global_batch, job.outline.layers)
    times = estimate(job.question, columns)
    times = played(job.question, columns, times, np.array([0]))
    return Planned(
        title=title(plan),
        plan=plan,
        identity=plan.identity(job.wanted.global_batch),
        estimate=_estimate(job, columns, times, job.needs(columns), 0),
        why="as given",
        untrained=job.outline.untrained or plan.untrained,
        placement=crossing(job.cluster, plan),
    )


def _planned(job: Job, found: Found, place: int, rank: int) -> Planned:
    plan = to_plan(found.columns, place)
    return Planned(
        title=", ".join([title(plan), *_varied(plan, job.wanted.vary)]),
        plan=plan,
        identity=plan.identity(job.wanted.global_batch),
        estimate=_estimate(job, found.columns, found.times, found.needs, place),
        why=_why(job, found, place, rank),
        untrained=job.outline.untrained or plan.untrained,
        placement=crossing(job.cluster, plan),
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
    low, high = interval(job.cluster.probed)
    by_kind = memory.anatomy(job.outline, wanted.seq_len, row, device.kind)
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
        mfu=mfu,
        hfu=None if mfu is None else mfu * (1 + float(full) / 3),
        peak_memory_bytes=inside + kinds["allocator and libraries"],
        memory_bytes=device.memory_bytes,
        memory=kinds,
        host_offloaded_bytes=host,
        host_memory_bytes=job.host_bytes,
        disk_offloaded_bytes=max(0, round(float(job.away(row)[0])) - host) if away else 0,
        parts_s={f.name: float(getattr(times, f.name)[place]) for f in fields(times)},
        ranks=ranks,
        tokens=job.tokens,
        time_s=budget,
        cost=None if budget is None or job.price is None else budget / 3600 * ranks * job.price,
    )


@lru_cache
def _residuals() -> Mapping[str, Any]:
    text = files("outpace.catalog").joinpath("residuals.json").read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = json.loads(text)
    return loaded


def interval(probed: bool) -> tuple[float, float]:
    """Of a predicted time: the factors between which the true one lies with LEVEL.

    They are quantiles of real comparisons, written by benchmarks/planner_accuracy.py.
    """
    table = _residuals()
    # Until steps on probed machines are recorded, they are taken as no surer than the catalog's.
    row = (table["probed"] if probed else None) or table["catalog"]
    return float(row["low"]), float(row["high"])


_NAMES: Mapping[str, str] = {
    "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "hsdp": "HSDP",
    "single": "one device", "ps": "parameter server", "ring": "ring all-reduce",
    "dp": "DP, one process", "mp": "naive model parallel",
}  # fmt: skip


def title(plan: Plan) -> str:
    """A plan in a few words: its axes, micro-batch and what it gives for memory."""
    name = _NAMES.get(plan.strategy)
    if name is None:
        mesh = _axes(plan)
    else:
        mesh = name if plan.world_size == 1 else f"{name} {plan.world_size}"
        if plan.strategy == "hsdp":
            mesh = f"HSDP {plan.dp_replicate} × {plan.dp_shard}"
    return ", ".join([mesh, f"micro-batch {plan.micro_batch}", *_levers(plan)])


def _axes(plan: Plan) -> str:
    words = [f"TP {plan.tp}"] if plan.tp > 1 else []
    words += [f"CP {plan.cp}"] if plan.cp > 1 else []
    if plan.pp > 1:
        loops = f" × {plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
        words.append(f"PP {plan.pp}{loops} {plan.schedule}")
    words += [f"replicas {plan.dp_replicate}"] if plan.dp_replicate > 1 else []
    words += [f"ZeRO-{plan.zero} {plan.dp_shard}"] if plan.dp_shard > 1 else []
    return " × ".join(words + ([f"EP {plan.ep}"] if plan.ep > 1 else []))


def _levers(plan: Plan) -> list[str]:
    found = []
    if plan.checkpointing != "none":
        half = ", half of the blocks" if plan.checkpoint_every > 1 else ""
        found.append(f"{plan.checkpointing} recomputation{half}")
    if plan.loss == "chunked":
        found.append("chunked loss")
    for what in ("activations", "parameters", "optimizer"):
        place = getattr(plan, f"offload_{what}")
        if place != "none":
            found.append(f"{what} on {'disk' if place == 'disk' else 'the host'}")
    return found


def _varied(plan: Plan, vary: Mapping[str, Any]) -> list[str]:
    """What a plan has of the settings that are varied, where it is not what plans have anyway."""
    words = {
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "compile": "compiled" if plan.compile else "",
        "stage_split": "even stages" if plan.stage_split == "even" else "",
        "sequence_parallel": "" if plan.sequence_parallel else "no sequence parallelism",
        "async_tp": "async TP" if plan.async_tp else "",
        "optimizer_in_backward": "steps in the backward" if plan.optimizer_in_backward else "",
    }
    return [words[name] for name in vary if words[name]]


def _why(job: Job, found: Found, place: int, rank: int) -> str:
    """One sentence: against the fastest, or, of the fastest, against the next."""
    others = [int(other) for other in found.ranked if other != place]
    if not others:
        return _alone(job.wanted)
    other = others[0]
    mine, theirs = found.times.step_s[place], found.times.step_s[other]
    gaps = {
        name: float(getattr(found.times, name)[other] - getattr(found.times, name)[place])
        for name in PARTS
    }
    against = title(to_plan(found.columns, other)).split(", micro-batch")[0]
    if rank == 0:
        name = max(gaps, key=lambda key: gaps[key])
        if gaps[name] <= 0 or theirs / mine - 1 < _ALIKE:
            return f"as fast as the next ({against}), and no harder to set up"
        return (
            f"{show_share(theirs / mine - 1)} faster than the next ({against}), which takes "
            f"{show_seconds(gaps[name])} more for {PARTS[name]}{_stream(found, name, other, place)}"
        )
    name = min(gaps, key=lambda key: gaps[key])
    if mine / theirs - 1 < _ALIKE:
        return f"as fast as the fastest ({against})"
    more = show_seconds(max(0.0, -gaps[name]))
    return (
        f"{show_share(mine / theirs - 1)} slower than the fastest: {more} more for {PARTS[name]}"
        f"{_stream(found, name, place, other)}"
    )


def _stream(found: Found, part: str, slower: int, faster: int) -> str:
    """Why memory-bound operations take longer, where one plan's numbers are wider than another's.

    Autocast leaves the residual stream in fp32 and casts weights for each micro-batch; strategies
    that shard parameters or gradients hold all of it in 16 bits (docs/planner.md).
    """
    c = found.columns
    wide = c.precise("bf16", "fp16", "fp8") & ~c.of("zero2", "zero3", "hsdp", "3d")
    if part != "memory_s" or not wide[slower] or wide[faster]:
        return ""
    return " (autocast leaves its residual stream in fp32: docs/planner.md)"


def _alone(wanted: Wanted) -> str:
    """Why a plan has no other to be compared with."""
    c = layouts(wanted)
    splits = (c.tp > 1, c.cp > 1, c.pp > 1, c.ep > 1, c.dp_replicate > 1)
    if len(np.unique(np.stack([family(c), c.zero, *splits]), axis=1).T) > 1:
        return "no other kind of plan fits"
    if wanted.keep:
        return "the only kind that --keep leaves"
    return "the only kind of plan that there is"


def _rejected(job: Job, found: Found) -> list[Rejected]:
    """Every family that is not among the ranked, and its best or its smallest plan."""
    shown = {FAMILIES[place] for place in family(found.columns)[found.ranked[: job.count]]}
    laid_out = {FAMILIES[place] for place in np.unique(family(layouts(job.wanted)))}
    rows = []
    for name in FAMILIES:
        if name in found.best and name not in shown:
            rows.append(_passed_over(job, found, name))
        elif name in laid_out and name not in shown:
            reason = f"does not go with {_kept(job.wanted)}"
            rows.append(Rejected(family=name, reason=reason))
    return rows


def _passed_over(job: Job, found: Found, name: str) -> Rejected:
    """A family's best plan against the fastest, or how far its smallest is from fitting."""
    place, first = found.best[name], found.ranked[0]
    if place < 0:
        small = found.smallest[name]
        plan = to_plan(found.columns, small)
        lever = " (it offloads nothing)" if plan.strategy in _WHOLE else ""
        reason = f"{_lacks(job, found.columns, small)} even with {_choices(plan)}{lever}"
        return Rejected(family=name, reason=reason, plan=plan)
    plan = to_plan(found.columns, place)
    seconds = float(found.times.step_s[place])
    gaps = {
        part: float(getattr(found.times, part)[place] - getattr(found.times, part)[first])
        for part in PARTS
    }
    worst = max(gaps, key=lambda key: gaps[key])
    reason = (
        f"{show_seconds(seconds)} at best, with {_choices(plan)}; "
        f"{seconds / float(found.times.step_s[first]):.2f} times the fastest: "
        f"{show_seconds(max(0.0, gaps[worst]))} more for {PARTS[worst]}"
        f"{_stream(found, worst, place, int(first))}"
    )
    return Rejected(family=name, reason=reason, plan=plan)


# Strategies that outpace has for comparison, whose plans offload nothing.
_WHOLE = ("dp", "ps", "ring", "horovod", "mp")


def _choices(plan: Plan) -> str:
    """A plan's micro-batch and levers, in words."""
    return ", ".join([f"micro-batch {plan.micro_batch}", *_levers(plan)])


def _kept(wanted: Wanted) -> str:
    return ", ".join(f"{name}={value}" for name, value in wanted.keep.items())


def _lacks(job: Job, columns: Columns, place: int) -> str:
    """Of a plan that does not fit: what it needs of what there is, on a device or its host."""
    row = columns.take([place])
    need = float(job.needs(row)[0])
    if need > job.limit or job.host_bytes is None:
        has = show_bytes(job.cluster.device.memory_bytes)
        return f"needs {show_bytes(round(need))} of a device's {has}"
    away = round(float(job.offloads(row)[0]))
    return f"needs {show_bytes(away)} of a node's {show_bytes(job.host_bytes)} of host memory"


def _insistences(job: Job, fastest_s: float) -> list[Insistence]:
    """What each thing that a person insists on costs: the time without it, all else kept."""
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
    """Why nothing fits, and the smallest machine that would do."""
    if not found.smallest:
        return _impossible(job.wanted)
    needs = {name: float(found.needs[spot]) for name, spot in found.smallest.items()}
    place = found.smallest[min(needs, key=lambda name: needs[name])]
    more = _enough(lambda nodes: _fits_on(job, nodes))
    return (
        f"{job.outline.name} ({show_count(parameters(job.outline))} parameters) does not fit: its "
        f"smallest plan ({title(to_plan(found.columns, place))}) "
        f"{_lacks(job, found.columns, place)}. "
        + (f"It fits on {more} nodes of {job.cluster.name}." if more else
           "Use devices with more memory, a shorter --seq-len, or a smaller model.")
    )  # fmt: skip


def _impossible(wanted: Wanted) -> str:
    """Why no plan can be laid out, and the nearest global batches that could be."""
    kept = f", with {_kept(wanted)}" if wanted.keep else ""
    near = nearest_batches(wanted)
    if near:
        remedy = f"Use a global batch of {' or '.join(f'{n:,}' for n in near)}, or insist on less."
    else:
        remedy = "Insist on less, or use other numbers of devices."
    return (
        f"no plan can be laid out: {wanted.world} devices and a global batch of "
        f"{wanted.global_batch}{kept}. The axes have to multiply to the devices, tp has to divide "
        f"the heads, and what is left of the devices the batch. {remedy}"
    )


_MOST_NODES = 4096


def _enough(fits: Callable[[int], bool]) -> int | None:
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
    """Whether so many nodes are enough, with a global batch that they can share out."""
    if nodes <= job.cluster.nodes:
        return False
    other = job.on(nodes)
    world = other.wanted.world
    batch = math.ceil(job.wanted.global_batch / world) * world
    wanted = replace(other.wanted, global_batch=batch)
    return fits(wanted, other.asks, job.limit)


def throughput(job: Job, nodes: int) -> Planned | None:
    """The best plan on so many nodes; None where none fits."""
    used, found = _fastest(replace(job.on(nodes), count=2))
    if not len(found.ranked):
        return None
    return _planned(used, found, int(found.ranked[0]), 0)
