"""Modules whose batches, names or outputs are of kinds that collate functions and projects make.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from zoo.common import (
    LENGTH,
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


def tags_in_lists_of_numbers(seed: int) -> Entry:
    """Each sample has a list of its tags, of any number: a list of lists of whole numbers."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, _ = vector_batch(drawn, samples)
        counts = torch.randint(1, 4, (samples,), generator=drawn).tolist()
        tags = [torch.randint(WIDTH, (n,), generator=drawn).tolist() for n in counts]
        return {"inputs": inputs, "tags": tags}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch["inputs"]).log_softmax(-1)
        each = [-one[tags].mean() for one, tags in zip(made, batch["tags"], strict=False)]
        return torch.stack(each).mean()

    return build_seeded(seed, BlockStack), loss, make


def tags_in_tuples(seed: int) -> Entry:
    """The same with a tuple of tuples, as `zip(*samples)` collates them."""
    module, loss, make = tags_in_lists_of_numbers(seed)

    def make_tuples(drawn: torch.Generator, samples: int) -> Batch:
        batch = make(drawn, samples)
        return {**batch, "tags": tuple(map(tuple, batch["tags"]))}

    def loss_of_tuples(module: nn.Module, batch: Batch) -> Any:
        assert loss is not None
        return loss(module, {**batch, "tags": list(map(list, batch["tags"]))})

    return module, loss_of_tuples, make_tuples


def texts_in_a_tuple(seed: int) -> Entry:
    """Names of classes in a tuple of texts, as `zip(*samples)` collates them."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, _ = vector_batch(drawn, samples)
        classes = torch.randint(WIDTH, (samples,), generator=drawn).tolist()
        return inputs, tuple("abcdef"[one] for one in classes)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch[0]).log_softmax(-1)
        each = [-one["abcdef".index(name)] for one, name in zip(made, batch[1], strict=False)]
        return torch.stack(each).mean()

    return build_seeded(seed, BlockStack), loss, make


def tensors_in_a_tuple(seed: int) -> Entry:
    """A tuple of one tensor of boxes for each sample, as detectors collate them."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, _ = vector_batch(drawn, samples)
        counts = torch.randint(1, 4, (samples,), generator=drawn).tolist()
        return inputs, tuple(torch.randn(n, WIDTH, generator=drawn) for n in counts)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch[0])
        each = [(one - boxes).square().mean() for one, boxes in zip(made, batch[1], strict=False)]
        return torch.stack(each).mean()

    return build_seeded(seed, BlockStack), loss, make


def targets_of_some_samples(seed: int) -> Entry:
    """A list of targets, which is None for samples that have none."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return inputs, [None if n % 3 == 1 else one for n, one in enumerate(targets)]

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        made = module(batch[0])
        pairs = [(a, b) for a, b in zip(made, batch[1], strict=False) if b is not None]
        each = [(a - b).square().mean() for a, b in pairs]
        return torch.stack(each).sum(), torch.tensor(len(each))

    return build_seeded(seed, BlockStack), loss, make


def batch_as_pairs(seed: int) -> Entry:
    """A list of (sequence, target), one for each sample, as `collate_fn=list` gives it."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            return self.run(x).mean(0)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return [
            (
                torch.randn(4, WIDTH, generator=drawn),
                torch.randn(WIDTH, generator=drawn),
            )
            for _ in range(samples)
        ]

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return torch.stack([(module(x) - y).square().mean() for x, y in batch]).mean()

    return build_seeded(seed, Model), loss, make


class _Graphs:
    """A batch of a plain class, with tensors as attributes."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)


def batch_of_a_plain_class(seed: int) -> Entry:
    """A batch of a class of the user's own that is no dataclass."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch.inputs) - batch.targets).square().mean()

    return build_seeded(seed, BlockStack), loss, lambda *asked: _Graphs(*vector_batch(*asked))


