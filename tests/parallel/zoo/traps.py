"""More modules with one trap each: state, gradients and batches that users treat in their own ways.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

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


def _sequences(drawn: torch.Generator, samples: int) -> Batch:
    shape = (samples, LENGTH, WIDTH)
    return torch.randn(*shape, generator=drawn), torch.randn(*shape, generator=drawn)


def _next_tokens(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def tied_by_a_property(seed: int) -> Entry:
    """The head is a property: the first block's weight."""

    class Model(BlockStack):
        @property
        def weight(self) -> Tensor:
            return self.layers[0].up.weight  # type: ignore[return-value,union-attr]

        def forward(self, x: Tensor) -> Any:
            return F.linear(self.run(x), self.weight)

    return build_seeded(seed, Model), squared_error, vector_batch


def parameter_made_by_the_first_forward(seed: int) -> Entry:
    """A scale that is there after the first forward, as users write lazy parameters themselves."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Any:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(x.new_ones(x.shape[-1]))
            return self.run(x) * self.scale

    return build_seeded(seed, Model), squared_error, vector_batch


def norm_shared_by_blocks(seed: int) -> Entry:
    """One norm that is a part of all blocks."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.norm = self.layers[0].norm  # type: ignore[union-attr,assignment]

    return build_seeded(seed, Model), squared_error, vector_batch


class _Centred:
    """A loss with state of its own: the running mean of all outputs, which it subtracts."""

    def __init__(self) -> None:
        self.mean: Any = 0.0

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        out = module(inputs)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return (out - self.mean - targets).square().mean()


def loss_with_a_running_mean(seed: int) -> Entry:
    """The state is outside of the module, so that no checkpoint holds it."""
    return build_seeded(seed, BlockStack), _Centred(), vector_batch


def teacher_moved_by_the_forward(seed: int) -> Entry:
    """MoCo's manner: a frozen copy of the student follows it, moved within the forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = BlockStack(), BlockStack()
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)

        @torch.no_grad()
        def follow(self) -> None:
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for followed, followed_by in pairs:
                followed.mul_(0.9).add_(followed_by, alpha=0.1)

        def forward(self, x: Tensor) -> Tensor:
            self.follow()
            with torch.no_grad():
                wanted = self.teacher(x)
            return self.student(x) - 0.5 * wanted

    return build_seeded(seed, Model), squared_error, vector_batch


def teacher_without_gradient(seed: int) -> Entry:
    """A frozen teacher of the same blocks, run without gradients, and a stop of the gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = BlockStack(), BlockStack()
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher(x)
            out = self.student(x)
            return out + (out - wanted).square() + out.detach() * out

    return build_seeded(seed, Model), squared_error, vector_batch


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.3 * gradient


def gradient_reversal(seed: int) -> Entry:
    """A domain's head whose gradient goes back with the other sign."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.domain = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Any:
            out = self.run(x)
            return out, self.domain(_Reversed.apply(out))

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        out, domain = module(inputs)
        return (out - targets).square().mean() + F.softplus(domain).mean()

    return build_seeded(seed, Model), loss, vector_batch


class _Quantised(torch.autograd.Function):
    """Rounds, and says how far each number was off, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        rounded = (x / scale).round() * scale
        ctx.save_for_backward(x)
        off = (x - rounded).detach()
        ctx.mark_non_differentiable(off)
        return rounded, off

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        inside = (x.abs() < 2).to(x.dtype)
        return gradient * inside, (gradient * (1 - inside)).sum().view(1)


