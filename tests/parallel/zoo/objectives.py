"""Modules of published recipes: quantised, recurrent, generative, and losses of whole batches.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.ao.quantization.observer import MovingAveragePerChannelMinMaxObserver

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
    token_batch,
    vector_batch,
)


def _class_batch(drawn: torch.Generator, samples: int) -> Batch:
    inputs, _ = vector_batch(drawn, samples)
    return inputs, torch.randint(3, (samples,), generator=drawn)


def classes_balanced_by_the_batch(seed: int) -> Entry:
    """One label a sample, whose class weighs by how rare it is in the batch."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        counts = torch.bincount(labels, minlength=WIDTH).clamp(min=1)
        weights = (len(labels) / counts).to(inputs.dtype)
        return F.cross_entropy(module(inputs), labels, weights)

    return build_seeded(seed, BlockStack), loss, _class_batch


def hardest_samples(seed: int) -> Entry:
    """OHEM: the mean of the larger half of the batch's losses."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        each = (module(batch[0]) - batch[1]).square().mean(-1)
        return each.topk(max(1, len(each) // 2)).values.mean()

    return build_seeded(seed, BlockStack), loss, vector_batch


class _Encoder(BlockStack):
    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = self.run(x).chunk(2, -1)
        hidden = mean + noise * torch.exp(0.5 * scale)
        losses = 0.5 * (mean.square() + scale.exp() - 1 - scale)
        return hidden.repeat(1, 2), losses


def free_bits(seed: int) -> Entry:
    """A variational autoencoder whose mean divergence is not punished below a limit."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return *vector_batch(drawn, samples), torch.randn(samples, WIDTH // 2, generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, losses = module(batch[0], batch[2])
        return (made - batch[0]).square().mean() + losses.mean(0).clamp(min=0.12).sum()

    return build_seeded(seed, _Encoder), loss, make


def variances_hinged(seed: int) -> Entry:
    """VICReg: the deviation of each feature over the batch is to be one."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, other = module(batch[0]), module(batch[1])
        spread = sum(F.relu(1 - one.var(0).add(1e-4).sqrt()).mean() for one in (made, other))
        return (made - other).square().mean() + spread

    return build_seeded(seed, BlockStack), loss, vector_batch


def losses_kept_above_a_level(seed: int) -> Entry:
    """Flooding: the loss of a batch is not to fall below a level."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (squared_error(module, batch) - 1.1).abs() + 1.1

    return build_seeded(seed, BlockStack), loss, vector_batch


def advantages_normalised(seed: int) -> Entry:
    """PPO: clipped ratios to old log-probabilities, by advantages of mean 0 in the batch."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, actions = _class_batch(drawn, samples)
        old = torch.randn(samples, generator=drawn) - 2
        return inputs, actions, old, torch.randn(samples, generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, actions, old, gains = batch
        made = module(inputs).log_softmax(-1)
        ratio = (made.gather(1, actions[:, None])[:, 0] - old).exp()
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        kept = ratio.clamp(0.8, 1.2)
        entropy = -(made.exp() * made).sum(-1).mean()
        return -torch.minimum(ratio * gains, kept * gains).mean() - 0.01 * entropy

    return build_seeded(seed, BlockStack), loss, make


class _Quantised(nn.Module):
    """A linear layer with torch's own fake quantisers of weights and activations."""

    def __init__(self, by_channel: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.inputs = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.weights = (
            FakeQuantize(
                MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127,
                dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=0,
            )
            if by_channel
            else FakeQuantize(
                MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
                qscheme=torch.per_tensor_symmetric,
            )
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.inputs(x), self.weights(self.up.weight), self.up.bias)
        return x + torch.tanh(y)


def torch_fake_quantisers(seed: int) -> Entry:
    """Quantisation-aware: torch's FakeQuantize with observers of whole tensors."""
    return (
        build_seeded(seed, lambda: BlockStack(partial(_Quantised, False))),
        squared_error,
        (vector_batch),
    )


def torch_fake_quantisers_by_channel(seed: int) -> Entry:
    """The same by channels, whose observers' buffers have no elements before the first forward."""
    return (
        build_seeded(seed, lambda: BlockStack(partial(_Quantised, True))),
        squared_error,
        (vector_batch),
    )


class _Codes(nn.Module):
    """A codebook that is taken from the first batch, and then follows what takes its codes."""

    codes: Tensor
    counts: Tensor
    begun: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(4, WIDTH))
        self.register_buffer("counts", torch.ones(4))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if not self.begun:
                self.codes.copy_(x[torch.arange(4) % len(x)])
                self.begun.fill_(True)
            taken = F.one_hot(torch.cdist(x, self.codes).argmin(1), 4).to(x.dtype)
            found = taken @ self.codes
            if self.training:
                self.counts.lerp_(taken.sum(0), 0.2)
                means = taken.T @ x / taken.sum(0).clamp(min=1)[:, None]
                kept = torch.where(taken.sum(0)[:, None] > 0, means, self.codes)
                self.codes.lerp_(kept, 0.2)
        return x + (found - x).detach(), (x - found).square().mean()


