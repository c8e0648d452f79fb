"""Modules that do in a later step what they do not do in the first.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

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


class _Clocked(BlockStack):
    """A stack that counts steps by a buffer, which a hook of the batch's number sets."""

    clock: Tensor

    def __init__(self, make: Callable[[], nn.Module] = ResidualBlock) -> None:
        super().__init__(make)
        self.register_buffer("clock", torch.zeros((), dtype=torch.int64))

    def set_clock(self, number: Tensor) -> int:
        self.clock.fill_(int(number[0]))
        return int(number[0])


def _numbered(drawn: torch.Generator, samples: int) -> Batch:
    """A batch that says which step it is of, as trainers give `global_step`."""
    inputs, targets = vector_batch(drawn, samples)
    return inputs, targets, torch.full((samples,), drawn.initial_seed())


def _numbered_error(module: nn.Module, batch: Batch) -> Tensor:
    inputs, targets, number = batch
    return (module(inputs, number) - targets).square().mean()


class _Penalised(ResidualBlock):
    """A block that leaves a penalty of its output on itself."""

    penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.penalty = made.square().mean()
        return made


def penalties_from_the_second_step(seed: int) -> Entry:
    """What blocks leave on themselves is added to the loss from the second step on."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        value = _numbered_error(module, batch)
        if int(batch[2][0]) > 1:
            value = value + 0.2 * sum(one.penalty for one in module.layers)  # type: ignore
        return value

    class Model(_Clocked):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            self.set_clock(number)
            return self.run(x)

    return build_seeded(seed, lambda: Model(_Penalised)), loss, _numbered


def penalties_that_grow_from_nothing(seed: int) -> Entry:
    """The same with a factor that is 0 in the first step and grows."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        factor = 0.2 * (int(batch[2][0]) - 1)
        value = _numbered_error(module, batch)
        return value + factor * sum(one.penalty for one in module.layers)  # type: ignore

    class Model(_Clocked):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            self.set_clock(number)
            return self.run(x)

    return build_seeded(seed, lambda: Model(_Penalised)), loss, _numbered


def features_from_the_second_step(seed: int) -> Entry:
    """The head reads the first block's output, too, from the second step on."""

    class Model(_Clocked):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            late = self.set_clock(number) > 1
            x = first = self.layers[0](self.stem(x))
            for layer in self.layers[1:]:
                x = layer(x)
            return self.head(x + first if late else x)

    return build_seeded(seed, Model), _numbered_error, _numbered


def penalty_of_weights_from_the_second_step(seed: int) -> Entry:
    """The loss penalises all parameters from the second step on."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        value = _numbered_error(module, batch)
        if int(batch[2][0]) > 1:
            value = value + 0.1 * sum(p.square().sum() for p in module.parameters())
        return value

    class Model(_Clocked):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            self.set_clock(number)
            return self.run(x)

    return build_seeded(seed, Model), loss, _numbered


def heads_in_turn(seed: int) -> Entry:
    """Odd steps train one head, even ones another, which has no gradient meanwhile."""

    class Model(_Clocked):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            odd = self.set_clock(number) % 2
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x) if odd else self.other(x)

    return build_seeded(seed, Model), _numbered_error, _numbered


def adversaries_in_turn(seed: int) -> Entry:
    """Odd steps train a critic on detached outputs, even ones the generator through the critic."""

    class Model(_Clocked):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

        def forward(self, x: Tensor, real: Tensor, number: Tensor) -> Tensor:
            if self.set_clock(number) % 2:
                made = self.run(x).detach()
                return (self.critic(made) - self.critic(real)).mean() + 0.1 * (
                    self.critic(made).square().mean()
                )
            return -self.critic(self.run(x)).mean() + 0.1 * self.critic(real).square().mean()

    return build_seeded(seed, Model), lambda module, batch: module(*batch), _numbered


def layers_added_by_step(seed: int) -> Entry:
    """Progressive stacking: step 1 runs half of the blocks, later steps all."""

    class Model(_Clocked):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            depth = 2 if self.set_clock(number) == 1 else len(self.layers)
            x = self.stem(x)
            for layer in self.layers[:depth]:
                x = layer(x)
            return self.head(x)

    return build_seeded(seed, Model), _numbered_error, _numbered


def blocks_in_another_order(seed: int) -> Entry:
    """From the second step on blocks are called in reverse order."""

    class Model(_Clocked):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            late = self.set_clock(number) > 1
            x = self.stem(x)
            for layer in reversed(self.layers) if late else self.layers:
                x = layer(x)
            return self.head(x)

    return build_seeded(seed, Model), _numbered_error, _numbered


def blocks_skipped_from_the_second_step(seed: int) -> Entry:
    """From the second step on the first and the third block are left out."""

    class Model(_Clocked):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            late = self.set_clock(number) > 1
            x = self.stem(x)
            for layer in self.layers[1::2] if late else self.layers:
                x = layer(x)
            return self.head(x)

    return build_seeded(seed, Model), _numbered_error, _numbered


def hooks_from_the_second_step(seed: int) -> Entry:
    """A hook that scales what blocks make is registered by the forward of the second step."""

    class Model(_Clocked):
        hooked = False

        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            if self.set_clock(number) > 1 and not self.hooked:
                self.hooked = True
                for layer in self.layers:
                    layer.register_forward_hook(lambda part, given, made: 1.3 * made)
            return self.run(x)

    return build_seeded(seed, Model), _numbered_error, _numbered


def schedule_by_an_iterator(seed: int) -> Entry:
    """A factor of the forward comes from an iterator that is advanced each time."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.factors = itertools.cycle([1.0, 0.5, 2.0])

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x) * next(self.factors)

    return build_seeded(seed, Model), squared_error, vector_batch


