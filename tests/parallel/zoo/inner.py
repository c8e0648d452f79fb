"""Modules whose forward or loss uses more of torch than layers: transforms, modes, own operators.

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
from torch.func import functional_call, grad, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

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


def _sequence_batch(drawn: torch.Generator, samples: int, length: int = 5) -> Batch:
    inputs = torch.randn(samples, length, WIDTH, generator=drawn)
    return inputs, torch.randn(samples, length, WIDTH, generator=drawn)


class _Memory(nn.Module):
    """A block that learns each sample's sequence by one gradient step, and reads what it learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rate = nn.Parameter(torch.tensor(0.1))
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = dict(self.net.named_parameters())

        def surprise(given: dict[str, Tensor], keys: Tensor, values: Tensor) -> Tensor:
            return (functional_call(self.net, given, (keys,)) - values).square().mean()

        slopes = vmap(grad(surprise), (None, 0, 0))(weights, self.keys(y), self.values(y))
        learnt = {name: weights[name] - self.rate * slope for name, slope in slopes.items()}
        return x + vmap(partial(functional_call, self.net))(learnt, (y,))


def memories_learnt_by_the_forward(seed: int) -> Entry:
    """Titans': a net in each block takes a gradient step on each sample, by vmap of grad."""
    return build_seeded(seed, lambda: BlockStack(_Memory)), squared_error, _sequence_batch


def truncated_backwards(seed: int) -> Entry:
    """The loss cuts the sequence into chunks, and runs the backward of all but the last itself."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            made = []
            for one in x.unbind(1):
                state = self.cell(one, state)
                made.append(self.head(state))
            return torch.stack(made, 1), state

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        state, chunks = inputs.new_zeros(len(inputs), WIDTH), 3
        pairs = zip(inputs.chunk(chunks, 1), targets.chunk(chunks, 1), strict=True)
        for number, (some, wanted) in enumerate(pairs):
            made, state = module(some, state.detach())
            value = (made - wanted).square().mean() / chunks
            if number < chunks - 1 and value.requires_grad:
                value.backward()
        return value

    return build_seeded(seed, Model), loss, partial(_sequence_batch, length=6)


def gradients_cached(seed: int) -> Entry:
    """GradCache: a contrast's gradient by embeddings without a graph, then a surrogate with one."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        with torch.no_grad():
            kept = module(inputs)
        kept.requires_grad_()
        with torch.enable_grad():
            scores = kept @ targets.T
            whole = F.cross_entropy(scores, torch.arange(len(scores)))
            (slope,) = torch.autograd.grad(whole, kept)
        made = module(inputs)
        surrogate = (made * slope).sum()
        return surrogate - surrogate.detach() + whole.detach()

    return build_seeded(seed, BlockStack), loss, vector_batch


def _keep_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpoints_by_a_policy(seed: int) -> Entry:
    """Blocks are recomputed but for their matmuls, which a policy keeps."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            contexts = partial(create_selective_checkpoint_contexts, _keep_matmuls)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


@torch.library.custom_op("zoo_inner::squash", mutates_args=())
def _squash(x: Tensor, slope: float) -> Tensor:
    return torch.tanh(x * slope)


@_squash.register_fake
def _(x: Tensor, slope: float) -> Tensor:
    return torch.empty_like(x)


def _keep_for_squash(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.slope = inputs[1]


def _squash_backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
    (made,) = ctx.saved_tensors
    return slope * (1 - made.square()) * ctx.slope, None


_squash.register_autograd(_squash_backward, setup_context=_keep_for_squash)


class _Squashed(ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + _squash(self.up(self.norm(x)), 0.7)


def operators_of_ones_own(seed: int) -> Entry:
    """Blocks call an operator that is registered with torch.library, with its own backward."""
    return build_seeded(seed, lambda: BlockStack(_Squashed)), squared_error, vector_batch


class _Mirrored(TorchFunctionMode):
    """Scales every linear layer's output, as emulations of other hardware do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return 0.8 * made if func is F.linear else made


