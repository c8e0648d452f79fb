"""Communication of a rank in a training step, by formula: collectives and bytes by kind.

Bytes sent assume that each collective uses the algorithm that sends the least. If each of N ranks
has B bytes, a rank sends, in

- all_reduce 2(N−1)/N · B, reduce_scatter and all_to_all (N−1)/N · B, all_gather (N−1) · B (B is its
  own part, 1/N of the result): Patarasuk and Yuan, "Bandwidth optimal all-reduce
  algorithms for clusters of workstations", JPDC 2009, §3; Chan et al., "Collective communication:
  theory, practice, and experience", 2007, table II;
- broadcast B, from the root alone; scatter (N−1) · B, from the root alone; reduce and gather B,
  from all except the root;
- send B.

Messages are counted at the sender only. `training.collective_counter` counts actual calls by the
same rules.

Legend: A accumulation steps, b samples of a micro-batch, S sequence, D hidden width, L layers, Ψ
parameters.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from outpace.planner.model.shapes import Shape, parameter_shapes
from outpace.records.model import ModelSpec
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Plan
from outpace.records.precisions import PRECISION_TRAITS, PrecisionTraits

_TOKEN_BYTES = 8  # int64
_TOTALS_BYTES = 16  # loss and targets: two float64
_STATUS_BYTES = 24  # stop request, memory and step time of a rank: three float64
NORM_BYTES = 8  # sum of squares of each rank's part, float64 in any precision


def sent_bytes(kind: str, ranks: int, given: int, root: bool) -> int:
    """Return the bytes that a rank sends in a collective of `ranks` ranks.

    `given` is the bytes on each rank before the collective. For a broadcast, it is the bytes of the
    root's array; for a scatter, the bytes that each rank receives. `root`: the rank is the
    collective's root, if it has one.
    """
    factors = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks,
        "all_gather": ranks - 1,
        "broadcast": int(root),
        "scatter": (ranks - 1) * root,
        "reduce": int(not root),
        "gather": int(not root),
        "send": 1,
    }
    return round(factors[kind] * given)


@dataclass
class Tally:
    """Counts of collectives and of bytes sent, by type of collective."""

    collectives: Counter[str] = field(default_factory=Counter)
    bytes_by_kind: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, ranks: int, given: int, times: int = 1, root: bool = False) -> None:
        """Count `times` collectives on `given` bytes per rank among `ranks` ranks.

        `root`: this rank is their root.
        """
        if times:
            self.collectives[kind] += times
            self.bytes_by_kind[kind] += times * sent_bytes(kind, ranks, given, root)

    @property
    def bytes(self) -> int:
        """Return the bytes sent in all collectives."""
        return self.bytes_by_kind.total()


@dataclass(frozen=True)
class StepOnRank:
    """One rank's share of a training step."""

    plan: Plan
    spec: ModelSpec
    global_batch: int
    seq_len: int
    rank: int

    @property
    def passes(self) -> int:
        """Return A, the number of accumulation steps.

        In a pipeline, each step has pp_microbatches micro-batches.
        """
        return self.plan.accumulation(self.global_batch)

    @property
    def item(self) -> int:
        """Return the bytes per element of parameters, gradients and their sums over ranks."""
        return 4 if self._has_fp32_master_shards else self._traits.weight_bytes

    @property
    def _traits(self) -> PrecisionTraits:
        return PRECISION_TRAITS[self.plan.precision]

    @property
    def _has_fp32_master_shards(self) -> bool:
        return self.plan.precision == "bf16-master" and self.plan.fully_shards

    @property
    def low_item(self) -> int:
        """Return the bytes per element of matmul inputs."""
        return self.item if self._traits.low is None else 2

    @property
    def gathered_item(self) -> int:
        """Return the bytes per element of gathered parameters."""
        return self._traits.shard_bytes[0]

    @property
    def reduced_item(self) -> int:
        """Return the bytes per element of gradients that sharded data parallelism reduces."""
        return self._traits.shard_bytes[1]

    @property
    def summed_item(self) -> int:
        """Return the bytes per element of gradients that are accumulated over micro-batches.

        bf16-master accumulates them in fp32; a single micro-batch needs no sum.
        """
        several = self.passes * self.plan.pp_microbatches > 1
        return 4 if several and self.plan.precision == "bf16-master" else self.item

    @property
    def gradient_item_bytes(self) -> int:
        """Return the bytes per element of gradients that ddp and ring reduce."""
        return 2 if self.plan.compress_gradients == "bf16" else self.item

    @property
    def sizes(self) -> list[int]:
        """Return the number of elements of each parameter."""
        return [math.prod(shape) for shape in parameter_shapes(self.spec).values()]

    @property
    def hidden_elements(self) -> int:
        """Return b · S · D, the number of elements of a micro-batch's hidden states."""
        return self.plan.micro_batch * self.seq_len * self.spec.hidden


