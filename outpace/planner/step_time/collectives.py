"""Exposed communication of gradients, parameters, keys and values, and tokens of experts."""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from outpace.planner.model.outline import weights
from outpace.planner.plan_columns import MODES, Floats, Ints
from outpace.planner.step_time.passes import StepPasses
from outpace.planner.step_time.pipeline import PipelineTime
from outpace.planner.step_time.setup import FP32, StepTimeSetup


@dataclass(frozen=True)
class _Collectives:
    """Seconds of a step's data-parallel collectives if nothing overlaps them.

    - `grads`: bytes of a rank's gradients.
    - `scatter`, `sum`: reduce-scatter, and all-reduce, of gradients over the ranks that shard.
    - `gather`: all-gather of parameters.
    - `weights`: broadcast or all-gather of the weights that ZeRO-1 has updated.
    - `replicas`: all-reduce of gradients over replicas.
    """

    grads: Floats  # bytes of gradients
    scatter: Floats
    sum: Floats
    gather: Floats
    weights: Floats
    replicas: Floats


@dataclass(frozen=True)
class _Pass:
    """Seconds of a micro-batch's forward or backward, and the fraction spent in matmuls."""

    seconds: Floats
    matmuls: Floats

    def of_layers(self, count: Floats) -> "_Pass":
        return _Pass(count * self.seconds, self.matmuls)


@dataclass(frozen=True)
class Ring:
    """Seconds to transfer context parallelism's keys and values in all layers, per micro-batch.

    `forward_s` and `backward_s` are the times that attention does not hide, `sent_s` and
    `sent_back_s` the times that the link is busy.
    """

    forward_s: Floats
    backward_s: Floats
    sent_s: Floats
    sent_back_s: Floats

    @property
    def exposed_s(self) -> Floats:
        """Return the exposed seconds of forward and backward."""
        return self.forward_s + self.backward_s


def ring(setup: StepTimeSetup, passes: StepPasses) -> Ring:
    """Return the time to send keys and values to the other context-parallel ranks during attention.

    Keys and values are sent around a ring in the forward and in the backward, their gradients only
    in the backward; recomputed attention sends keys and values once more. Attention is computed in
    parts, one for the keys of each rank, which take equally long. If keys and values are gathered
    instead, only the part for a rank's own keys can hide the gather. A part's gradients are sent
    during the next part, so those of the last part are exposed. While the device waits for the host
    to launch kernels, transfers continue, so this waiting time is subtracted.
    """
    c, stack = setup.columns, setup.question.stack
    if (c.cp == 1).all():
        nothing = np.zeros(len(c))
        return Ring(nothing, nothing, nothing, nothing)
    layers = setup.layers
    full = c.modes[:, MODES.index("full")]
    ahead = passes.forward("attention_s") * layers
    back = passes.backward("attention_s") * layers - full * ahead
    keys_s, grads_s, (merged_s, merged_back_s) = _ring_seconds(setup)
    others: Floats = (c.cp - 1).astype(np.float64)
    one = np.ones_like(others)
    forward_s = _exposed_ring_s(setup, keys_s, ahead, one if stack.gathers_keys else others)
    if stack.gathers_keys:
        last_s = grads_s / c.cp
        gathered_s = _exposed_ring_s(setup, keys_s, back, one)
        backward_s = gathered_s + last_s + _exposed_ring_s(setup, grads_s - last_s, back, others)
    else:
        last_s = grads_s / c.cp * (stack.ring != "engine")
        backward_s = last_s + _exposed_ring_s(setup, keys_s + grads_s - last_s, back, others)
    forward_s = forward_s + merged_s
    backward_s = full * forward_s + backward_s + merged_back_s
    idle_s, idle_back_s = layers * passes.forward("idle_s"), layers * passes.backward("idle_s")
    return Ring(*(
        np.where(c.cp > 1, found, 0.0)
        for found in (
            np.maximum(forward_s - idle_s, 0.0), np.maximum(backward_s - idle_back_s, 0.0),
            keys_s, (1 + full) * keys_s + grads_s,
        )
    ))  # fmt: skip


def _exposed_ring_s(
    setup: StepTimeSetup, comm_s: Floats, attention_s: Floats, parts: Floats
) -> Floats:
    """Return the communication time that attention to the keys of `parts` ranks does not hide."""
    hidden = np.minimum(comm_s, attention_s * parts / setup.columns.cp)
    exposed: Floats = comm_s - setup.device.hides * hidden
    return exposed


