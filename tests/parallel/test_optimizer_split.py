"""Optimizers of a user's own equal one process, or are refused before the first step."""

from functools import partial

import pytest
import torch
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.parallel.optimizer_split import OptimizerTrial
from tests.parallel.test_user_loops import require_equal, require_refused
from tests.parallel.user_loops import LOOPS, SAMPLES, Loop, Stack, batches, squares
from tests.parallel.user_optimizers import (
    SEPARATE,
    TOGETHER,
    Distance,
    LocalTrust,
    Orthogonal,
    Trust,
)


class _WithOptimizer(Loop):
    def __init__(self, build):
        self.build = build

    def train(self, run):
        optimizer = run.make_optimizer(build=self.build, lr=rate_of(self.build))
        for batch in batches():
            run.backward(batch)
            optimizer.step()
        return {}


CASES = {kind.__name__: kind for kind in (Distance, Trust, LocalTrust, Orthogonal)}
CASES["Adafactor"] = torch.optim.Adafactor
LOOPS_OF_OPTIMIZERS = {name: partial(_WithOptimizer, build) for name, build in CASES.items()}


@pytest.fixture(autouse=True)
def _more_loops(monkeypatch):
    for name, make in LOOPS_OF_OPTIMIZERS.items():
        monkeypatch.setitem(LOOPS, name, make)


def rate_of(build):
    return 1.0 if build is Distance else 0.05


def trial_of(build):
    sizes = ((5, 3), (3,), (2, 2, 3, 3))
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.1}]
    groups = [{"params": parameters}] if build is torch.optim.LBFGS else groups
    return OptimizerTrial(partial(build, lr=rate_of(build)), groups, torch.device("cpu"))


@pytest.mark.parametrize("build", TOGETHER)
def test_optimizers_of_all_parameters_together_are_found(build):
    trial = trial_of(build)
    drawn = torch.get_rng_state()
    assert "updates change by" in trial.explain_parts() and trial.name == build.__name__
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("build", SEPARATE)
def test_optimizers_of_each_parameter_are_not_refused(build):
    assert trial_of(build).explain_parts() is None


def test_what_cannot_be_tried_is_not_refused():
    """Random numbers, failures, parameters that are not the given ones."""

    class Noise(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(torch.randn_like(p))

    other = nn.Parameter(torch.zeros(2))
    builds = (Noise, lambda groups, **_: torch.optim.SGD([other], lr=0.1), lambda *_, **__: None)
    assert [trial_of(build).explain_parts() for build in builds] == [None] * 3


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["zero1", "1f1b"])
def test_ranks_with_some_parameters_refuse_what_needs_all(tmp_path, strategy):
    pattern = rf"Distance computes with all parameters together, but under strategy {strategy}"
    require_refused(tmp_path, strategy, "Distance", pattern, by="model", check="off")


@pytest.mark.gloo
def test_shards_are_whole_for_an_optimizer(tmp_path):
    """Numbers and norms of a parameter are over all ranks."""
    require_equal(tmp_path, "zero3", "Distance", "Trust", "Orthogonal", check="off")


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "pattern"),
    [("LocalTrust", "updates change by"), ("Adafactor", "it fails with RuntimeError: aten")],
)
def test_an_optimizer_that_does_not_know_shards_is_refused(tmp_path, name, pattern):
    pattern = f"{name} computes different updates from shards.*zero3.*{pattern}"
    require_refused(tmp_path, "zero3", name, pattern, check="off")


@pytest.mark.gloo
def test_verify_tries_the_optimizer():
    def build():
        return {"module": Stack().double(), "loss": squares, "optimizer": Distance}

    given = build()
    plans = [plan_for_module(name, 2, SAMPLES) for name in ("zero1", "zero3")]
    found = outpace.verify(
        given["module"], loss=squares, batch=batches()[0], plans=plans, optimizer=Distance
    )
    first, second = found.verdicts
    assert first.refused and "Distance computes with all parameters" in first.reason
    assert second.passed
