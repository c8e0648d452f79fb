"""Ranks that have built different modules, in what they send each other and in what they do not."""

import pytest
import torch
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked

pytestmark = pytest.mark.gloo


class Waves(nn.Module):
    """Fourier features whose frequencies are a plain attribute."""

    def __init__(self, seed, used=True):
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.waves, self.used = torch.randn(4, 4, generator=drawn), used
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = torch.sin(x @ self.waves) if self.used else x
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def squares(module, batch):
    return module(batch).square().mean()


def train(folder, build, strategy="ddp"):
    def act(rank):
        torch.manual_seed(0)
        module = build(rank.ranks.rank)
        model = outpace.parallelize(module, plan_for_module(strategy, 2, 8), loss=squares)
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
        model.forward_backward(model.share(batch))

    return run_forked(2, act, 240.0, folder)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_attributes_that_differ_and_matter_are_refused(tmp_path, strategy):
    ends = train(tmp_path, Waves, strategy)
    assert all(end.refused for end in ends)
    assert "ranks compute losses of the same samples that differ by" in ends[0].said
    assert "they have different values of waves in an attribute" in ends[0].said


def test_attributes_that_differ_and_do_not_matter_train(tmp_path):
    ends = train(tmp_path, lambda rank: Waves(rank, used=False))
    assert [end.said for end in ends] == [None, None]


class HashWaves(Waves):
    def forward(self, x):
        return super().forward(x) * (1 + hash("name") % 2)


def test_what_is_another_number_in_each_process_is_refused(tmp_path, monkeypatch):
    known = hash

    def build(rank):
        # Forked processes have one key of hashes.
        monkeypatch.setattr("builtins.hash", lambda one: rank if one == "name" else known(one))
        return HashWaves(0)

    ends = train(tmp_path, build)
    assert all(end.refused for end in ends) and "hash() of a string" in ends[0].said


class Noisy(Waves):
    """Draws from generators of its own, which each rank seeds otherwise, as for augmentation."""

    def __init__(self, seed, kind):
        super().__init__(0)
        drawn = torch.Generator().manual_seed(seed)
        self.drawn = {"plain": drawn, "listed": [drawn], "named": {"a": (drawn,)}}[kind]

    def forward(self, x):
        (drawn,) = torch.utils._pytree.tree_leaves(self.drawn)
        return super().forward(x + torch.randn(x.shape, generator=drawn))


@pytest.mark.parametrize("kind", ["plain", "listed", "named"])
def test_generators_that_each_rank_seeds_otherwise_are_no_other_module(tmp_path, kind):
    ends = train(tmp_path, lambda rank: Noisy(rank, kind))
    assert not any("ranks compute losses" in (end.said or "") for end in ends), ends


def heads(names):
    module = Waves(0)
    module.heads = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    return module


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda rank: heads(("b", "a") if rank else ("a", "b")),
            "parameter or buffer 9 is heads.b.weight of shape (4, 4) (torch.float32) on rank 1, "
            "but heads.a.weight of shape (4, 4) (torch.float32) on rank 0",
        ),
        (
            lambda rank: heads(("a",) if rank else ("a", "b")),
            "parameter or buffer 11 is nothing more on rank 1, but heads.b.weight",
        ),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "1f1b"])
def test_parts_in_another_order_are_refused(tmp_path, build, said, strategy):
    ends = train(tmp_path, build, strategy)
    assert all(end.refused for end in ends), ends
    assert (
        "rank 1 has built a different module from rank 0" in ends[0].said and said in ends[0].said
    )
