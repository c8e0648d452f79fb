"""Tables of schedules: equal to torch's own, whole, free of deadlock, and as idle as published."""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from outpace.parallel.pipeline import CLASSES
from outpace.planner.pipeline import simulator
from outpace.planner.pipeline.schedules import orders, schedule_graph
from outpace.planner.pipeline.simulator import (
    Action,
    StageTime,
    idle_share_formula,
    makespan_s,
    simulate_stages,
    wire,
)
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES

ONE_STAGE = [name for name, laid_out in SCHEDULES.items() if laid_out.stages_per_rank == 1]
MORE_STAGES = [name for name in SCHEDULES if name not in ONE_STAGE]
LOOPS = [name for name in MORE_STAGES if SCHEDULES[name].placement == "loop"]


def most_in_flight(order) -> int:
    """Return the largest number of forwards whose activations a rank keeps at once.

    Each is one micro-batch on one stage: with v stages on the rank, a micro-batch counts v times.
    It is kept until the weights' part of its backward is done.
    """
    kept = most = 0
    for action in order:
        kept += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, kept)
    return most


def grid(schedule, ranks):
    """Micro-batches and stages a rank: fewer than ranks, as many, odd numbers, many."""
    counts = {1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1,
              3 * ranks, 4 * ranks + 2, 5 * ranks} - {0}  # fmt: skip
    return product(sorted(counts), (1, 2, 3, 4) if schedule in LOOPS else (2,))


def torch_schedule(name, ranks, microbatches, each):
    """Torch's, made for the first rank; it knows the others' actions too."""
    count = ranks * each
    held = [
        SimpleNamespace(
            stage_index=stage, num_stages=count, group_size=ranks, group_rank=0, submod=nn.Module(),
            has_backward=True, is_first=stage == 0, is_last=stage == count - 1,
        )
        for stage in range(count)
        if SCHEDULES[name].rank_of(stage, ranks) == 0
    ]  # fmt: skip
    return CLASSES[name](held, microbatches, loss_fn=lambda *_: None)


def computing(given_actions):
    """What torch computes, without bubbles and communication; of a pair, one after the other."""
    found = []
    for one in given_actions:
        if one is not None and one.sub_actions is not None:
            found += computing(one.sub_actions)
        elif one is not None and one.is_compute_op:
            kind = one.computation_type.value
            found.append(Action(kind, one.stage_index, one.microbatch_index))
    return found


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("schedule", MORE_STAGES)
def test_a_table_is_torchs_own_and_refused_where_torch_refuses(schedule, ranks):
    compared = 0
    for microbatches, each in grid(schedule, ranks):
        try:
            theirs = torch_schedule(schedule, ranks, microbatches, each)
        except ValueError:
            with pytest.raises(BadInputError):
                orders(schedule, ranks, microbatches, each)
            continue
        ours = orders(schedule, ranks, microbatches, each)
        for rank in range(ranks):
            assert ours[rank] == computing(theirs.pipeline_order[rank])
            assert ours[rank] == computing(theirs.pipeline_order_with_comms[rank])  # what it runs
        compared += 1
    assert compared >= 4


