"""Modules as training recipes have them: teachers, queues, deep supervision, routers, ensembles.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations

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


def teacher_outside_of_the_module(seed: int) -> Entry:
    """Distillation: the loss holds a frozen teacher, and stops its gradient."""
    torch.manual_seed(seed + 1)
    teacher = BlockStack().requires_grad_(False)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        made = module(inputs)
        with torch.no_grad():
            soft = copy.deepcopy(teacher).to(inputs.dtype)(inputs).softmax(-1)
        distilled = F.kl_div(made.log_softmax(-1), soft, reduction="batchmean")
        return (made - targets).square().mean() + 0.5 * distilled

    return build_seeded(seed, BlockStack), loss, vector_batch


def teacher_by_averages_of_weights(seed: int) -> Entry:
    """BYOL's: a target net that each forward in training moves towards the student, and a queue."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.target = copy.deepcopy(self.stem).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                wanted = self.target(x)
                if self.training:
                    for mine, its in zip(
                        self.target.parameters(), self.stem.parameters(), strict=True
                    ):
                        mine.lerp_(its, 0.1)
            return self.run(x), wanted

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, wanted = module(batch[0])
        return 2 - 2 * F.cosine_similarity(made, wanted, dim=-1).mean()

    return build_seeded(seed, Model), loss, vector_batch


def queue_of_negatives(seed: int) -> Entry:
    """MoCo's: keys of earlier batches in a buffer with a pointer, as negatives of the next."""

    class Model(BlockStack):
        queue: Tensor
        pointer: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", F.normalize(torch.randn(16, WIDTH), dim=-1))
            self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            query, key = F.normalize(self.run(x), dim=-1), F.normalize(self.stem(other), dim=-1)
            near = (query * key.detach()).sum(-1, keepdim=True)
            scores = torch.cat([near, query @ self.queue.clone().T], 1) / 0.2
            if self.training:
                with torch.no_grad():
                    places = (self.pointer + torch.arange(len(x))) % len(self.queue)
                    self.queue[places] = key
                    self.pointer.add_(len(x)).remainder_(len(self.queue))
            return scores

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        scores = module(*batch)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))

    return build_seeded(seed, Model), loss, vector_batch


def deep_supervision(seed: int) -> Entry:
    """A head after each block, and the mean of their losses."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

        def forward(self, x: Tensor) -> list[Tensor]:
            made, x = [], self.stem(x)
            for layer, head in zip(self.layers, self.heads, strict=True):
                x = layer(x)
                made.append(head(x))
            return [*made, self.head(x)]

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch[0])
        terms = [(one - batch[1]).square().mean() / (n + 1) for n, one in enumerate(made)]
        return torch.stack(terms).mean()

    return build_seeded(seed, Model), loss, vector_batch


def targets_with_nan(seed: int) -> Entry:
    """Targets that are missing are NaN, and are left out of the mean."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, targets = module(batch[0]), batch[1]
        return (made - targets)[~targets.isnan()].square().mean()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        missing = torch.rand(targets.shape, generator=drawn) < 0.3
        missing[:, 0] = False
        return inputs, targets.masked_fill(missing, math.nan)

    return build_seeded(seed, BlockStack), loss, make


def targets_with_nan_by_where(seed: int) -> Entry:
    """Targets that are missing are NaN: errors by where, as a sum and a count."""

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        there = ~batch[1].isnan()
        errors = module(batch[0]) - torch.where(there, batch[1], 0.0)
        return (errors.square() * there).sum(), there.sum()

    module, _, make = targets_with_nan(seed)
    return module, loss, make


def weights_of_samples(seed: int) -> Entry:
    """Each sample has a weight, and the loss is the weighted mean."""

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        errors = (module(batch["x"]) - batch["y"]).square().mean(-1)
        return (batch["weights"] * errors).sum(), batch["weights"].sum()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        weights = torch.rand(samples, generator=drawn) + 0.1
        return {"x": inputs, "y": targets, "weights": weights}

    return build_seeded(seed, BlockStack), loss, make


