"""Modules whose forwards, parts, buffers and batches have forms that other files do not have.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common import (
    LAYERS,
    VOCAB,
    WIDTH,
    Batch,
    BlockStack,
    Entry,
    ResidualBlock,
    build_seeded,
    squared_error,
    vector_batch,
)


class _Yielding(BlockStack):
    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
            yield self.head(x)


def forward_that_yields(seed: int) -> Entry:
    """Deep supervision: the forward is a generator, which yields an output after each block."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        errors = [(one - batch[1]).square().mean() for one in module(batch[0])]
        return torch.stack(errors).mean()

    return build_seeded(seed, _Yielding), loss, vector_batch


class _Decoding(BlockStack):
    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return partial(self.decode, x)

    def decode(self, hidden: Tensor, points: Tensor) -> Tensor:
        made: Tensor = self.head(hidden + points)
        return made


def forward_that_returns_a_function(seed: int) -> Entry:
    """Neural processes: the forward returns a decoder of what it has seen."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch[0])(batch[1]) - batch[1]).square().mean()

    return build_seeded(seed, _Decoding), loss, vector_batch


class _Direct(BlockStack):
    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for layer in self.layers:
            x = layer.forward(x)
        return self.head(x)


def blocks_by_their_forward(seed: int) -> Entry:
    """Blocks are called as `layer.forward(x)`, past all hooks."""
    return build_seeded(seed, _Direct), squared_error, vector_batch


class _Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(ResidualBlock() for _ in range(LAYERS)))
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.body[2:](self.body[:2](x)) + self.side(x)
        return made


def slices_of_a_sequential(seed: int) -> Entry:
    """A backbone in an nn.Sequential runs in slices, each a new nn.Sequential."""
    return build_seeded(seed, _Sliced), squared_error, vector_batch


class _Tables(BlockStack):
    order: Tensor
    numbers: Tensor
    mask: Tensor
    turns: Tensor
    scales: Tensor
    shifts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(WIDTH).flip(0).to(torch.uint16))
        self.register_buffer("numbers", torch.arange(WIDTH).to(torch.uint32))
        self.register_buffer("mask", torch.arange(WIDTH) > 0)
        self.register_buffer("turns", torch.polar(torch.ones(WIDTH // 2), torch.arange(3.0)))
        self.register_buffer("scales", torch.linspace(0.5, 2, WIDTH).to(torch.float8_e4m3fn))
        self.register_buffer("shifts", torch.arange(WIDTH).to(torch.int16))

    def forward(self, x: Tensor) -> Any:
        x = x[:, self.order.long()] * self.scales.to(x) + 0.1 * self.shifts.to(x)
        x = torch.where(self.mask, x, 0.5 * x + 0.0 * self.numbers.to(x))
        turned = torch.view_as_complex(x.view(len(x), -1, 2).contiguous()) * self.turns
        return self.run(torch.view_as_real(turned).flatten(1).to(x))


def buffers_of_rare_dtypes(seed: int) -> Entry:
    """Tables of 16 and 32 bits without a sign, of booleans, complex numbers and 8 bits."""
    return build_seeded(seed, _Tables), squared_error, vector_batch


class _Trees(BlockStack):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(VOCAB, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def encode(self, tree: Any) -> Tensor:
        if isinstance(tree, int):
            return self.words.weight[tree]
        return torch.tanh(self.join(torch.cat([self.encode(part) for part in tree])))

    def forward(self, trees: Any) -> Any:
        return self.run(torch.stack([self.encode(tree) for tree in trees]))


def trees_of_nested_tuples(seed: int) -> Entry:
    """A recursive net over binary trees of any form, which are tuples of tuples and numbers."""

    def draw_tree(drawn: torch.Generator, depth: int) -> Any:
        if not depth or not int(torch.randint(3, (), generator=drawn)):
            return int(torch.randint(VOCAB, (), generator=drawn))
        return draw_tree(drawn, depth - 1), draw_tree(drawn, depth - 1)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        trees = [(draw_tree(drawn, 2), draw_tree(drawn, 2)) for _ in range(samples)]
        return {"targets": vector_batch(drawn, samples)[1], "trees": trees}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch["trees"]) - batch["targets"]).square().mean()

    return build_seeded(seed, _Trees), loss, make


MODULES: tuple[Callable[[int], Entry], ...] = (
    forward_that_yields, forward_that_returns_a_function, blocks_by_their_forward,
    slices_of_a_sequential, buffers_of_rare_dtypes, trees_of_nested_tuples,
)  # fmt: skip