def run_by_torch(schedule, ranks, microbatches, stage):
    """What torch has a stage do, in its order; the stage only writes it down.

    Not what torch lists: for the last rank of 1f1b, torch 2.13 lists micro-batches 1 to m, and
    runs 0 to m − 1.
    """
    done = []
    none = lambda *_, **__: []  # noqa: E731
    stand_in = SimpleNamespace(
        stage_index=stage, num_stages=ranks, is_first=stage == 0, is_last=False,
        get_fwd_recv_ops=none, get_fwd_send_ops=none, get_bwd_recv_ops=none, get_bwd_send_ops=none,
        perform_reduce_grad=none,
        forward_one_chunk=lambda number, *_, **__: done.append(Action("F", stage, number)),
        backward_one_chunk=lambda number, **_: done.append(Action("B", stage, number)),
    )  # fmt: skip
    theirs = CLASSES[schedule](stand_in, microbatches)
    theirs._initialize_stage = none
    theirs._step_microbatches([()] * microbatches, [{}] * microbatches)
    return done


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_table_of_one_stage_a_rank_is_what_torch_runs(schedule, ranks):
    for microbatches, _ in grid(schedule, ranks):
        try:
            theirs = [run_by_torch(schedule, ranks, microbatches, rank) for rank in range(ranks)]
        except ValueError:
            with pytest.raises(BadInputError, match="Use gpipe"):
                orders(schedule, ranks, microbatches)
            continue
        assert orders(schedule, ranks, microbatches) == theirs
    assert orders("mp", ranks, 1) == orders("gpipe", ranks, 1)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("pipedream", 2, 2), "pipedream is not a pipeline schedule. Use mp, gpipe"),
        (("gpipe", 0, 2), "at least one rank and one micro-batch, but got 0 and 2"),
        (("zb", 2, 0), "at least one rank and one micro-batch, but got 2 and 0"),
        (("mp", 2, 2), "mp has one micro-batch in flight"),
        (("1f1b", 4, 3), "1f1b needs a micro-batch for each of 4 stages"),
        (("1f1b", 4, 4, 2), "1f1b with 2 stages on a rank: it needs exactly 1. Use interleaved"),
        (("interleaved", 3, 7), "cannot be divided into 2 rounds. Use 6"),
        (("loopedbfs", 3, 7, 0), "loopedbfs with 0 stages on a rank: it needs at least 1$"),
        (("zbv", 2, 4, 3), "zbv with 3 stages on a rank: it needs exactly 2"),
        (("dualpipev", 2, 3), "dualpipev needs a micro-batch for each of 4 stages"),
    ],
)
def test_numbers_that_a_schedule_cannot_take_are_refused(asked, why):
    with pytest.raises(BadInputError, match=why):
        orders(*asked)


@st.composite
def pipelines(draw, names=tuple(SCHEDULES)):
    """A schedule, its ranks, micro-batches and stages a rank, such as it can take."""
    schedule = draw(st.sampled_from(names))
    ranks, microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    each = draw(st.integers(1, 5)) if schedule in LOOPS else SCHEDULES[schedule].stages_per_rank
    microbatches = 1 if schedule == "mp" else microbatches
    try:
        orders(schedule, ranks, microbatches, each)
    except BadInputError:
        assume(False)
    return schedule, ranks, microbatches, each


seconds = st.floats(0.01, 10)


@given(pipelines())
def test_each_micro_batch_goes_forwards_and_backwards_once_through_every_stage(sizes):
    schedule, ranks, microbatches, each = sizes
    done = Counter()
    for rank, order in enumerate(orders(*sizes)):
        before = set()
        for action in order:
            kind, stage, number = action
            assert SCHEDULES[schedule].rank_of(stage, ranks) == rank
            first = {"F": None, "B": "F", "I": "F", "W": "I"}[kind]
            assert first is None or Action(first, stage, number) in before
            assert action not in before
            before.add(action)
            # Parts of a backward are half of it each.
            done["F" if kind == "F" else "B", stage, number] += 1 if kind in "FB" else 0.5
        assert most_in_flight(order) > 0
        assert sum({"F": 1, "B": -1, "I": 0, "W": -1}[kind] for kind, _, _ in order) == 0
    everything = product("FB", range(ranks * each), range(microbatches))
    assert done == dict.fromkeys(everything, 1)


@given(pipelines(), st.data())
def test_every_table_plays_and_its_makespan_is_the_plays(sizes, data):
    schedule, ranks, microbatches, each = sizes
    drawn = st.builds(StageTime, seconds, seconds, seconds)
    times = [data.draw(drawn) for _ in range(ranks * each)]
    transfer_s = data.draw(st.floats(0, 1))
    todo = orders(*sizes)
    played = simulate_stages(todo, times, transfer_s)
    assert makespan_s(todo, times, transfer_s) == played.makespan_s
    assert schedule_graph(*sizes).makespan_s(times, transfer_s) == played.makespan_s
    for rank in range(ranks):
        work_s = sum(
            microbatches * (time.seconds("F") + time.seconds("B"))
            for stage, time in enumerate(times)
            if SCHEDULES[schedule].rank_of(stage, ranks) == rank
        )
        assert played.busy_s(rank) == pytest.approx(work_s)