def weights_of_samples_normalised(seed: int) -> Entry:
    """The weighted mean as one number, by the weights of the batch that the loss sees."""
    module, summed, make = weights_of_samples(seed)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        total, weights = summed(module, batch)  # type: ignore[misc]
        return total / weights

    return module, loss, make


def depth_by_a_learned_halt(seed: int) -> Entry:
    """Adaptive computation time: one block again, until each sample's halting passes a limit."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.block, self.halt = ResidualBlock(), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x)
            left, out = x.new_ones(len(x), 1), torch.zeros_like(x)
            for step in range(6):
                x = self.block(x)
                share = self.halt(x).sigmoid() if step < 5 else torch.ones_like(left)
                out, left = out + left * share * x, left * (1 - share)
                if bool((left < 0.2).all()):
                    break
            return self.head(out + left * x), left.mean()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, ponder = module(batch[0])
        return (made - batch[1]).square().mean() + 0.1 * ponder

    return build_seeded(seed, Model), loss, vector_batch


def router_losses_in_a_list(seed: int) -> Entry:
    """Top-1 experts that append their z-loss to a list of the model, which the loss empties."""

    class Block(nn.Module):
        def __init__(self, terms: list[Tensor]) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.terms = terms

        def forward(self, x: Tensor) -> Tensor:
            scores = self.router(x)
            shares = scores.softmax(-1)
            self.terms.append(0.1 * scores.logsumexp(-1).square().mean())
            chosen = shares.argmax(-1)
            out = torch.stack([expert(x) for expert in self.experts], 1)
            at = torch.arange(len(x))
            return x + shares[at, chosen, None] * out[at, chosen]

    class Model(BlockStack):
        def __init__(self) -> None:
            self_terms: list[Tensor] = []
            super().__init__(lambda: Block(self_terms))
            self.terms = self_terms

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        module.terms.clear()  # type: ignore[operator,union-attr]
        value = squared_error(module, batch)
        return value + sum(module.terms)  # type: ignore[arg-type,operator]

    return build_seeded(seed, Model), loss, vector_batch


def router_losses_returned(seed: int) -> Entry:
    """Blocks hand on their input with the sum of routers' losses so far."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.router(x)
            weights, chosen = scores.softmax(-1).topk(2)
            out = x
            for number, expert in enumerate(self.experts):
                out = out + (weights * (chosen == number)).sum(-1, keepdim=True) * expert(x)
            return out, terms + scores.logsumexp(-1).square().mean()

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x, terms = self.stem(x), x.new_zeros(())
            for layer in self.layers:
                x, terms = layer(x, terms)
            return self.head(x), terms

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, terms = module(batch[0])
        return (made - batch[1]).square().mean() + 0.01 * terms

    return build_seeded(seed, Model), loss, vector_batch


def jacobians_by_vmap(seed: int) -> Entry:
    """A penalty on each sample's Jacobian of the head, by torch.func in the forward."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.run(x)
            slopes = vmap(jacrev(lambda one: torch.tanh(self.head(one))))(hidden)
            return hidden, slopes.square().mean()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, slopes = module(batch[0])
        return (made - batch[1]).square().mean() + 0.1 * slopes

    return build_seeded(seed, Model), loss, vector_batch


def ensemble_by_stacked_state(seed: int) -> Entry:
    """Nets of one form, run at once by vmap over their stacked parameters."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
                for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            # stack_module_state detaches, so that parameters are stacked here.
            named = [dict(net.named_parameters()) for net in self.nets]
            held = {name: torch.stack([one[name] for one in named]) for name in named[0]}
            run = lambda values: functional_call(self.nets[0], values, (x,))  # noqa: E731
            return vmap(run)(held).mean(0)

    assert stack_module_state
    return build_seeded(seed, Model), squared_error, vector_batch


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        root = x.abs().sqrt()
        ctx.save_for_backward(x, root, scale)
        ctx.shape = x.shape
        return root * scale

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        x, root, scale = ctx.saved_tensors
        into = given[0] * scale * x.sign() / (2 * root + 0.1)
        return into.view(ctx.shape), (given[0] * root).sum_to_size(scale.shape)


