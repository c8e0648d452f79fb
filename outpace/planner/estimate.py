"""How long a step of many plans takes, and where the time goes: closed forms, all plans at once.

A step is the pipeline's passes (compute and what it waits for, the bubble), the exchange of
gradients as far as no backward hides it, and the optimizer. docs/planner.md derives each term.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from outpace.catalog import efficiency
from outpace.planner.columns import MODES, PRECISIONS, Columns, Floats, Ints
from outpace.planner.device import Device, dtype_of, items
from outpace.planner.fabric import Fabric
from outpace.planner.layers import Cells, Kernel, Work, embedding, head, layer
from outpace.planner.optimizer_time import optimizer_s
from outpace.planner.outlines import (
    head_in_layers,
    layer_parameters,
    outside_elements,
    weights,
)
from outpace.planner.play import StageTime
from outpace.planner.stages import balance
from outpace.records.outline import Outline

_FP32 = 4.0
# Of a block that is computed again: states of random numbers are kept, set, and set back, on the
# host and the device (torch.utils.checkpoint).
_CHECKPOINT_OPERATORS = 6
# Of a message sent and one received by a stage: two operations, the beginning and end of their
# group, and waiting for either (torch.distributed.batch_isend_irecv).
_EXCHANGE_OPERATORS = 6


@dataclass(frozen=True)
class Question:
    """A model on a machine, and the attention kernel there.

    `loader_tokens_per_s` is what a node loads beside computing.
    """

    outline: Outline
    seq_len: int
    device: Device
    fabric: Fabric
    kernel: Kernel = "fused"
    loader_tokens_per_s: float = math.inf


@dataclass(frozen=True)
class Times:
    """Seconds of a step by what they go to, one entry a plan; they add up to the step.

    `host_s` is what the device waits for the host, and what uneven stages wait for the slowest.
    `data_s` is exposed of gradients' and parameters' exchanges, `tensor_s`, `context_s`,
    `pipeline_s` and `expert_s` of those axes'. `loading_s` is waiting for samples.
    """

    products_s: Floats
    attention_s: Floats
    memory_s: Floats
    host_s: Floats
    bubble_s: Floats
    tensor_s: Floats
    context_s: Floats
    pipeline_s: Floats
    expert_s: Floats
    data_s: Floats
    optimizer_s: Floats
    offload_s: Floats
    loading_s: Floats

    @property
    def step_s(self) -> Floats:
        """All of it."""
        total: Floats = np.sum([getattr(self, f.name) for f in fields(self)], axis=0)
        return total


def estimate(question: Question, columns: Columns) -> Times:
    """Of each plan."""
    return _Step(question, columns).times()


@dataclass(frozen=True)
class Stages:
    """Of one plan's pipeline: seconds of a micro-batch on each stage, and between two.

    `posted_s` is the host's part of a step's exchanges.
    """

    times: tuple[StageTime, ...]
    transfer_s: float
    posted_s: float


def stages_of(question: Question, columns: Columns) -> Stages:
    """Of the first plan, to be played."""
    return _Step(question, columns.take([0])).stages()


@dataclass(frozen=True)
class _Pass:
    """Of one micro-batch: seconds on the device, on the host, and waiting for other ranks' parts.

    `weights_s` are the device's for gradients of weights, which some schedules put off.

    A host runs ahead of its accelerator, so that a pass takes what the slower of them takes; where
    both are one (`alone`), it takes what both take.
    """

    device_s: Floats
    host_s: Floats
    tensor_s: Floats
    products_s: Floats
    attention_s: Floats
    weights_s: Floats
    alone: bool

    @property
    def seconds(self) -> Floats:
        if self.alone:
            return self.device_s + self.tensor_s + self.host_s
        return np.maximum(self.device_s + self.tensor_s, self.host_s)


def _total(passes: Sequence[_Pass], shares: Floats, name: str) -> Floats:
    """Of all stacks, each by its share of the layers."""
    found: Floats = np.sum(
        [share * getattr(one, name) for share, one in zip(shares, passes, strict=True)], axis=0
    )
    return found


@dataclass(frozen=True)
class _Pipeline:
    """Seconds of a micro-batch: on a rank with the slowest stages, and on all stages together.

    `own_s` is what a rank with the slowest stages computes, `pace_s` with its weights' traffic.
    `ranks` has seconds and layers of the ranks that may be slowest: the first, those between, the
    last.
    """

    pace_s: Floats
    way_s: Floats
    own_s: Floats
    ranks: tuple[tuple[Floats, Floats], ...]


class _Step:
    def __init__(self, question: Question, columns: Columns) -> None:
        self.q, self.c = question, columns
        self.outline, self.device, self.fabric = question.outline, question.device, question.fabric
        self._sizes()
        self._cells()
        self.micro = columns.microbatches * columns.passes

    def _sizes(self) -> None:
        """Bytes of numbers, and parameters of a rank before data parallelism shards them."""
        c = self.c
        self.item = items(c.precision)
        shards_cast = c.of("zero2", "zero3", "hsdp", "3d")
        self.autocast = c.precise("bf16", "fp16", "fp8") & ~shards_cast
        self.wide = np.where(self.autocast, _FP32, self.item)
        self.kept = np.where(c.precise("fp16-master", "bf16-pure", "fp16-pure"), 2.0, _FP32)
        layers, more = np.zeros(len(c)), np.zeros(len(c))
        for stack in self.outline.stacks:
            experts = sum(w.elements for w in weights(stack, self.outline.hidden) if w.experts)
            rest = layer_parameters(stack, self.outline.hidden) - experts
            layers = layers + stack.layers * (rest / c.tp + experts / c.ep)
            # Who shares out experts shards as well: of what is sharded ep is a part.
            alone = np.where(c.zero > 0, c.ep, 1)
            more = more + stack.layers * experts * (alone - 1) / c.ep
        ends = outside_elements(self.outline) / c.tp
        # A pipeline's ends have the embedding and the head; the fuller one decides.
        self.parameters = layers / c.pp + np.where(c.pp > 1, ends / (1 if self._tied else 2), ends)
        self.owned = self.parameters + more / c.pp

    @property
    def _alone(self) -> bool:
        return self.device.kind == "cpu"

    @property
    def _tied(self) -> bool:
        return self.outline.tied

    def _cells(self) -> None:
        c = self.c
        rates = np.array([self.device.rate(dtype_of(name)) for name in PRECISIONS])
        split = np.where(c.sequence_parallel, c.tp, 1)
        keys = np.stack(
            [rates[c.precision], self.item, self.wide, c.micro_batch, c.tp, c.cp, c.ep, split,
             c.compile], axis=1,
        ).astype(float)  # fmt: skip
        unique, self.of = np.unique(keys, axis=0, return_inverse=True)
        self.cells = Cells(*unique.T)
        self.tokens = c.micro_batch * self.q.seq_len / c.cp

    def _spread(self, values: Floats) -> Floats:
        """Of each plan, what is of each cell."""
        return np.broadcast_to(values, self.cells.rate.shape)[self.of]

    def times(self) -> Times:
        """Put together."""
        c = self.c
        counts = np.array([stack.layers for stack in self.outline.stacks], float)
        shares = counts / counts.sum()
        forwards, backwards = self._layers()
        ahead_s, back_s = (_total(p, shares, "seconds") for p in (forwards, backwards))
        ends = self._ends()
        pipeline = self._pipeline(ahead_s + back_s, ends)
        busy = self.micro * pipeline.pace_s
        own = self.outline.layers / c.pp

        def of(name: str) -> Floats:
            """A rank's seconds in the mean."""
            layers = _total(forwards, shares, name) + _total(backwards, shares, name)
            outside: Floats = np.sum([getattr(end, name) for end in ends], axis=0)
            return self.micro * (own * layers + outside / c.pp)

        products, attention, tensor = of("products_s"), of("attention_s"), of("tensor_s")
        moved = np.maximum(of("device_s") - products - attention, 0.0)
        moved = moved + self.micro * self._weight_traffic()
        known = products + attention + tensor + moved
        fit = np.minimum(1.0, busy / np.maximum(known, 1e-30))
        put_off = _total(backwards, shares, "weights_s") / np.maximum(ahead_s + back_s, 1e-30)
        found = Times(
            products_s=products * fit,
            attention_s=attention * fit,
            memory_s=moved * fit,
            host_s=np.maximum(busy - known, 0.0),
            bubble_s=c.passes * self._bubble(pipeline, put_off),
            tensor_s=tensor * fit,
            context_s=self._ring(forwards, backwards, shares, own),
            pipeline_s=self._sends(),
            expert_s=self._experts(),
            data_s=self._data(ahead_s, back_s, pipeline),
            optimizer_s=self._optimizer(),
            offload_s=self._offload(busy),
            loading_s=np.zeros(len(c)),
        )
        return replace(found, loading_s=self._loading(found.step_s))

    def _loading(self, step_s: Floats) -> Floats:
        """Loaders work ahead of the step, so that what is waited for is what takes longer."""
        c = self.c
        samples = c.micro_batch * self.micro * c.data_parallel
        nodes = np.clip(c.ranks / self.fabric.per_node, 1, c.data_parallel)
        loaded_s = samples * self.q.seq_len / nodes / self.q.loader_tokens_per_s
        return np.maximum(loaded_s - step_s, 0.0)

    # Passes.

    def _layers(self) -> tuple[list[_Pass], list[_Pass]]:
        """Of each stack's layer: a forward, and a backward with what it computes again."""
        forwards, backwards = [], []
        for stack in self.outline.stacks:
            work = layer(self.device, self.outline, stack, self.cells, self.q.seq_len,
                         self.q.kernel)  # fmt: skip
            w = Work(**{f.name: self._spread(getattr(work, f.name)) for f in fields(work)})
            sums = float(stack.attention is not None) + float(stack.mlp is not None)
            forwards.append(self._forward(w, sums))
            backwards.append(self._backward(w, sums))
        return forwards, backwards

    def _forward(self, w: Work, sums: float) -> _Pass:
        tensor_s, calls = self._tensor(sums, w.products_s)
        host_s = (w.forward_operators + calls) * self.device.operator_s
        none = np.zeros_like(w.forward_s)
        return _Pass(w.forward_s, host_s, tensor_s, w.products_s, w.attention_s, none, self._alone)

    def _backward(self, w: Work, sums: float) -> _Pass:
        """Recomputation by its shares of the blocks: all of a block, or all but attention itself.

        What "selective" computes again has no products; it moves memory, as norms and activations.
        """
        modes = {name: self.c.modes[:, place] for place, name in enumerate(MODES)}
        full, dense = modes["full"], modes["attention"]
        most = full + dense
        light_s = np.maximum(w.forward_s - w.products_s - w.inner_s, 0.0)
        again_s = most * w.forward_s - dense * w.inner_s + modes["selective"] * light_s
        again = most * (w.forward_operators + _CHECKPOINT_OPERATORS) - dense * w.inner_operators
        again_tensor_s, calls = self._tensor(sums, w.products_s)
        tensor_s, _ = self._tensor(sums, 2 * w.products_s)
        launched = w.backward_operators * efficiency.BACKWARD_SHARE + again + calls * (1 + most)
        return _Pass(
            w.backward_s + again_s,
            launched * self.device.operator_s,
            tensor_s + most * again_tensor_s,
            (2 + most) * w.products_s,
            w.attention_back_s + full * w.attention_s,
            w.weights_s,
            self._alone,
        )

    def _tensor(self, sums: float, products_s: Floats) -> tuple[Floats, Floats]:
        """Exchanges of tensor parallelism in a layer's forward, and how many; as many backwards.

        A sum after attention and one after the MLP; with sequence parallelism each is a gather and
        a scattering sum, of the same bytes together (Korthikanti et al., arXiv 2205.05198, §4.2).
        With async_tp each goes on in tp parts beside the product that it is for.
        """
        c = self.c
        nbytes = self.tokens * self.outline.hidden * self.item
        near = np.ones_like(c.tp)
        whole = self.fabric.collective_s(nbytes, c.tp, near, 2)
        halves = 2 * self.fabric.collective_s(nbytes, c.tp, near, 1)
        calls = np.where(c.tp > 1, np.where(c.sequence_parallel, 2.0, 1.0), 0.0)
        exchange_s = sums * np.where(c.sequence_parallel, halves, whole)
        exposed_s = np.where(
            c.async_tp, self._beside(exchange_s, products_s, c.tp.astype(float)), exchange_s
        )
        return exposed_s, sums * calls

    def _ends(self) -> tuple[_Pass, _Pass, _Pass, _Pass]:
        """Embedding and head, forward and backward."""
        zero = np.zeros(len(self.c))
        found = []
        for part in (embedding, head):
            work = part(self.device, self.outline, self.cells, self.q.seq_len)
            for seconds, products, share in (
                (work.forward_s, work.products_s, 1.0),
                (work.backward_s, work.products_back_s, efficiency.BACKWARD_SHARE),
            ):
                device_s, products_s = self._spread(seconds), self._spread(products)
                host_s = self._spread(work.operators) * self.device.operator_s * share
                found.append(_Pass(device_s, host_s, zero, products_s, zero, zero, self._alone))
        return found[0], found[1], found[2], found[3]

    # The pipeline.

    def _pipeline(self, layer_s: Floats, ends: tuple[_Pass, _Pass, _Pass, _Pass]) -> _Pipeline:
        c, layers = self.c, float(self.outline.layers)
        first_s = ends[0].seconds + ends[1].seconds
        last_s = ends[2].seconds + ends[3].seconds
        stages = c.pp * c.stages_per_rank
        first, middle, last = self._cut(stages)
        way = layers * layer_s + first_s + last_s
        # A rank has one of the slowest stages, and others of the mean beside it.
        beside, traffic = c.stages_per_rank - 1, self._weight_traffic()
        rows, slowest = [], np.zeros_like(way)
        for count, end_s in ((first, first_s), (middle, 0.0), (last, last_s)):
            stage = np.where(stages == 1, way, count * layer_s + end_s)
            slowest = np.maximum(slowest, stage)
            rows.append((stage + beside * way / stages + traffic, count + beside * layers / stages))
        own = slowest + beside * way / stages
        return _Pipeline(own + traffic, way, own, tuple(rows if (stages > 1).any() else rows[:1]))

    def _cut(self, stages: Ints) -> tuple[Floats, Floats, Floats]:
        """Blocks of the first stage, the fullest of those between, and the last.

        Cut by multiply-adds, as outpace does (`stages.layers_per_stage`), whatever takes how long.
        """
        layers, head = self.outline.layers, head_in_layers(self.outline)
        even = np.where(self.c.even_stages | (stages == 1), layers / stages, 0.0)
        first, middle, last = even.copy(), even.copy(), even.copy()
        balanced = np.nonzero(~self.c.even_stages & (stages > 1) & (stages <= layers))[0]
        unique, places = np.unique(stages[balanced], return_inverse=True)
        cuts = np.array(
            [[*_ends_of(balance(layers, int(count), head))] for count in unique], float
        ).reshape(-1, 3)
        first[balanced], middle[balanced], last[balanced] = cuts[places].T
        return first, middle, last

    def stages(self) -> Stages:
        """Of one plan: blocks by stage, with the embedding on the first and the head on the last.

        Of a backward, the weights' part is that of their gradients.
        """
        c, layers = self.c, self.outline.layers
        counts = np.array([stack.layers for stack in self.outline.stacks], float)
        forwards, backwards = self._layers()
        ahead, back, grads = (
            float(_total(passes, counts / counts.sum(), name)[0])
            for passes, name in (
                (forwards, "seconds"), (backwards, "seconds"), (backwards, "weights_s"),
            )
        )  # fmt: skip
        ends = [float(end.seconds[0]) for end in self._ends()]
        number = int(c.pp[0] * c.stages_per_rank[0])
        each, more = divmod(layers, number)
        spread = tuple(each + (place < more) for place in range(number))
        if not c.even_stages[0]:
            spread = balance(layers, number, head_in_layers(self.outline))
        traffic = float(self._weight_traffic()[0]) / float(c.stages_per_rank[0])
        times = []
        for place, count in enumerate(spread):
            first, last = place == 0, place == number - 1
            forward = count * ahead + first * ends[0] + last * ends[2]
            backward = count * back + first * ends[1] + last * ends[3] + traffic
            weights_s = min(count * grads + last * ends[2], backward)
            times.append(StageTime(forward, backward - weights_s, weights_s))
        one, posted = self._hop()
        return Stages(tuple(times), float(one[0]), float(posted[0]))

    def _bubble(self, pipeline: _Pipeline, weights: Floats) -> Floats:
        """Seconds that a pass's ranks wait for each other while the pipeline fills and drains.

        gpipe and 1f1b: a micro-batch's way through all ranks but the slowest. With v stages a
        rank, of this 1/v (arXiv 2104.04473, §2.2). Split backwards fill most of it: what is left
        of 1f1b's (p−1)(F+I+W) is (p−1)(F+I−W)/v for zb, and (p−1)(F+I−2W), which is 0 where all
        are equal, for zbv (Qi et al., arXiv 2401.10241, table 1); dualpipev has as much. `weights`
        is W's share of a pass.
        """
        c = self.c
        left = np.where(c.scheduled("zb"), np.maximum(1 - 2 * weights, 0.0), 1.0)
        none_left = np.maximum(1 - 3 * weights, 0.0)
        left = np.where(c.scheduled("zbv", "dualpipev"), none_left, left)
        waits = np.maximum(pipeline.way_s - pipeline.own_s, 0.0) / c.stages_per_rank * left
        alone = pipeline.way_s * c.microbatches - c.microbatches * pipeline.pace_s
        waits = np.where(c.scheduled("mp"), np.maximum(alone, 0.0), waits)
        # Ranks that take turns on a core have more of it while others wait.
        busy = c.microbatches * pipeline.pace_s
        waits = np.maximum((busy + waits) / self.device.sharers - busy, 0.0)
        return np.where(c.pp > 1, waits, 0.0)

    # Exchanges.

    def _sends(self) -> Floats:
        """Activations and their gradients between stages.

        While the pipeline fills and drains each hop is waited for; beside that 1f1b, which has no
        micro-batch to spare, waits for one each way a micro-batch.
        """
        c = self.c
        one, posted_s = self._hop()
        fill = 2.0 * (c.pp * c.stages_per_rank - 1)
        waits = np.where(c.scheduled("1f1b"), 2.0 * c.microbatches, 0.0)
        hops = np.where(c.scheduled("mp"), fill * c.microbatches, fill + waits)
        return np.where(c.pp > 1, c.passes * (hops * one + posted_s), 0.0)

    def _hop(self) -> tuple[Floats, Floats]:
        """Seconds of a message between stages; and of the host, which posts all of a pass's.

        Every stage posts an exchange forwards and one backwards for each micro-batch.
        """
        c = self.c
        nbytes = self.tokens * self.outline.hidden * self.item
        nbytes = nbytes / np.where(c.sequence_parallel, c.tp, 1)
        one = self.fabric.send_s(nbytes, c.tp * c.cp * c.data_parallel)
        posted = 2.0 * (c.microbatches + c.pp - 1) * c.stages_per_rank * _EXCHANGE_OPERATORS
        return one, (posted * self.device.operator_s).astype(np.float64)

    def _ring(
        self, forwards: list[_Pass], backwards: list[_Pass], shares: Floats, own: Floats
    ) -> Floats:
        """Keys and values go round while attention is computed; what is left is waited for.

        Forwards once round, backwards with gradients twice as much; where attention is computed
        again, they go round again.
        """
        c = self.c
        total, merged = np.zeros(len(c)), np.zeros(len(c))
        for stack in self.outline.stacks:
            a = stack.attention
            if a is None:
                continue
            # Each part's outputs are put together with those before: read, read, written, in fp32;
            # gradients likewise.
            outputs = self.tokens * a.heads / c.tp * a.value_dim * 3 * _FP32
            merged = merged + stack.layers / c.pp * 2 * (c.cp - 1) * (
                outputs / self.device.memory_bytes_per_s + 3 * self.device.fixed_s
            )
            widths = np.maximum(a.kv_heads / c.tp, 1) * (a.head_dim + a.value_dim)
            each = self.fabric.send_s(self.tokens * widths * self.item, c.tp)
            total = total + stack.layers / c.pp * (c.cp - 1) * each
        share = (c.cp - 1) / c.cp
        full = self.c.modes[:, MODES.index("full")]
        ahead = share * own * _total(forwards, shares, "attention_s")
        back = share * own * _total(backwards, shares, "attention_s") - full * ahead
        exposed = np.maximum(3 * total - ahead - back, 0) + full * np.maximum(total - ahead, 0)
        return np.where(c.cp > 1, self.micro * (exposed + merged * (1 + full / 2)), 0.0)

    def _experts(self) -> Floats:
        """Tokens to their experts and back, all to all: twice forwards, twice backwards."""
        c = self.c
        total = np.zeros(len(c))
        for stack in self.outline.stacks:
            if stack.mlp is not None and stack.mlp.experts:
                nbytes = self.tokens * stack.mlp.active * self.outline.hidden * self.item
                one = self.fabric.collective_s(nbytes * c.ep, c.ep, c.tp, 1)
                total = total + stack.layers / c.pp * 4 * one
        return np.where(c.ep > 1, self.micro * total, 0.0)

    def _data(self, ahead_s: Floats, back_s: Floats, pipeline: _Pipeline) -> Floats:
        """What is exposed of gradients' sums, and of gathering parameters that are sharded.

        `ahead_s` and `back_s` are a layer's passes of one micro-batch. Where a pipeline's ranks
        differ, one that is not the slowest may be by what it exposes.
        """
        c = self.c
        together = c.dp_shard * c.cp  # a sequence's ranks share and shard as well
        grads = self.parameters * self.kept
        low = self.parameters * np.where(self.item < _FP32, 2.0, _FP32)
        shard_sum = self.fabric.collective_s(grads, together, c.tp, 1)
        gather = self.fabric.collective_s(low, together, c.tp, 1)
        far = c.tp * c.cp * c.dp_shard
        replicas = self.fabric.collective_s(
            grads / np.where(c.zero > 0, c.dp_shard, 1), c.dp_replicate, far, 2
        )
        replicas = replicas + np.where(
            c.zero == 0, self.fabric.collective_s(grads, c.cp, c.tp, 2), 0.0
        )
        # The embedding's gradient is the last to be whole, and a bucket is no smaller than it.
        table = self.outline.vocab * self.outline.embedded / c.tp / self.parameters
        last = np.where(c.pp > 1, 0.0, np.minimum(table, 1.0))
        buckets = np.maximum(1.0, np.floor(grads / c.bucket_bytes))
        buckets = np.minimum(buckets, 1 / np.maximum(last, 1e-9))
        units = np.maximum(self.outline.layers / c.pp, 1.0)
        # A pipeline's micro-batches share gathers and sums.
        shared = np.where(c.pp > 1, c.microbatches, 1)
        rounds = np.where(c.pp > 1, c.passes, self.micro)
        # Megatron's gathers go on beside the next forward, ZeroRedundancyOptimizer's do not.
        product = c.of("3d")
        sums = shard_sum + replicas

        def exposed_by(ahead: Floats, back: Floats) -> Floats:
            own_gather = np.where(product, self._beside(gather, ahead, units), gather)
            zero1 = self._beside(shard_sum, back, buckets) + self._beside(replicas, back, buckets)
            # Layer by layer: a gather before each forward and backward, a sum after.
            into = self._beside(gather + sums, shared * back, units + 1)
            zero3 = rounds * (self._beside(gather, shared * ahead, units + 1) + into)
            zero2 = self._beside(gather, shared * ahead, units + 1)
            zero2 = rounds * (zero2 + self._beside(sums, shared * back, units + 1))
            plain = self._beside(replicas, back, buckets)
            levels = [c.zero == level for level in (1, 2, 3)]
            return np.select(levels, [zero1 + own_gather, zero2, zero3], plain)

        busy = self.micro * pipeline.pace_s
        exposed: Floats = np.max(
            [
                self.micro * seconds - busy + exposed_by(count * ahead_s, count * back_s)
                for seconds, count in pipeline.ranks
            ],
            axis=0,
        )
        exposed = exposed + self._units(units)
        exposed = np.where((c.data_parallel > 1) | (c.cp > 1), exposed, 0.0)
        return np.where(c.of("dp", "ps"), self._one_to_all(grads), exposed)

    def _units(self, units: Floats) -> Floats:
        """The host's part of gathering shards and summing up gradients, unit by unit."""
        c = self.c
        rounds = np.where(c.pp > 1, c.passes, self.micro)
        sums = np.where(c.zero > 1, rounds, 0)
        gathers = np.where(c.zero == 3, 2 * rounds, sums)
        found: Floats = (sums + gathers) * (units + 1) * self.device.unit_s
        return found

    def _beside(self, exchange_s: Floats, compute_s: Floats, units: Floats) -> Floats:
        """What is exposed of an exchange in equal parts, one fewer of which has company."""
        exposed = np.maximum(exchange_s / units, exchange_s - compute_s * (units - 1) / units)
        found: Floats = exchange_s - self.device.hides * (exchange_s - exposed)
        return found

    def _one_to_all(self, grads: Floats) -> Floats:
        """dp: parameters to every replica before a forward, gradients back, over one device's link.

        ps: as much over the servers' links, each worker's in turn, both ways at the same time.
        """
        c = self.c
        others = np.maximum(c.data_parallel - 1, 0)
        link = np.where(
            c.data_parallel <= self.fabric.per_node,
            self.fabric.pair_bytes_per_s,
            self.fabric.across_bytes_per_s,
        )
        dp = 2 * others * grads / link
        ps = c.data_parallel * grads / np.maximum(c.servers, 1) / link
        return np.where(c.of("ps"), ps, self.micro * dp)

    # Parameters.

    def _weight_traffic(self) -> Floats:
        """Of a micro-batch: weights cast for products, gradients cast back and added up."""
        cast = np.where(self.autocast, 12.0, 0.0)
        add = np.where(self.micro > 1, 3 * self.kept, 0.0)
        seconds: Floats = self.parameters * (cast + add) / self.device.memory_bytes_per_s
        return seconds

    def _optimizer(self) -> Floats:
        """By the optimizer's own traffic, launches and products, of the parameters of a shard."""
        shards = np.where(self.c.zero > 0, self.c.dp_shard * self.c.cp, 1)
        return optimizer_s(self.outline, self.device, self.fabric, self.c, self.owned / shards)

    def _offload(self, busy: Floats) -> Floats:
        """What lies in host memory goes over the host's link: what passes do not hide."""
        c = self.c
        shards = np.where(c.zero > 0, c.dp_shard * c.cp, 1)
        own = self.owned / shards
        rate = self.device.host_bytes_per_s
        host_steps = own * 7 * _FP32 / self.device.host_memory_bytes_per_s
        state = np.where(c.offload_optimizer > 0, own * (self.kept + _FP32) / rate + host_steps, 0)
        gathers = np.where(c.pp > 1, c.passes, self.micro)
        lent = 2 * gathers * own * self.kept / rate
        weights_s = np.where(c.offload_parameters > 0, np.maximum(lent - busy, 0.0) + host_steps, 0)
        there_and_back = 2 * self.micro * self._saved() / rate
        acts = np.where(c.offload_activations > 0, np.maximum(there_and_back - busy, 0.0), 0.0)
        disk = np.maximum(c.offload_optimizer, c.offload_parameters) > 1
        slow = np.where(disk, own * 2 * 3 * _FP32 / self.device.disk_bytes_per_s, 0.0)
        total: Floats = state + weights_s + acts + slow
        return total

    def _saved(self) -> Floats:
        """Bytes that a rank's blocks keep of a micro-batch for the backward.

        Inputs and outputs of norms and what products read: queries, keys, values and their mix,
        and of the MLP what its activation reads and gives (Korthikanti et al., arXiv 2205.05198,
        §4.1, without scores). A block that is computed again keeps its input alone; with
        "attention" the mix as well, with "selective" what products gave.
        """
        c, hidden = self.c, self.outline.hidden
        modes = {name: c.modes[:, place] for place, name in enumerate(MODES)}
        total = np.zeros(len(c))
        for stack in self.outline.stacks:
            a, m = stack.attention, stack.mlp
            mix = 0 if a is None else a.heads * a.value_dim
            read = (
                0 if a is None else a.heads * a.head_dim + a.kv_heads * (a.head_dim + a.value_dim)
            )
            inner = 0 if m is None else m.width * (m.active if m.experts else 1) + m.shared
            products = (read + mix + inner * (2 if m is not None and m.gated else 1)) / c.tp
            activated = inner * (2 if m is not None and m.gated else 1) / c.tp
            everything = 4 * hidden + products + activated
            each = (
                modes["none"] * everything
                + modes["selective"] * (2 * hidden + products)
                + modes["attention"] * (hidden + mix / c.tp)
                + modes["full"] * hidden
            )
            total = total + stack.layers / c.pp * each
        saved: Floats = total * self.tokens * self.item
        return saved


def _ends_of(counts: tuple[int, ...]) -> tuple[int, int, int]:
    """Blocks of the first stage, the fullest between, and the last."""
    return counts[0], max(counts[1:-1], default=0), counts[-1]
