"""Tensors of a checkpoint have the names of a single process."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from outpace.optim.build import make_optimizer
from outpace.records.settings import TrainSettings
from outpace.training.states import collect_tensors, drop_16bit_weights, load_tensors


def collect(module, value):
    for parameter in module.parameters():
        parameter.data.fill_(value)
    named = module.named_parameters()
    optimizer = make_optimizer(named, "adamw-foreach", TrainSettings(lr=1e-2), master_weights=True)
    return optimizer, collect_tensors(module, optimizer, trained_only=False)


def test_wrapped_layers_have_the_names_of_plain_ones():
    """A training with checkpoint_wrapper or torch.compile resumes from one without, and back."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    first, second = (nn.Linear(2, 2).bfloat16() for _ in range(2))
    wrapped = nn.Sequential(checkpoint_wrapper(first), torch.compile(second, backend="eager"))
    (_, known), (optimizer, found) = collect(plain, 1.0), collect(wrapped, 2.0)
    assert found["model"].keys() == known["model"].keys() == plain.state_dict().keys()
    assert found["optimizer"].keys() == known["optimizer"].keys()
    load_tensors(wrapped, optimizer, known, trained_only=False)
    assert all(bool((optimizer.state[p]["master"] == 1).all()) for p in wrapped.parameters())
    rounded = {"model": {name: tensor.bfloat16() for name, tensor in found["model"].items()}}
    drop_16bit_weights(rounded, wrapped)
    assert rounded == {"model": {}}
