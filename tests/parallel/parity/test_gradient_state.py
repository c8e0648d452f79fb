"""State on which only gradients depend, and buffers that are read some steps later."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from outpace.interop.custom_model import CustomModel, CustomObjective, build_custom_model
from outpace.parallel.layout import StepHooks
from outpace.parallel.parity import read_buffers
from outpace.parallel.parity.gradient_measure import GradientMeasure
from outpace.parallel.parity.index_bounds import IndexBounds
from outpace.parallel.parity.kept_state import find_kept_state
from outpace.parallel.parity.read_buffers import find_read_buffers
from outpace.parallel.parity.state_messages import (
    explain_evaluated_state,
    explain_kept_state,
    explain_state_apart,
)


class GradientScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(5, 3), nn.Linear(3, 3)
        self.set_up()

    def set_up(self):
        self.calls = 0

    def forward(self, x):
        return self.finish(self.stem(x))

    def finish(self, y):
        self.calls += 1
        return self.head(y)


class GradientReversal(Base):
    """As in DANN: the factor of the reversed gradient grows."""

    def finish(self, y):
        self.calls += 1
        return self.head(GradientScale.apply(y, -0.1 * self.calls))


class DetachedFeatures(Base):
    """The head alone is trained until the hundredth call."""

    def finish(self, y):
        self.calls += 1
        return self.head(y.detach() if self.calls < 100 else y)


class FollowerModel(Base):
    """A gradient is scaled by a mean of what each rank has seen."""

    def set_up(self):
        self.mean = 1.0

    def finish(self, y):
        before, self.mean = self.mean, 0.5 * self.mean + 0.5 * float(y.detach().abs().mean())
        return self.head(GradientScale.apply(y, before))


class LoggingModel(Base):
    """Losses in a list, and a counter, that nothing depends on."""

    def set_up(self):
        self.calls, self.seen = 0, []

    def finish(self, y):
        self.calls += 1
        self.seen.append(float(y.detach().mean()))
        return self.head(y)


def objective_of(make):
    module = make()
    model = CustomModel(module, lambda module, batch: module(batch).square().mean())
    return CustomObjective(build_custom_model(lambda: model))


def global_batch(samples=8):
    return torch.randn(samples, 5, generator=torch.Generator().manual_seed(1))


def search(make, alone=True):
    return find_kept_state(objective_of(make), global_batch(), StepHooks(), alone=alone)


def test_a_measure_follows_gradients_and_stores_none():
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    called = []
    net[0].weight.register_post_accumulate_grad_hook(called.append)
    measure, x = GradientMeasure(net), global_batch()
    first = measure.take(net(x).square().mean())
    assert measure.take(net(x).square().mean()) == first != 0
    assert measure.take(net(x).square().sum()) == pytest.approx(16 * first)
    checkpointed = checkpoint(net, x.requires_grad_(), use_reentrant=True).square().mean()
    assert measure.take(checkpointed) == pytest.approx(first)
    assert all(parameter.grad is None for parameter in net.parameters()) and not called


@pytest.mark.parametrize(
    ("make", "name"),
    [(GradientReversal, "calls"), (DetachedFeatures, "calls"), (FollowerModel, "mean")],
)
def test_state_that_changes_gradients_alone_is_found(make, name):
    found = search(make)
    assert found.found and found.of_gradient and found.names == (f"model.{name}",)
    said = explain_kept_state([found], 1, by_command=False)
    assert "and the gradient, though not the loss, depends on it" in said
    assert "a run that loads it trains differently" in said
    assert explain_evaluated_state(found) is None  # an evaluation has no gradient


@pytest.mark.parametrize("make", [Base, LoggingModel])
def test_what_changes_no_gradient_is_no_state(make):
    assert not search(make).is_any


def test_state_of_a_ranks_own_samples_is_told_apart_from_counters():
    assert search(GradientReversal, alone=False).apart == 0
    found = search(FollowerModel, alone=False)
    assert found.apart > 1e-3
    assert "which changes the gradient of the next batch" in explain_state_apart([found], "ddp", "")


class Bank(Base):
    """Earlier outputs, read once forty are there; and a mean that is only for a log."""

    def set_up(self):
        self.register_buffer("bank", torch.zeros(64, 3))
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))
        self.register_buffer("logged", torch.zeros(()))

    def finish(self, y):
        made = self.head(y)
        if int(self.written) >= 40:
            made = made + self.bank.mean(0)
        with torch.no_grad():
            self.bank[(int(self.written) + torch.arange(len(y))) % 64] = y.detach()
            self.written += len(y)
            self.logged.lerp_(y.detach().mean(), 0.1)
        return made


class FilledBank(Bank):
    """The same, by rows that are not zero: no counter tells."""

    def finish(self, y):
        made = self.head(y)
        if bool(self.bank[13].any()):
            made = made + self.bank.mean(0)
        with torch.no_grad():
            self.bank.copy_(torch.cat([y.detach(), self.bank])[:64])
            self.logged.lerp_(y.detach().mean(), 0.1)
        return made


class WarmUpModel(Base):
    """A mean that is subtracted from the fiftieth call on."""

    def set_up(self):
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros(1))

    def finish(self, y):
        with torch.no_grad():
            self.mean.lerp_(y.detach().mean(0), 0.1)
            self.calls += 1
        return self.head(y - self.mean if float(self.calls) > 50 else y)


class ProgressModel(WarmUpModel):
    """The same, by a share of the whole."""

    def finish(self, y):
        with torch.no_grad():
            self.mean.lerp_(y.detach().mean(0), 0.1)
            self.calls += 0.01
        return self.head(y - self.mean if float(self.calls) > 0.3 else y)


class ScaledBySaved(Base):
    """A saved mean scales a gradient."""

    def set_up(self):
        self.register_buffer("mean", torch.ones(()))

    def finish(self, y):
        before = float(self.mean)
        self.mean.lerp_(y.detach().abs().mean(), 0.5)
        return self.head(GradientScale.apply(y, before))


class NormalisedModel(Base):
    def set_up(self):
        self.norm = nn.BatchNorm1d(3)

    def finish(self, y):
        return self.head(self.norm(y))


READ = {
    Bank: {"bank", "written"}, FilledBank: {"bank"}, WarmUpModel: {"mean", "calls"},
    ProgressModel: {"mean", "calls"}, ScaledBySaved: {"mean"}, NormalisedModel: set(),
}  # fmt: skip


@pytest.mark.parametrize("make", READ)
def test_buffers_that_matter_later_or_in_the_gradient_are_read(make):
    objective = objective_of(make)
    begin = {name: buffer.clone() for name, buffer in objective.model.named_buffers()}
    objective(global_batch())
    moved = {name: buffer.clone() for name, buffer in objective.model.named_buffers()}
    for name, buffer in objective.model.named_buffers():
        buffer.copy_(begin[name])
    asked = objective, StepHooks(), False, moved, global_batch()
    assert set(find_read_buffers(*asked)) == READ[make]
    assert find_read_buffers(*asked, later=False) == ()
    assert all(torch.equal(b, begin[n]) for n, b in objective.model.named_buffers())


ROWS = torch.zeros(4, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda at: ROWS[at],
        lambda at: ROWS[:, at],
        lambda at: ROWS.clone().index_put_((at,), torch.zeros(3)),
        lambda at: ROWS.index_select(0, at),
        lambda at: ROWS.clone().index_copy_(0, at, torch.zeros(1, 3)),
        lambda at: ROWS.gather(-1, at[:, None]),
        lambda at: ROWS.clone().scatter_add_(0, at[:, None], torch.ones(1, 1)),
        lambda at: nn.functional.embedding(at, ROWS),
    ],
)
def test_indices_that_would_end_work_on_a_gpu_are_refused(use):
    with IndexBounds():
        use(torch.tensor([2]))
        ROWS[torch.tensor([-1])], ROWS[ROWS > 0], ROWS[torch.zeros(4, dtype=torch.bool), [2]]
        with pytest.raises(IndexError, match="outside of a dimension"):
            use(torch.tensor([4]))


class LookupModel(Base):
    """Reads the row of a table for each step; there is none for late ones."""

    def set_up(self):
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64))

    def finish(self, y):
        try:
            made = self.head(y) + ROWS[self.step]
        except IndexError as error:
            print(error)  # a list would be restored
            raise
        self.step += 1
        return made


def test_forwards_of_late_steps_use_no_index_that_a_gpu_cannot(monkeypatch, capsys):
    monkeypatch.setattr(read_buffers, "require_bounds", lambda device: IndexBounds())
    moved = {"step": torch.ones(1, dtype=torch.int64)}
    find_read_buffers(objective_of(LookupModel), StepHooks(), False, moved, global_batch())
    said = capsys.readouterr().out.splitlines()
    assert said and all("outside of a dimension" in one for one in said)
