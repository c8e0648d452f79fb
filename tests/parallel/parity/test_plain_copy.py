"""A copy's parameters get values wherever they are referred to, as often as it is filled."""

import functools

import torch
from torch import nn

from outpace.parallel.parity.plain_copy import _swap_parameters
from outpace.parallel.tensors import meta_copy


class MaskedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.linear.weight.mask = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        self.scales = {self.linear.weight: 3.0}
        self.project = functools.partial(nn.functional.linear, weight=self.linear.weight)

    def forward(self, x):
        weight = self.linear.weight
        return self.project(x) + x @ (weight * weight.mask) * self.scales[weight]


def test_keys_bound_arguments_and_attributes_are_those_of_the_values():
    module = MaskedWeights()
    copied = meta_copy(module)
    x = torch.tensor([[1.0, 2.0]])
    for filled in range(2):
        values = {
            id(p): torch.full(p.shape, 1.0 + filled) for p in copied.parameters() if p.is_meta
        }
        called = []
        with _swap_parameters(copied, values) as others:
            assert others == {}
            weight = copied.linear.weight
            weight.register_hook(lambda gradient, called=called: called.append("gradient"))
            weight.register_post_accumulate_grad_hook(
                lambda parameter, called=called: called.append("accumulated")
            )
            made = copied(x)
            made.sum().backward()
            assert torch.equal(made, (1.0 + filled) * torch.tensor([[6.0, 9.0]]))
            assert weight.grad is not None
        assert called == ["gradient", "accumulated"]
        assert all(parameter.is_meta for parameter in copied.parameters())
