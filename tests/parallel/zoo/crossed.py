"""Modules whose blocks give, take or share unusual things.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common import (
    LAYERS,
    WIDTH,
    Batch,
    BlockStack,
    Entry,
    ResidualBlock,
    build_seeded,
    squared_error,
    vector_batch,
)


def complex_between_blocks(seed: int) -> Entry:
    """Blocks work on spectra: complex weights, and complex tensors from block to block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(0.4 * torch.randn(WIDTH // 2 + 1, 2))

        def forward(self, spectrum: Tensor) -> Tensor:
            return spectrum * (1 + torch.view_as_complex(self.weight))

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(self.stem(x))
            for layer in self.layers:
                spectrum = layer(spectrum)
            return self.head(torch.fft.irfft(spectrum, n=WIDTH))

    return build_seeded(seed, Model), squared_error, vector_batch


def kept_states_changed_in_place(seed: int) -> Entry:
    """States of all layers are kept for the head, and blocks change their input in place."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            made = x + torch.tanh(self.up(self.norm(0.5 * x)))
            x.detach().mul_(0.9)
            return made

    class Model(BlockStack):
        def run(self, x: Tensor) -> Tensor:
            states = [self.stem(x)]
            for layer in self.layers:
                states.append(layer(states[-1]))
            return self.head(torch.stack(states).sum(0))

    return build_seeded(seed, lambda: Model(Block)), squared_error, vector_batch


def tokens_routed_to_nothing(seed: int) -> Entry:
    """Blocks return the tokens that they routed away: often none, a tensor without elements."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor, routed: Tensor) -> tuple[Tensor, Tensor]:
            made = super().forward(x)
            away = made[made[:, 0] > 1.5]
            return made, torch.cat([routed, away])

    class Model(BlockStack):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x)
            routed = x[:0]
            for layer in self.layers:
                x, routed = layer(x, routed)
            return self.head(x), routed.square().sum() / len(x)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, more = module(batch[0])
        return (made - batch[1]).square().mean() + 0.1 * more

    return build_seeded(seed, lambda: Model(Block)), loss, vector_batch


def numbers_returned_by_blocks(seed: int) -> Entry:
    """Blocks return how many of their units were active, as a Python number for the loss."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor, active: int = 0) -> tuple[Tensor, int]:  # type: ignore
            made = super().forward(x)
            return made, active + int((made > 0).sum())

    class Model(BlockStack):
        def forward(self, x: Tensor) -> tuple[Tensor, float]:
            x, active = self.stem(x), 0
            for layer in self.layers:
                x, active = layer(x, active)
            return self.head(x), active / (LAYERS * x.numel())

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, active = module(batch[0])
        return (made - batch[1]).square().mean() * (1 + active)

    return build_seeded(seed, lambda: Model(Block)), loss, vector_batch


def weights_as_arguments(seed: int) -> Entry:
    """The model gives each block a parameter of its own, beside the input."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * gate.sigmoid()

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)
            self.gate = nn.Parameter(torch.randn(WIDTH))

        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x, self.gate)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def functions_as_arguments(seed: int) -> Entry:
    """The model gives blocks a function over its own parameters (a score of positions)."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor, score: Any) -> Tensor:  # type: ignore[override]
            return super().forward(score(x))

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)
            self.slope = nn.Parameter(torch.randn(WIDTH))

        def score(self, x: Tensor) -> Tensor:
            return x + 0.3 * torch.tanh(self.slope * x)

        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x, self.score)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def losses_of_routed_tokens_alone(seed: int) -> Entry:
    """Blocks leave a loss on themselves where tokens were routed, and None where none were."""

    class Block(ResidualBlock):
        routed: Any = None

        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            at = made[:, 0] > 0.8
            self.routed = made[at].square().mean() if at.any() else None
            return made

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        value = squared_error(module, batch)
        for layer in module.layers:  # type: ignore[union-attr]
            if layer.routed is not None:
                value = value + 0.2 * layer.routed
        return value

    return build_seeded(seed, lambda: BlockStack(Block)), loss, vector_batch


def branches_in_threads(seed: int) -> Entry:
    """Two halves of the blocks run in threads of their own."""

    class Model(BlockStack):
        def branch(self, x: Tensor, start: int, grad: bool) -> Tensor:
            with torch.set_grad_enabled(grad):
                for layer in self.layers[start::2]:
                    x = layer(x)
            return x

        def forward(self, x: Tensor) -> Tensor:
            x, grad = self.stem(x), torch.is_grad_enabled()
            with ThreadPoolExecutor(2) as pool:
                both = [pool.submit(self.branch, x, start, grad) for start in range(2)]
                made = both[0].result() + both[1].result()
            return self.head(made)

    return build_seeded(seed, Model), squared_error, vector_batch


def frozen_first_half(seed: int) -> Entry:
    """Stem and first blocks are frozen, so that what a stage hands on needs no gradient."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            for part in (self.stem, self.layers[0], self.layers[1]):
                part.requires_grad_(False)

    return build_seeded(seed, Model), squared_error, vector_batch


