"""Communication of a rank in a step, by purpose and axis.

For plans with one axis, the bytes are those of `planner.communication.volume`, which `outpace
verify` measures, split by purpose. For combined axes (strategy 3d), and for tensor-parallel
collectives that recomputation repeats, the formulas are in this module.

Volumes: gradients 2(N−1)/N · Ψ, and 1.5 times that with sharded parameters (Rajbhandari et al.,
arXiv 1910.02054, §7); between stages b · S · D per micro-batch and boundary; for tensor parallelism
8(t−1)/t · b · S · D per layer (Narayanan et al., arXiv 2104.04473, §3.2).
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from outpace.planner.communication.volume import (
    NORM_BYTES,
    StepOnRank,
    Tally,
    of_every_job,
    sent_bytes,
    step_traffic,
)
from outpace.planner.model.shapes import parameter_shapes
from outpace.planner.pipeline.stages import layers_per_stage
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Axis, Plan, Strategy
from outpace.records.strategies import TRAITS, strategies_that

# Gathers: parameters before their use. Gradients: their sums over ranks. Updates: parameters sent
# after a step. Activations: tensor parallelism's, for which computation waits. Sends: between
# stages. Ring: keys and values. Tied: a shared embedding's gradient. Control: totals and norms.
Part = Literal[
    "gathers", "gradients", "updates", "activations", "sends", "ring", "tied", "control"
]  # fmt: skip
Where = Axis | Literal["world"]


@dataclass(frozen=True)
class Flow:
    """Bytes sent for one purpose on one axis in a step.

    `sent_bytes`: the bytes that a rank sends, counted as in `planner.communication.volume`.
    `link_bytes`: the bytes on each link of a ring through the axis's ranks; for pipelines, the
    bytes in one direction across each stage boundary.
    """

    part: Part
    axis: Where
    sent_bytes: int
    link_bytes: int


# Strategies other than 3d whose bytes are split by purpose here.
_OF_ONE_AXIS: tuple[Strategy, ...] = (
    "ddp", "ring", "zero1", "zero2", "zero3", "hsdp", *strategies_that(
        lambda traits: traits.module == "pipeline"
    ), "tp", "cp",
)  # fmt: skip


def flows(work: StepOnRank) -> list[Flow]:
    """Return the communication of `work.rank` in a step.

    Raises BadInputError if there is no formula for the plan.
    """
    plan = work.plan
    if plan.strategy == "single":
        return []
    if plan.lora_rank is not None or plan.compress_gradients == "powersgd":
        what = "adapters" if plan.lora_rank is not None else "PowerSGD"
        raise BadInputError(
            f"`outpace network` has no formula for the traffic of {what}. Use a plan without "
            f"{what}."
        )
    if plan.strategy == "3d":
        return [flow for flow in _combined_axes_flows(work) if flow.sent_bytes or flow.link_bytes]
    tally = None if plan.strategy not in _OF_ONE_AXIS else step_traffic(
        _without_recomputation(plan), work.spec, global_batch=work.global_batch,
        seq_len=work.seq_len, rank=work.rank,
    )  # fmt: skip
    if tally is None:
        raise BadInputError(
            f"`outpace network` supports {', '.join(_OF_ONE_AXIS)} and 3d; the plan's strategy is "
            f"{plan.strategy}."
        )
    # hsdp has two axes, of which the last one shards.
    found = [*_one_axis_flows(work, TRAITS[plan.strategy].axes[-1], tally)]
    if plan.strategy == "tp" and plan.recomputes:
        again = _repeated_bytes(work, work.spec.layers, work.passes)
        found.append(Flow("activations", "tp", again, again))
    return found


def _without_recomputation(plan: Plan) -> Plan:
    """Return the plan without recomputation, whose repeated collectives are counted separately."""
    return plan.model_copy(
        update={"checkpointing": "none", "checkpoint_every": 1, "checkpoint_layers": ()}
    )


def _one_axis_flows(work: StepOnRank, axis: Axis, tally: Tally) -> Iterator[Flow]:
    """Split the traffic of a one-axis strategy by purpose.

    Messages that every job sends count as control.
    """
    plan, spec = work.plan, work.spec
    by_kind = Counter(tally.bytes_by_kind)
    replicas = plan.dp_replicate
    extra = _control_bytes(plan)
    by_kind.subtract(extra)
    yield _ring_flow("control", "world", extra.total())
    match plan.strategy:
        case "ddp":
            yield _ring_flow("gradients", axis, by_kind["all_reduce"])
        case "ring":
            yield _ring_flow("gradients", axis, by_kind["send"])
            yield _ring_flow("control", axis, by_kind["all_reduce"])
        case "zero1":
            yield _ring_flow("gradients", axis, by_kind["all_reduce"])
            every = sent_bytes("reduce_scatter", plan.dp_shard, sum(work.sizes) * work.item, False)
            yield Flow("updates", axis, by_kind["broadcast"], every)
        case "zero2" | "zero3" | "hsdp":
            yield _ring_flow("gathers", axis, by_kind["all_gather"])
            yield _ring_flow("gradients", axis, by_kind["reduce_scatter"])
            if replicas > 1:
                yield _ring_flow("gradients", "dp_replicate", by_kind["all_reduce"])
        case "cp":
            yield _ring_flow("ring", axis, by_kind["send"])
            yield _ring_flow("gradients", axis, by_kind["all_reduce"])
        case "tp":
            yield _ring_flow("activations", axis, by_kind.total())
        case _:
            ranks = SCHEDULES[plan.strategy]
            ends = {ranks.rank_of(stage, plan.pp) for stage in (0, plan.stages - 1)}
            tied = spec.vocab * spec.hidden * work.item if spec.tied and len(ends) == 2 else 0
            mine = tied if work.rank in ends else 0
            border = work.passes * plan.pp_microbatches * work.hidden_elements * work.item
            yield Flow("sends", "pp", by_kind["send"] - mine, border)
            if tied:
                yield Flow("tied", "pp", mine, tied)


def _ring_flow(part: Part, axis: Where, size_bytes: int) -> Flow:
    return Flow(part, axis, size_bytes, size_bytes)


def _control_bytes(plan: Plan) -> Counter[str]:
    """Return the bytes of loss totals, stop requests and gradient norms, by collective."""
    tally = of_every_job(plan)
    norm = {"ddp": 1, "ring": 1, "zero1": 1, "cp": 1, "tp": 1}.get(plan.strategy, 0)
    if not norm:
        ranks = plan.pp if plan.strategy in SCHEDULES else plan.dp_shard
        tally.add("all_reduce", ranks, NORM_BYTES)
    return tally.bytes_by_kind


def _combined_axes_flows(work: StepOnRank) -> Iterator[Flow]:
    """Yield a rank's flows on combined axes: within its stage, among replicas, and between stages.

    The gradients of all micro-batches of a pipeline are reduced together. Blocks are gathered for
    every forward pass, and once for the backward passes of an accumulation step (measured: `outpace
    verify --strategy 3d`). The values are this rank's, not averages over stages.
    """
    plan, spec = work.plan, work.spec
    place = _rank_share(work)
    shards = plan.dp_shard * plan.cp
    micro_batches = work.passes * plan.pp_microbatches
    gathers, gradients, shares = Tally(), Tally(), Tally()
    for block, sizes in place.units.items():
        shard = sum(-(-rows // shards) * rest for rows, rest in sizes)
        times = work.passes * ((plan.pp_microbatches + 1 if plan.pp > 1 else 2) if block else 1)
        if shards > 1:
            gathers.add("all_gather", shards, shard * work.gathered_item, times)
            whole = shard * shards * work.reduced_item
            gradients.add("reduce_scatter", shards, whole, work.passes)
        if plan.dp_replicate > 1:
            shares.add("all_reduce", plan.dp_replicate, shard * work.reduced_item, work.passes)
    axis: Axis = "dp_shard" if plan.dp_shard > 1 else "cp"
    yield _ring_flow("gathers", axis, gathers.bytes)
    yield _ring_flow("gradients", axis, gradients.bytes)
    yield _ring_flow("gradients", "dp_replicate", shares.bytes)
    yield from _stage_flows(work, place, micro_batches)
    if plan.pp > 1:
        split = plan.cp * (plan.tp if plan.sequence_parallel else 1)
        border = micro_batches * work.hidden_elements // split * work.item
        yield Flow("sends", "pp", place.borders * border, border)
        if spec.tied and place.ends:
            tied = spec.vocab * spec.hidden // plan.tp // shards * work.item
            yield Flow("tied", "pp", tied if place.first or place.last else 0, tied)
    yield _ring_flow("control", "world", _control_bytes(plan).total())


def _stage_flows(work: StepOnRank, place: "_RankShare", micro_batches: int) -> Iterator[Flow]:
    """Yield the tensor- and context-parallel flows of the stage's layers."""
    plan, spec = work.plan, work.spec
    if plan.tp > 1:
        hidden = work.hidden_elements // plan.cp
        all_reduces = 4 * place.layers + place.last
        tally = Tally()
        # An all-reduce, or a reduce-scatter and an all-gather of the same bytes.
        tally.add("all_reduce", plan.tp, hidden * work.low_item, micro_batches * all_reduces)
        tally.add("all_reduce", plan.tp, hidden * work.item, micro_batches * place.first)
        tokens = plan.micro_batch * work.seq_len // plan.cp * work.item
        tally.add("all_reduce", plan.tp, 3 * tokens, micro_batches * place.last)
        again = _repeated_bytes(work, place.layers, micro_batches) if plan.recomputes else 0
        yield _ring_flow("activations", "tp", tally.bytes + again)
    if plan.cp > 1:
        width = spec.kv_heads // min(plan.tp, spec.kv_heads) * spec.head_dim
        numbers = 2 * plan.micro_batch * (work.seq_len // plan.cp) * width
        sent = 2 * (plan.cp - 1) * work.low_item + plan.cp * work.item
        yield _ring_flow("ring", "cp", numbers * sent * place.layers * micro_batches)


def _repeated_bytes(work: StepOnRank, layers: int, micro_batches: int) -> int:
    """Return the bytes of forward tensor-parallel collectives that recomputation repeats.

    A block's last collective is not repeated unless the backward reads its result, as dropout or a
    norm after it does. Measured: 2 all-gathers and a reduce-scatter of 4 collectives are repeated,
    or one all-reduce of 2.
    """
    plan, spec = work.plan, work.spec
    modes = plan.modes(spec.layers)
    share = sum(mode in ("full", "attention") for mode in modes) / spec.layers
    halves = 3 if plan.sequence_parallel else 2
    if spec.dropout > 0 or not spec.norm_first:
        halves = 4
    whole = work.hidden_elements // plan.cp * work.low_item
    half = sent_bytes("reduce_scatter", plan.tp, whole, False)
    return round(share * halves * half * layers * micro_batches)


@dataclass(frozen=True)
class _RankShare:
    """The part of the model that a rank holds, on combined axes.

    `units` has, for each FSDP unit, the numbers of rows and columns of its parameters.
    """

    layers: int
    first: bool
    last: bool
    ends: bool  # the first and the last stage are on different ranks
    borders: int  # messages that it sends for each micro-batch
    units: dict[str, list[tuple[int, int]]]


def _rank_share(work: StepOnRank) -> _RankShare:
    plan = work.plan
    schedule = SCHEDULES.get(plan.schedule)
    at = work.rank // (plan.world_size // plan.pp)
    ranks_of = (
        [0] if schedule is None else [schedule.rank_of(s, plan.pp) for s in range(plan.stages)]
    )
    mine = [stage for stage, rank in enumerate(ranks_of) if rank == at]
    counts = layers_per_stage(work.spec, plan.stages)
    starts = [sum(counts[:stage]) for stage in range(plan.stages + 1)]
    blocks = {b for stage in mine for b in range(starts[stage], starts[stage + 1])}
    first, last = 0 in mine, plan.stages - 1 in mine
    units: dict[str, list[tuple[int, int]]] = {"": []}
    for name, shape in parameter_shapes(work.spec).items():
        number = name.split(".")[1] if name.startswith("blocks.") else ""
        held = int(number) in blocks if number else _is_on_rank(name, first, last, work.spec.tied)
        if held:
            rows, rest = shape[0], math.prod(shape[1:])
            if plan.tp > 1 and "norm" not in name and "positions" not in name:
                columns = name.endswith(("attention.out.weight", "mlp.down.weight"))
                rows, rest = (rows, -(-rest // plan.tp)) if columns else (-(-rows // plan.tp), rest)
            units.setdefault(number, []).append((rows, rest))
    return _RankShare(
        layers=len(blocks), first=first, last=last, ends=len({ranks_of[0], ranks_of[-1]}) == 2,
        borders=sum(at in pair for pair in pairwise(ranks_of) if len(set(pair)) == 2),
        units=units,
    )  # fmt: skip


def _is_on_rank(name: str, first: bool, last: bool, tied: bool) -> bool:
    """Return whether a rank holds a parameter outside of blocks.

    `first` and `last`: the rank has the first or the last stage. Both hold a `tied` embedding.
    """
    if name.startswith("embed."):
        return first or (last and tied and name == "embed.tokens.weight")
    return last


def neighbours(plan: Plan) -> list[tuple[int, int]]:
    """Return the pairs of pipeline ranks that send messages to each other for every micro-batch."""
    schedule = SCHEDULES.get(plan.schedule)
    if schedule is None:
        return []
    ranks = [schedule.rank_of(stage, plan.pp) for stage in range(plan.stages)]
    return [pair for pair in pairwise(ranks) if len(set(pair)) == 2]
