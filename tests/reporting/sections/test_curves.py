"""Curves over the steps of a run."""

import numpy as np
import pytest

from outpace.records.measurement import Evaluation
from outpace.reporting.data.step_log import StepLog
from outpace.reporting.sections.curves import losses, step_times


def log(times_s):
    steps = np.arange(1.0, len(times_s) + 1)
    columns = {"step": steps, "tokens": 64 * steps, "loss": 8 - steps / 100}
    return StepLog({**columns, "step_time_s": np.asarray(times_s)})


@pytest.mark.parametrize(
    ("times_s", "top"),
    [
        ([0.87, *[0.05] * 99], 55.0),  # the first step would flatten the others
        ([0.09, *[0.05] * 99], None),
        ([0.87, *[0.05] * 49, 0.8, *[0.05] * 49], None),  # a slow step later on is shown
        ([0.87, 0.05, 0.05, 0.05], None),  # as few as the warm-up's
    ],
)
def test_a_slow_first_step_does_not_flatten_the_others(times_s, top):
    drawn = step_times(log(times_s), 0.05)
    found = drawn.layout["yaxis"].get("range")
    assert found == (None if top is None else [0, top])
    assert ("lie above the figure" in drawn.alt) is (top is not None)
    assert "the slowest, step 1, took" in drawn.alt
    if top is not None:
        assert drawn.layout["yaxis"]["title"]["text"] == "time of a step (ms)"


@pytest.mark.parametrize(("points", "mode"), [(2, "markers"), (3, "lines+markers")])
def test_two_losses_on_held_out_data_are_no_curve(points, mode):
    held = [
        Evaluation(step=step, loss=5.0, perplexity=148.0, tokens=9, tokens_per_s=1.0)
        for step in (0, 50, 100)[-points:]
    ]
    (trace,) = [one for one in losses(log([0.05] * 100), held).traces
                if one["name"] == "held-out data"]  # fmt: skip
    assert trace["mode"] == mode
