"""Modules with state that steps change: in buffers, objects, arrays, classes and optimizers.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

import collections
import copy
import functools
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
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


def scales_by_a_history(seed: int) -> Entry:
    """Delayed scaling of 8-bit matmuls: the largest values of the last forwards give a scale."""

    class Block(ResidualBlock):
        history: Tensor
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("history", torch.zeros(4))
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            rounded = (normed * self.scale * 8).round() / (8 * self.scale)
            made = x + torch.tanh(self.up(normed + (rounded - normed).detach()))
            if self.training:
                self.history = self.history.roll(1)
                self.history[0] = normed.detach().abs().max()
                self.scale = 1 / self.history.max().clamp(min=0.1)
            return made

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def weights_of_groups(seed: int) -> Entry:
    """Group DRO: the loss multiplies groups' weights, a buffer, by exponents of their losses."""

    class Model(BlockStack):
        weights: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights", torch.full((2,), 0.5))

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return *vector_batch(drawn, samples), torch.arange(samples) % 2

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets, groups = batch
        errors = (module(inputs) - targets).square().mean(-1)
        means = torch.stack([errors[groups == g].mean() for g in range(2)])
        if torch.is_grad_enabled():
            raised = module.weights * (0.5 * means.detach()).exp()
            module.weights = raised / raised.sum()
        return (module.weights * means).sum()

    return build_seeded(seed, Model), loss, make


