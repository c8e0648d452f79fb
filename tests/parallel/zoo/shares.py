"""Losses and batches that depend on how many samples, ranks or positives there are.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.common import (
    LENGTH,
    VOCAB,
    WIDTH,
    Batch,
    BlockStack,
    Entry,
    build_seeded,
    squared_error,
    token_batch,
    vector_batch,
)


def penalty_on_rank_0(seed: int) -> Entry:
    """Rank 0 alone adds a penalty."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        value = squared_error(module, batch)
        if not dist.is_initialized() or dist.get_rank() == 0:
            value = 1.5 * value
        return value

    return build_seeded(seed, BlockStack), loss, vector_batch


def loss_times_ranks(seed: int) -> Entry:
    """The loss is multiplied by the number of ranks, against DDP's mean."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return ranks * squared_error(module, batch)

    return build_seeded(seed, BlockStack), loss, vector_batch


def _marked(drawn: torch.Generator, samples: int) -> Batch:
    """Samples of which the second half has no positives."""
    inputs, targets = vector_batch(drawn, samples)
    positive = torch.rand(samples, WIDTH, generator=drawn) > 0.5
    positive[samples // 2 :] = False
    return inputs, targets, positive


def boxes_counted_over_ranks(seed: int) -> Entry:
    """A detector's: the loss is divided by the mean number of positives of all ranks."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets, positive = batch
        errors = (module(inputs) - targets).abs() * positive
        count = positive.sum().to(torch.float32)
        if dist.is_initialized():
            dist.all_reduce(count)
            count = count / dist.get_world_size()
        return errors.sum() / count.clamp(min=1)

    return build_seeded(seed, BlockStack), loss, _marked


def focal_sums_and_positives(seed: int) -> Entry:
    """A focal loss as a sum and the number of positives, of which some parts have none."""

    def loss(module: nn.Module, batch: Batch) -> Any:
        inputs, _, positive = batch
        logits = module(inputs)
        wanted = positive.to(logits.dtype)
        errors = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        return (errors * (1 - (-errors).exp()) ** 2).sum(), int(positive.sum())

    return build_seeded(seed, BlockStack), loss, _marked


def nothing_without_positives(seed: int) -> Entry:
    """Where a part has no positives, the loss is a constant 0, which no parameter leads to."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets, positive = batch
        made = module(inputs)
        if not positive.any():
            return torch.zeros((), dtype=made.dtype, requires_grad=made.requires_grad)
        return ((made - targets).square() * positive).mean()

    return build_seeded(seed, BlockStack), loss, _marked


def nothing_without_gradient(seed: int) -> Entry:
    """The same with a 0 that has no gradient at all, so that its backward fails."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets, positive = batch
        made = module(inputs)
        if not positive.any():
            return torch.zeros((), dtype=made.dtype)
        return ((made - targets).square() * positive).mean()

    return build_seeded(seed, BlockStack), loss, _marked


def errors_over_items_of_the_whole(seed: int) -> Entry:
    """Trainer's: a sum over tokens is divided by the whole batch's number, which it carries."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Embedding(VOCAB, WIDTH)  # type: ignore[assignment]
            self.head = nn.Linear(WIDTH, VOCAB)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return {**token_batch(drawn, samples), "num_items_in_batch": samples * LENGTH}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        logits, targets = module(batch["tokens"]), batch["targets"]
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / batch["num_items_in_batch"]

    return build_seeded(seed, Model), loss, make


def state_for_eight_samples(seed: int) -> Entry:
    """A learned start for each place in the batch, which has to have eight."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(0.1 * torch.randn(8, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x + self.start)

    return build_seeded(seed, Model), squared_error, vector_batch


def starts_by_place(seed: int) -> Entry:
    """The same for up to eight samples: `start[:len(x)]`."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(0.5 * torch.randn(8, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x + self.start[: len(x)])

    return build_seeded(seed, Model), squared_error, vector_batch


def sequences_in_one_row(seed: int) -> Entry:
    """Sequences of several lengths are one row of tokens, with the places where each begins."""

    class Model(BlockStack):
        def forward(self, x: Tensor, begins: Tensor) -> Tensor:
            hidden = self.run(x)
            lengths = begins.diff()
            of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            sums = hidden.new_zeros(len(lengths), WIDTH).index_add(0, of, hidden)
            return sums / lengths[:, None]

    def make(drawn: torch.Generator, samples: int) -> Batch:
        lengths = torch.randint(1, 5, (samples,), generator=drawn)
        begins = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        x = torch.randn(int(begins[-1]), WIDTH, generator=drawn)
        return {"x": x, "begins": begins, "y": torch.randn(samples, WIDTH, generator=drawn)}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch["x"], batch["begins"]) - batch["y"]).square().mean()

    return build_seeded(seed, Model), loss, make


def mixed_with_its_reverse(seed: int) -> Entry:
    """Mixup as in timm: each sample is mixed with its place from the end of the batch."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = (0.7 * one + 0.3 * one.flip(0) for one in batch)
        return (module(inputs) - targets).square().mean()

    return build_seeded(seed, BlockStack), loss, vector_batch


