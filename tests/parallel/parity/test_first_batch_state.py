"""The check of the first batch finds state that a module or its loss keeps from step to step."""

import random

import pytest
import torch
from torch import nn

from tests.parallel.parity.first_batch_cases import (
    Block,
    Quiet,
    Stack,
    Still,
    run_first_step,
    squares,
)

pytestmark = pytest.mark.gloo


class RunningMean:
    """A loss with state of its own, which no checkpoint has."""

    def __init__(self):
        self.mean = 0.0

    def __call__(self, module, batch):
        out = module(batch[0])
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return (out - self.mean - batch[1]).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "gpipe"])
def test_a_loss_with_a_running_mean_is_refused_or_reported(tmp_path, strategy):
    found = run_first_step(tmp_path, strategy, Stack, RunningMean())
    said = found[0].get("refused") or found[0]["warnings"][-1]
    assert ("refused" in found[0]) == ("refused" in found[1]) == (strategy != "gpipe")
    assert "keeps loss.mean in an attribute" in said and "register_buffer" in said


class AnnealedBlock(Block):
    def __init__(self):
        super().__init__()
        self.calls, self.coin = 0, random.Random(1)

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls + self.coin.random()


class CountedStack(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(AnnealedBlock() for _ in range(4))


def test_counters_and_generators_of_blocks_are_not_taken_for_a_fault(tmp_path):
    for said in run_first_step(tmp_path, "1f1b", CountedStack):
        assert said.get("refused") is None and said["passes"] == 1


class Averaged(Stack):
    """Subtracts a running mean of its outputs, which lies in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.mean = 0.0

    def forward(self, x):
        made = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * made.detach().mean((0, 1))
        return made - self.mean


class Recurrent(Still):
    """Goes on with the state that each sample had."""

    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, x):
        made = Stack.forward(self, x)
        made = made if self.state is None else made + 0.5 * self.state
        self.state = made.detach()
        return made


class Cached(Still):
    """Keeps what it computes, and what it has looked up, neither of which is read again."""

    def __init__(self):
        super().__init__()
        self.masks = {}

    def forward(self, x):
        made = Stack.forward(self, x)
        self.masks[x.shape[1]] = torch.ones(x.shape[1])
        self.aux = made.square().mean()
        return made


@pytest.mark.parametrize(
    ("make", "strategy", "samples", "refused", "words"),
    [
        (Averaged, "ddp", 8, True, "keeps mean in an attribute from step to step"),
        (Averaged, "ddp", 2, True, "keeps mean in an attribute from step to step"),
        (Averaged, "gpipe", 8, False, "keeps mean in an attribute from step to step"),
        (Recurrent, "zero2", 8, False, "keeps state in an attribute from step to step"),
        (Recurrent, "ddp", 2, False, "keeps state in an attribute from step to step"),
        (Cached, "ddp", 8, False, None),
    ],
)
def test_state_in_attributes_is_reported_or_refused(
    tmp_path, make, strategy, samples, refused, words
):
    """Of two samples each rank has one, and compares with the other's."""
    found = run_first_step(tmp_path, strategy, make, samples=samples)
    assert all(("refused" in said) == refused for said in found), found
    told = [said["refused"] for said in found] if refused else found[0]["warnings"]
    about_state = [one for one in told if "from step to step" in one]
    assert bool(about_state) == (words is not None), told
    for one in about_state:
        assert words in one and "register_buffer" in one


class Criterion(nn.Module):
    """A loss that is a module, with a running mean of itself if it `keeps` one."""

    def __init__(self, keeps):
        super().__init__()
        self.keeps = keeps
        self.register_buffer("mean", torch.ones(()))

    def forward(self, module, batch):
        value = squares(module, batch)
        if not self.keeps:
            return value * self.mean
        with torch.no_grad():
            self.mean.lerp_(value, 0.3)
        return value / self.mean


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "1f1b"])
def test_a_loss_may_be_a_module_with_buffers(tmp_path, strategy):
    for said in run_first_step(tmp_path, strategy, Quiet, Criterion(keeps=False)):
        assert said["warnings"] == [] and "refused" not in said
    if strategy == "zero3":
        refused, _ = run_first_step(tmp_path / "keeping", strategy, Quiet, Criterion(keeps=True))
        assert "loss.mean (a buffer of the loss) from step to step" in refused["refused"]
