"""An offloaded optimizer takes the steps of the one that it stands for, whichever that is."""

import copy

import pytest
import torch
from torch import nn

from outpace.nn.scratch_files import Scratch
from outpace.optim import offload
from outpace.optim.build import make_optimizer
from outpace.optim.offload import with_offloading
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

SETTINGS = TrainSettings(lr=1e-2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def optimizer(module, name, scratch=None, **where):
    plan = Plan.parse(where, "test")
    place = (lambda groups, build: with_offloading(build, plan, scratch)(groups)) if where else None
    kind = {} if place is None else {"place": place}
    return make_optimizer(module.named_parameters(), name, SETTINGS, **kind)


def train(module, stepped, steps, rate=1e-2):
    for step in range(steps):
        for group in stepped.param_groups:
            group["lr"] = rate / (step + 1)
        torch.manual_seed(step)
        module(torch.randn(5, 8)).square().sum().backward()
        if step == 1:
            module[0].bias.grad = None  # as of a part that was not used: it is not stepped
        stepped.step()
        stepped.zero_grad()


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach", "adamw-for-loop"])
def test_the_steps_are_those_of_the_optimizer(monkeypatch, tmp_path, name, where):
    monkeypatch.setattr(offload, "UNIT_BYTES", 100)  # several units, and some of several tensors
    plain, moved = model(), model()
    mine = optimizer(moved, name, Scratch(tmp_path), offload_optimizer=where)
    known = optimizer(plain, name)
    train(plain, known, 3)
    train(moved, mine, 3)
    assert list(tmp_path.iterdir()) == []  # files have no names
    for a, b in zip(plain.parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        for kind, tensor in known.state[a].items():
            torch.testing.assert_close(tensor, mine.state[b][kind], rtol=0, atol=0)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_weights_and_states_that_are_loaded_are_gone_on_with(where):
    before = model()
    saved = optimizer(before, "adamw-fused")
    train(before, saved, 2)
    after = model()
    mine = optimizer(after, "adamw-fused", Scratch(), offload_optimizer=where)
    train(after, mine, 1)  # of which nothing may be left
    after.load_state_dict(before.state_dict())
    mine.load_state_dict(copy.deepcopy(saved.state_dict()))
    train(before, saved, 2, 1e-3)
    train(after, mine, 2, 1e-3)
    for a, b in zip(before.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_without_a_place_the_optimizer_is_itself():
    def build(groups):
        return torch.optim.SGD(groups)

    assert with_offloading(build, Plan(), Scratch()) is build
