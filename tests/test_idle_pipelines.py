"""Idle pipelines: a real one beside its play, and what it keeps."""

import sys
from pathlib import Path

import pytest
import torch

from outpace.planner.pipeline.schedules import orders
from outpace.planner.pipeline.simulator import StageTime, idle_share_formula, simulate
from outpace.records.pipelines import SCHEDULES
from outpace.trace.allocations import Allocations

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from idle_pipelines import expected_time_s
from saved_bytes import SavedBytes

RANKS = Path(__file__).with_name("idle_ranks.py")


@pytest.mark.gloo
def test_a_real_pipeline_waits_as_its_schedule_plays(on_ranks):
    said = on_ranks(4, RANKS)
    assert said["mp"]["formula"] == pytest.approx(3 / 4)
    assert said["gpipe"]["formula"] == pytest.approx(3 / 7)
    assert said["zbv"]["formula"] is None
    for one in said.values():
        # Sending and a busy machine make a step longer, never shorter; how much longer is for
        # benchmarks/idle.py to say, on a machine that does nothing else.
        assert one["makespan_s"] > one["simulated_makespan_s"] * 0.99
        assert one["measured"] > one["replayed"] - 0.01
    # Stages that waited for one another in turn would be idle for 3/4 of each step.
    for idle in ("measured", "simulated"):
        assert said["zbv"][idle] < 3 / 7 and said["gpipe"][idle] < 3 / 4


@pytest.mark.parametrize("strategy", [name for name in SCHEDULES if name != "mp"])
def test_every_schedule_does_all_there_is_to_do(strategy):
    ranks, microbatches = 4, 8
    todo = orders(strategy, ranks, microbatches)
    stages = ranks * SCHEDULES[strategy].stages_per_rank
    times = [StageTime(1, 1, 1)] * stages
    done = simulate(todo, lambda action: expected_time_s(action, times))
    busy = [done.busy_s(rank) for rank in range(ranks)]
    assert busy == [pytest.approx(3 * microbatches * stages / ranks)] * ranks
    formula = idle_share_formula(strategy, ranks, microbatches)
    if formula is not None:
        assert done.idle_share == pytest.approx(formula)
    else:  # what splitting the backward is for
        assert done.idle_share < idle_share_formula("interleaved", ranks, microbatches)


def test_what_is_kept_for_the_backward_is_counted_once_and_given_up():
    weight = torch.ones(10, 10, requires_grad=True)
    x = torch.ones(5, 10)
    saved = SavedBytes(iter([weight]))
    with saved:
        squared = (x @ weight).pow(2)  # keeps x, and the product
    assert saved.live_bytes == 4 * (50 + 50)
    squared.sum().backward()
    assert saved.live_bytes == 0
    assert saved.peak_bytes == 400


def test_allocations_are_what_lives_and_the_most_that_did():
    with Allocations() as allocated:
        kept = torch.ones(1000)
        kept = kept + torch.ones(1000)
    assert allocated.left_bytes == 4000
    assert allocated.peak_bytes == 12000