def function_with_saved_tensors(seed: int) -> Entry:
    """A Function of the user's own whose gradient is another than autograd's."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + _Kept.apply(self.up(self.norm(x)), self.scale)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def keys_shared_by_layers(seed: int) -> Entry:
    """Every second block attends by the keys and values of the one before it."""

    class Block(nn.Module):
        def __init__(self, shares: bool) -> None:
            super().__init__()
            self.query = nn.Linear(WIDTH, WIDTH)
            self.both = None if shares else nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
            kept = kept if self.both is None else self.both(x)
            assert kept is not None
            keys, values = kept.chunk(2, -1)
            return x + F.scaled_dot_product_attention(self.query(x), keys, values), kept

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.layers = nn.ModuleList(Block(n % 2 == 1) for n in range(LAYERS))

        def forward(self, tokens: Tensor) -> Tensor:
            x, kept = self.embed(tokens), None
            for layer in self.layers:
                x, kept = layer(x, kept)
            return self.head(x)

    return build_seeded(seed, Model), _token_loss, token_batch


def keys_in_a_cache_of_the_model(seed: int) -> Entry:
    """Blocks put keys into a dict that the model makes in each forward; later ones read it."""

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.query, self.number = nn.Linear(WIDTH, WIDTH), number
            self.both = nn.Linear(WIDTH, 2 * WIDTH) if number < 2 else None

        def forward(self, x: Tensor, cache: dict[int, Tensor]) -> Tensor:
            if self.both is not None:
                cache[self.number] = self.both(x)
            keys, values = cache[self.number % 2].chunk(2, -1)
            return x + F.scaled_dot_product_attention(self.query(x), keys, values)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.layers = nn.ModuleList(Block(n) for n in range(LAYERS))

        def forward(self, tokens: Tensor) -> Tensor:
            x, cache = self.embed(tokens), {}  # type: ignore[var-annotated]
            for layer in self.layers:
                x = layer(x, cache)
            return self.head(x)

    return build_seeded(seed, Model), _token_loss, token_batch


def _token_loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def bags_of_embeddings(seed: int) -> Entry:
    """EmbeddingBag with a weight for each token of a sample, and a table of many unused rows."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(50, WIDTH, mode="sum")
            self.importance = nn.Embedding(50, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            weights = self.importance(tokens)[..., 0].softmax(-1)
            return self.run(self.bag(tokens, per_sample_weights=weights))

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(batch["tokens"]).square().mean()

    return build_seeded(seed, Model), loss, token_batch


def loss_with_parameters(seed: int) -> Entry:
    """Center loss: the loss is a module with parameters of its own."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed + 1)
            self.centers = nn.Parameter(torch.randn(3, WIDTH))

        def forward(self, module: nn.Module, batch: Batch) -> Tensor:
            made = module(batch["x"])
            return (made - self.centers[batch["y"]].to(made.dtype)).square().mean()

    return build_seeded(seed, BlockStack), Loss(), _class_batch


def _class_batch(drawn: torch.Generator, samples: int) -> Batch:
    return {
        "x": torch.randn(samples, WIDTH, generator=drawn),
        "y": torch.randint(3, (samples,), generator=drawn),
    }


def margins_of_normalised_classes(seed: int) -> Entry:
    """ArcFace's head: cosines of normalised rows, with a margin for the right class."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.classes = nn.Parameter(torch.randn(3, WIDTH))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            cosines = F.normalize(self.run(x), dim=-1) @ F.normalize(self.classes, dim=-1).T
            angles = cosines.clamp(-0.999, 0.999).acos()
            margin = 0.3 * F.one_hot(labels, 3).to(angles.dtype)
            return 8 * (angles + margin).cos()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(module(batch["x"], batch["y"]), batch["y"])

    return build_seeded(seed, Model), loss, _class_batch


def weights_by_norms_of_gradients(seed: int) -> Entry:
    """GradNorm's: a backward hook moves a buffer, by which the next forward weighs its terms."""

    class Model(BlockStack):
        share: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("share", torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.run(x)
            if hidden.requires_grad:
                hidden.register_hook(self._move)
            return self.head(hidden) + self.share.clone() * self.other(hidden)

        def _move(self, gradient: Tensor) -> None:
            with torch.no_grad():
                self.share.lerp_(10 * gradient.norm(), 0.5)

    return build_seeded(seed, Model), squared_error, vector_batch


def weights_by_rates_of_losses(seed: int) -> Entry:
    """Dynamic weight averaging: terms weigh by their last value over the one before, in buffers."""

    class Model(BlockStack):
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("last", torch.ones(2, 2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = self.run(x)
            terms = torch.stack([
                (self.head(hidden) - y).square().mean(), (self.other(hidden) - y).abs().mean(),
            ])  # fmt: skip
            weights = (self.last[0] / self.last[1]).softmax(0)
            if self.training:
                with torch.no_grad():
                    self.last[1] = self.last[0]
                    self.last[0] = terms
            return (weights * terms).sum()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(*batch)

    return build_seeded(seed, Model), loss, vector_batch


def annealed_by_a_buffer(seed: int) -> Entry:
    """A temperature that falls with a counter of steps, kept in a buffer that forwards raise."""

    class Model(BlockStack):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            heat = torch.exp(-0.1 * self.steps)
            if self.training:
                self.steps += 1
            return self.run(x) * (1 + heat)

    return build_seeded(seed, Model), squared_error, vector_batch


def one_parameter_for_all_layers(seed: int) -> Entry:
    """Weights of all layers in one stacked parameter, as scans have them: no blocks."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(0.4 * torch.randn(LAYERS, WIDTH, WIDTH))
            self.biases = nn.Parameter(torch.zeros(LAYERS, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for weight, bias in zip(self.weights, self.biases, strict=True):
                x = x + torch.tanh(x @ weight + bias)
            return x

    return build_seeded(seed, Model), squared_error, vector_batch


def orthogonal_recurrent_weights(seed: int) -> Entry:
    """A recurrent net whose matrix is orthogonal by a parametrization, and used at each step."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))
            self.outer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), WIDTH)
            for step in range(LENGTH):
                state = torch.tanh(self.inner(state) + self.outer(x[:, step]))
            return self.head(state)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs = torch.randn(samples, LENGTH, WIDTH, generator=drawn)
        return inputs, torch.randn(samples, WIDTH, generator=drawn)

    return build_seeded(seed, Model), squared_error, make


def observers_of_ranges(seed: int) -> Entry:
    """Quantisation-aware: smallest and largest activations in buffers, straight through."""

    class Block(ResidualBlock):
        low: Tensor
        high: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.tensor(0.0))
            self.register_buffer("high", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.low.copy_(torch.minimum(self.low, x.min()))
                    self.high.copy_(torch.maximum(self.high, x.max()))
            step = (self.high - self.low) / 15
            rounded = ((x - self.low) / step).round() * step + self.low
            return super().forward(x + (rounded - x).detach())

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def scores_of_chains(seed: int) -> Entry:
    """A linear chain's CRF: transitions are parameters, the loss a log of sums over paths."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
            self.head, self.moves = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, 3))

        def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            scores = self.head(x)
            paths = scores[:, 0]
            for step in range(1, scores.shape[1]):
                paths = (paths[:, :, None] + self.moves).logsumexp(1) + scores[:, step]
            told = scores.gather(2, tags[..., None]).sum((1, 2))
            moved = self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
            return paths.logsumexp(1) - told - moved

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(batch["tokens"], batch["targets"] % 3).mean()

    return build_seeded(seed, Model), loss, token_batch


def spectral_layers(seed: int) -> Entry:
    """Fourier layers: complex weights over the modes of a real signal."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modes = nn.Parameter(0.3 * torch.randn(3, WIDTH, WIDTH, dtype=torch.cfloat))
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            waves = torch.fft.rfft(x, dim=1)
            some = torch.einsum("bmi,mio->bmo", waves[:, :3], self.modes.to(waves.dtype))
            return x + torch.tanh(torch.fft.irfft(some, n=x.shape[1], dim=1) + self.up(x))

    def make(drawn: torch.Generator, samples: int) -> Batch:
        shape = (samples, LENGTH, WIDTH)
        return torch.randn(*shape, generator=drawn), torch.randn(*shape, generator=drawn)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, make


def gradients_gathered_over_ranks(seed: int) -> Entry:
    """Contrast over all ranks' samples, which the forward gathers itself where there are ranks."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        one, other = F.normalize(module(batch[0]), dim=-1), F.normalize(batch[1], dim=-1)
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            parts = [torch.empty_like(other) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, other)
            begin, other = dist.get_rank() * len(one), torch.cat(parts)
        else:
            begin = 0
        return F.cross_entropy(one @ other.T, begin + torch.arange(len(one)))

    return build_seeded(seed, BlockStack), loss, vector_batch


def teacher_forcing_by_sampling(seed: int) -> Entry:
    """A decoder that feeds itself its own arg max at odd positions."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.layers = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            states = [self.embed.weight.new_zeros(len(tokens), WIDTH) for _ in self.layers]
            made, fed = [], tokens[:, 0]
            for step in range(tokens.shape[1]):
                x = self.embed(fed if step % 2 else tokens[:, step])
                for number, layer in enumerate(self.layers):
                    states[number] = x = layer(x, states[number])
                made.append(self.head(x))
                fed = made[-1].argmax(-1)
            return torch.stack(made, 1)

    return build_seeded(seed, Model), _token_loss, token_batch


def parameters_sliced_by_the_batch(seed: int) -> Entry:
    """Slimmable: the batch's width says how much of each matrix is used."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            width = WIDTH // 2
            part = F.linear(x[..., :width], self.up.weight[:width, :width], self.up.bias[:width])
            return torch.cat([x[..., :width] + torch.tanh(part), x[..., width:]], -1)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def weights_given_by_properties(seed: int) -> Entry:
    """Symmetric matrices that a property makes of the stored half, and a head tied by it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stored = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))

        @property
        def weight(self) -> Tensor:
            return self.stored.triu() + self.stored.triu(1).T

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(F.linear(x, self.weight))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

        @property
        def head(self) -> Tensor:
            return self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return x @ self.head.T

    return build_seeded(seed, Model), _token_loss, token_batch