def step_traffic(
    plan: Plan, spec: ModelSpec, *, global_batch: int, seq_len: int, rank: int
) -> Tally | None:
    """Return the traffic that `rank` sends in a step; None if there is no formula.

    There is none for plans with recomputation or adapters. The traffic includes the messages of
    every job: the loss's sum and count, and the status of each rank.
    """
    formula = _FORMULAS.get(plan.strategy)
    if formula is None or plan.recomputes or plan.lora_rank is not None:
        return None
    tally = of_every_job(plan)
    if plan.world_size > 1:
        formula(StepOnRank(plan, spec, global_batch, seq_len, rank), tally)
    return tally


def of_every_job(plan: Plan) -> Tally:
    """Return the messages between ranks that every step sends, whatever its strategy."""
    tally = Tally()
    if plan.world_size > 1:
        tally.add("all_reduce", plan.world_size, _TOTALS_BYTES)
        tally.add("all_gather", plan.world_size, _STATUS_BYTES)
    return tally


def _count_ddp(work: StepOnRank, tally: Tally) -> None:
    """Count the traffic of ddp: one all-reduce per step of all gradients, in buckets.

    Buckets depend on the order in which gradients are ready (Li et al., VLDB 2020, §3.2); the
    reverse order of parameters is assumed.
    """
    limit, buckets = work.plan.bucket_mib * 2**20, [0]
    for size in reversed(work.sizes):
        if buckets[-1] * work.item >= limit:
            buckets.append(0)
        buckets[-1] += size
    for bucket in buckets:
        tally.add("all_reduce", work.plan.world_size, bucket * work.gradient_item_bytes)


def _count_zero1(work: StepOnRank, tally: Tally) -> None:
    """Count the traffic of zero1: ddp's, plus a broadcast of each rank's updated parameters.

    See Rajbhandari et al., SC 2020, §7.1, with an all-reduce instead of their reduce-scatter. Each
    parameter is assigned to the rank with the fewest elements so far: matrices before vectors,
    largest first.
    """
    _count_ddp(work, tally)
    ranks = work.plan.world_size
    filled = [0] * ranks
    shapes = parameter_shapes(work.spec).values()
    for shape in sorted(shapes, key=lambda shape: (len(shape) < 2, -math.prod(shape))):
        filled[filled.index(min(filled))] += math.prod(shape)
    for owner, numbers in enumerate(filled):
        root = owner == work.rank
        tally.add("broadcast", ranks, numbers * work.item, int(numbers > 0), root)