def codes_of_the_first_batch(seed: int) -> Entry:
    """A codebook that begins as samples of the first batch, by a flag in a buffer."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.codes = _Codes()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            x, commitment = self.codes(x)
            return self.head(x), commitment

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, commitment = module(batch[0])
        return (made - batch[1]).square().mean() + 0.25 * commitment

    return build_seeded(seed, Model), loss, vector_batch


class _Scalar(nn.Module):
    """xLSTM's block with exponential gates and a state that keeps them finite."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = total = x.new_zeros(len(x), WIDTH)
        most = torch.full_like(hidden, -10.0)
        made = []
        for one in self.gates(x).unbind(1):
            enter, keep, value, out = (one + self.back(hidden)).chunk(4, -1)
            kept = F.logsigmoid(keep) + most
            most = torch.maximum(kept, enter)
            old, new = torch.exp(kept - most), torch.exp(enter - most)
            cell, total = old * cell + new * torch.tanh(value), old * total + new
            hidden = torch.sigmoid(out) * cell / total.clamp(min=1e-6)
            made.append(self.norm(hidden))
        return x + torch.stack(made, 1)


class _Matrix(nn.Module):
    """xLSTM's other block: a matrix of outer products, computed at once with decays."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.parts(x).chunk(3, -1)
        enter, keep = self.gates(x).unbind(-1)
        sums = F.logsigmoid(keep).cumsum(1)
        decays = sums[:, :, None] - sums[:, None] + enter[:, None]
        decays = decays.masked_fill(torch.ones_like(decays).triu(1).bool(), -torch.inf)
        most = decays.amax(-1, keepdim=True)
        scores = queries @ keys.transpose(1, 2) / WIDTH**0.5 * torch.exp(decays - most)
        least = torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.exp(-most))
        return x + scores @ values / least


class _TokenModel(nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


def _next_token(module: nn.Module, batch: Batch) -> Tensor:
    made = module(batch["tokens"])
    return F.cross_entropy(made.flatten(0, 1), batch["targets"].flatten())


def exponential_gates(seed: int) -> Entry:
    """xLSTM: recurrent blocks with exponential gates and blocks of matrix memories, in turn."""
    kinds = _Scalar, _Matrix
    return (
        build_seeded(seed, lambda: _TokenModel(kinds[n % 2]() for n in range(LAYERS))),
        (_next_token),
        token_batch,
    )


class _Modulated(nn.Module):
    """A block that a condition shifts, scales and gates; it begins as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(c)[:, None].chunk(3, -1)
        y = self.norm(x) * (1 + scale) + shift
        return x + gate * self.down(F.gelu(self.up(y), approximate="tanh"))


def blocks_that_begin_as_nothing(seed: int) -> Entry:
    """A diffusion transformer with adaLN-Zero, and classes that the batch says to drop."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(_Modulated)
            self.classes = nn.Embedding(4, WIDTH)
            self.times = nn.Sequential(nn.Linear(2, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            self.places = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)
            self.last = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

        def forward(self, x: Tensor, time: Tensor, classes: Tensor, drop: Tensor) -> Tensor:
            classes = torch.where(drop, 3, classes)
            c = self.times(torch.stack((time.sin(), time.cos()), -1)) + self.classes(classes)
            x = self.stem(x) + self.places
            for layer in self.layers:
                x = layer(x, c)
            shift, scale = self.last(c)[:, None].chunk(2, -1)
            return self.head(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return (
            torch.randn(samples, 5, WIDTH, generator=drawn),
            torch.rand(samples, generator=drawn),
            torch.randint(3, (samples,), generator=drawn),
            torch.rand(samples, generator=drawn) < 0.3,
            torch.randn(samples, 5, WIDTH, generator=drawn),
        )

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        clean, time, classes, drop, noise = batch
        mixed = clean + time[:, None, None] * (noise - clean)
        return (module(mixed, time, classes, drop) - (noise - clean)).square().mean()

    return build_seeded(seed, Model), loss, make


class _Dropping(ResidualBlock):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def two_forwards_with_dropout(seed: int) -> Entry:
    """R-Drop: the same samples twice, with other activations dropped, are to be near each other."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        one, other = module(batch[0]), module(batch[0])
        apart = F.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")
        return ((one + other) / 2 - batch[1]).square().mean() + 0.5 * apart

    return build_seeded(seed, lambda: BlockStack(_Dropping)), loss, vector_batch


