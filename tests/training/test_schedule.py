from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.records.settings import TrainSettings
from outpace.training.schedule import learning_rate, warmup_steps

SCHEDULES = ("cosine", "linear", "wsd", "constant")


@given(
    schedule=st.sampled_from(SCHEDULES),
    total=st.integers(1, 400),
    warmup=st.integers(0, 50),
    lr=st.floats(1e-6, 1.0),
    ratio=st.floats(0, 1),
)
def test_rate_never_leaves_its_bounds_and_falls_after_warmup(schedule, total, warmup, lr, ratio):
    settings = TrainSettings(schedule=schedule, warmup=warmup, lr=lr, min_lr_ratio=ratio)
    rates = [learning_rate(settings, step, total) for step in range(total)]
    assert all(0 <= rate <= lr * (1 + 1e-12) for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert all(a >= b - 1e-15 for a, b in pairwise(falling))
    assert all(rate >= lr * ratio * (1 - 1e-12) for rate in falling)


@pytest.mark.parametrize(
    ("schedule", "half", "end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("wsd", 1.0, 0.1),
                                  ("constant", 1.0, 1.0)]
)  # fmt: skip
def test_known_points(schedule, half, end):
    settings = TrainSettings(schedule=schedule, warmup=0, lr=1.0, min_lr_ratio=0.1)
    assert learning_rate(settings, 0, 100) == pytest.approx(1.0)
    assert learning_rate(settings, 50, 100) == pytest.approx(half)
    assert learning_rate(settings, 100, 100) == pytest.approx(end)


def test_warmup_reaches_the_peak_at_its_last_step():
    settings = TrainSettings(warmup=10, lr=0.5)
    assert learning_rate(settings, 0, 100) == pytest.approx(0.05)
    assert learning_rate(settings, 9, 100) == pytest.approx(0.5)
    assert warmup_steps(TrainSettings(), 200) == 10