def function_with_side_output(seed: int) -> Entry:
    """Blocks round by a Function of their own, and return how much that was off."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((1,), 0.1))

        def forward(self, x: Tensor) -> Any:
            return _Quantised.apply(super().forward(x), self.scale)

    class Model(BlockStack):
        def run(self, x: Tensor) -> Tensor:
            x, off = self.stem(x), 0.0
            for layer in self.layers:
                x, more = layer(x)
                off = off + more
            return self.head(x + off)

    return build_seeded(seed, lambda: Model(Block)), squared_error, vector_batch


def depth_by_own_generator(seed: int) -> Entry:
    """Stochastic depth by a random.Random and a torch.Generator of each block."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.coin, self.noise = Random(3), torch.Generator().manual_seed(4)

        def forward(self, x: Tensor) -> Tensor:
            scale = 1 + 0.1 * torch.rand((), generator=self.noise, dtype=x.dtype)
            return x + (0.5 + self.coin.random()) * scale * torch.tanh(self.up(x))

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def depth_by_python_random(seed: int) -> Entry:
    """Layers are dropped by Python's own generator."""
    import random

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            return x if random.random() < 0.3 else super().forward(x)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def iterations_by_sample(seed: int) -> Entry:
    """One cell is called until each sample has halted, and each is what it was when it did."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Any:
            left = 1 + (x[:, 0].detach().abs() * 3).long().clamp(max=4)
            x = self.stem(x)
            while bool((left > 0).any()):
                x = torch.where((left > 0)[:, None], self.layers[0](x), x)
                left = left - 1
            for layer in self.layers[1:]:
                x = layer(x)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def early_exit(seed: int) -> Entry:
    """Samples leave after different blocks; when all have left, no more blocks are called."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Any:
            exits = 1 + (x[:, 0].detach() > 0).long() + (x[:, 1].detach() > 0).long()
            x = self.stem(x)
            for number, layer in enumerate(self.layers):
                at = (exits > number).nonzero()[:, 0]
                if not len(at):
                    break
                x = x.index_copy(0, at, layer(x[at]))
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def routes_by_a_name_in_the_batch(seed: int) -> Entry:
    """A nested ModuleDict, of which a name in the batch says which branch is called."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.tasks = nn.ModuleDict(
                {
                    "text": nn.ModuleDict({"en": nn.Linear(WIDTH, WIDTH)}),
                    "image": nn.ModuleDict({"rgb": nn.Linear(WIDTH, WIDTH)}),
                }
            )

        def forward(self, x: Tensor, task: str, kind: str) -> Any:
            return self.tasks[task][kind](self.run(x))  # type: ignore[index]

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return {"x": inputs, "targets": targets, "task": "text", "kind": "en"}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        out = module(batch["x"], batch["task"], kind=batch["kind"])
        return (out - batch["targets"]).square().mean()

    return build_seeded(seed, Model), loss, make


@dataclass
class _Pair:
    inputs: Tensor
    targets: Tensor


class _Named(NamedTuple):
    inputs: Tensor
    targets: Tensor
    name: str


def batch_as_dataclass(seed: int) -> Entry:
    """A batch of a class of the user's own."""

    def loss(module: nn.Module, batch: _Pair) -> Tensor:
        return (module(batch.inputs) - batch.targets).square().mean()

    return build_seeded(seed, BlockStack), loss, lambda d, n: _Pair(*vector_batch(d, n))


def batch_as_named_tuple(seed: int) -> Entry:
    """A named tuple, with a name for all samples."""

    def loss(module: nn.Module, batch: _Named) -> Tensor:
        return (module(batch.inputs) - batch.targets).square().mean()

    return build_seeded(seed, BlockStack), loss, lambda d, n: _Named(*vector_batch(d, n), "all")


def batch_as_ragged_list(seed: int) -> Entry:
    """A list of samples of different lengths, and a list of their targets."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs = [torch.randn(2 + n % 3, WIDTH, generator=drawn) for n in range(samples)]
        return {"inputs": inputs, "targets": [one.sum(0) for one in inputs]}

    def loss(module: nn.Module, batch: Batch) -> Any:
        padded = nn.utils.rnn.pad_sequence(batch["inputs"], batch_first=True)
        out = module(padded).sum(1)
        return (out - torch.stack(batch["targets"])).square().mean()

    return build_seeded(seed, BlockStack), loss, make


@dataclass
class _Made:
    hidden: Tensor
    extra: Tensor | None = None


def blocks_return_dataclasses(seed: int) -> Entry:
    """What blocks and the model return is of a class of the user's own."""

    class Block(ResidualBlock):
        def forward(self, x: Any) -> Any:
            return _Made(super().forward(x.hidden))

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Any:
            made: Any = _Made(self.stem(x))
            for layer in self.layers:
                made = layer(made)
            return _Made(self.head(made.hidden), made.hidden)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch[0])
        return (made.hidden - batch[1]).square().mean() + 0.1 * made.extra.square().mean()

    return build_seeded(seed, lambda: Model(Block)), loss, vector_batch


