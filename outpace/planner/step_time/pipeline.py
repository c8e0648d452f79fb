"""Time of a pipeline: its slowest rank, the waits of other ranks, and messages between stages."""

from dataclasses import dataclass

import numpy as np

from outpace.planner.model.outline import head_in_layers
from outpace.planner.pipeline.simulator import StageTime
from outpace.planner.pipeline.stages import balance, even
from outpace.planner.plan_columns import Floats, Ints
from outpace.planner.step_time.parameters import weight_traffic_s
from outpace.planner.step_time.passes import StepPasses
from outpace.planner.step_time.setup import StepTimeSetup

# Operators with which a stage sends one message and receives another: two operations, the start and
# end of their group, and two waits (torch.distributed.batch_isend_irecv).
_EXCHANGE_OPERATORS = 6


@dataclass(frozen=True)
class PipelineTime:
    """Seconds per micro-batch of a pipeline's slowest rank and of all its stages.

    - `compute_s`: the computation of a rank with the slowest stages.
    - `pace_s`: the same with the time to cast and accumulate its weights; the rate of the pipeline.
    - `way_s`: the computation of all stages, one after the other.
    - `ranks`: the seconds and the number of layers of ranks that may be the slowest: the first, one
      in between, and the last.
    """

    pace_s: Floats
    way_s: Floats
    compute_s: Floats
    ranks: tuple[tuple[Floats, Floats], ...]


@dataclass(frozen=True)
class Stages:
    """Seconds of a micro-batch on each stage of a plan's pipeline, and of a message between stages.

    `posted_s` is the time that the host needs to start a step's sends and receives.
    """

    times: tuple[StageTime, ...]
    transfer_s: float
    posted_s: float


def pipeline_time(setup: StepTimeSetup, passes: StepPasses) -> PipelineTime:
    """Return the pipeline times of every plan; a single stage is a pipeline without a bubble."""
    c, layers = setup.columns, float(setup.outline.layers)
    layer_s = passes.forward("seconds") + passes.backward("seconds")
    first_s, last_s = passes.ends.first_s, passes.ends.last_s
    stages = c.pp * c.stages_per_rank
    first, middle, last = _split_layers(setup, stages)
    way = layers * layer_s + first_s + last_s
    # Assume that a rank has one of the slowest stages, and that its other stages are average.
    beside, traffic = c.stages_per_rank - 1, weight_traffic_s(setup)
    rows, slowest = [], np.zeros_like(way)
    for count, end_s in ((first, first_s), (middle, 0.0), (last, last_s)):
        stage = np.where(stages == 1, way, count * layer_s + end_s)
        slowest = np.maximum(slowest, stage)
        rows.append((stage + beside * way / stages + traffic, count + beside * layers / stages))
    own = slowest + beside * way / stages
    return PipelineTime(own + traffic, way, own, tuple(rows if (stages > 1).any() else rows[:1]))


def _split_layers(setup: StepTimeSetup, stages: Ints) -> tuple[Floats, Floats, Floats]:
    """Return the blocks of the first stage, of the largest stage in between, and of the last stage.

    Stages are split by multiply-adds, as in outpace (`stages.layers_per_stage`), regardless of
    their times.
    """
    layers, head = setup.outline.layers, head_in_layers(setup.outline)
    alone = np.where(stages == 1, float(layers), 0.0)
    first, middle, last = alone.copy(), alone.copy(), alone.copy()
    for evenly in (True, False):
        chosen = setup.columns.even_stages == evenly
        rows = np.nonzero(chosen & (stages > 1) & (stages <= layers))[0]
        unique, places = np.unique(stages[rows], return_inverse=True)
        spreads = [
            even(layers, int(count)) if evenly else balance(layers, int(count), head)
            for count in unique
        ]
        cuts = np.array([[*_first_middle_last(spread)] for spread in spreads], float).reshape(-1, 3)
        first[rows], middle[rows], last[rows] = cuts[places].T
    return first, middle, last