def _ring_seconds(setup: StepTimeSetup) -> tuple[Floats, Floats, tuple[Floats, Floats]]:
    """Return a micro-batch's seconds of context parallelism in all layers, without overlap.

    The first two are for sending keys and values to all ranks once, and for sending their gradients
    around the ring. The last pair is for merging partial outputs in the forward and partial
    gradients in the backward.
    """
    c, stack = setup.columns, setup.question.stack
    sent, grads = np.zeros(len(c)), np.zeros(len(c))
    ahead, back = np.zeros(len(c)), np.zeros(len(c))
    rounds, width = (c.cp - 1.0, setup.numbers.item) if stack.ring == "engine" else (c.cp, FP32)
    rate, fixed_s = setup.device.memory_bytes_per_s, 3 * setup.device.fixed_s
    for layer in setup.outline.stacks:
        a = layer.attention
        if a is None:
            continue
        heads = a.heads if stack.repeats_keys else a.kv_heads
        keys = setup.tokens * np.maximum(heads / c.tp, 1) * (a.head_dim + a.value_dim)
        outputs = setup.tokens * a.heads / c.tp * a.value_dim
        nbytes = keys * setup.numbers.item
        one = setup.fabric.send_s(nbytes, c.cp, c.tp) * (c.cp - 1)
        if stack.gathers_keys:
            one = setup.fabric.gather_s(nbytes * c.cp, c.cp, c.tp)
        count = layer.layers / c.pp
        sent = sent + count * one
        grads = grads + count * rounds * setup.fabric.send_s(keys * width, c.cp, c.tp)
        merge, of_queries, of_keys = _merge_bytes(setup)
        ahead = ahead + count * (c.cp - 1) * (outputs * merge / rate + fixed_s)
        moved = outputs * of_queries + keys * of_keys
        back = back + count * (c.cp - 1) * (moved / rate + fixed_s)
    return sent, grads, (ahead, back)


def _merge_bytes(setup: StepTimeSetup) -> tuple[Floats | float, Floats | float, Floats | float]:
    """Return the bytes moved per element to merge a part of ring attention with previous parts.

    In order, the results are for outputs, gradients of queries, and gradients of keys.

    - Transformer Engine: a kernel reads two outputs in fp32 and writes one (12). Gradients of
      queries count the same, those of keys nothing.
    - outpace (parallel/context.py): it scales the sum of previous parts (reads 4, writes 4), then
      adds the new part (reads 4 + 2, writes 4). Gradients are only added (10).
    - torch (_SDPAMerger and _templated_ring_attention_backward of
      torch/distributed/tensor/experimental/_attention.py): operators cast the part to fp32 (2 + 4)
      and compute a difference, a product, and a difference (4 + 4 + 4, 4 + 4, 4 + 4 + 4). Gradients
      are added (4 + 2 + 4). Those of keys are copied in _partial_update (4 + 4, for half of them)
      and again to be sent (4 + 4). If compiled, each merge is one kernel.
    """
    if setup.question.stack.ring == "engine":
        return 12.0, 12.0, 0.0
    if setup.question.stack.ring == "outpace":
        return 18.0, 10.0, 10.0
    compiled = setup.columns.compile
    return np.where(compiled, 10.0, 38.0), 10.0, np.where(compiled, 10.0, 10.0 + 4 + 8)


def experts_s(setup: StepTimeSetup, busy: Floats) -> Floats:
    """Return the time to send tokens to their experts and back, with two all-to-alls per pass.

    Each tp rank sends its share of the tokens. Ranks that have parts of the same experts gather the
    tokens that any of them received, and reduce-scatter the experts' results. The bytes are those
    of other tp collectives (`passes._tensor_collectives`) times the experts per token. `busy` is
    the seconds of forwards and backwards; they hide these collectives if the stack overlaps one
    micro-batch's collectives with another's computation.
    """
    c = setup.columns
    total = np.zeros(len(c))
    again = 1 + c.modes[:, MODES.index("full")] / 2 + c.modes[:, MODES.index("attention")] / 2
    for stack in setup.outline.stacks:
        if stack.mlp is not None and stack.mlp.experts:
            nbytes = setup.tokens * setup.outline.hidden * setup.numbers.item
            one = _dispatch_s(setup, nbytes / c.tp, stack.mlp.active, setup.tokens / c.tp)
            more = nbytes * (stack.mlp.active - 1)
            near = np.ones_like(c.etp)
            together = setup.fabric.gather_s(more, c.etp, near)
            together = together + setup.fabric.scatter_s(more, c.etp, near)
            total = total + stack.layers / c.pp * again * (4 * one + 2 * together)
    found = np.where(c.ep > 1, setup.micro * total, 0.0)
    if setup.question.stack.overlaps_dispatch:
        found = found - setup.device.hides * np.minimum(found, busy)
    return found


