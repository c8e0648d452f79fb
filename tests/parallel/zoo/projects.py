"""Modules of shapes that public projects have: RWKV, DINO, SwAV, Glow, DeepSeek, LLaVA, and others.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint_sequential

from zoo.common import (
    LAYERS,
    LENGTH,
    VOCAB,
    WIDTH,
    Batch,
    BlockStack,
    Entry,
    ResidualBlock,
    build_seeded,
    squared_error,
    token_batch,
    vector_batch,
)


def _sequence_batch(drawn: torch.Generator, samples: int) -> Batch:
    shape = (samples, LENGTH, WIDTH)
    return torch.randn(*shape, generator=drawn), torch.randn(*shape, generator=drawn)


def _next_tokens(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def first_values_for_all_blocks(seed: int) -> Entry:
    """RWKV-7's: the first block makes values (None before it) that all later ones mix in."""

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.norm, self.key = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            self.decay = nn.Parameter(torch.linspace(-2, 1, WIDTH))
            self.mix = nn.Parameter(torch.full((WIDTH,), 0.3))
            if number:
                self.share = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
            given = self.norm(x)
            given = given + (F.pad(given, (0, 0, 1, -1)) - given) * self.mix
            key, value = self.key(given).exp().clamp(max=20), self.value(given)
            if self.number == 0 or first is None:
                first = value
            else:
                value = value + (first - value) * self.share.sigmoid()
            keep = torch.exp(-torch.exp(self.decay))
            above, below = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
            made = []
            for step in range(x.shape[1]):
                above = keep * above + key[:, step] * value[:, step]
                below = keep * below + key[:, step]
                made.append(above / (below + 1e-6))
            return x + self.out(torch.stack(made, 1)), first

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.blocks = nn.ModuleList(Block(number) for number in range(LAYERS))

        def forward(self, tokens: Tensor) -> Tensor:
            x, first = self.embed(tokens), None
            for block in self.blocks:
                x, first = block(x, first)
            return self.head(x)

    return build_seeded(seed, Model), _next_tokens, token_batch


