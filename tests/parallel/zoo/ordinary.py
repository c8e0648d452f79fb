"""Modules as research projects have them, which showed something that modules with a trap did not.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

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


class _Words(BlockStack):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scores = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(self.run(self.embed(tokens)))


def _rewards(module: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Each sample's mean log-probability of its labels."""
    there = labels != -100
    chosen = module(tokens).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (chosen * there).sum(-1) / there.sum(-1)


def _preferences(module: nn.Module, batch: Batch) -> Tensor:
    samples = len(batch["tokens"])
    both = [torch.cat((batch[name], batch[f"rejected_{name}"])) for name in ("tokens", "labels")]
    good, bad = _rewards(module, *both).split(samples)
    return -F.logsigmoid(2 * (good - bad) - 0.5).mean()


def _preference_batch(drawn: torch.Generator, samples: int) -> Batch:
    batch, prompts = {}, torch.arange(samples)[:, None] % 3 >= torch.arange(LENGTH)
    for name in ("", "rejected_"):
        one = token_batch(drawn, samples)
        batch[f"{name}tokens"] = one["tokens"]
        batch[f"{name}labels"] = one["targets"].masked_fill(prompts, -100)
    return batch


def preferences_by_length(seed: int) -> Entry:
    """SimPO: a mean over samples, in batches that have labels for each token."""
    return build_seeded(seed, _Words), _preferences, _preference_batch


def preferences_with_their_number(seed: int) -> Entry:
    """The same with the number of samples, as the check of the first batch advises."""

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        samples = len(batch["tokens"])
        return _preferences(module, batch) * samples, samples

    return build_seeded(seed, _Words), loss, _preference_batch


def mixed_with_partners_by_index(seed: int) -> Entry:
    """Mixup whose data set says which other sample of the batch each one is mixed with."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets, partners = batch
        share = 0.7
        mixed = [share * one + (1 - share) * one[partners] for one in (inputs, targets)]
        return squared_error(module, tuple(mixed))

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return inputs, targets, torch.randperm(samples, generator=drawn)

    return build_seeded(seed, BlockStack), loss, make


def tables_with_offsets(seed: int) -> Entry:
    """DLRM: for each table the values of all samples in a row, and where each sample's begin."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(VOCAB, WIDTH, mode="sum") for _ in range(3))

        def forward(self, dense: Tensor, starts: list[Tensor], values: list[Tensor]) -> Tensor:
            bags = zip(self.tables, values, starts, strict=True)
            return self.run(dense + sum(table(one, start) for table, one, start in bags))

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        *given, targets = batch
        return (module(*given) - targets).square().mean()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        sizes = [1 + (torch.arange(samples) + table) % 3 for table in range(3)]
        starts = [size.cumsum(0) - size for size in sizes]
        values = [torch.randint(VOCAB, (int(size.sum()),), generator=drawn) for size in sizes]
        return inputs, starts, values, targets

    return build_seeded(seed, Model), loss, make


def training_step_with_a_log(seed: int) -> Entry:
    """Lightning's: `training_step` logs, counts samples, and returns a dict with the loss."""

    class Model(BlockStack):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.logged: dict[str, list[float]] = {}
            self.register_buffer("seen", torch.tensor(0))

        def log(self, name: str, value: Tensor) -> None:
            self.logged.setdefault(name, []).append(float(value.detach()))

        def training_step(self, batch: Batch, number: int) -> dict[str, Tensor]:
            made = self(batch[0])
            loss = F.mse_loss(made, batch[1])
            self.log("train_loss", loss)
            self.seen += len(made)
            return {"loss": loss, "predictions": made.detach()}

    def loss(module: Any, batch: Batch) -> dict[str, Tensor]:
        return module.training_step(batch, 0)  # type: ignore[no-any-return]

    return build_seeded(seed, Model), loss, vector_batch


