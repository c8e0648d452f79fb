"""Pieces of the modules here: types of an entry, small batches, losses and stacks of blocks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any
LossFunction = Callable[[nn.Module, Any], Any]
MakeBatch = Callable[[torch.Generator, int], Batch]
Entry = tuple[nn.Module, LossFunction | None, MakeBatch]

WIDTH, LAYERS, VOCAB, LENGTH = 6, 4, 11, 5


def squared_error(module: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return (module(inputs) - targets).square().mean()


def vector_batch(drawn: torch.Generator, samples: int) -> Batch:
    inputs = torch.randn(samples, WIDTH, generator=drawn)
    return inputs, torch.randn(samples, WIDTH, generator=drawn)


def token_batch(drawn: torch.Generator, samples: int) -> Batch:
    numbers = torch.randint(VOCAB, (samples, LENGTH + 1), generator=drawn)
    return {"tokens": numbers[:, :-1], "targets": numbers[:, 1:]}


class ResidualBlock(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class BlockStack(nn.Module):
    """A stem, blocks that are called in order, and a head."""

    def __init__(self, make: Callable[[], nn.Module] = ResidualBlock) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


def build_seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return build()
