"""Optimizers of a user's own equal one process, or are refused before the first step."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked
from outpace.parallel.optimizer_split import OptimizerTrial
from outpace.parallel.refusals import LoopPosition
from outpace.parallel.shard_access import combine_with_whole, read_whole_values
from tests.parallel.test_user_loops import require_equal, require_refused
from tests.parallel.user_loops import LOOPS, SAMPLES, Loop, ParallelRun, Stack, batches, squares
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
    assert "updates change by" in trial.explain_subset() and trial.name == build.__name__
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("build", SEPARATE)
def test_optimizers_of_each_parameter_are_not_refused(build):
    assert trial_of(build).explain_subset() is None


def test_what_cannot_be_tried_is_not_refused():
    """Random numbers, failures, parameters that are not the given ones."""

    class Noise(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(torch.randn_like(p))

    other = nn.Parameter(torch.zeros(2))
    builds = (Noise, lambda groups, **_: torch.optim.SGD([other], lr=0.1), lambda *_, **__: None)
    assert [trial_of(build).explain_subset() for build in builds] == [None] * 3


def test_a_trial_is_small_and_leaves_nothing(capsys, recwarn):
    """Groups that differ in numbers alone are tried once; names and prints do no harm."""
    built = []

    class Loud(torch.optim.SGD):
        def __init__(self, groups):
            built.append(groups)
            groups[0]["betas"].append(1)
            super().__init__(groups, lr=0.1)

        def step(self, closure=None):
            print("step")
            warnings.warn("step", stacklevel=2)
            return super().step(closure)

    betas = [0.9]
    groups = [
        {"params": [(str(n), nn.Parameter(torch.zeros(2)))], "lr": n + 1.0, "betas": betas}
        for n in range(50)
    ]
    groups += [{"params": [nn.Parameter(torch.zeros(2, 2))], "lr": 1.0, "betas": betas, "on": flag}
               for flag in (True, False)]  # fmt: skip
    assert OptimizerTrial(Loud, groups, torch.device("cpu")).explain_subset() is None
    assert [len(one) for one in built] == [3, 3] and betas == [0.9]
    assert capsys.readouterr().out == "" and not recwarn.list


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
def test_rounding_in_bf16_is_not_refused_and_ranks_agree_on_trials(tmp_path):
    """Muon orthogonalises in bf16. An optimizer that fails on one rank is tried on none."""

    def act(rank):
        mesh = init_device_mesh("cpu", (2,))
        read_whole_values(LoopPosition())
        combine_with_whole(True)
        shards = [distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]) for _ in range(3)]
        groups = [{"params": [nn.Parameter(one) for one in shards]}]

        def explain(build):
            return OptimizerTrial(build, groups, torch.device("cpu")).explain_shards()

        class Failing(LocalTrust):
            def step(self, closure=None):
                assert rank.ranks.rank == 0
                return super().step(closure)

        assert explain(partial(torch.optim.Muon, lr=0.02)) is None
        assert "updates change by" in explain(LocalTrust)
        assert explain(Failing) is None

    ends = run_forked(2, act, 60.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_groups_may_name_their_parameters(tmp_path, strategy):
    def act(rank):
        run = ParallelRun(Stack, strategy, by="model", check="off")
        optimizer = run.make_optimizer([{"params": run.named_parameters()}])
        run.backward(batches()[0])
        optimizer.step()

    ends = run_forked(2, act, 60.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


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
