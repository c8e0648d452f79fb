"""Modules whose state matters some steps later, or changes gradients alone.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.common import (
    WIDTH,
    Batch,
    BlockStack,
    Entry,
    ResidualBlock,
    build_seeded,
    squared_error,
    vector_batch,
)


def _with_extra(module: nn.Module, batch: Batch) -> Tensor:
    made, extra = module(batch[0])
    return (made - batch[1]).square().mean() + 0.3 * extra


class _Bank(BlockStack):
    bank: Tensor
    written: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(24, WIDTH))
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        made = self.run(x)
        keys = F.normalize(made, dim=-1)
        extra = made.new_zeros(())
        if int(self.written) >= 16:
            extra = (keys @ self.bank.clone().T).logsumexp(-1).mean()
        with torch.no_grad():
            self.bank[(int(self.written) + torch.arange(len(x))) % 24] = keys.detach()
            self.written += len(x)
        return made, extra


def memory_read_once_full(seed: int) -> Entry:
    """Cross-batch memory: a bank of embeddings in a buffer, read once it has enough rows."""
    return build_seeded(seed, _Bank), _with_extra, vector_batch


class _Counted(BlockStack):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        made = self.run(x)
        extra = made.square().mean() * float(self.steps >= 2)
        self.steps += 1
        return made, extra


def term_from_a_saved_step(seed: int) -> Entry:
    """A term whose coefficient is 0 until a counter in a buffer reaches 2."""
    return build_seeded(seed, _Counted), _with_extra, vector_batch


class _Quantiser(nn.Module):
    largest: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.lerp_(x.detach().abs().max(), 0.1)
            self.calls += 1
        if int(self.calls) < 3:
            return x
        scale = self.largest.clone() / 15
        return x + ((x / scale).round().clamp(-15, 15) * scale - x).detach()


class _QuantisedBlock(ResidualBlock):
    def __init__(self) -> None:
        super().__init__()
        self.quantise = _Quantiser()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.quantise(super().forward(x))
        return made


def quantised_from_a_step(seed: int) -> Entry:
    """Ranges are observed from the first call, and used from the third on."""
    return build_seeded(seed, partial(BlockStack, _QuantisedBlock)), squared_error, vector_batch


class _Prototypes(BlockStack):
    prototypes: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prototypes", torch.zeros(3, WIDTH))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        made = self.run(x)
        extra = made.new_zeros(())
        if bool((self.seen >= 4).all()):
            extra = (made - self.prototypes[labels]).square().mean()
        with torch.no_grad():
            for one in range(3):
                mine = made.detach()[labels == one]
                if len(mine):
                    self.prototypes[one].lerp_(mine.mean(0), 0.1)
                    self.seen[one] += len(mine)
        return made, extra


def prototypes_once_all_are_seen(seed: int) -> Entry:
    """Running means of classes attract, once each class has been seen four times."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        labels = torch.randint(3, (samples,), generator=drawn)
        return vector_batch(drawn, samples)[0], labels

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, extra = module(*batch)
        return F.cross_entropy(made, batch[1]) + 0.5 * extra

    return build_seeded(seed, _Prototypes), loss, make


class _Scaled(torch.autograd.Function):
    """Passes values on, and multiplies their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.factor * gradients[0], None


class _Domain(BlockStack):
    calls: Any

    def __init__(self, saved: bool) -> None:
        super().__init__()
        self.domain = nn.Linear(WIDTH, 1)
        if saved:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        else:
            self.calls = 0

    def forward(self, x: Tensor) -> Any:
        out = self.run(x)
        factor = 2 / (1 + math.exp(-0.5 * float(self.calls))) - 1
        self.calls += 1
        return out, F.softplus(self.domain(_Scaled.apply(out, -factor))).mean()


def reversal_that_grows(seed: int) -> Entry:
    """DANN: the factor of the reversed gradient grows with the calls, which no loss shows."""
    return build_seeded(seed, partial(_Domain, False)), _with_extra, vector_batch


def reversal_by_a_saved_count(seed: int) -> Entry:
    """The same, by a counter in a buffer."""
    return build_seeded(seed, partial(_Domain, True)), _with_extra, vector_batch


class _Detached(BlockStack):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        self.calls += 1
        return self.head(x.detach() if self.calls < 3 else x) + 0.0 * x.sum()


def detached_until_a_call(seed: int) -> Entry:
    """The head alone is trained first: features are detached until the third call."""
    return build_seeded(seed, _Detached), squared_error, vector_batch


class _Followed(BlockStack):
    size: Any

    def __init__(self, saved: bool) -> None:
        super().__init__()
        if saved:
            self.register_buffer("size", torch.ones(()))
        else:
            self.size = 1.0

    def forward(self, x: Tensor) -> Any:
        made = self.run(x)
        before, now = float(self.size), float(made.detach().abs().mean())
        if isinstance(self.size, Tensor):
            self.size.fill_(0.8 * before + 0.2 * now)
        else:
            self.size = 0.8 * before + 0.2 * now
        return _Scaled.apply(made, before)


def gradients_scaled_by_history(seed: int) -> Entry:
    """A gradient is scaled by a running mean of earlier outputs' sizes."""
    return build_seeded(seed, partial(_Followed, False)), squared_error, vector_batch


def gradients_scaled_by_a_buffer(seed: int) -> Entry:
    """The same, by a mean in a buffer."""
    return build_seeded(seed, partial(_Followed, True)), squared_error, vector_batch


class _Listing(BlockStack):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []


def weighted_by_a_long_list(seed: int) -> Entry:
    """Losses in a list, whose first and last weigh the next one once there are more than ten."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        error, losses = squared_error(module, batch), module.losses
        assert isinstance(losses, list)
        weight = min(2.0, losses[0] / losses[-1]) if len(losses) > 10 else 1.0
        losses.append(float(error.detach()))
        return weight * error

    return build_seeded(seed, _Listing), loss, vector_batch


class _Pruned(ResidualBlock):
    mask: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if int(self.calls) == 3:
            sizes = self.up.weight.detach().abs()
            self.mask.copy_(sizes > sizes.flatten().kthvalue(18).values)
        weight = self.up.weight * self.mask.clone()
        return x + torch.tanh(F.linear(self.norm(x), weight, self.up.bias))


def pruned_at_a_call(seed: int) -> Entry:
    """Magnitude pruning: masks in buffers are made anew at the third call."""
    return build_seeded(seed, partial(BlockStack, _Pruned)), squared_error, vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    memory_read_once_full, term_from_a_saved_step, quantised_from_a_step,
    prototypes_once_all_are_seen, reversal_that_grows, reversal_by_a_saved_count,
    detached_until_a_call, gradients_scaled_by_history, gradients_scaled_by_a_buffer,
    weighted_by_a_long_list, pruned_at_a_call,
)  # fmt: skip