def _dispatch_s(setup: StepTimeSetup, nbytes: Floats, copies: int, tokens: Floats) -> Floats:
    """Return the seconds to send a layer's tokens to their experts, or to return them."""
    c, fabric = setup.columns, setup.fabric
    if setup.question.stack.dispatcher == "allgather":  # and a reduce-scatter on the way back
        whole = nbytes * c.ep
        both = fabric.gather_s(whole, c.ep, c.etp) + fabric.scatter_s(whole, c.ep, c.etp)
        return both / 2
    once = setup.question.stack.dispatcher == "deepep"
    return fabric.all_to_all_s(nbytes, copies, c.ep, c.etp, once=once, tokens=tokens)


def exposed_data_s(
    setup: StepTimeSetup, passes: StepPasses, pipeline: PipelineTime, keys: Ring
) -> Floats:
    """Return the time of data-parallel collectives that forwards and backwards do not hide.

    These collectives reduce gradients and gather sharded parameters. If a pipeline's ranks differ,
    the result is for the rank that becomes the slowest with its collectives. The collectives also
    run while the device waits for context parallelism (`keys`), unless both use the same link.
    """
    c, collectives = setup.columns, _estimate_collectives(setup)
    near = c.tp * c.cp <= setup.fabric.per_node
    shared = near == (c.tp * c.cp * c.data_parallel <= setup.fabric.per_node)
    ahead, back = (
        _Pass(
            np.maximum(seconds + (exposed_s - shared * sent_s) / setup.layers, 0.0),
            np.clip(products_s / np.maximum(seconds, 1e-30), 0.0, 1.0),
        )
        for seconds, products_s, exposed_s, sent_s in (
            (passes.forward("seconds"), passes.forward("products_s"),
             keys.forward_s, keys.sent_s),
            (passes.backward("seconds"), passes.backward("products_s"),
             keys.backward_s, keys.sent_back_s),
        )
    )  # fmt: skip
    busy = setup.micro * pipeline.pace_s
    exposed: Floats = np.max(
        [
            setup.micro * seconds
            - busy
            + _zero_exposed_s(setup, collectives, ahead.of_layers(count), back.of_layers(count))
            for seconds, count in pipeline.ranks
        ],
        axis=0,
    )
    exposed = exposed + _unit_launch_s(setup)
    exposed = np.where((c.data_parallel > 1) | (c.cp > 1), exposed, 0.0)
    return np.where(c.strategy_in("dp", "ps"), _one_to_all_s(setup, collectives.grads), exposed)


def whole_data_s(setup: StepTimeSetup) -> Floats:
    """Return the time of reducing gradients and gathering parameters if nothing hides it."""
    none = _Pass(np.zeros(len(setup.columns)), np.zeros(len(setup.columns)))
    return _zero_exposed_s(setup, _estimate_collectives(setup), none, none)


