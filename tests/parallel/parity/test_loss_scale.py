"""Gradients that do not grow with the loss are found; autograd's own do."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import outpace
from outpace.interop.custom_model import CustomModel, CustomObjective, build_custom_model
from outpace.launch.forked_job import run_forked
from outpace.parallel.layout import StepHooks
from outpace.parallel.parity.comparison import SINGLE, Projection
from outpace.parallel.parity.loss_scale import find_unscaled_gradients, has_user_backward
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan


class DoublingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, term):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_ones(())


class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.change = change

    def forward(self, x):
        return self.second(self.change(torch.tanh(self.first(x))))


def doubled(x):
    return DoublingFunction.apply(x)


def recomputed(x):
    return checkpoint(torch.sin, x, use_reentrant=True)


def with_loss(x):
    return WithLoss.apply(x, 0.1 * x.square().mean())


def clipped(x):
    x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return x


def noisy(x):
    x.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))
    return x


def find(change):
    def loss(module, batch):
        return (module(batch[0]) - batch[1]).square().mean()

    objective = CustomObjective(build_custom_model(lambda: CustomModel(Net(change), loss)))
    names = [name for name, _ in objective.model.named_parameters()]
    taker = []

    def take(name, parameter):
        taker[-1](name, parameter.grad)
        parameter.grad = None

    for name, parameter in objective.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: take(name, p))
    drawn = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 4, generator=drawn), torch.randn(4, 2, generator=drawn)
    found = find_unscaled_gradients(
        objective, batch, names, Projection(16, torch.device("cpu")),
        lambda one: taker.append(one) if one is not None else taker.clear(),
        StepHooks(), False, "ddp", SINGLE,
    )  # fmt: skip
    assert all(parameter.grad is None for parameter in objective.parameters())
    return found


class Twice(nn.Module):
    """One layer in two checkpoints with reentry; one's gradient, which comes first, is clipped."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        first = checkpoint(self.layer, x, use_reentrant=True)
        apart = x.detach().requires_grad_()
        return first + clipped(checkpoint(self.layer, apart, use_reentrant=True))


@pytest.mark.parametrize("change", [nn.Identity(), doubled, recomputed, noisy])
def test_derivatives_of_the_loss_grow_with_it(change):
    assert find(change) == []


@pytest.mark.parametrize("change", [with_loss, clipped])
def test_what_a_backward_adds_or_clips_does_not(change):
    assert find(change) == ["first.weight", "first.bias"]


def test_all_parts_of_a_gradient_count():
    assert find(Twice()) == ["change.layer.weight", "change.layer.bias"]


def chunked(module, batch):
    """Truncated backpropagation: the backward of all parts but the last runs at once."""
    first, last = [
        (module(x) - y).square().mean() / 2
        for x, y in zip(batch[0].chunk(2, 1), batch[1].chunk(2, 1), strict=True)
    ]
    if first.requires_grad:
        first.backward()
    return last


def pairs():
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, 4, generator=drawn), torch.randn(8, 6, 2, generator=drawn)


WORDS = (
    r"itself runs a backward, which adds to the gradients of "
    r"(change.bias, change.weight, )?first.bias.*Return the sum of all"
)


def test_a_loss_that_runs_a_backward_is_refused_in_one_process_too():
    plan = Plan(strategy="single", micro_batch=8)
    model = outpace.parallelize(Net(nn.Identity()), plan, loss=chunked)
    with pytest.raises(BadInputError, match=WORDS):
        model.forward_backward(pairs())
    with pytest.raises(BadInputError, match=WORDS):
        outpace.verify(Net(nn.Identity()), loss=chunked, batch=pairs(), plans="ddp")


@pytest.mark.gloo
@pytest.mark.parametrize("change", [nn.Identity(), nn.BatchNorm1d(3)])
def test_a_loss_that_runs_a_backward_is_refused_by_all_ranks(tmp_path, change):
    """Batch normalisation is synchronised, so that no forward runs on some ranks alone."""

    def act(rank):
        plan = Plan(strategy="ddp", dp_replicate=2, micro_batch=4)
        model = outpace.parallelize(Net(change), plan, loss=chunked)
        model.forward_backward(model.share(pairs()))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.refused and re.search(WORDS, end.said) for end in ends)


def test_functions_of_the_user_are_seen_in_the_graph():
    x = torch.ones(3, requires_grad=True)
    assert not has_user_backward(torch.tanh(x).sum())
    assert has_user_backward(torch.tanh(doubled(x)).sum())