class _Two(NamedTuple):
    hidden: Tensor
    rest: Tensor | None


def blocks_return_named_tuples(seed: int) -> Entry:
    """Blocks return named tuples with None in them."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Any:
            return _Two(super().forward(x), None)

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Any:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x).hidden
            return _Two(self.head(x), None)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch[0]).hidden - batch[1]).square().mean()

    return build_seeded(seed, lambda: Model(Block)), loss, vector_batch


def whole_numbers_moved(seed: int) -> Entry:
    """Blocks count in int and bool buffers, and use them."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1, dtype=torch.int32))
            self.register_buffer("on", torch.ones(WIDTH, dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
                self.on: Tensor = self.on.roll(1)
                self.on[0] = self.calls[0] % 2 == 0  # type: ignore[index,operator]
            return x + torch.tanh(self.up(x)) * self.on / (1 + self.calls)  # type: ignore[operator]

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def old_spectral_norm(seed: int) -> Entry:
    """`nn.utils.spectral_norm`, which moves vectors with each forward."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.utils.spectral_norm(self.up)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def parametrized_spectral_norm(seed: int) -> Entry:
    """The same as a parametrization."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.utils.parametrizations.spectral_norm(self.up)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def orthogonal_and_own_parametrization(seed: int) -> Entry:
    """Weights that are orthogonal, and biases that are positive, by parametrizations."""

    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softplus(x)

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.orthogonal(self.up)
            nn.utils.parametrize.register_parametrization(self.up, "bias", Positive())

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def backward_hooks_on_blocks(seed: int) -> Entry:
    """Full backward hooks that scale what goes back through blocks."""

    def scale(module: nn.Module, given: Any, made: Any) -> Any:
        return tuple(None if one is None else 0.5 * one for one in given)

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.register_full_backward_hook(scale)

    return build_seeded(seed, Model), squared_error, vector_batch


def _half(gradient: Tensor) -> Tensor:
    return 0.5 * gradient


def hooks_on_parameters(seed: int) -> Entry:
    """Hooks that change gradients of parameters: halved, and kept out of some rows."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            rows = torch.ones(WIDTH, 1)
            rows[:2] = 0
            self.layers[1].up.weight.register_hook(lambda g: g * rows)  # type: ignore[union-attr]
            self.layers[2].up.bias.register_hook(_half)  # type: ignore[union-attr]
            self.head.weight.register_hook(_half)

    return build_seeded(seed, Model), squared_error, vector_batch


def hooks_after_accumulation(seed: int) -> Entry:
    """The same by hooks that change `.grad` after it was added up."""

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].up.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[union-attr]
            self.head.weight.register_post_accumulate_grad_hook(halve)

    return build_seeded(seed, Model), squared_error, vector_batch


def hooks_on_activations(seed: int) -> Entry:
    """Gradients of activations are halved on their way, in blocks and outside of them."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if out.requires_grad:
                out.register_hook(_half)
            return out

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Any:
            out = self.run(x)
            if out.requires_grad:
                out.register_hook(_half)
            return out

    return build_seeded(seed, lambda: Model(Block)), squared_error, vector_batch


def buffer_with_a_gradient(seed: int) -> Entry:
    """A buffer that requires gradients, which no optimizer steps."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.ones(WIDTH).requires_grad_())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.gain)  # type: ignore[operator]

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def some_blocks_in_bfloat16(seed: int) -> Entry:
    """Two of the blocks are in bf16, and cast what comes and goes."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x.to(self.up.weight.dtype)).to(x.dtype)

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)
            for layer in self.layers[1:3]:
                layer.to(torch.bfloat16)

    return build_seeded(seed, Model), squared_error, vector_batch


def autocast_in_the_forward(seed: int) -> Entry:
    """The model's forward has its own autocast."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                out = self.run(x)
            return out.to(x.dtype)

    return build_seeded(seed, Model), squared_error, vector_batch


class _Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, **options)
        self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def embedding_with_sparse_gradients(seed: int) -> Entry:
    """An embedding whose gradient is sparse."""
    return build_seeded(seed, lambda: _Embedded(sparse=True)), _next_tokens, token_batch


def embedding_with_max_norm(seed: int) -> Entry:
    """An embedding whose forward shortens the rows that are read, in place."""
    return build_seeded(seed, lambda: _Embedded(max_norm=1.0)), _next_tokens, token_batch


def embedding_with_padding(seed: int) -> Entry:
    """Rows of padding, and gradients by how often a row is read."""
    return build_seeded(seed, lambda: _Embedded(padding_idx=0)), _next_tokens, token_batch


def weights_clamped_by_the_forward(seed: int) -> Entry:
    """WGAN's clipping: a block's forward keeps its weights small, in place."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.2, 0.2)
            return super().forward(x)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def attention_with_masks(seed: int) -> Entry:
    """nn.MultiheadAttention with a causal mask, and one of each sample's padding."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, causal: Tensor, padding: Tensor) -> Tensor:
            y = self.norm(x)
            seen, _ = self.attend(y, y, y, attn_mask=causal, key_padding_mask=padding)
            return x + torch.tanh(self.up(seen))

    class Model(BlockStack):
        def forward(self, x: Tensor, padding: Tensor) -> Any:  # type: ignore[override]
            length = x.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x, causal, padding)
            return self.head(x)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = _sequences(drawn, samples)
        lengths = torch.randint(1, LENGTH + 1, (samples,), generator=drawn)
        return inputs, targets, torch.arange(LENGTH)[None] >= lengths[:, None]

    def loss(module: nn.Module, batch: Batch) -> Any:
        inputs, targets, padding = batch
        off = (module(inputs, padding) - targets).square().mean(-1)
        return off.masked_fill(padding, 0).sum(), (~padding).sum()

    return build_seeded(seed, lambda: Model(Block)), loss, make


def norms_with_running_statistics(seed: int) -> Entry:
    """InstanceNorm and BatchNorm with cumulative averages, and GroupNorm, in blocks."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.instance = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)
            self.batch = nn.BatchNorm1d(WIDTH, momentum=None)
            self.group = nn.GroupNorm(2, WIDTH)
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = x.transpose(1, 2)
            y = self.group(self.batch(self.instance(y))).transpose(1, 2)
            return x + torch.tanh(self.up(y))

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, _sequences


def connectionist_temporal_loss(seed: int) -> Entry:
    """CTC over lengths of each sample, as a sum and a count."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.symbols = nn.Linear(WIDTH, VOCAB)

        def forward(self, x: Tensor) -> Any:
            return self.symbols(self.run(x)).log_softmax(-1)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs = torch.randn(samples, 9, WIDTH, generator=drawn)
        targets = torch.randint(1, VOCAB, (samples, 4), generator=drawn)
        lengths = torch.randint(1, 4, (samples,), generator=drawn)
        return {"inputs": inputs, "targets": targets, "lengths": lengths}

    def loss(module: nn.Module, batch: Batch) -> Any:
        made = module(batch["inputs"]).transpose(0, 1)
        frames = torch.full((made.shape[1],), made.shape[0])
        total = F.ctc_loss(made, batch["targets"], frames, batch["lengths"], reduction="sum",
                           zero_infinity=True)  # fmt: skip
        return total, batch["lengths"].sum()

    return build_seeded(seed, Model), loss, make


def weighted_and_smoothed_classes(seed: int) -> Entry:
    """Cross-entropy with classes' weights from a buffer, and smoothing: a sum and a count."""

    class Model(_Embedded):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights", torch.linspace(0.2, 2, VOCAB))

    def loss(module: nn.Module, batch: Batch) -> Any:
        weights: Any = module.weights
        targets = batch["targets"].flatten()
        logits = module(batch["tokens"]).flatten(0, 1)
        total = F.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=0.1)
        return total, weights[targets].sum()

    return build_seeded(seed, Model), loss, token_batch