@given(pipelines(("mp", "gpipe", "1f1b", "interleaved", "loopedbfs")), seconds, seconds)
def test_equal_stages_are_as_idle_as_the_closed_forms_say(sizes, forward_s, backward_s):
    schedule, ranks, microbatches, each = sizes
    formula = idle_share_formula(schedule, ranks, microbatches, each)
    times = [StageTime(forward_s, backward_s, 0.0)] * (ranks * each)
    idle = simulate_stages(orders(*sizes), times).idle_share
    if formula is None:  # a rank waits between its stages
        assert each > 1 and microbatches < ranks
        assert idle > (ranks - 1) / (each * microbatches + ranks - 1)
        return
    assert idle == pytest.approx(formula, abs=1e-9)
    if each == 1:
        assert 1 - formula == pytest.approx(
            1 / ranks if schedule == "mp" else microbatches / (microbatches + ranks - 1)
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_split_backwards_wait_as_published(ranks, rounds):
    """arXiv 2412.19437, Table 2, column "Bubble", with B = I + W.

    1F1B: (PP − 1)(F + B). ZB1P: (PP − 1)(F + B − 2W). DualPipe: (PP/2 − 1)(F&B + B − 3W), here
    of PP = 2n stages on n ranks, F&B = F + B. arXiv 2401.10241, §6, has no bubble for zbv where
    F = I = W, but for n − 1 forwards until the last rank begins.
    """
    microbatches = rounds * ranks

    def bubble_s(schedule, time, each):
        todo = orders(schedule, ranks, microbatches, each)
        played = simulate_stages(todo, [time] * (ranks * each))
        return played.makespan_s - played.busy_s(0)

    for inputs_s, weights_s in ((1.0, 1.0), (1.25, 0.75), (1.5, 0.5)):
        time = StageTime(1.0, inputs_s, weights_s)
        whole = 1.0 + inputs_s + weights_s
        assert bubble_s("1f1b", time, 1) == pytest.approx((ranks - 1) * whole)
        for each in (1, 2, 3):
            expected = (ranks - 1) * (whole - 2 * weights_s)
            assert bubble_s("zb", time, each) == pytest.approx(expected)
    equal = StageTime(1.0, 1.0, 1.0)
    assert bubble_s("zbv", equal, 2) == pytest.approx(ranks - 1)


@given(pipelines())
def test_each_rank_keeps_as_much_as_its_schedule_says(sizes):
    """Micro-batches on a stage.

    1F1B keeps PP − rank (arXiv 2104.04473, §2.2.1). zbv keeps what 1f1b's first rank does
    (arXiv 2401.10241, §6), of stages half as large. DualPipe: PP + 1 of PP stages (arXiv
    2412.19437, Table 2, column "Activation").
    """
    schedule, ranks, microbatches, each = sizes
    size = microbatches // max(1, microbatches // ranks)  # of a round
    kept = [most_in_flight(order) for order in orders(*sizes)]
    most = each * microbatches
    for rank, found in enumerate(kept):
        expected = {
            "mp": 1,
            "gpipe": microbatches,
            "1f1b": ranks - rank,
            "interleaved": min(most, (each - 1) * size + 2 * (ranks - 1 - rank) + 1),
            "loopedbfs": most,
            "zb": min(most, (each - 1) * size + ranks),
            "zbv": 2 * ranks,
            "dualpipev": 2 * ranks + 1,
        }[schedule]
        if schedule == "zbv" and microbatches < 2 * ranks:
            assert found <= min(most, expected)
        else:
            assert found == expected


def test_a_table_is_made_ready_by_looking_at_each_action_twice_at_most(monkeypatch):
    looked = Counter()
    take = simulator._TopologicalSorter._run_if_ready

    def counted(self, rank, action, ready):
        looked[action] += 1
        return take(self, rank, action, ready)

    monkeypatch.setattr(simulator._TopologicalSorter, "_run_if_ready", counted)
    for schedule in ("1f1b", "zb", "zbv", "dualpipev"):
        looked.clear()
        todo = orders(schedule, 16, 128)
        wiring = wire(todo)
        assert (
            sorted(wiring.actions) == sorted(looked) == sorted(a for order in todo for a in order)
        )
        assert max(looked.values()) <= 2  # once in vain, and again when what it needs is there


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "mp"])
def test_the_largest_tables_play(schedule):
    ranks, microbatches = 64, 512
    wiring = schedule_graph(schedule, ranks, microbatches)
    stages = ranks * SCHEDULES[schedule].stages_per_rank
    times = [StageTime(1.0, 1.0, 1.0)] * stages
    work_s = 3.0 * microbatches * stages / ranks
    assert work_s < wiring.makespan_s(times) < 1.3 * work_s