def states_of_a_scan_per_block(seed: int) -> Entry:
    """Blocks return a recurrent state that the model gathers in a list and returns as well."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.into = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
            self.log_a = nn.Parameter(torch.arange(1.0, WIDTH + 1).log())
            self.log_a._no_weight_decay = True  # type: ignore[attr-defined]

        def forward(
            self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, use_cache: bool = False
        ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
            inner, gate = self.into(self.norm(x)).chunk(2, -1)
            inner = F.silu(self.conv(inner.mT)[..., : x.shape[1]]).mT
            step, made = x.new_zeros(len(x), WIDTH) if state is None else state[0], []
            for number in range(x.shape[1]):
                step = torch.exp(-self.log_a.exp() * 0.1) * step + inner[:, number]
                made.append(step)
            kept = (step, inner[:, -2:]) if use_cache else None
            return x + torch.stack(made, 1) * F.silu(gate), kept

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, tokens: Tensor, use_cache: bool = True) -> tuple[Tensor, list[Any]]:
            x, states = self.embed(tokens), []
            for layer in self.layers:
                x, state = layer(x, use_cache=use_cache)
                states.append(state)
            return F.linear(self.norm(x), self.embed.weight), states

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        scores, states = module(batch["tokens"])
        small = sum(one[0].square().mean() for one in states)
        return F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten()) + 0.01 * small

    return build_seeded(seed, Model), loss, token_batch


def bias_of_loads_without_gradient(seed: int) -> Entry:
    """DeepSeek-V3's router: a bias in a buffer moves against loads, which another buffer counts."""

    class Experts(nn.Module):
        bias: Tensor
        loads: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.register_buffer("bias", torch.zeros(4))
            self.register_buffer("loads", torch.zeros(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            shares = self.router(x).sigmoid()
            chosen = (shares + self.bias).topk(2, -1).indices
            if self.training:
                with torch.no_grad():
                    self.loads += F.one_hot(chosen, 4).sum((0, 1))
                    self.bias += 0.05 * (self.loads.mean() - self.loads).sign()
            weights = shares.gather(-1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
            out = x
            for number, expert in enumerate(self.experts):
                rows, places = (chosen == number).nonzero(as_tuple=True)
                out = out.index_add(0, rows, weights[rows, places, None] * expert(x[rows]))
            return out

    return build_seeded(seed, lambda: BlockStack(Experts)), squared_error, vector_batch


def experts_of_limited_capacity(seed: int) -> Entry:
    """Switch: each expert takes so many of the batch's samples, in order, and drops the others."""

    class Experts(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            shares, chosen = self.router(self.norm(x)).softmax(-1).max(-1)
            capacity, out = max(1, math.ceil(len(x) / 2)), x
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0][:capacity]
                out = out.index_add(0, rows, shares[rows, None] * expert(x[rows]))
            return out + torch.tanh(self.up(x))

    return build_seeded(seed, lambda: BlockStack(Experts)), squared_error, vector_batch


def experts_that_choose_samples(seed: int) -> Entry:
    """Expert choice: each expert takes the samples of the batch that score highest with it."""

    class Experts(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            shares, out = self.router(self.norm(x)).softmax(-1), x
            weights, rows = shares.topk(max(1, len(x) // 2), dim=0)
            for number, expert in enumerate(self.experts):
                taken = rows[:, number]
                out = out.index_add(0, taken, weights[:, number, None] * expert(x[taken]))
            return out

    return build_seeded(seed, lambda: BlockStack(Experts)), squared_error, vector_batch


def routing_in_a_namespace(seed: int) -> Entry:
    """Own loss in a namespace of outputs, with the balance of routers as a term of it."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.Parameter(0.3 * torch.randn(3, WIDTH, WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            shares = self.router(x).softmax(-1)
            mixed = torch.einsum("be,eio,bi->bo", shares, self.experts, x)
            return super().forward(x) + mixed, shares

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            x, gates = self.stem(x), []
            for layer in self.layers:
                x, shares = layer(x)
                gates.append(shares)
            made = SimpleNamespace(logits=self.head(x), router_probs=gates, loss=None)
            if labels is not None:
                balance = sum(one.square().sum(-1).mean() for one in gates)
                made.aux_loss = balance
                made.loss = (made.logits - labels).square().mean() + 0.02 * balance
            return made

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(batch[0], labels=batch[1]).loss

    return build_seeded(seed, Model), loss, vector_batch


def several_tokens_ahead(seed: int) -> Entry:
    """Multi-token prediction: a block more that shares the embedding and the head."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
            self.join, self.ahead = nn.Linear(2 * WIDTH, WIDTH), ResidualBlock()
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            joined = torch.cat([x[:, :-1], self.embed(tokens[:, 1:])], -1)
            further = self.head(self.ahead(self.join(joined)))
            now = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
            later = F.cross_entropy(further.flatten(0, 1), targets[:, 1:].flatten())
            return {"loss": now + 0.3 * later, "now": now.detach(), "later": later.detach()}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(batch["tokens"], batch["targets"])["loss"]

    return build_seeded(seed, Model), loss, token_batch


def images_put_among_tokens(seed: int) -> Entry:
    """LLaVA's: embeddings of images go by masked_scatter to the places of one token."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.Sequential(nn.Flatten(), nn.Linear(12, WIDTH)).requires_grad_(False)
            self.project = nn.Linear(WIDTH, WIDTH)
            self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))

        def forward(self, tokens: Tensor, pixels: Tensor) -> Tensor:
            x = self.embed(tokens)
            with torch.no_grad():
                seen = self.vision(pixels)
            at = (tokens == 0)[..., None].expand_as(x)
            x = x.masked_scatter(at, self.project(seen).to(x.dtype))
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        numbers = torch.randint(1, VOCAB, (samples, LENGTH + 1), generator=drawn)
        numbers[:, 1] = 0
        pixels = torch.randn(samples, 3, 2, 2, generator=drawn)
        targets = numbers[:, 1:].masked_fill(numbers[:, 1:] == 0, -100)
        return {"tokens": numbers[:, :-1], "pixels": pixels, "targets": targets}

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        scores = module(batch["tokens"], batch["pixels"]).flatten(0, 1)
        targets = batch["targets"].flatten()
        return F.cross_entropy(scores, targets, reduction="sum"), (targets != -100).sum()

    return build_seeded(seed, Model), loss, make


def images_of_any_number_among_tokens(seed: int) -> Entry:
    """The same with as many images as the batch's samples have between them."""
    module, loss, _ = images_put_among_tokens(seed)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        numbers = torch.randint(1, VOCAB, (samples, LENGTH + 1), generator=drawn)
        numbers[:, 1] = 0
        numbers[::2, 2] = 0
        count = int((numbers[:, :-1] == 0).sum())
        pixels = torch.randn(count, 3, 2, 2, generator=drawn)
        targets = numbers[:, 1:].masked_fill(numbers[:, 1:] == 0, -100)
        return {"tokens": numbers[:, :-1], "pixels": pixels, "targets": targets}

    return module, loss, make


def self_distillation_with_centre(seed: int) -> Entry:
    """DINO's: a teacher that follows the student, and a centre of its outputs in a buffer."""

    class Model(nn.Module):
        centre: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.student = BlockStack()
            self.last = parametrizations.weight_norm(nn.Linear(WIDTH, 7, bias=False))
            self.last.parametrizations.weight.original0.requires_grad_(False)  # type: ignore
            self.teacher = copy.deepcopy(nn.Sequential(self.student, self.last))
            self.teacher.requires_grad_(False)
            self.register_buffer("centre", torch.zeros(1, 7))

        def forward(self, crops: list[Tensor]) -> Tensor:
            made = self.last(self.student(torch.cat(crops))).chunk(len(crops))
            with torch.no_grad():
                wanted = [self.teacher(crop) for crop in crops[:2]]
            total = made[0].new_zeros(())
            for at, target in enumerate(wanted):
                soft = ((target - self.centre) / 0.1).softmax(-1)
                for other, scores in enumerate(made):
                    if other != at:
                        total = total - (soft * (scores / 0.2).log_softmax(-1)).sum(-1).mean()
            if self.training:
                with torch.no_grad():
                    self.centre = self.centre.lerp(torch.cat(wanted).mean(0, keepdim=True), 0.1)
            return total / (2 * len(made) - 2)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module([batch[0], batch[1], batch[0] * 0.9])

    return build_seeded(seed, Model), loss, vector_batch


def codes_of_a_balanced_batch(seed: int) -> Entry:
    """SwAV's: prototypes scaled in place, and codes by Sinkhorn's rounds over the batch."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.prototypes = nn.Linear(WIDTH, 5, bias=False)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            with torch.no_grad():
                weight = F.normalize(self.prototypes.weight.data.clone(), dim=1)
                self.prototypes.weight.copy_(weight)
            scores = [self.prototypes(F.normalize(self.run(one), dim=-1)) for one in (x, other)]
            with torch.no_grad():
                codes = (scores[1] / 0.05).exp()
                for _ in range(3):
                    codes = codes / codes.sum(0, keepdim=True)
                    codes = codes / codes.sum(1, keepdim=True)
            return -(codes * (scores[0] / 0.1).log_softmax(-1)).sum(-1).mean()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(*batch)

    return build_seeded(seed, Model), loss, vector_batch


def cross_correlation_of_the_batch(seed: int) -> Entry:
    """Barlow Twins': the correlation of features over the batch is to be the identity."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        one, other = ((made - made.mean(0)) / (made.std(0) + 1e-5) for made in map(module, batch))
        matrix = one.T @ other / len(one)
        off = matrix - torch.diag_embed(matrix.diagonal())
        return (matrix.diagonal() - 1).square().sum() + 0.01 * off.square().sum()

    return build_seeded(seed, BlockStack), loss, vector_batch


def prototypes_of_the_batch(seed: int) -> Entry:
    """Few shots: means of the support's classes are what the queries are compared with."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        x = torch.randn(samples, WIDTH, generator=drawn)
        return {"x": x, "classes": torch.arange(samples) % 2}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, half = module(batch["x"]), max(2, len(batch["x"]) // 2)
        kinds = F.one_hot(batch["classes"][:half], 2).to(made.dtype)
        means = kinds.T @ made[:half] / kinds.sum(0).clamp(min=1)[:, None]
        scores = -torch.cdist(made, means).square()
        return F.cross_entropy(scores, batch["classes"])

    return build_seeded(seed, BlockStack), loss, make


def scales_set_by_the_first_batch(seed: int) -> Entry:
    """Glow's: the first forward writes scales and biases, and each flow returns its volume."""

    class Flow(nn.Module):
        ready: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.bias = (
                nn.Parameter(torch.zeros(WIDTH)),
                nn.Parameter(torch.zeros(WIDTH)),
            )
            self.net = nn.Linear(WIDTH // 2, WIDTH)
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
            if self.training and not self.ready:
                with torch.no_grad():
                    self.bias.copy_(-x.mean(0))
                    self.scale.copy_(-(x.std(0) + 1e-3).log())
                    self.ready.fill_(True)
            x = (x + self.bias) * self.scale.exp()
            one, other = x.chunk(2, -1)
            shift, log = self.net(one).chunk(2, -1)
            log = torch.tanh(log)
            x = torch.cat([other * log.exp() + shift, one], -1)
            return x, volume + log.sum(-1) + self.scale.sum()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flows = nn.ModuleList(Flow() for _ in range(LAYERS))

        def forward(self, x: Tensor) -> Tensor:
            volume = x.new_zeros(len(x))
            for flow in self.flows:
                x, volume = flow(x, volume)
            return (0.5 * x.square().sum(-1) - volume).mean() / WIDTH

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(batch[0])

    return build_seeded(seed, Model), loss, vector_batch


def flows_with_volumes(seed: int) -> Entry:
    """Coupling flows with LU matrices in parameters and buffers, and volumes of each sample."""

    class Flow(nn.Module):
        order: Tensor

        def __init__(self) -> None:
            super().__init__()
            lower = torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH).tril(-1)
            self.lower, self.upper = (
                nn.Parameter(lower),
                nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH)),
            )
            self.log = nn.Parameter(torch.zeros(WIDTH))
            self.register_buffer("order", torch.randperm(WIDTH))
            self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril(-1))

        def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
            lower = self.lower * self.mask + torch.eye(WIDTH, dtype=x.dtype)
            upper = self.upper * self.mask.T + self.log.exp().diag()
            return torch.asinh(x[:, self.order] @ lower @ upper), volume + self.log.sum()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flows = nn.ModuleList(Flow() for _ in range(LAYERS))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            volume = x.new_zeros(len(x))
            for flow in self.flows:
                x, volume = flow(x, volume)
            return x, volume

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        x, volume = module(batch[0])
        return (0.5 * x.square().sum(-1) - volume).mean()

    return build_seeded(seed, Model), loss, vector_batch


def features_of_a_frozen_net(seed: int) -> Entry:
    """A perceptual loss whose frozen net is in the module, kept in evaluation mode by `train`."""

    class Features(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU(inplace=True),
                nn.Conv1d(3, 2, 3, padding=1),
            )  # fmt: skip
            self.requires_grad_(False).eval()

        def train(self, mode: bool = True) -> "Features":
            return super().train(False)

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.features = Features()

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            made = self.run(x)
            near, wanted = self.features(made[:, None]), self.features(targets[:, None])
            return (made - targets).abs().mean() + 0.5 * (near - wanted).square().mean()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(*batch)

    return build_seeded(seed, Model), loss, vector_batch


def structural_similarity(seed: int) -> Entry:
    """SSIM of images: moments by a window in a buffer that grows with the input's channels."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 4, 3, padding=1)
            self.body = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(LAYERS)))
            self.head = nn.Conv2d(4, 1, 3, padding=1)
            window = torch.tensor([0.25, 0.5, 0.25])
            self.register_buffer("window", (window[:, None] * window)[None, None], persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.body:
                x = x + F.leaky_relu(layer(x), 0.1)
            return self.head(x).sigmoid()

        def similarity(self, one: Tensor, other: Tensor) -> Tensor:
            blur: Callable[[Tensor], Tensor] = lambda x: F.conv2d(x, self.window)  # type: ignore # noqa: E731
            mean, mean_too = blur(one), blur(other)
            spread = blur(one * one) - mean**2
            spread_too = blur(other * other) - mean_too**2
            both = blur(one * other) - mean * mean_too
            above = (2 * mean * mean_too + 1e-4) * (2 * both + 9e-4)
            return above / ((mean**2 + mean_too**2 + 1e-4) * (spread + spread_too + 9e-4))

    def make(drawn: torch.Generator, samples: int) -> Batch:
        shape = (samples, 1, 6, 6)
        return torch.rand(*shape, generator=drawn), torch.rand(*shape, generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch[0])
        near = module.similarity(made, batch[1])  # type: ignore[operator]
        return 1 - near.mean() + 0.5 * (made - batch[1]).abs().mean()

    return build_seeded(seed, Model), loss, make


def codes_that_are_born_again(seed: int) -> Entry:
    """Residual quantisers by running averages; unused codes become samples."""

    class Quantiser(nn.Module):
        codes: Tensor
        counts: Tensor
        sums: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(6, WIDTH))
            self.register_buffer("counts", torch.ones(6))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            chosen = torch.cdist(x.detach(), self.codes).argmin(-1)
            taken = self.codes[chosen]
            if self.training:
                with torch.no_grad():
                    hits = F.one_hot(chosen, 6).to(x.dtype)
                    self.counts.mul_(0.8).add_(hits.sum(0), alpha=0.2)
                    self.sums.mul_(0.8).add_(hits.T @ x, alpha=0.2)
                    new = self.sums / self.counts.clamp(min=1e-2)[:, None]
                    dead = self.counts < 0.5
                    new[dead] = x[torch.arange(int(dead.sum())) % len(x)]
                    self.codes.copy_(new)
            return x + (taken - x).detach(), (x - taken).square().mean()

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.ModuleList(Quantiser() for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.run(x)
            left, out, terms = hidden, torch.zeros_like(hidden), []
            for level in self.levels:
                made, term = level(left)
                left, out = left - made.detach(), out + made
                terms.append(term)
            return out, torch.stack(terms).sum()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, commitment = module(batch[0])
        return (made - batch[1]).square().mean() + 0.25 * commitment

    return build_seeded(seed, Model), loss, vector_batch


def adapters_with_switched_gradients(seed: int) -> Entry:
    """LoRA of the user's own: wraps linear layers, and the forward freezes what it wraps."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.scale = base, 2.0
            self.down = nn.Parameter(torch.randn(2, base.in_features) / 2)
            self.up = nn.Parameter(torch.zeros(base.out_features, 2))

        @property
        def weight(self) -> Tensor:
            return self.base.weight + self.scale * self.up @ self.down

        def forward(self, x: Tensor) -> Tensor:
            for parameter in self.base.parameters():
                parameter.requires_grad = False
            return F.linear(x, self.weight, self.base.bias)

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.up = Adapter(layer.up)  # type: ignore[arg-type]

    return build_seeded(seed, Model), squared_error, vector_batch


def adversaries_in_one_module(seed: int) -> Entry:
    """A GAN's both losses in one: the critic's parameters are frozen for the generator's term."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = BlockStack()
            self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            made = self.generator(x)
            self.critic.requires_grad_(False)
            fooled = F.softplus(-self.critic(made)).mean()
            self.critic.requires_grad_(True)
            told = (
                F.softplus(self.critic(made.detach())).mean()
                + F.softplus(-self.critic(real)).mean()
            )
            return fooled + told

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(*batch)

    return build_seeded(seed, Model), loss, vector_batch


def recycled_without_gradients(seed: int) -> Entry:
    """AlphaFold's recycling: all blocks twice without gradients, then once with them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_pairs, self.to_single = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, single: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
            made = self.to_pairs(self.norm(single))
            pairs = pairs + torch.tanh(made[:, :, None] * made[:, None])
            return single + self.to_single(pairs.mean(2)), pairs

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.again = nn.LayerNorm(WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

        def forward(self, x: Tensor, recycles: int = 2) -> Tensor:
            last = torch.zeros_like(x)
            for cycle in range(recycles + 1):
                with torch.set_grad_enabled(cycle == recycles and torch.is_grad_enabled()):
                    single = self.stem(x) + self.again(last)
                    pairs = x.new_zeros(len(x), LENGTH, LENGTH, 4)
                    for layer in self.layers:
                        single, pairs = layer(single, pairs)
                    last = single.detach() if cycle < recycles else single
            return self.head(last)

    return build_seeded(seed, Model), squared_error, _sequence_batch


def one_attention_between_blocks(seed: int) -> Entry:
    """Zamba's: one attention block, called after every second one, with a matrix for each call."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
            self.shared = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 2))

        def forward(self, x: Tensor) -> Tensor:
            first = x = self.stem(x)
            for number, layer in enumerate(self.layers):
                x = layer(x)
                if number % 2:
                    seen, _ = self.shared(x, first, first, need_weights=False)
                    x = x + self.after[number // 2](seen)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, _sequence_batch


def blocks_entered_twice_in_the_list(seed: int) -> Entry:
    """MobileLLM's: a list with each block twice in a row."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            one, other = ResidualBlock(), ResidualBlock()
            self.layers = nn.ModuleList([one, one, other, other])

    return build_seeded(seed, Model), squared_error, vector_batch


def graph_in_a_sparse_buffer(seed: int) -> Entry:
    """LightGCN's: a sparse matrix in a buffer, over users and items; samples are pairs of them."""

    class Model(nn.Module):
        graph: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(5, WIDTH), nn.Embedding(6, WIDTH)
            places = torch.tensor([[0, 1, 2, 3, 4, 0, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 0, 1, 2, 3]])
            matrix = torch.sparse_coo_tensor(places, torch.full((10,), 0.5), (11, 11))
            self.register_buffer("graph", matrix.coalesce())

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            x = torch.cat([self.users.weight, self.items.weight])
            layers = [x]
            for _ in range(3):
                x = torch.sparse.mm(self.graph.to(x.dtype), x)
                layers.append(x)
            mixed = torch.stack(layers).mean(0)
            return (mixed[users] * mixed[5 + items]).sum(-1)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        draw = lambda most: torch.randint(most, (samples,), generator=drawn)  # noqa: E731
        return {"users": draw(5), "liked": draw(6), "other": draw(6)}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        near, far = (module(batch["users"], batch[name]) for name in ("liked", "other"))
        return -F.logsigmoid(near - far).mean()

    return build_seeded(seed, Model), loss, make


def frozen_weights_in_int8(seed: int) -> Entry:
    """Quantised: int8 weights as parameters without gradients, scales, and adapters beside."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.003), requires_grad=False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.to(x.dtype) * self.scale.to(x.dtype)
            return F.linear(x, weight) + self.up(self.down(x))

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.up = Quantised()  # type: ignore[assignment]

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def parameter_without_elements(seed: int) -> Entry:
    """A parameter of no elements that tells the device and the dtype, as many projects have it."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.indicator = nn.Parameter(torch.empty(0))
            self.register_buffer("zero", torch.tensor(0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.indicator.device, self.indicator.dtype))

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)

        @property
        def device(self) -> torch.device:
            return next(self.parameters()).device

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x.to(self.device, next(self.parameters()).dtype))

    return build_seeded(seed, Model), squared_error, vector_batch


def checkpointed_sequence(seed: int) -> Entry:
    """checkpoint_sequential over a Sequential's segments, and saved tensors that hooks pack."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(ResidualBlock() for _ in range(LAYERS)))
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda one: (one.shape, one.flatten().clone()), lambda kept: kept[1].view(kept[0])
            ):
                return torch.tanh(self.head(x)) * x

    return build_seeded(seed, Model), squared_error, vector_batch


def parametrizations_cached(seed: int) -> Entry:
    """Weights by a parametrization that the forward computes once, in parametrize.cached."""

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).T

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            parametrize.register_parametrization(self.up, "weight", Symmetric())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached():
                return self.run(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def decoder_by_the_encoders_weights(seed: int) -> Entry:
    """An autoencoder whose decoder uses the transposed weights of the encoder's blocks."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
            self.biases = nn.ParameterList(torch.zeros(WIDTH) for _ in range(LAYERS))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            for layer, bias in zip(reversed(self.layers), self.biases, strict=True):
                x = torch.tanh(F.linear(x, layer.up.weight.t(), bias))  # type: ignore
            return x

    return build_seeded(seed, Model), squared_error, vector_batch


def ghost_batches(seed: int) -> Entry:
    """Ghost batch norm: chunks of four samples are normalised apart, with the same averages."""

    class Ghost(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training or len(x) < 8:
                return super().forward(x)
            return torch.cat([super(Ghost, self).forward(part) for part in x.split(4)])

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Ghost(WIDTH)  # type: ignore[assignment]

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def norms_frozen_by_train(seed: int) -> Entry:
    """Batch norms that stay in evaluation mode while the rest trains, as fine-tuning has them."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None)  # type: ignore[assignment]

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)
            self.train()

        def train(self, mode: bool = True) -> "Model":
            super().train(mode)
            for part in self.modules():
                if isinstance(part, nn.BatchNorm1d):
                    part.eval()
            return self

    return build_seeded(seed, Model), squared_error, vector_batch


def memory_in_a_buffer_of_samples(seed: int) -> Entry:
    """Transformer-XL's memory in a buffer with a row for each sample of the batch."""

    class Model(BlockStack):
        memory: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(8, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if len(self.memory) != len(x):
                self.memory = self.memory.new_zeros(len(x), WIDTH)
            hidden = self.run(x + 0.5 * self.memory)
            if self.training:
                self.memory = hidden.detach()
            return hidden

    return build_seeded(seed, Model), squared_error, vector_batch


def memory_that_grows(seed: int) -> Entry:
    """A bank of the last features, which a forward makes longer until it has twenty rows."""

    class Model(BlockStack):
        bank: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.zeros(1, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.run(x)
            near = (hidden @ self.bank.T).softmax(-1) @ self.bank
            if self.training:
                self.bank = torch.cat([self.bank, hidden.detach()])[-20:]
            return hidden + near

    return build_seeded(seed, Model), squared_error, vector_batch


def averages_that_are_not_saved(seed: int) -> Entry:
    """Running scales in a buffer with persistent=False, by which the forward divides."""

    class Block(ResidualBlock):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.scale.lerp_(x.detach().square().mean().sqrt(), 0.2)
            return super().forward(x / self.scale)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


class _CentredIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        return given[0] - given[0].mean(0)


def gradients_centred_over_samples(seed: int) -> Entry:
    """A Function whose backward subtracts the mean of the batch's gradients."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_CentredIdentity.apply(x))

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def joint_network_over_a_lattice(seed: int) -> Entry:
    """A transducer: encoder and predictor meet in a lattice, of which paths are summed."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
            self.embed, self.predict = (
                nn.Embedding(VOCAB, WIDTH),
                nn.GRU(WIDTH, WIDTH, batch_first=True),
            )
            self.joint = nn.Linear(WIDTH, VOCAB)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            told, _ = self.predict(F.pad(self.embed(labels), (0, 0, 1, 0)))
            return self.joint(torch.tanh(x[:, :, None] + told[:, None])).log_softmax(-1)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        labels = batch["labels"]
        scores = module(batch["x"], labels)
        _, frames, most, _ = scores.shape
        rows: list[Tensor] = []
        for frame in range(frames):
            row: list[Tensor] = []
            for at in range(most):
                ways = []
                if frame:
                    ways.append(rows[-1][:, at] + scores[:, frame - 1, at, 0])
                if at:
                    move = scores[:, frame, at - 1].gather(-1, labels[:, at - 1, None])[:, 0]
                    ways.append(row[-1] + move)
                start = torch.zeros_like(scores[:, 0, 0, 0])
                row.append(torch.stack(ways).logsumexp(0) if ways else start)
            rows.append(torch.stack(row, 1))
        return -(rows[-1][:, -1] + scores[:, -1, -1, 0]).mean()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return {
            "x": torch.randn(samples, LENGTH, WIDTH, generator=drawn),
            "labels": torch.randint(1, VOCAB, (samples, 3), generator=drawn),
        }

    return build_seeded(seed, Model), loss, make


def modalities_interleaved(seed: int) -> Entry:
    """A decision transformer: three kinds of embeddings in turn, each kind with its head."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reward, self.state = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.action, self.time = nn.Embedding(4, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.layers = nn.ModuleDict({f"h{n}": ResidualBlock() for n in range(LAYERS)})
            self.act, self.foresee = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)

        def forward(
            self, rewards: Tensor, states: Tensor, actions: Tensor
        ) -> tuple[Tensor, Tensor]:
            when = self.time(torch.arange(states.shape[1]))
            kinds = self.reward(rewards[..., None]), self.state(states), self.action(actions)
            x = torch.stack([kind + when for kind in kinds], 2).flatten(1, 2)
            for layer in self.layers.values():
                x = layer(x)
            _, state, action = x.unflatten(1, (-1, 3)).unbind(2)
            return self.act(state), self.foresee(action)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return {
            "rewards": torch.randn(samples, LENGTH, generator=drawn),
            "states": torch.randn(samples, LENGTH, WIDTH, generator=drawn),
            "actions": torch.randint(4, (samples, LENGTH), generator=drawn),
            "mask": torch.rand(samples, LENGTH, generator=drawn) < 0.7,
        }

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        acts, next_states = module(batch["rewards"], batch["states"], batch["actions"])
        each = F.cross_entropy(acts.flatten(0, 1), batch["actions"].flatten(), reduction="none")
        off = (next_states[:, :-1] - batch["states"][:, 1:]).square().mean(-1)
        mask = batch["mask"].to(each.dtype)
        return (each.view_as(mask) * mask).sum() + (off * mask[:, 1:]).sum(), mask.sum()

    return build_seeded(seed, Model), loss, make


MODULES: tuple[Callable[[int], Entry], ...] = (
    first_values_for_all_blocks, states_of_a_scan_per_block, bias_of_loads_without_gradient,
    experts_of_limited_capacity, experts_that_choose_samples, routing_in_a_namespace,
    several_tokens_ahead, images_put_among_tokens, images_of_any_number_among_tokens,
    self_distillation_with_centre, codes_of_a_balanced_batch, cross_correlation_of_the_batch,
    prototypes_of_the_batch, scales_set_by_the_first_batch, flows_with_volumes,
    features_of_a_frozen_net, structural_similarity, codes_that_are_born_again,
    adapters_with_switched_gradients, adversaries_in_one_module, recycled_without_gradients,
    one_attention_between_blocks, blocks_entered_twice_in_the_list, graph_in_a_sparse_buffer,
    frozen_weights_in_int8, parameter_without_elements, checkpointed_sequence,
    parametrizations_cached, decoder_by_the_encoders_weights, ghost_batches, norms_frozen_by_train,
    memory_in_a_buffer_of_samples, memory_that_grows, averages_that_are_not_saved,
    gradients_centred_over_samples, joint_network_over_a_lattice, modalities_interleaved,
)  # fmt: skip