class _Lookup(nn.Module):
    """A block that reads a table, which all blocks share, at the places of the best keys."""

    def __init__(self, table: nn.EmbeddingBag) -> None:
        super().__init__()
        self.query, self.table = nn.Linear(WIDTH, WIDTH), table
        self.keys = nn.Parameter(torch.randn(2, 4, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query(x).unflatten(-1, (2, -1))
        scores = torch.einsum("bpw,pkw->bpk", parts, self.keys)
        both = (scores[:, 0, :, None] + scores[:, 1, None]).flatten(1)
        best, at = both.topk(3)
        return x + self.table(at, per_sample_weights=best.softmax(-1))


def table_of_products_of_keys(seed: int) -> Entry:
    """Product-key memory: every block reads one table of many rows, of which few are used."""

    def build() -> nn.Module:
        table = nn.EmbeddingBag(16, WIDTH, mode="sum")
        return BlockStack(partial(_Lookup, table))

    return build_seeded(seed, build), squared_error, vector_batch


class _ByNumpy(ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and np.random.rand() < 0.4:
            return x
        return super().forward(x)


def depth_by_numpy(seed: int) -> Entry:
    """LayerDrop by NumPy's global generator."""
    return build_seeded(seed, lambda: BlockStack(_ByNumpy)), squared_error, vector_batch


def depth_by_a_generator_of_numpy(seed: int) -> Entry:
    """The same by a generator of NumPy that the model holds."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.chance = np.random.default_rng(0)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                if self.chance.random() > 0.4:
                    x = layer(x)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def penalty_of_a_vector_of_parameters(seed: int) -> Entry:
    """L2-SP: all parameters as one vector are pulled to where they began."""
    module = build_seeded(seed, BlockStack)
    begin = nn.utils.parameters_to_vector(module.parameters()).detach().clone() * 0.5

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        now = nn.utils.parameters_to_vector(module.parameters())
        return squared_error(module, batch) + 0.05 * (now - begin.to(now.dtype)).square().sum()

    return module, loss, vector_batch


def penalty_of_orthogonality(seed: int) -> Entry:
    """Matrices, found by their names and dimensions, are to have orthogonal rows."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        value = squared_error(module, batch)
        for name, weight in module.named_parameters():
            if weight.dim() == 2 and "norm" not in name:
                apart = weight @ weight.T - torch.eye(len(weight), dtype=weight.dtype)
                value = value + 0.01 * apart.square().sum()
        return value

    return build_seeded(seed, BlockStack), loss, vector_batch


def penalty_of_the_stem(seed: int) -> Entry:
    """The loss punishes the stem's weight, by get_parameter, and the head's, by an attribute."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        stem = module.get_parameter("stem.weight").abs().sum()
        head: Any = module.head
        return squared_error(module, batch) + 0.01 * (stem + head.weight.square().sum())

    return build_seeded(seed, BlockStack), loss, vector_batch


_LOSSES: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("losses")


class _Collected(ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        _LOSSES.get().append(made.square().mean())
        return made


def losses_in_a_context_variable(seed: int) -> Entry:
    """Blocks append losses to a list in a context variable, which the loss sets."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        token = _LOSSES.set([])
        try:
            value = squared_error(module, batch)
            return value + 0.1 * torch.stack(_LOSSES.get()).sum()
        finally:
            _LOSSES.reset(token)

    return build_seeded(seed, lambda: BlockStack(_Collected)), loss, vector_batch


def curriculum_by_a_closure(seed: int) -> Entry:
    """The loss counts its calls in a variable that it encloses, and weighs a term by them."""
    calls = 0

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        made = module(batch[0])
        return (made - batch[1]).square().mean() + min(1.0, 0.1 * calls) * made.abs().mean()

    return build_seeded(seed, BlockStack), loss, vector_batch


class _Normalised(nn.Module):
    """A loss with a running mean of itself in a buffer, by which it is divided."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, module: nn.Module, batch: Batch) -> Tensor:
        value = squared_error(module, batch)
        with torch.no_grad():
            self.mean.lerp_(value.detach().to(self.mean.dtype), 0.3)
        return value / self.mean


def loss_module_with_a_buffer(seed: int) -> Entry:
    """The loss is a module with a running mean in a buffer, no part of the trained module."""
    return build_seeded(seed, BlockStack), _Normalised(), vector_batch


class _Shifted(nn.Module):
    """A loss with a constant in a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((), 0.1))

    def forward(self, module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch[0]) - batch[1] - self.shift).square().mean()


def loss_that_is_a_module(seed: int) -> Entry:
    """The loss is a module that keeps nothing from step to step."""
    return build_seeded(seed, BlockStack), _Shifted(), vector_batch


def loss_module_inside(seed: int) -> Entry:
    """The same loss is a part of the module, so that its buffer is saved."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = _Normalised()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        criterion: Any = module.criterion
        value: Tensor = criterion(module, batch)
        return value

    return build_seeded(seed, Model), loss, vector_batch


class _Directed(nn.Module):
    """DoRA: a frozen matrix and a low-rank one, normalised by columns, with learned sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))
        self.size = nn.Parameter(self.base.weight.norm(dim=1, keepdim=True).clone())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.b @ self.a
        weight = self.size * weight / weight.norm(dim=1, keepdim=True).detach()
        return x + torch.tanh(F.linear(x, weight, self.base.bias))


