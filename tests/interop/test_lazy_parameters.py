"""Lazy modules of one's own get their shapes from the data, or are refused with what to do."""

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from outpace.interop.custom_model import build_custom_model
from outpace.records.errors import BadInputError


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return torch.full((6,), float(number)), torch.ones(3)


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3))


def squares(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()


def test_a_batch_of_the_data_gives_shapes_and_leaves_the_mode():
    own = build_custom_model(lambda: (lazy(), squares, Pairs()))
    tensors = [*own.module.parameters(), *own.module.buffers()]
    assert not any(is_lazy(tensor) for tensor in tensors)
    assert own.module[0].weight.shape == (8, 6) and own.module.training
    assert all(part.training for part in own.module.modules())
    assert own.module[1].num_batches_tracked == 0 and not own.module[1].running_mean.any()


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (lazy, "it has no dataset"),
        (
            lambda: (lazy(), lambda module, batch: batch[0].nothing, Pairs()),
            "the module fails on a batch",
        ),
        (lambda: (lazy(), lambda module, batch: module[0](batch[0]).sum(), Pairs()), "not reach"),
    ],
    ids=["no data", "a loss that fails", "parts that no batch reaches"],
)
def test_what_stays_lazy_is_refused_with_what_to_do(returned, why):
    with pytest.raises(BadInputError, match=rf"lazy parameters.*{why}.*Run a batch through"):
        build_custom_model(returned)