def _count_ring(work: StepOnRank, tally: Tally) -> None:
    """Count the traffic of ring: 2(N−1)/N of each buffer, in 2(N−1) messages.

    See Patarasuk and Yuan 2009, §3. A buffer has one additional element per parameter. If N does
    not divide the buffer's length, chunk lengths differ by one, and a rank sends up to two elements
    more or fewer per buffer than this count.
    """
    ranks, item = work.plan.world_size, work.gradient_item_bytes
    for sizes in bucket_sizes(reversed(work.sizes), work.plan.bucket_mib * 2**20 // item):
        length = (sum(sizes) + len(sizes)) * item
        tally.collectives["send"] += 2 * (ranks - 1)
        tally.bytes_by_kind["send"] += sent_bytes("all_reduce", ranks, length, False)


def bucket_sizes(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """Group consecutive sizes so that each sum is at most `limit`; larger sizes stay alone."""
    groups: list[list[int]] = []
    for size in sizes:
        if groups and sum(groups[-1]) + size <= limit:
            groups[-1].append(size)
        else:
            groups.append([size])
    return groups


def _count_fully_sharded(work: StepOnRank, tally: Tally) -> None:
    """Count the traffic of zero2, zero3 and hsdp: parameter gathers and gradient reductions.

    Ψ is the number of parameters, and N the number of shards.

    - zero2: an all-gather and a reduce-scatter of Ψ per pass, 2(N−1)/N · Ψ, as much as ddp.
    - zero3 and hsdp: two all-gathers of each block, 3(N−1)/N · Ψ, 1.5 times as much (Rajbhandari et
      al., "ZeRO", SC 2020, §7.2). Parameters outside of blocks are gathered once.
    - hsdp: also an all-reduce of each shard's gradients among replicas (Zhao et al., "PyTorch
      FSDP", VLDB 2023, §3.2.2).

    FSDP reduces gradients in every pass, unlike ddp, which reduces them once per step. In mixed
    precision, parameters are gathered in 16 bits and gradients reduced in 32. Each parameter is
    split along its first dimension, padded to a multiple of N.
    """
    plan, passes = work.plan, work.passes
    for block, shapes in _group_by_fsdp_unit(parameter_shapes(work.spec)).items():
        gathers = 2 if block and plan.strategy != "zero2" else 1
        shard = sum(-(-shape[0] // plan.dp_shard) * math.prod(shape[1:]) for shape in shapes)
        if plan.dp_shard > 1:
            tally.add("all_gather", plan.dp_shard, shard * work.gathered_item, passes * gathers)
            whole = shard * plan.dp_shard * work.reduced_item
            tally.add("reduce_scatter", plan.dp_shard, whole, passes)
        if plan.dp_replicate > 1:
            tally.add("all_reduce", plan.dp_replicate, shard * work.reduced_item, passes)
    tally.add("all_reduce", plan.dp_shard, NORM_BYTES)


def _group_by_fsdp_unit(named: Mapping[str, Shape]) -> dict[str, list[Shape]]:
    """Group parameter shapes by FSDP unit: each block under its number, all others under ""."""
    units: dict[str, list[Shape]] = {}
    for name, shape in named.items():
        block = name.split(".")[1] if name.startswith("blocks.") else ""
        units.setdefault(block, []).append(shape)
    return units


def _count_dp(work: StepOnRank, tally: Tally) -> None:
    """Count the traffic of dp: five collectives per pass, as in `nn.DataParallel`, and a broadcast.

    The five carry weights, samples, outputs, gradients of outputs, and gradients of weights with
    one additional element per parameter (Li et al., VLDB 2020, §2.2). The broadcast, once per step,
    sends the gradient norm.
    """
    ranks, first, passes = work.plan.world_size, work.rank == 0, work.passes
    # BERT's last norm has the dtype of the matmul before it, other norms have fp32.
    output_item = work.item if work.spec.norm_first else work.low_item
    weights, outputs = sum(work.sizes) * work.item, work.hidden_elements * output_item
    samples = work.plan.micro_batch * work.seq_len * _TOKEN_BYTES
    gradients = weights + len(work.sizes) * work.item
    tally.add("broadcast", ranks, weights, passes, first)
    tally.add("scatter", ranks, samples, passes, first)
    tally.add("gather", ranks, outputs, passes, first)
    tally.add("scatter", ranks, outputs, passes, first)
    tally.add("reduce", ranks, gradients, passes, first)
    tally.add("broadcast", ranks, max(work.item, 4), root=first)  # the norm


def _count_ps(work: StepOnRank, tally: Tally) -> None:
    """Count the traffic of ps: workers' gradients, and the sums or weights that servers return.

    See Li et al., OSDI 2014, §2.2. Gradients include one additional element per parameter. A
    worker's other devices reduce their gradients to its first device, which broadcasts the results
    to them.
    """
    plan, item = work.plan, work.item
    each, workers = plan.worker_devices, plan.data_parallel // plan.worker_devices
    shares = share_by_size(work.sizes, plan.servers)
    sums = [sum(work.sizes[index] for index in share) for share in shares]
    messages = [(size + len(share)) * item for size, share in zip(sums, shares, strict=True)]
    if work.rank < plan.data_parallel:
        speaks = work.rank % each == 0
        for message, size in zip(messages, sums, strict=True):
            back = size * item if plan.server_updates else message
            tally.add("reduce", each, message, int(each > 1), speaks)
            tally.add("broadcast", each, back, int(each > 1), speaks)
            tally.add("send", 2, message, int(speaks))
    else:
        server = work.rank - plan.data_parallel
        answer = sums[server] * item if plan.server_updates else messages[server]
        tally.add("send", 2, answer, workers)
    norm = "all_reduce" if plan.server_updates else "broadcast"
    tally.add(norm, plan.world_size, max(item, 4), root=work.rank == 0)


def share_by_size(sizes: Iterable[int], shares: int) -> list[list[int]]:
    """Distribute items over groups: largest first, each to the smallest group so far.

    The largest group is at most 4/3 of the largest in an optimal distribution (Graham, "Bounds on
    multiprocessing timing anomalies", 1969).
    """
    chosen: list[list[int]] = [[] for _ in range(shares)]
    filled = [0] * shares
    for index, size in sorted(enumerate(sizes), key=lambda pair: pair[1], reverse=True):
        share = filled.index(min(filled))
        chosen[share].append(index)
        filled[share] += size
    return chosen


def _count_pipeline(work: StepOnRank, tally: Tally) -> None:
    """Count the traffic of pipelines: hidden states forward, and their gradients backward.

    Each takes b · S · D elements per micro-batch and boundary (Narayanan et al., arXiv 2104.04473,
    §3.2). If embeddings are tied, the ranks of the first and last stage all-reduce their gradient.
    """
    plan, spec = work.plan, work.spec
    schedule = SCHEDULES[plan.strategy]
    ranks_of = [schedule.rank_of(stage, plan.pp) for stage in range(plan.stages)]
    messages = work.passes * plan.pp_microbatches
    for border in pairwise(ranks_of):
        if len(set(border)) == 2:
            tally.add(
                "send", 2, work.hidden_elements * work.item, messages * border.count(work.rank)
            )
    ends = {ranks_of[0], ranks_of[-1]}
    if spec.tied and len(ends) == 2 and work.rank in ends:
        tally.add("send", 2, spec.vocab * spec.hidden * work.summed_item)
    tally.add("all_reduce", plan.pp, NORM_BYTES)


def _count_tp(work: StepOnRank, tally: Tally) -> None:
    """Count the traffic of tp: 8(N−1)/N · b · S · D elements per layer and pass.

    Sequence parallelism sends as many bytes as plain tensor parallelism. Plain tensor parallelism
    all-reduces the outputs of attention and MLP, and the gradients of their inputs (Shoeybi et al.,
    arXiv 1909.08053, §3). Sequence parallelism replaces each all-reduce by a reduce-scatter and an
    all-gather (Korthikanti et al., arXiv 2205.05198, §4.2.2). The embedding's output and the
    gradient of the head's input need one more all-reduce each, or its replacement. BERT's head,
    whose transform every rank computes in full, has an all-reduce instead of the reduce-scatter.
    The loss adds three numbers per token. Gradients of unsplit weights that each rank computes from
    its part of the sequence or of the heads are all-reduced once per step.
    """
    plan, spec, ranks = work.plan, work.spec, work.plan.tp
    regions = (2 * spec.layers + 1) * work.passes  # attentions, MLPs and the head
    embedded, hidden = work.hidden_elements * work.item, work.hidden_elements * work.low_item
    if plan.sequence_parallel:
        whole = 0 if spec.norm_first else work.passes
        tally.add("all_reduce", ranks, hidden, whole)
        tally.add("reduce_scatter", ranks, embedded, work.passes)
        tally.add("reduce_scatter", ranks, hidden, 2 * regions - work.passes - whole)
        tally.add("all_gather", ranks, embedded // ranks, work.passes)
        tally.add("all_gather", ranks, hidden // ranks, 2 * regions - work.passes)
    else:
        tally.add("all_reduce", ranks, embedded, work.passes)
        tally.add("all_reduce", ranks, hidden, 2 * regions - work.passes)
    tokens = plan.micro_batch * work.seq_len * max(work.item, 4)  # softmax is in fp32
    tally.add("all_reduce", ranks, tokens, work.passes)
    tally.add("all_reduce", ranks, 2 * tokens, work.passes)
    shared = _shared_elements(work)
    if shared:
        tally.add("all_reduce", ranks, shared * work.summed_item)
    tally.add("all_reduce", ranks, NORM_BYTES)


def _shared_elements(work: StepOnRank) -> int:
    """Return the number of elements of unsplit weights whose gradients tp ranks must all-reduce."""
    partial = ["q_norm", "k_norm"]
    if work.plan.sequence_parallel:
        partial += ["norm", "embed.positions", "embed.segments"]
    named = parameter_shapes(work.spec).items()
    return sum(
        math.prod(shape)
        for name, shape in named
        if any(part in name for part in partial) and not name.startswith("head_transform")
    )


def _count_cp(work: StepOnRank, tally: Tally) -> None:
    """Count the traffic of cp: keys, values and their gradients, passed around a ring.

    Keys and values take N−1 messages per layer in the forward, and again in the backward. Their
    gradients return to the owners in N messages (Liu et al., arXiv 2310.01889, §3). Gradients of
    parameters are all-reduced as in ddp.
    """
    plan, spec, ranks = work.plan, work.spec, work.plan.cp
    times = spec.layers * work.passes
    numbers = 2 * plan.micro_batch * (work.seq_len // ranks) * spec.kv_heads * spec.head_dim
    tally.add("send", 2, numbers * work.low_item, 2 * (ranks - 1) * times)
    tally.add("send", 2, numbers * max(work.item, 4), ranks * times)  # summed in fp32 on the way
    _count_ddp(work, tally)


def _count_nothing(work: StepOnRank, tally: Tally) -> None:
    """Count nothing, because a single process sends nothing."""


_FORMULAS: Mapping[str, Callable[[StepOnRank, Tally], None]] = {
    "single": _count_nothing,
    "dp": _count_dp,
    "ps": _count_ps,
    "ddp": _count_ddp,
    "ring": _count_ring,
    "zero1": _count_zero1,
    "zero2": _count_fully_sharded,
    "zero3": _count_fully_sharded,
    "hsdp": _count_fully_sharded,
    **dict.fromkeys(SCHEDULES, _count_pipeline),
    "tp": _count_tp,
    "cp": _count_cp,
}