def products_under_a_mode(seed: int) -> Entry:
    """The forward runs in a mode of the user's own that changes what linear layers give."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            with _Mirrored():
                return self.run(x)

    return build_seeded(seed, Model), squared_error, vector_batch


class _Turned(nn.Module):
    """A block that turns its input by tables that it makes in inference mode, once."""

    tables: tuple[Tensor, Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.tables is None:
            with torch.inference_mode():
                angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 3
                self.tables = angles.cos(), angles.sin()
        cosines, sines = (one.clone() for one in self.tables)
        y = self.up(x)
        return x + torch.tanh(y * cosines + y.roll(1, -1) * sines)


def tables_in_inference_mode(seed: int) -> Entry:
    """Blocks keep tables that the first forward made in inference mode."""
    return build_seeded(seed, lambda: BlockStack(_Turned)), squared_error, _sequence_batch


def teacher_in_inference_mode(seed: int) -> Entry:
    """A frozen teacher runs in inference mode, and its outputs are targets."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = BlockStack(), BlockStack().requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.inference_mode():
                wanted = self.teacher(x)
            return self.student(x), wanted.clone()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, wanted = module(batch[0])
        return (made - wanted).square().mean() + 0.1 * (made - batch[1]).abs().mean()

    return build_seeded(seed, Model), loss, vector_batch


STREAMS = 3


class _Connected(nn.Module):
    """A block over several residual streams, which are in the first dimension with the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.block = ResidualBlock()
        self.mix = nn.Parameter(0.9 * torch.eye(STREAMS) + 0.03)
        self.read = nn.Parameter(torch.full((STREAMS,), 1 / STREAMS))
        self.write = nn.Parameter(torch.ones(STREAMS))

    def forward(self, x: Tensor) -> Tensor:
        streams = x.unflatten(0, (-1, STREAMS))
        made = self.block(torch.einsum("bsw,s->bw", streams, self.read))
        streams = torch.einsum("bsw,st->btw", streams, self.mix)
        return (streams + made[:, None] * self.write[:, None]).flatten(0, 1)


def streams_in_the_first_dimension(seed: int) -> Entry:
    """Hyper-connections: between blocks each sample has three rows in the first dimension."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).repeat_interleave(STREAMS, 0)
            for layer in self.layers:
                x = layer(x)
            return self.head(x.unflatten(0, (-1, STREAMS)).mean(1))

    return build_seeded(seed, lambda: Model(_Connected)), squared_error, vector_batch


def recurrent_layers_as_blocks(seed: int) -> Entry:
    """A list of nn.LSTM, some of both directions, whose states are dropped or go to the head."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
                for _ in range(LAYERS)
            )
            self.head = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                made, (state, _) = layer(x)
                x = x + made
            last = state.transpose(0, 1).flatten(1)
            return self.head(torch.cat((x, last[:, None].expand_as(x)), -1))

    return build_seeded(seed, Model), squared_error, _sequence_batch


@partial(torch.compile, backend="aot_eager", dynamic=True)
def _gate(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(y) + torch.tanh(y)


class _Gated(ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + _gate(x, self.up(self.norm(x)))


def helpers_compiled(seed: int) -> Entry:
    """Blocks call a function of the file that torch.compile has wrapped."""
    return build_seeded(seed, lambda: BlockStack(_Gated)), squared_error, vector_batch


def velocities_by_jvp(seed: int) -> Entry:
    """MeanFlow's: the loss takes a derivative of the whole module in forward mode."""

    class Model(BlockStack):
        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return self.run(x * (1 + time))

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        time = torch.full((len(inputs), 1), 0.3, dtype=inputs.dtype)
        made, slope = jvp(module, (inputs, time), (targets, torch.ones_like(time)))
        return (made - (targets - 0.3 * slope).detach()).square().mean()

    return build_seeded(seed, Model), loss, vector_batch


class _Padded(Tensor):
    """Hidden states that carry a mask of their own through the operations on them."""

    mask: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [one.mask for one in args if isinstance(one, cls) and hasattr(one, "mask")]
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, cls) and masks:
            made.mask = masks[0]
        return made


class _Masked(ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made * x.mask if isinstance(x, _Padded) and hasattr(x, "mask") else made


def masks_in_a_subclass_of_tensors(seed: int) -> Entry:
    """What goes from block to block is a subclass of Tensor that carries a mask."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
            x = self.stem(x).as_subclass(_Padded)
            x.mask = mask
            for layer in self.layers:
                x = layer(x)
            return self.head(x.as_subclass(Tensor))

    return build_seeded(seed, lambda: Model(_Masked)), squared_error, vector_batch


class _Noting(ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        made.penalty = getattr(x, "penalty", 0.0) + made.square().mean(-1)  # type: ignore
        return made


def penalties_as_attributes_of_tensors(seed: int) -> Entry:
    """Blocks put what they add up on the tensor that they return, as an attribute of it."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x), getattr(x, "penalty", torch.zeros(()))

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, penalty = module(batch[0])
        return (made - batch[1]).square().mean() + 0.1 * penalty.mean()

    return build_seeded(seed, lambda: Model(_Noting)), loss, vector_batch


class _Spread(ResidualBlock):
    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        mixed = torch.sparse.mm(neighbours, x.flatten(0, 1)).view_as(x)
        return super().forward(x + 0.3 * mixed)


def neighbours_in_a_sparse_argument(seed: int) -> Entry:
    """Graphs of one size: the forward makes a sparse matrix of all samples, given to each block."""

    class Model(BlockStack):
        def forward(self, x: Tensor, near: Tensor) -> Tensor:
            matrix = torch.block_diag(*near).to_sparse()
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x, matrix)
            return self.head(x)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        x, y = _sequence_batch(drawn, samples)
        near = torch.rand(samples, x.shape[1], x.shape[1], generator=drawn)
        return x, (near > 0.5).to(x.dtype), y

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch[0], batch[1]) - batch[2]).square().mean()

    return build_seeded(seed, lambda: Model(_Spread)), loss, make