def schedule_by_a_generator(seed: int) -> Entry:
    """The same with a generator function, which cannot be copied."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.factors = self.make()

        @staticmethod
        def make() -> Any:
            factor = 1.0
            while True:
                yield factor
                factor *= 0.8

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x) * next(self.factors)

    return build_seeded(seed, Model), squared_error, vector_batch


def lengths_by_content(seed: int) -> Entry:
    """Tokens without weight are dropped between blocks: as many as stay in this micro-batch."""

    class Model(BlockStack):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            x = self.stem(x)[:, : int(lengths.max())]
            for layer in self.layers:
                x = layer(x)
            at = torch.arange(x.shape[1]) < lengths[:, None]
            return (self.head(x) * at[..., None]).sum(1) / lengths[:, None]

    def make(drawn: torch.Generator, samples: int) -> Batch:
        x = torch.randn(samples, 7, WIDTH, generator=drawn)
        lengths = torch.randint(1, 7, (samples,), generator=drawn)
        if drawn.initial_seed() == 1:
            lengths = torch.full((samples,), 7)
        return x, lengths, torch.randn(samples, WIDTH, generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        x, lengths, targets = batch
        return (module(x, lengths) - targets).square().mean()

    return build_seeded(seed, Model), loss, make


def lengths_by_content_from_the_first(seed: int) -> Entry:
    """The same, where micro-batches of the first step differ already."""
    module, loss, make = lengths_by_content(seed)
    return module, loss, functools.partial(_drawn_lengths, make)


def _drawn_lengths(make: Any, drawn: torch.Generator, samples: int) -> Batch:
    x, _, targets = make(drawn, samples)
    return x, torch.randint(1, 7, (samples,), generator=drawn), targets


def tokens_dropped_by_scores(seed: int) -> Entry:
    """Tokens whose score is low leave between blocks: how many depends on the weights."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
                scores = x.detach().square().mean(-1).amax(0)
                x = x[:, scores >= scores.median()] if x.shape[1] > 3 else x
            return self.head(x).mean(1)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        x = torch.randn(samples, 9, WIDTH, generator=drawn)
        return x, torch.randn(samples, WIDTH, generator=drawn)

    return build_seeded(seed, Model), squared_error, make


MODULES: tuple[Callable[[int], Entry], ...] = (
    penalties_from_the_second_step, penalties_that_grow_from_nothing,
    features_from_the_second_step, penalty_of_weights_from_the_second_step, heads_in_turn,
    adversaries_in_turn, layers_added_by_step, blocks_in_another_order,
    blocks_skipped_from_the_second_step, hooks_from_the_second_step, schedule_by_an_iterator,
    schedule_by_a_generator, lengths_by_content, lengths_by_content_from_the_first,
    tokens_dropped_by_scores,
)  # fmt: skip