def gradients_of_samples(seed: int) -> Entry:
    """Each sample's gradient by vmap over the whole module, whose norms are punished."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        def error(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
            return (functional_call(module, parameters, (x[None],)) - y[None]).square().mean()

        parameters = dict(module.named_parameters())
        slopes = vmap(grad(error), (None, 0, 0))(parameters, *batch)
        norms = sum(one.flatten(1).square().sum(1) for one in slopes.values())
        return squared_error(module, batch) + 0.01 * norms.mean()

    return build_seeded(seed, BlockStack), loss, vector_batch


class _UnitColumns(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.normalize(weight, dim=0)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def autoencoder_of_frozen_activations(seed: int) -> Entry:
    """A sparse autoencoder of what a hook finds in a frozen language model, with unused units."""

    class Model(nn.Module):
        since: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.words, self.found = _Words().requires_grad_(False), list[Tensor]()
            self.words.layers[2].register_forward_hook(self._keep)
            self.encoder, self.decoder = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH, bias=False)
            parametrize.register_parametrization(self.decoder, "weight", _UnitColumns())
            self.register_buffer("since", torch.zeros(20, dtype=torch.long))

        def _keep(self, module: nn.Module, given: Any, made: Tensor) -> None:
            self.found.append(made)

        def forward(self, tokens: Tensor) -> Tensor:
            self.found.clear()
            with torch.no_grad():
                self.words(tokens)
            x = self.found.pop()
            units = F.relu(self.encoder(x))
            largest, which = units.topk(3, -1)
            kept = torch.zeros_like(units).scatter(-1, which, largest)
            self.since.add_(1).masked_fill_((kept > 0).any(0).any(0), 0)
            return (self.decoder(kept) - x).square().sum(-1).mean() + 0.01 * kept.sum(-1).mean()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return token_batch(drawn, samples)["tokens"]

    return build_seeded(seed, Model), None, make


def boxes_named_by_their_image(seed: int) -> Entry:
    """YOLOv8: the boxes of all images in one tensor, sorted into images by their numbers."""

    class Model(BlockStack):
        def forward(self, images: Tensor) -> Tensor:
            return self.run(images)[..., :4].sigmoid()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, image = module(batch["images"]), batch["image"]
        sums = []
        for number, boxes in enumerate(made):
            own = batch["boxes"][image == number]
            nearest = torch.cdist(own, boxes.detach()).argmin(1)
            sums.append((boxes[nearest] - own).abs().sum() + boxes.square().mean())
        return torch.stack(sums).mean()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        image = torch.arange(samples).repeat_interleave(torch.arange(samples) % 4)
        images = torch.randn(samples, LENGTH, WIDTH, generator=drawn)
        boxes = torch.rand(len(image), 4, generator=drawn)
        return {"images": images, "image": image, "boxes": boxes}

    return build_seeded(seed, Model), loss, make


class _Critic(nn.Module):
    """A generator and a critic, whose penalty is computed at every second call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = BlockStack(), BlockStack(_spectral_block)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, noise: Tensor, given: Tensor) -> Tensor:
        made = self.generator(noise)
        given = given.detach().requires_grad_()
        scores = self.critic(given).mean(-1)
        loss = F.softplus(-scores) + F.softplus(self.critic(made.detach()).mean(-1))
        if self.calls % 2 == 0:
            (slope,) = torch.autograd.grad(scores.sum(), given, create_graph=True)
            loss = loss + slope.square().sum(-1)
        self.calls += 1
        weights = {name: one.detach() for name, one in self.critic.named_parameters()}
        fooled = F.softplus(-functional_call(self.critic, weights, (made,)).mean(-1))
        return (loss + fooled).mean()


def _spectral_block() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.LeakyReLU(0.2))


def critic_with_a_penalty_at_times(seed: int) -> Entry:
    """GAN: spectral norms, and the squared slope at given samples at every second call."""
    return build_seeded(seed, _Critic), lambda module, batch: module(*batch), vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    preferences_by_length, preferences_with_their_number, mixed_with_partners_by_index,
    tables_with_offsets, training_step_with_a_log, gradients_of_samples,
    autoencoder_of_frozen_activations, boxes_named_by_their_image, critic_with_a_penalty_at_times,
)  # fmt: skip