def blocks_without_parameters(seed: int) -> Entry:
    """Every second block is an activation."""

    def make() -> nn.Module:
        stack = BlockStack()
        stack.layers[1], stack.layers[3] = nn.Tanh(), nn.GELU()
        return stack

    return build_seeded(seed, make), squared_error, vector_batch


def plain_sequential(seed: int) -> Entry:
    """A plain nn.Sequential of linear layers and activations."""

    def make() -> nn.Module:
        pairs = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*pairs)

    return build_seeded(seed, make), squared_error, vector_batch


def low_rank_beside_frozen(seed: int) -> Entry:
    """LoRA by hand: frozen matrices in wrappers, and a second factor that begins as 0."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(0.5 * torch.randn(2, WIDTH))
            self.up = nn.Parameter(torch.zeros(WIDTH, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down.t() @ self.up.t()

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.up = Adapted(self.up)  # type: ignore[assignment]

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def one_net_for_all_weights(seed: int) -> Entry:
    """A hypernetwork makes the weights of every block from its embedding of the layer."""

    class Block(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return x + torch.tanh(x @ weight)

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)
            self.places = nn.Embedding(LAYERS, 4)
            self.net = nn.Linear(4, WIDTH * WIDTH)

        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for number, layer in enumerate(self.layers):
                weight = self.net(self.places.weight[number]).view(WIDTH, WIDTH)
                x = layer(x, weight)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def mixed_dtypes_between_blocks(seed: int) -> Entry:
    """Blocks hand on float64 sums beside their output, and masks, and whole numbers."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor, total: Tensor, seen: Tensor, count: Tensor) -> Any:  # type: ignore
            made = super().forward(x)
            positive = made > 0
            return made, total + made.double().sum(-1), seen | positive, count + positive.long()

    class Model(BlockStack):
        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            total = x.new_zeros(len(x), dtype=torch.float64)
            seen, count = x > 9, torch.zeros_like(x, dtype=torch.int64)
            for layer in self.layers:
                x, total, seen, count = layer(x, total, seen, count)
            more = 0.01 * total[:, None].to(x.dtype) + 0.1 * seen + 0.05 * count
            return self.head(x + more)

    return build_seeded(seed, lambda: Model(Block)), squared_error, vector_batch


def input_needed_by_every_block(seed: int) -> Entry:
    """Each block takes the model's input again, with gradients through both."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor, start: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + 0.2 * start

    class Model(BlockStack):
        def run(self, x: Tensor) -> Tensor:
            x = start = self.stem(x)
            for layer in self.layers:
                x = layer(x, start)
            return self.head(x)

    return build_seeded(seed, lambda: Model(Block)), squared_error, vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    complex_between_blocks, kept_states_changed_in_place, tokens_routed_to_nothing,
    numbers_returned_by_blocks, weights_as_arguments, functions_as_arguments,
    losses_of_routed_tokens_alone, branches_in_threads, frozen_first_half,
    blocks_without_parameters, plain_sequential, low_rank_beside_frozen, one_net_for_all_weights,
    mixed_dtypes_between_blocks, input_needed_by_every_block,
)  # fmt: skip