def two_views_in_one_batch(seed: int) -> Entry:
    """The first half of the batch has other views of the second half's samples."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        one, other = F.normalize(module(batch[0]), dim=-1).chunk(2)
        return (one - other).square().sum(-1).mean()

    return build_seeded(seed, BlockStack), loss, vector_batch


def adaptive_classes(seed: int) -> Entry:
    """torch's adaptive softmax: clusters of rare words are used by micro-batches that have some."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Embedding(VOCAB, WIDTH)  # type: ignore[assignment]
            self.output = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, [4, 8], div_value=1.5)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        batch = token_batch(drawn, samples)
        batch["targets"][samples // 2 :].clamp_(max=3)
        return batch

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        hidden = module(batch["tokens"]).flatten(0, 1)
        return module.output(hidden, batch["targets"].flatten()).loss  # type: ignore

    return build_seeded(seed, Model), loss, make


def classes_weighted_by_counts(seed: int) -> Entry:
    """Classes of tokens weigh by how rare they are in the batch."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs = torch.randn(samples, LENGTH, WIDTH, generator=drawn)
        return inputs, torch.randint(WIDTH, (samples, LENGTH), generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        logits, targets = module(batch[0]).flatten(0, 1), batch[1].flatten()
        counts = torch.bincount(targets, minlength=WIDTH).to(logits.dtype)
        return F.cross_entropy(logits, targets, weight=1 / counts.clamp(min=1))

    return build_seeded(seed, BlockStack), loss, make


def temperature_by_the_number_of_samples(seed: int) -> Entry:
    """Logits are divided by a temperature that depends on the number of samples."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        scale = len(batch[0]) ** 0.5
        return (module(batch[0]) / scale - batch[1]).square().mean()

    return build_seeded(seed, BlockStack), loss, vector_batch


def distances_of_whole_distributions(seed: int) -> Entry:
    """The loss sorts the outputs of all samples, and compares them with sorted targets."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch[0]).sort(0).values
        return (made - batch[1].sort(0).values).square().mean()

    return build_seeded(seed, BlockStack), loss, vector_batch


def boxes_matched(seed: int) -> Entry:
    """Each target goes to the output that is nearest, greedily, over the sum of targets."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            return self.run(x[:, None] + torch.linspace(-1, 1, 4)[:, None])

    def loss(module: nn.Module, batch: Batch) -> Any:
        total, count = torch.zeros(()), 0
        for made, found, number in zip(
            module(batch["x"]), batch["boxes"], batch["numbers"], strict=True
        ):
            boxes = found[: int(number)]
            costs = torch.cdist(boxes, made).detach()
            for number in range(len(boxes)):
                at = int(costs[number].argmin())
                total = total + (made[at] - boxes[number]).abs().sum()
                costs[:, at] = torch.inf
                count += 1
        return total, count

    def make(drawn: torch.Generator, samples: int) -> Batch:
        boxes = torch.randn(samples, 3, WIDTH, generator=drawn)
        x = torch.randn(samples, WIDTH, generator=drawn)
        return {"x": x, "boxes": boxes, "numbers": torch.arange(samples) % 4}

    return build_seeded(seed, Model), loss, make


MODULES: tuple[Callable[[int], Entry], ...] = (
    penalty_on_rank_0, loss_times_ranks, boxes_counted_over_ranks, focal_sums_and_positives,
    nothing_without_positives, nothing_without_gradient, errors_over_items_of_the_whole,
    state_for_eight_samples, starts_by_place,
    sequences_in_one_row, mixed_with_its_reverse, two_views_in_one_batch, adaptive_classes,
    classes_weighted_by_counts, temperature_by_the_number_of_samples,
    distances_of_whole_distributions, boxes_matched,
)  # fmt: skip