def multiplier_of_a_constraint(seed: int) -> Entry:
    """A Lagrange multiplier, a buffer, rises in the forward while a constraint is not met."""

    class Model(BlockStack):
        multiplier: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("multiplier", torch.tensor(0.1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            made = self.run(x)
            excess = made.square().mean() - 0.2
            if self.training:
                with torch.no_grad():
                    self.multiplier.add_(0.5 * excess.detach()).clamp_(min=0)
            return made, self.multiplier.clone() * excess

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, term = module(batch[0])
        return (made - batch[1]).square().mean() + term

    return build_seeded(seed, Model), loss, vector_batch


def optimizer_in_the_forward(seed: int) -> Entry:
    """A critic of the outputs is trained by its own optimizer in each forward."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Linear(WIDTH, 1)
            self.critic.requires_grad_(False)
            self.rates = 0.05

        def forward(self, x: Tensor) -> Tensor:
            made = self.run(x)
            if torch.is_grad_enabled():
                weight = self.critic.weight.detach().requires_grad_()
                value = (made.detach() @ weight.t() - 1).square().mean()
                (slope,) = torch.autograd.grad(value, weight)
                with torch.no_grad():
                    self.critic.weight -= self.rates * slope
            return made + 0.1 * self.critic(made).tanh()

    return build_seeded(seed, Model), squared_error, vector_batch


class _Tracker:
    """Running statistics in a plain object."""

    def __init__(self) -> None:
        self.mean, self.number = torch.zeros(WIDTH), 0

    def update(self, x: Tensor) -> None:
        self.mean = 0.9 * self.mean.to(x.dtype) + 0.1 * x.mean(0)
        self.number += 1


def statistics_in_an_object(seed: int) -> Entry:
    """Running means are kept by an object that is no module."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.tracker = _Tracker()

        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.is_grad_enabled():
                self.tracker.update(x.detach())
            return self.run(x - self.tracker.mean.to(x.dtype))

    return build_seeded(seed, Model), squared_error, vector_batch


def statistics_in_an_array(seed: int) -> Entry:
    """Running means are kept in an array of NumPy, which is written to in place."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.mean = np.zeros(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.mean *= 0.9
            self.mean += 0.1 * x.detach().double().mean(0).numpy()
            return self.run(x - torch.from_numpy(self.mean.copy()).to(x.dtype))

    return build_seeded(seed, Model), squared_error, vector_batch


def queue_in_a_deque(seed: int) -> Entry:
    """Outputs of the last forwards are negatives, in a deque of bounded length."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.queue: collections.deque[Tensor] = collections.deque(maxlen=3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            made = self.run(x)
            near = sum((made @ one.mean(0)).square().mean() for one in self.queue)
            self.queue.append(made.detach())
            return made, near + made.new_zeros(())

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, near = module(batch[0])
        return (made - batch[1]).square().mean() + 0.1 * near

    return build_seeded(seed, Model), loss, vector_batch


def count_on_the_class(seed: int) -> Entry:
    """A class attribute counts forwards, and the forward is scaled by it."""

    class Model(BlockStack):
        calls: ClassVar[int] = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return self.run(x) / (1 + 0.1 * type(self).calls)

    return build_seeded(seed, Model), squared_error, vector_batch


def teacher_by_its_state_dict(seed: int) -> Entry:
    """A teacher follows in the forward, through the state dicts of both."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = BlockStack()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if self.training:
                theirs = self.teacher.state_dict()
                for name, value in self.student.state_dict().items():
                    theirs[name].mul_(0.9).add_(0.1 * value)
            with torch.no_grad():
                wanted = self.teacher(x)
            return self.student(x), wanted

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, wanted = module(batch[0])
        return (made - batch[1]).square().mean() + 0.3 * (made - wanted).square().mean()

    return build_seeded(seed, Model), loss, vector_batch


def teacher_in_a_plain_list(seed: int) -> Entry:
    """The same teacher, hidden from `parameters()` in a list, follows through `parameters()`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = BlockStack()
            self.hidden = [copy.deepcopy(self.student).requires_grad_(False)]

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            (teacher,) = self.hidden
            if self.training:
                with torch.no_grad():
                    pairs = zip(teacher.parameters(), self.student.parameters(), strict=True)
                    for one, other in pairs:
                        one.data = 0.9 * one.data.to(other.dtype) + 0.1 * other.data
            with torch.no_grad():
                wanted = teacher.to(x.dtype)(x)
            return self.student(x), wanted

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, wanted = module(batch[0])
        return (made - batch[1]).square().mean() + 0.3 * (made - wanted).square().mean()

    return build_seeded(seed, Model), loss, vector_batch


@functools.cache
def _frequencies(length: int, width: int) -> Tensor:
    angles = torch.arange(length)[:, None] / 10 ** (torch.arange(width) / width)
    return angles.cos()


def tables_by_a_cache(seed: int) -> Entry:
    """A table of positions is made once for each length, by functools.cache."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            return self.run(x * _frequencies(x.shape[1], WIDTH).to(x.dtype))

    def make(drawn: torch.Generator, samples: int) -> Batch:
        length = 3 + drawn.initial_seed() % 3
        x = torch.randn(samples, length, WIDTH, generator=drawn)
        return x, torch.randn(samples, length, WIDTH, generator=drawn)

    return build_seeded(seed, Model), squared_error, make


def rotary_tables_that_grow(seed: int) -> Entry:
    """Tables of cosines are attributes of blocks, made again where a sequence is longer."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.longest, self.table = 0, torch.zeros(0)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > self.longest:
                self.longest = x.shape[1]
                self.table = _frequencies.__wrapped__(self.longest, WIDTH).to(x.dtype)
            return super().forward(x * self.table[: x.shape[1]])

    def make(drawn: torch.Generator, samples: int) -> Batch:
        length = 3 + drawn.initial_seed() % 3
        x = torch.randn(samples, length, WIDTH, generator=drawn)
        return x, torch.randn(samples, length, WIDTH, generator=drawn)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, make


def targets_by_earlier_epochs(seed: int) -> Entry:
    """Early-learning regularisation: targets by a sample's number move to what was predicted."""

    class Model(BlockStack):
        wanted: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("wanted", torch.zeros(16, WIDTH))

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return *vector_batch(drawn, samples), torch.randperm(16, generator=drawn)[:samples]

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets, numbers = batch
        made = module(inputs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                module.wanted[numbers] = 0.7 * module.wanted[numbers] + 0.3 * made
        near = (made - module.wanted[numbers]).square().mean()
        return (made - targets).square().mean() + 0.5 * near

    return build_seeded(seed, Model), loss, make


def pseudo_labels_by_an_earlier_forward(seed: int) -> Entry:
    """The loss runs the module in evaluation mode without gradients first, for its targets."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if self.training else 1.1)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        before = module.training
        module.eval()
        with torch.no_grad():
            wanted = module(batch[1])
        module.train(before)
        made = module(batch[0])
        return (made - wanted).square().mean() + 0.1 * (made - batch[1]).square().mean()

    return build_seeded(seed, lambda: BlockStack(Block)), loss, vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    scales_by_a_history, weights_of_groups, multiplier_of_a_constraint, optimizer_in_the_forward,
    statistics_in_an_object, statistics_in_an_array, queue_in_a_deque, count_on_the_class,
    teacher_by_its_state_dict, teacher_in_a_plain_list, tables_by_a_cache, rotary_tables_that_grow,
    targets_by_earlier_epochs, pseudo_labels_by_an_earlier_forward,
)  # fmt: skip