def recurrent_state_kept(seed: int) -> Entry:
    """An LSTM that goes on with the state of the batch before."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.inner = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCAB)
            self.state: Any = None

        def forward(self, tokens: Tensor) -> Tensor:
            made, state = self.inner(self.embed(tokens), self.state)
            self.state = tuple(one.detach() for one in state)
            return self.head(made)

    return build_seeded(seed, Model), _next_tokens, token_batch


def methods_beside_forward(seed: int) -> Entry:
    """The loss calls `encode` and `score`; there is no forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
            self.head = nn.Linear(WIDTH, WIDTH)

        def encode(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            return x

        def score(self, hidden: Tensor, targets: Tensor) -> Tensor:
            return (self.head(hidden) - targets).square().mean()

    def loss(module: Any, batch: Batch) -> Tensor:
        return module.score(module.encode(batch[0]), batch[1])

    return build_seeded(seed, Model), loss, vector_batch


def names_by_getattr(seed: int) -> Entry:
    """A wrapper that gives what it does not have from the module within."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: Tensor) -> Any:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return build_seeded(seed, lambda: Wrapper(BlockStack())), squared_error, vector_batch


def copies_impossible(seed: int) -> Entry:
    """Blocks hold a lock, and the model a generator, which cannot be copied."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                return super().forward(x)

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)
            self.numbers: Iterator[int] = (number for number in range(9))

    return build_seeded(seed, Model), squared_error, vector_batch