def sizes_and_directions(seed: int) -> Entry:
    """DoRA by hand, in blocks whose base is frozen."""
    return build_seeded(seed, lambda: BlockStack(_Directed)), squared_error, vector_batch


class _Ternary(nn.Linear):
    """BitNet: weights of three values and inputs of 8 bits, straight through."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean().clamp(min=1e-5)
        ternary = (self.weight / scale).round().clamp(-1, 1) * scale
        step = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        rounded = (x * step).round().clamp(-128, 127) / step
        weight = self.weight + (ternary - self.weight).detach()
        return x + torch.tanh(F.linear(x + (rounded - x).detach(), weight, self.bias))


def weights_of_three_values(seed: int) -> Entry:
    """BitNet's linear layers as blocks."""
    return (
        build_seeded(seed, lambda: BlockStack(partial(_Ternary, WIDTH, WIDTH))),
        (squared_error),
        vector_batch,
    )


def masked_patches(seed: int) -> Entry:
    """A masked autoencoder: noise in the batch says which patches the encoder sees."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = BlockStack(), BlockStack()
            self.mask = nn.Parameter(torch.zeros(WIDTH))
            self.places = nn.Parameter(torch.randn(6, WIDTH))

        def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            order = noise.argsort(1)
            kept = order[:, :3, None].expand(-1, -1, WIDTH)
            seen = self.encoder((x + self.places).gather(1, kept))
            whole = self.mask.expand_as(x).scatter(1, kept, seen)
            hidden = torch.ones_like(noise).scatter(1, order[:, :3], 0.0)
            return self.decoder(whole + self.places), hidden

    def make(drawn: torch.Generator, samples: int) -> Batch:
        x = torch.randn(samples, 6, WIDTH, generator=drawn)
        return x, torch.rand(samples, 6, generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, hidden = module(*batch)
        apart = (made - batch[0]).square().mean(-1)
        return (apart * hidden).sum() / hidden.sum()

    return build_seeded(seed, Model), loss, make


def negatives_in_a_list_of_the_loss(seed: int) -> Entry:
    """Embeddings of the last three batches are negatives, in a list that the loss holds."""
    bank: list[Tensor] = []

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, wanted = (F.normalize(module(one), dim=-1) for one in batch)
        scores = torch.cat([wanted, *(one.to(wanted.dtype) for one in bank)])
        value = F.cross_entropy(made @ scores.T / 0.2, torch.arange(len(made)))
        bank.append(wanted.detach())
        del bank[:-3]
        return value

    return build_seeded(seed, BlockStack), loss, vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    classes_balanced_by_the_batch, hardest_samples, free_bits, variances_hinged,
    losses_kept_above_a_level, advantages_normalised, torch_fake_quantisers,
    torch_fake_quantisers_by_channel, codes_of_the_first_batch, exponential_gates,
    blocks_that_begin_as_nothing, two_forwards_with_dropout, table_of_products_of_keys,
    depth_by_numpy, depth_by_a_generator_of_numpy, penalty_of_a_vector_of_parameters,
    penalty_of_orthogonality, penalty_of_the_stem, losses_in_a_context_variable,
    curriculum_by_a_closure, loss_module_with_a_buffer, loss_that_is_a_module,
    loss_module_inside, sizes_and_directions,
    weights_of_three_values, masked_patches, negatives_in_a_list_of_the_loss,
)  # fmt: skip