def adversarial_inputs(seed: int) -> Entry:
    """The loss of inputs that a step along the gradient has moved, beside that of the inputs."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        if not torch.is_grad_enabled():
            return squared_error(module, batch)
        moved = inputs.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(squared_error(module, (moved, targets)), moved)
        worst = (inputs + 0.1 * slope.sign()).detach()
        return (squared_error(module, batch) + squared_error(module, (worst, targets))) / 2

    return build_seeded(seed, BlockStack), loss, vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    teacher_outside_of_the_module, teacher_by_averages_of_weights, queue_of_negatives,
    deep_supervision, targets_with_nan, targets_with_nan_by_where, weights_of_samples,
    weights_of_samples_normalised, depth_by_a_learned_halt, router_losses_in_a_list,
    router_losses_returned, jacobians_by_vmap, ensemble_by_stacked_state,
    function_with_saved_tensors, keys_shared_by_layers, keys_in_a_cache_of_the_model,
    bags_of_embeddings, loss_with_parameters, margins_of_normalised_classes,
    weights_by_norms_of_gradients, weights_by_rates_of_losses, annealed_by_a_buffer,
    one_parameter_for_all_layers, orthogonal_recurrent_weights, observers_of_ranges,
    scores_of_chains, spectral_layers, gradients_gathered_over_ranks, teacher_forcing_by_sampling,
    parameters_sliced_by_the_batch, weights_given_by_properties, adversarial_inputs,
)  # fmt: skip