class _Believing(nn.Module):
    """A block that returns a distribution, and takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> torch.distributions.Normal:
        x = given.mean + 0.1 * given.stddev
        return torch.distributions.Normal(
            x + torch.tanh(self.mean(x)), F.softplus(self.scale(x)) + 0.1
        )


def distributions_between_blocks(seed: int) -> Entry:
    """Blocks hand on normal distributions, and the loss is the last one's log-probability."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> torch.distributions.Normal:
            made = torch.distributions.Normal(self.stem(x), torch.ones_like(x))
            for layer in self.layers:
                made = layer(made)
            return made

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = -module(batch[0]).log_prob(batch[1]).mean()
        return value

    return build_seeded(seed, lambda: Model(_Believing)), loss, vector_batch


class _Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))


def steps_by_the_largest_error(seed: int) -> Entry:
    """A differential equation whose steps are halved until all samples' errors are small."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope, self.head = _Slope(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            steps = 1
            while True:
                y = x
                for _ in range(steps):
                    y = y + self.slope(y) / steps
                with torch.no_grad():
                    z = x
                    for _ in range(2 * steps):
                        z = z + self.slope(z) / (2 * steps)
                if (y - z).abs().max() < 0.05 or steps >= 16:
                    return self.head(y)
                steps *= 2

    return build_seeded(seed, Model), squared_error, vector_batch


class _Routed(nn.Module):
    """A block that computes half of each sequence's tokens, those of the highest scores."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.score = ResidualBlock(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        best, at = scores.topk(x.shape[1] // 2, 1)
        at = at[..., None].expand(-1, -1, WIDTH)
        made = self.block(x.gather(1, at)) * torch.sigmoid(best)[..., None]
        return x.scatter_add(1, at, made)


def tokens_routed_around_blocks(seed: int) -> Entry:
    """Mixture of depths: every block computes half of each sequence's tokens."""
    return (
        build_seeded(seed, lambda: BlockStack(_Routed)),
        squared_error,
        partial(_sequence_batch, length=6),
    )


def rendered_rays(seed: int) -> Entry:
    """A radiance field: points along rays, waves of positions, densities added up along a ray."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.waves = nn.Parameter(2.0 ** torch.arange(2), requires_grad=False)
            self.density, self.colour = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

        def forward(self, rays: Tensor) -> Tensor:
            begin, way = rays.chunk(2, -1)
            depths = torch.linspace(0, 1, 5, dtype=rays.dtype, device=rays.device)
            points = begin[:, None] + way[:, None] * depths[:, None]
            angles = (points[..., None] * self.waves).flatten(-2)
            hidden = self.run(torch.sin(math.pi * angles))
            opaque = 1 - torch.exp(-F.softplus(self.density(hidden)) / 5)
            left = torch.cumprod(1 - opaque + 1e-6, 1)
            colours = torch.sigmoid(self.colour(hidden))
            return (left / (1 - opaque + 1e-6) * opaque * colours).sum(1)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return (
            torch.randn(samples, 6, generator=drawn), torch.rand(samples, 3, generator=drawn)
        )  # fmt: skip

    return build_seeded(seed, Model), squared_error, make


MODULES: tuple[Callable[[int], Entry], ...] = (
    memories_learnt_by_the_forward, truncated_backwards, gradients_cached, checkpoints_by_a_policy,
    operators_of_ones_own, products_under_a_mode, tables_in_inference_mode,
    teacher_in_inference_mode, streams_in_the_first_dimension, recurrent_layers_as_blocks,
    helpers_compiled, velocities_by_jvp, masks_in_a_subclass_of_tensors,
    penalties_as_attributes_of_tensors, neighbours_in_a_sparse_argument,
    distributions_between_blocks, steps_by_the_largest_error, tokens_routed_around_blocks,
    rendered_rays,
)  # fmt: skip
