"""Memory of a step on one rank, in order: permanent tensors, forward, backward, optimizer."""

from collections.abc import Iterator

import numpy as np

from outpace.planner.memory.backward import add_backward
from outpace.planner.memory.forward import add_forward
from outpace.planner.memory.fullest_rank import fullest_ranks
from outpace.planner.memory.loss import add_loss
from outpace.planner.memory.optimizer_step import add_optimizer_step
from outpace.planner.memory.permanent_tensors import add_permanent_tensors
from outpace.planner.memory.rank_setup import RankSetup, set_up_rank
from outpace.planner.memory.setup import MemoryQuestion, set_up
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import Ints, PlanBatch


def step_timelines(
    question: MemoryQuestion,
    columns: PlanBatch,
    records_kinds: bool = False,
    only_last: bool = False,
) -> Iterator[tuple[Ints, MemoryTimeline]]:
    """Yield plan indices and a step's timeline, for each rank that may need the most memory.

    With `only_last`, only for the last pipeline rank. A pipeline's memory may peak after its first
    backward, when gradients exist, or before it, when more activations may be in flight. Pipelines
    with more activations before it are yielded twice, once for each time. `records_kinds`: also
    record memory by kind, for the peak's breakdown.
    """
    setup, everyone = set_up(question, columns), np.arange(len(columns))
    for place in fullest_ranks(question.outline, columns):
        if only_last and not place.last.all():
            continue
        later = place.later_chunks >= place.chunks
        yield everyone, _step_timeline(set_up_rank(setup, place, later), records_kinds)
        again = np.flatnonzero((place.later_chunks > 0) & ~later)
        if len(again):
            some = set_up(question, columns.select(again))
            rank = set_up_rank(some, place.select(again), np.ones(len(again), dtype=bool))
            yield again, _step_timeline(rank, records_kinds)


def start_timelines(question: MemoryQuestion, columns: PlanBatch) -> Iterator[MemoryTimeline]:
    """Yield timelines up to the first forward, for ranks that may need the most memory."""
    setup, early = set_up(question, columns), np.zeros(len(columns), dtype=bool)
    for place in fullest_ranks(question.outline, columns):
        timeline = MemoryTimeline(len(columns), records_kinds=False)
        add_permanent_tensors(timeline, set_up_rank(setup, place, early))
        yield timeline


def _step_timeline(rank: RankSetup, records_kinds: bool) -> MemoryTimeline:
    setup, place = rank.setup, rank.place
    timeline = MemoryTimeline(len(place.layers), records_kinds)
    add_permanent_tensors(timeline, rank)
    # Output gradients of earlier chunks, whose weight gradients have not been computed yet.
    before = np.where(rank.later, place.waiting, 0.0)
    delayed = before * rank.blocks * setup.block.outputs
    add_forward(timeline, rank, delayed)
    add_loss(timeline, rank)
    zbv = setup.columns.schedule_in("zbv")
    timeline.free("temporary", np.where(zbv, delayed, 0.0))
    add_backward(timeline, rank)
    add_optimizer_step(timeline, rank)
    return timeline