def parts_of_a_plain_class(seed: int) -> Entry:
    """A dict with inputs in a tensor, and targets in an object of the user's own."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return {"inputs": inputs, "labels": _Graphs(targets, targets)}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch["inputs"])
        wanted = batch["labels"].targets
        each = [(a - b).square().mean() for a, b in zip(made, wanted, strict=False)]
        return torch.stack(each).mean()

    return build_seeded(seed, BlockStack), loss, make


def packed_by_the_collate(seed: int) -> Entry:
    """The batch has a PackedSequence of the samples, and a target for each."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: PackedSequence) -> Tensor:
            made, lengths = pad_packed_sequence(self.net(x)[0], batch_first=True)
            return self.head(made.sum(1) / lengths[:, None])

    def make(drawn: torch.Generator, samples: int) -> Batch:
        lengths = sorted(torch.randint(1, 5, (samples,), generator=drawn).tolist(), reverse=True)
        packed = pack_sequence([torch.randn(n, WIDTH, generator=drawn) for n in lengths])
        return packed, torch.randn(samples, WIDTH, generator=drawn)

    return build_seeded(seed, Model), squared_error, make


def entries_that_are_none(seed: int) -> Entry:
    """A dict with None for what this data set lacks, flags, and a number of the epoch."""

    class Model(BlockStack):
        def forward(
            self, x: Tensor, mask: Tensor | None = None, *, causal: bool, epoch: int
        ) -> Tensor:
            assert mask is None and causal
            return self.run(x) * (1 + 0.01 * epoch)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return {
            "x": inputs, "mask": None, "causal": True, "epoch": drawn.initial_seed() % 5,
            "labels": targets,
        }  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        labels = batch.pop("labels")
        return (module(**batch) - labels).square().mean()

    return build_seeded(seed, Model), loss, make


def masks_for_all_samples(seed: int) -> Entry:
    """A mask of shape (1, 1, S, S), positions of (1, S), and a temperature of (1,), for all."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens: Tensor, mask: Tensor, places: Tensor) -> Tensor:
            x = self.embed(tokens) + self.places(places)
            for layer in self.layers:
                parts = layer(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
                made = F.scaled_dot_product_attention(*parts, attn_mask=mask)
                x = x + made.transpose(1, 2).flatten(2)
            return self.head(x)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        numbers = torch.randint(VOCAB, (samples, LENGTH + 1), generator=drawn)
        return {
            "tokens": numbers[:, :-1], "targets": numbers[:, 1:],
            "mask": torch.ones(LENGTH, LENGTH).tril()[None, None].bool(),
            "places": torch.arange(LENGTH)[None], "temperature": torch.tensor([1.3]),
        }  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch["tokens"], batch["mask"], batch["places"]) / batch["temperature"]
        return F.cross_entropy(made.flatten(0, 1), batch["targets"].flatten())

    return build_seeded(seed, Model), loss, make


def nothing_returned(seed: int) -> Entry:
    """The loss returns None where no sample has a label, as trainers take for a skipped batch."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return inputs, targets, torch.arange(samples) < samples // 2

    def loss(module: nn.Module, batch: Batch) -> Any:
        inputs, targets, known = batch
        made = module(inputs)
        if not known.any():
            return None
        return (made - targets)[known].square().mean()

    return build_seeded(seed, BlockStack), loss, make