def blocks_with_their_own_losses(seed: int) -> Entry:
    """Greedy training: each block sees a detached input, and leaves its own loss."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.loss: Any = None

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x.detach())
            self.loss = out.square().mean(-1).sum()
            return out

    def loss(module: nn.Module, batch: Batch) -> Any:
        inputs, targets = batch
        total = (module(inputs) - targets).square().sum()
        layers: Any = module.layers
        return total + sum(layer.loss for layer in layers), len(inputs)

    return build_seeded(seed, lambda: BlockStack(Block)), loss, vector_batch


def gradient_stopped_between_blocks(seed: int) -> Entry:
    """The third block's input is detached: what comes before has no gradient at all."""

    class Model(BlockStack):
        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for number, layer in enumerate(self.layers):
                x = layer(x.detach() if number == 2 else x)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def forces_by_gradients(seed: int) -> Entry:
    """An energy and its derivative by positions, both of which are fitted: two backwards."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.run(x).square().sum(-1)
                (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return energy, forces

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        energy, forces = module(inputs)
        return (energy - targets[:, 0]).square().mean() + (forces - targets).square().mean()

    return build_seeded(seed, Model), loss, vector_batch


def gradient_penalty_in_the_loss(seed: int) -> Entry:
    """WGAN-GP's penalty: the loss takes the gradient of outputs by inputs."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        inputs = inputs.detach().requires_grad_()
        with torch.enable_grad():
            out = module(inputs)
            (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        return (out - targets).square().mean() + (slope.norm(dim=-1) - 1).square().mean()

    return build_seeded(seed, BlockStack), loss, vector_batch


def inner_steps_by_functional_call(seed: int) -> Entry:
    """MAML's manner: a step of an inner loss, and the loss of the parameters after it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = BlockStack()

        def forward(self, x: Tensor) -> Any:
            named = dict(self.inner.named_parameters())
            with torch.enable_grad():
                out = functional_call(self.inner, named, (x,))
                inner = out.square().mean(-1)
                total = inner.sum() / len(x)
                gradients = torch.autograd.grad(total, list(named.values()), create_graph=True)
            pairs = zip(named.items(), gradients, strict=True)
            stepped = {name: value - 0.1 * gradient for (name, value), gradient in pairs}
            return functional_call(self.inner, stepped, (x,))

    return build_seeded(seed, Model), squared_error, vector_batch


def scripted_blocks(seed: int) -> Entry:
    """Blocks are compiled by torch.jit.script."""
    return (
        build_seeded(seed, lambda: BlockStack(lambda: torch.jit.script(_Plain()))),
        squared_error,
        vector_batch,
    )


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


def forwards_of_instances(seed: int) -> Entry:
    """Each block has a forward of its own as an attribute, as some libraries replace it."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.forward = self._fast  # type: ignore[method-assign]

        def _fast(self, x: Tensor) -> Tensor:
            return x + torch.sigmoid(self.up(self.norm(x)))

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def buffer_made_by_the_first_forward(seed: int) -> Entry:
    """Positions are registered as a buffer when a length is seen for the first time."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            if getattr(self, "positions", None) is None or len(self.positions) < x.shape[1]:
                places = torch.arange(x.shape[1], dtype=x.dtype).sin()[:, None]
                self.register_buffer("positions", places, persistent=False)
            positions: Any = self.positions
            return super().forward(x + positions[: x.shape[1]])

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, _sequences


def numbers_counted_in_blocks(seed: int) -> Entry:
    """Annealing by a plain number that each block counts up."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps += 1
            return x + torch.tanh(self.up(x)) * (1 - 0.5**self.steps)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def frozen_until_a_step(seed: int) -> Entry:
    """The forward itself freezes blocks, and thaws them after some calls."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += self.training
            self.layers[1].requires_grad_(self.calls > 2)
            return self.run(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def penalty_of_blocks_parameters(seed: int) -> Entry:
    """The loss punishes the weights of two blocks, found by attributes."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        layers: Any = module.layers
        penalty = layers[0].up.weight.square().sum() + layers[3].up.weight.square().sum()
        return squared_error(module, batch) + 0.01 * penalty

    return build_seeded(seed, BlockStack), loss, vector_batch


def penalty_in_the_forward(seed: int) -> Entry:
    """The model's forward punishes all its own weights."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Any:
            out = self.run(x)
            return out, sum(parameter.abs().sum() for parameter in self.parameters())

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        out, penalty = module(batch[0])
        return (out - batch[1]).square().mean() + 0.01 * penalty

    return build_seeded(seed, Model), loss, vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    tied_by_a_property, parameter_made_by_the_first_forward, norm_shared_by_blocks,
    loss_with_a_running_mean, teacher_moved_by_the_forward, teacher_without_gradient,
    gradient_reversal, function_with_side_output, depth_by_own_generator, depth_by_python_random,
    iterations_by_sample, early_exit, routes_by_a_name_in_the_batch, batch_as_dataclass,
    batch_as_named_tuple, batch_as_ragged_list, blocks_return_dataclasses,
    blocks_return_named_tuples, whole_numbers_moved, old_spectral_norm, parametrized_spectral_norm,
    orthogonal_and_own_parametrization, backward_hooks_on_blocks, hooks_on_parameters,
    hooks_after_accumulation, hooks_on_activations, buffer_with_a_gradient,
    some_blocks_in_bfloat16, autocast_in_the_forward, embedding_with_sparse_gradients,
    embedding_with_max_norm, embedding_with_padding, weights_clamped_by_the_forward,
    attention_with_masks, norms_with_running_statistics, connectionist_temporal_loss,
    weighted_and_smoothed_classes, recurrent_state_kept, methods_beside_forward, names_by_getattr,
    copies_impossible, blocks_with_their_own_losses, gradient_stopped_between_blocks,
    forces_by_gradients, gradient_penalty_in_the_loss, inner_steps_by_functional_call,
    scripted_blocks, forwards_of_instances, buffer_made_by_the_first_forward,
    numbers_counted_in_blocks, frozen_until_a_step, penalty_of_blocks_parameters,
    penalty_in_the_forward,
)  # fmt: skip