def slowest_s(setup: StepTimeSetup, busy: Floats) -> Floats:
    """Return how many seconds longer the slowest device computes than the median device.

    `busy` is the seconds of matmuls and attention, which depend on a device's clock, unlike memory
    traffic, links and the host. The expected maximum of n normal variables is at the quantile (n -
    3/8) / (n + 1/4) (Blom, Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    counts, place = np.unique(setup.columns.ranks, return_inverse=True)
    normal = NormalDist()
    late = np.array([normal.inv_cdf((n - 0.375) / (n + 0.25)) for n in counts.tolist()])
    found: Floats = busy * setup.device.spread * late[place.reshape(-1)]
    return found


def _estimate_collectives(setup: StepTimeSetup) -> _Collectives:
    c, fabric, adapters = setup.columns, setup.fabric, setup.question.adapters
    together = c.dp_shard * c.cp  # context-parallel ranks reduce and shard as well
    gathered, reduced = c.shard_bytes()
    frozen = adapters.base_bytes if adapters is not None else None
    packed_bytes = frozen if adapters is not None else 1.0  # else cast to 8 bits
    if frozen is not None and not setup.question.other_program:
        # A block with packed weights sends all weights in their stored form (memory.adapters).
        reduced = setup.numbers.kept
    grads = setup.parameters.trained * np.where(c.zero < 2, setup.numbers.kept, reduced)
    # Gathers send the updated weights or, if weights are sharded, all of them.
    width = np.where(setup.numbers.item < FP32, 2.0, FP32)
    packed = setup.parameters.packed
    spread = (setup.parameters.present - packed) * gathered + packed * (packed_bytes or 0.0)
    low = np.where(c.zero < 2, setup.parameters.trained * width, spread)
    far = c.tp * c.cp * c.dp_shard
    each = grads / np.where(c.zero > 0, c.dp_shard, 1)
    replicas = fabric.sum_s(each, c.dp_replicate, far)
    replicas = replicas + np.where(c.zero == 0, fabric.sum_s(grads, c.cp, c.tp), 0.0)
    units, buckets = _count_collectives(setup), _count_buckets(setup, grads)
    sent = fabric.broadcasts_s if setup.question.stack.broadcasts else fabric.gather_s
    return _Collectives(
        grads=grads,
        scatter=units * fabric.scatter_s(grads / units, together, c.tp),
        sum=buckets * fabric.sum_s(grads / buckets, together, c.tp),
        gather=np.where(
            (c.zero == 1) & setup.question.stack.broadcasts,
            fabric.broadcasts_s(low, together, c.tp),
            units * fabric.gather_s(low / units, together, c.tp),
        ),
        weights=sent(grads, together, c.tp),
        replicas=replicas,
    )


def _count_collectives(setup: StepTimeSetup) -> Floats:
    """Return the number of collectives for parameters or gradients: one per block or parameter.

    Each has its own latency, which grows with the number of ranks.
    """
    each = 1.0
    if setup.question.stack.collectives == "parameters":
        counts = [
            stack.layers * sum(1 + w.bias for w in weights(stack, setup.outline.hidden))
            + stack.layers * stack.norms * (2 if stack.norm_bias else 1)
            for stack in setup.outline.stacks
        ]
        each = sum(counts) / setup.outline.layers
    return np.maximum(setup.layers, 1.0) * each + 1


def _zero_exposed_s(setup: StepTimeSetup, comms: _Collectives, ahead: _Pass, back: _Pass) -> Floats:
    """Return the exposed time of data-parallel collectives by ZeRO stage.

    `ahead` and `back` are one micro-batch's passes, which can hide them.
    """
    c = setup.columns
    buckets, units = _count_buckets(setup, comms.grads), np.maximum(setup.layers, 1.0)
    # The micro-batches of a pipeline share gathers and reductions.
    shared = np.where(c.pp > 1, c.microbatches, 1)
    rounds = np.where(c.pp > 1, c.passes, setup.micro)
    # Megatron reduce-scatters, and its gathers overlap with the next forward. With
    # ZeroRedundancyOptimizer, ranks all-reduce, and wait for broadcasts of weights.
    product = c.strategy_in("3d")
    states = np.where(product, comms.scatter, comms.sum)
    gather_s = _exposed_stages_s(setup, comms.gather, ahead, units)
    own_gather = np.where(product, gather_s, comms.weights)
    plain = _exposed_stages_s(setup, comms.replicas, back, buckets)
    if setup.question.stack.stage_gathers == "micro-batches":  # outpace's replicas are shards of 1
        plain = np.where(c.pp > 1, rounds * comms.replicas, plain)
    zero1 = _exposed_stages_s(setup, states, back, buckets) + plain
    # Per layer: a gather before each forward and backward, a reduction after it.
    sums = comms.scatter + comms.replicas
    gathered = _exposed_s(setup, comms.gather, ahead, shared, units + 1)
    zero3 = rounds * (gathered + _exposed_s(setup, comms.gather + sums, back, shared, units + 1))
    if setup.question.stack.stage_gathers != "twice":
        zero3 = np.where(c.pp > 1, rounds * _stage_exposed_s(setup, comms, ahead, back), zero3)
    zero2 = rounds * (gathered + _exposed_s(setup, sums, back, shared, units + 1))
    levels = [c.zero == level for level in (1, 2, 3)]
    return np.select(levels, [zero1 + own_gather, zero2, zero3], plain)


def _stage_exposed_s(
    setup: StepTimeSetup, comms: _Collectives, ahead: _Pass, back: _Pass
) -> Floats:
    """Return the exposed time of a pipeline's collectives per accumulation step.

    This is for pipelines that shard weights. Gradients are reduced after the last backward.
    Parameters are either gathered in the first forward and kept, or freed after each forward and
    gathered again for a backward, which keeps them for the next forward. If they are freed, each
    further gather is during a forward for gpipe, which runs all forwards first, and during a
    backward for other schedules.
    """
    c, units = setup.columns, np.maximum(setup.layers, 1.0) + 1
    one = np.ones(len(c))
    in_forward = _exposed_s(setup, comms.gather, ahead, one, units)
    found = in_forward + comms.scatter + comms.replicas
    if setup.question.stack.stage_gathers == "micro-batches":
        in_backward = _exposed_s(setup, comms.gather, back, one, units)
        first = c.schedule_in("gpipe")
        found = found + np.where(first, in_backward, in_forward) - in_forward
        found = found + c.microbatches * np.where(first, in_forward, in_backward)
    return found


def _exposed_s(
    setup: StepTimeSetup, comm_s: Floats, beside: _Pass, times: Floats | Ints, units: Floats
) -> Floats:
    """Return the time of collectives that several passes do not hide.

    `beside` is one pass, a micro-batch's forward or backward, and `times` the number of passes that
    the collectives overlap. They are sent in `units` equal parts.
    """
    return setup.exposed_s(comm_s, times * beside.seconds, units, beside.matmuls)


def _exposed_stages_s(setup: StepTimeSetup, comm_s: Floats, beside: _Pass, units: Floats) -> Floats:
    """Return the time of reductions, or of gathers, that a micro-batch's passes do not hide.

    With interleaved stages, each stage has its own collectives. A stage's parameters are gathered
    during the forwards of the rank's previous stage, for as many micro-batches as there are ranks,
    and its gradients are reduced likewise during backwards. Collectives of a rank's first stage can
    be hidden by at most one micro-batch's pass.
    """
    c, stack = setup.columns, setup.question.stack
    apart = c.schedule_in("interleaved") & stack.sums_by_stages
    stages = np.where(apart, c.stages_per_rank, 1)
    first = _exposed_s(setup, comm_s / stages, beside, 1 / stages, np.maximum(units / stages, 1.0))
    others = (stages - 1) / stages
    hidden_s = np.minimum(comm_s, np.minimum(c.microbatches, c.pp) * beside.seconds) * others
    return first + comm_s * others - setup.hides(beside.matmuls) * hidden_s


def _count_buckets(setup: StepTimeSetup, grads: Floats) -> Floats:
    """Return the number of buckets in which replicas all-reduce gradients.

    The last bucket is exposed. It contains the embedding's gradient, which is complete last, so the
    number of equal buckets is limited such that one is at least as large as the embedding.
    """
    c = setup.columns
    table = setup.outline.vocab * setup.outline.table_width / c.tp / setup.parameters.present
    last = np.where(c.pp > 1, 0.0, np.minimum(table, 1.0))
    buckets = np.maximum(1.0, np.floor(grads / c.bucket_bytes))
    return np.minimum(buckets, 1 / np.maximum(last, 1e-9))


def _unit_launch_s(setup: StepTimeSetup) -> Floats:
    """Return the seconds that the host needs to launch gathers and reductions of FSDP units."""
    c, units = setup.columns, np.maximum(setup.layers, 1.0)
    rounds = np.where(c.pp > 1, c.passes, setup.micro)
    sums = np.where(c.zero > 1, rounds, 0)
    gathers = np.where(c.zero == 3, setup.gathers, sums)
    found: Floats = (sums + gathers) * (units + 1) * setup.device.unit_s
    return found


def _one_to_all_s(setup: StepTimeSetup, grads: Floats) -> Floats:
    """Return the seconds of communication of the strategies dp and ps (parameter servers).

    In dp, one link sends parameters to all replicas and receives their gradients. In ps, the
    servers' links do so for each worker in turn, in both directions at the same time.
    """
    c = setup.columns
    others = np.maximum(c.data_parallel - 1, 0)
    link = np.where(
        c.data_parallel <= setup.fabric.per_node,
        setup.fabric.pair_bytes_per_s,
        setup.fabric.across_bytes_per_s,
    )
    dp = 2 * others * grads / link
    ps = c.data_parallel * grads / np.maximum(c.servers, 1) / link
    return np.where(c.strategy_in("ps"), ps, setup.micro * dp)
