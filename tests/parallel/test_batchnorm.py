"""Batch normalisation over parts of a batch: its statistics, its backward, and what is left be."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from outpace.parallel.batchnorm import MicroBatchNorm, by_micro_batch, commit
from outpace.records.errors import BadInputError

RANKS = Path(__file__).with_name("batchnorm_ranks.py")


@pytest.mark.gloo
def test_synchronised_over_uneven_replicas_equals_one_process(on_ranks):
    assert on_ranks(2, RANKS) == "equal"


@pytest.mark.parametrize("momentum", [0.1, None])
def test_micro_batches_normalise_apart_and_averages_are_the_mini_batchs(momentum):
    """Huang et al., arXiv 1811.06965, §2.3."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, momentum=momentum).double()
    parted = copy.deepcopy(plain)
    by_micro_batch(parted)
    assert type(parted) is MicroBatchNorm
    for _ in range(2):
        batch = torch.randn(6, 3, 2, 5, dtype=torch.float64) + 100
        for part in batch.split(2):
            own = nn.BatchNorm2d(3).double()
            assert torch.allclose(parted(part), own(part), rtol=0, atol=1e-12)
        commit(parted)
        plain(batch)
        for name, buffer in plain.named_buffers():
            assert torch.allclose(parted.get_buffer(name), buffer, rtol=1e-9), name
    plain.eval(), parted.eval()
    assert torch.allclose(parted(batch), plain(batch), rtol=1e-9)


def test_a_normalisation_of_ones_own_kind_is_refused():
    class Own(nn.BatchNorm1d):
        pass

    with pytest.raises(BadInputError, match="norm is a Own"):
        by_micro_batch(nn.ModuleDict({"norm": Own(3)}))


def test_layer_normalisation_is_unaffected():
    module = nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.BatchNorm1d(4))
    before = list(module)
    by_micro_batch(module)
    assert all(new is old for new, old in zip(module, before, strict=True))
    assert [type(part) for part in module] == [
        nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, MicroBatchNorm,
    ]  # fmt: skip
    x = torch.randn(8, 4, dtype=torch.float64)
    norm = module[0].double()
    assert torch.equal(torch.cat([norm(part) for part in x.split(2)]), norm(x))