def stages_of_plan(setup: StepTimeSetup, passes: StepPasses) -> Stages:
    """Return the stages of the first plan, with the embedding on the first and head on the last."""
    c, layers = setup.columns, setup.outline.layers
    ahead, back = float(passes.forward("seconds")[0]), float(passes.backward("seconds")[0])
    grads = float(passes.backward("deferred_s")[0])
    ends = passes.ends
    number = int(c.pp[0] * c.stages_per_rank[0])
    spread = even(layers, number)
    if not c.even_stages[0]:
        spread = balance(layers, number, head_in_layers(setup.outline))
    traffic = float(weight_traffic_s(setup)[0]) / float(c.stages_per_rank[0])
    times = []
    for place, count in enumerate(spread):
        forward, backward, weights_s = count * ahead, count * back, count * grads
        if place == 0:
            forward += float(ends.embedding.seconds[0])
            backward += float(ends.embedding_back.seconds[0])
        if place == number - 1:
            forward += float(ends.head.seconds[0])
            backward += float(ends.head_back.seconds[0])
            weights_s += float(ends.head.seconds[0])
        backward += traffic
        weights_s = min(weights_s, backward)
        times.append(StageTime(forward, backward - weights_s, weights_s))
    one, posted = _message_s(setup)
    return Stages(tuple(times), float(one[0]), float(posted[0]))


def bubble_s(setup: StepTimeSetup, pipeline: PipelineTime, weights: Floats) -> Floats:
    """Return the time that ranks wait for each other while the pipeline fills and drains.

    F, I and W are the times of a micro-batch's forward, input gradients and weight gradients on a
    rank, p the number of ranks, and v the stages per rank. `weights` is W's fraction of their sum.

    - gpipe and 1f1b: a micro-batch's time through all ranks except the slowest, (p−1)(F+I+W); with
      several stages per rank, 1/v of it (arXiv 2104.04473, §2.2).
    - zb: (p−1)(F+I−W)/v, because weight gradients fill most of the time (Qi et al., arXiv
      2401.10241, table 1).
    - zbv and dualpipev: the same, because the table's (p−1)(F+I−2W) omits the forwards until the
      last rank begins (§6). All ranks wait at least until the first micro-batch has passed all
      stages.

    With fewer micro-batches than ranks, schedules with several stages per rank also wait for the
    first micro-batch to return to the first rank.
    """
    c = setup.columns
    split = c.splits_backward()
    left = np.where(split, np.maximum(1 - 2 * weights, 0.0), 1.0)
    waits = np.maximum(pipeline.way_s - pipeline.compute_s, 0.0) / c.stages_per_rank * left
    rank_s, busy = pipeline.way_s / c.pp, c.microbatches * pipeline.pace_s
    laps = np.where(split, 0, c.stages_per_rank - 1) * np.maximum(c.pp - c.microbatches, 0)
    waits = waits + laps * rank_s / c.stages_per_rank
    along_v = rank_s * ((c.pp + c.microbatches - 1) * (1 - weights) + weights)
    waits = np.where(c.schedule_in("zbv", "dualpipev"), np.maximum(waits, along_v - busy), waits)
    alone = pipeline.way_s * c.microbatches - c.microbatches * pipeline.pace_s
    waits = np.where(c.schedule_in("mp"), np.maximum(alone, 0.0), waits)
    # Ranks that share a core run faster while others wait.
    waits = np.maximum((busy + waits) / setup.device.sharers - busy, 0.0)
    return np.where(c.pp > 1, waits, 0.0)


def sends_s(setup: StepTimeSetup) -> Floats:
    """Return the seconds of sending activations and their gradients between stages.

    While the pipeline fills and drains, ranks wait for each hop. 1f1b also waits for one message in
    each direction per micro-batch, because it has no other micro-batch to work on meanwhile.
    """
    c = setup.columns
    one, posted_s = _message_s(setup)
    fill = 2.0 * (c.pp * c.stages_per_rank - 1)
    waits = np.where(c.schedule_in("1f1b"), 2.0 * c.microbatches, 0.0)
    hops = np.where(c.schedule_in("mp"), fill * c.microbatches, fill + waits)
    return np.where(c.pp > 1, c.passes * (hops * one + posted_s), 0.0)


def _message_s(setup: StepTimeSetup) -> tuple[Floats, Floats]:
    """Return the seconds of a message between stages, and of the host to post a step's messages.

    Every stage posts one message in each direction per micro-batch.
    """
    c = setup.columns
    nbytes = setup.tokens * setup.outline.hidden * setup.numbers.item
    nbytes = nbytes / np.where(c.sequence_parallel, c.tp, 1)
    one = setup.fabric.send_s(nbytes, c.pp, c.tp * c.cp * c.data_parallel)
    posted = 2.0 * (c.microbatches + c.pp - 1) * c.stages_per_rank * _EXCHANGE_OPERATORS
    return one, (posted * setup.device.operator_s).astype(np.float64)


def _first_middle_last(counts: tuple[int, ...]) -> tuple[int, int, int]:
    return counts[0], max(counts[1:-1], default=0), counts[-1]