def loss_with_its_accuracy(seed: int) -> Entry:
    """The loss returns (loss, accuracy), as many training steps do."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, _ = vector_batch(drawn, samples)
        return inputs, torch.randint(WIDTH, (samples,), generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        made = module(batch[0])
        right = (made.argmax(-1) == batch[1]).float().mean()
        return F.cross_entropy(made, batch[1]), right

    return build_seeded(seed, BlockStack), loss, make


def loss_with_a_log(seed: int) -> Entry:
    """The loss returns (loss, {"mse": …}), with numbers for a log."""

    def loss(module: nn.Module, batch: Batch) -> Any:
        value = squared_error(module, batch)
        return value, {"mse": value.detach(), "rmse": float(value.detach().sqrt())}

    return build_seeded(seed, BlockStack), loss, vector_batch


def names_with_marks(seed: int) -> Entry:
    """Parts and parameters have names with slashes, spaces, dashes and letters of all kinds."""
    names = ("user/id", "item-id", "größe 1", "0", "weight:0", "a\\b", "%s", "…")

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleDict({one: nn.Linear(WIDTH, WIDTH) for one in names})
            self.scales = nn.ParameterDict({one: torch.ones(WIDTH) for one in names})
            self.register_buffer("mean/of all", torch.full((WIDTH,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            made = sum(self.tables[one](x) * self.scales[one] for one in names)
            return self.run(made - getattr(self, "mean/of all"))

    return build_seeded(seed, Model), squared_error, vector_batch


def crops_of_several_sizes(seed: int) -> Entry:
    """Multi-crop: a list of two large and three small images of each sample, by size at once."""

    class Model(BlockStack):
        def forward(self, crops: list[Tensor]) -> Tensor:
            made, begin = [], 0
            sizes = [one.shape[-1] for one in crops]
            for end in range(1, len(crops) + 1):
                if end == len(crops) or sizes[end] != sizes[begin]:
                    some = torch.cat(crops[begin:end])
                    pooled = F.adaptive_avg_pool2d(some, (2, 3)).mean(1).flatten(1)
                    made.append(self.run(pooled))
                    begin = end
            return torch.cat(made)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return [torch.randn(samples, 3, n, n, generator=drawn) for n in (8, 8, 4, 4, 4)]

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        first, second, *others = module(batch).chunk(len(batch))
        return (
            sum(  # type: ignore[return-value]
                (one - first.detach()).square().mean() for one in (second, *others)
            )
            + (first.mean(0) - 0.1).square().mean() * 0
            + (first - 1).square().mean()
        )

    return build_seeded(seed, Model), loss, make


class _Attended(nn.Module):
    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.mask is None or self.mask.shape[0] < length:
            self.mask = torch.ones(length, length, dtype=x.dtype).tril()
        weights = self.mask[:length, :length] / self.mask[:length, :length].sum(1, keepdim=True)
        return x + torch.tanh(weights @ self.up(x))


def masks_cached_in_empty_buffers(seed: int) -> Entry:
    """Buffers that are None at first become masks, which grow with the longest sequence."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        length = 3 + drawn.initial_seed() % 4
        shape = samples, length, WIDTH
        return torch.randn(shape, generator=drawn), torch.randn(shape, generator=drawn)

    return build_seeded(seed, lambda: BlockStack(_Attended)), squared_error, make


class _Counted(ResidualBlock):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen += x.detach().mean(0)
        return super().forward(x) - 0.1 * self.seen


def buffers_moved_in_evaluation(seed: int) -> Entry:
    """Averages that move in evaluation mode alone, and that the forward subtracts."""
    return build_seeded(seed, lambda: BlockStack(_Counted)), squared_error, vector_batch


class _First(nn.Module):
    """A block that takes a tuple of (numbers, states), by keyword, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.table = ResidualBlock(), nn.Embedding(VOCAB, WIDTH)

    def forward(self, *, both: tuple[Tensor, Tensor], scale: float = 1.0) -> Any:
        numbers, x = both
        return numbers, self.block(x + scale * self.table(numbers))


def numbers_before_states(seed: int) -> Entry:
    """Blocks take a tuple by keyword whose first member is whole numbers, and return one."""

    class Model(BlockStack):
        def forward(self, numbers: Tensor, x: Tensor) -> Tensor:
            both = numbers, self.stem(x)
            for layer in self.layers:
                both = layer(both=both, scale=0.5)
            return self.head(both[1])

    def make(drawn: torch.Generator, samples: int) -> Batch:
        numbers = torch.randint(VOCAB, (samples,), generator=drawn)
        return numbers, *vector_batch(drawn, samples)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch[0], batch[1]) - batch[2]).square().mean()

    return build_seeded(seed, lambda: Model(_First)), loss, make


MODULES: tuple[Callable[[int], Entry], ...] = (
    tags_in_lists_of_numbers, tags_in_tuples, texts_in_a_tuple, tensors_in_a_tuple,
    targets_of_some_samples, batch_as_pairs, batch_of_a_plain_class, parts_of_a_plain_class,
    packed_by_the_collate, entries_that_are_none, masks_for_all_samples, nothing_returned,
    loss_with_its_accuracy, loss_with_a_log, names_with_marks, crops_of_several_sizes,
    masks_cached_in_empty_buffers, buffers_moved_in_evaluation, numbers_before_states,
)  # fmt: skip
