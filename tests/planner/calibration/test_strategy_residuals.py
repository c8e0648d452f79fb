"""What measured plans tell of others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.planner.calibration.strategy_residuals import Deviations
from outpace.records.plan import Plan

DDP = {"strategy": "ddp", "dp_replicate": 2}
ZERO3 = {"strategy": "zero3", "dp_shard": 2}


def plan(layout, **values):
    return Plan(**layout, **{"micro_batch": 4, **values})


def after(*missed):
    """What is known after (plan, what it took longer, as a logarithm)."""
    return Deviations(tuple(one for one, _ in missed), np.array([more for _, more in missed]))


def test_before_anything_is_measured_nothing_is_expected():
    means, spreads = after().predict([plan(DDP), plan(ZERO3, micro_batch=1)])
    assert list(means) == [0.0, 0.0]
    assert spreads == pytest.approx(spreads[0]) and 0.13 < spreads[0] < 0.16


@given(st.floats(-1, 1))
def test_the_more_plans_have_in_common_the_more_they_tell_of_each_other(more):
    known = after((plan(DDP), more))
    others = [plan(DDP, micro_batch=2), plan(DDP, micro_batch=1, checkpointing="full"),
              plan(ZERO3, micro_batch=1, checkpointing="full", loss="chunked")]  # fmt: skip
    means, spreads = known.predict(others)
    near, further, far = abs(means)
    assert abs(more) >= near >= further >= far and all(means * more >= 0)
    assert spreads[0] <= spreads[1] <= spreads[2]


def test_what_is_expected_is_what_strategy_recomputing_and_size_add():
    taken = {"none": 0.0, "selective": 0.15}
    known = after(*[(plan(DDP, checkpointing=mode), more) for mode, more in taken.items()])
    (plain, selective), _ = known.predict([plan(ZERO3, checkpointing=mode) for mode in taken])
    assert selective - plain > 0.03  # of another strategy, too


def test_a_planner_that_is_right_is_trusted_and_one_that_is_wrong_is_not():
    plans = [plan(DDP, micro_batch=1 << size) for size in range(5)]
    alike = [plan(DDP, micro_batch=4, loss="chunked")]
    spread = {}
    for off in (0.0, 0.05, 0.3):
        known = after(*[(one, off * (-1) ** at) for at, one in enumerate(plans)])
        spread[off] = known.predict(alike)[1]
    assert spread[0.0] < spread[0.05] < spread[0.3]
    assert spread[0.0] < 0.08
