"""Schedules played: the papers' closed forms for equal stages, and laws for others."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.planner.pipeline.schedules import orders
from outpace.planner.pipeline.simulator import (
    Action,
    StageTime,
    idle_share_formula,
    makespan_s,
    simulate_stages,
)
from outpace.records.errors import BadInputError

# Of ranks, and of micro-batches: as many or more, as 1f1b needs them.
sizes_of_a_pipeline = st.tuples(st.integers(1, 6), st.integers(0, 8)).map(
    lambda drawn: (drawn[0], sum(drawn))
)
seconds = st.floats(0.01, 10)


@given(sizes_of_a_pipeline, seconds, seconds)
def test_equal_stages_give_the_closed_forms_however_long_a_backward_is(sizes, forward, backward):
    ranks, microbatches = sizes
    times = [StageTime(forward, backward, 0.0)] * ranks
    gpipe = simulate_stages(orders("gpipe", ranks, microbatches), times)
    assert 1 - gpipe.idle_share == pytest.approx(microbatches / (microbatches + ranks - 1))
    one_f_one_b = simulate_stages(orders("1f1b", ranks, microbatches), times)
    assert one_f_one_b.makespan_s == pytest.approx(gpipe.makespan_s)
    alone = simulate_stages(orders("mp", ranks, 1), times)
    assert 1 - alone.idle_share == pytest.approx(1 / ranks)


@given(sizes_of_a_pipeline, st.data())
def test_no_rank_works_before_it_can_nor_twice_at_once(sizes, data):
    ranks, microbatches = sizes
    times = [StageTime(*data.draw(st.tuples(seconds, seconds, seconds))) for _ in range(ranks)]
    transfer_s = data.draw(st.floats(0, 1))
    for schedule in ("gpipe", "1f1b"):
        todo = orders(schedule, ranks, microbatches)
        played = simulate_stages(todo, times, transfer_s)
        assert makespan_s(todo, times, transfer_s) == played.makespan_s
        ends = {span.action: span.end_s for spans in played.ranks for span in spans}
        for spans in played.ranks:
            for earlier, later in pairwise(spans):
                assert later.begin_s >= earlier.end_s
            for span in spans:
                kind, stage, number = span.action
                before = Action(kind, stage - 1 if kind == "F" else stage + 1, number)
                assert span.begin_s >= ends.get(before, -transfer_s) + transfer_s
        slowest = max(microbatches * (time.seconds("F") + time.seconds("B")) for time in times)
        assert played.makespan_s >= slowest * (1 - 1e-9)
        assert 0 <= played.idle_share < 1


def test_an_unequal_stage_is_waited_for_and_the_closed_form_does_not_know():
    times = [StageTime(1, 2, 0), StageTime(2, 4, 0)]
    played = simulate_stages(orders("gpipe", 2, 4), times)
    # 1 to get to the slow stage, its 4 × 2 and 4 × 4, and 2 to come back.
    assert played.makespan_s == 1 + 8 + 16 + 2
    assert played.idle_share == pytest.approx(1 - (12 + 24) / (2 * 27))
    assert idle_share_formula("gpipe", 2, 4) == pytest.approx(1 / 5)


def test_weights_gradients_fill_what_would_be_idle():
    first = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)]
    last = [Action("F", 1, 0), Action("I", 1, 0), Action("F", 1, 1), Action("I", 1, 1)]
    late = [*last, Action("W", 1, 0), Action("W", 1, 1)]
    times = [StageTime(1, 1, 1)] * 2
    assert simulate_stages([first, late], times).makespan_s < (
        simulate_stages(orders("1f1b", 2, 2), times).makespan_s
    )


def test_orders_that_wait_for_each_other_are_named():
    backwards_first = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0)]]
    with pytest.raises(BadInputError, match="rank 0 at B of micro-batch 0 on stage 0, rank 1"):
        simulate_stages(backwards_first, [StageTime(1, 1, 1)] * 2)
