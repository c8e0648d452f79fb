"""Modules with one trap each for stages of pipelines, checkpoints, and custom losses.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. Each loss is a mean over samples, or (sum, count), so
that a batch that is cut must come to the loss and gradients of one process exactly. `MODULES` lists
entries that have to come out right in every pipeline, `REFUSED` those that may be refused.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

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


class _LeavesAux(ResidualBlock):
    """A loss of its own in `aux`, a number before the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux = (self.up(x).square().sum(-1) - 1).square().sum()
        return super().forward(x)


def aux_on_blocks(seed: int) -> Entry:
    """Blocks leave a loss on themselves, which the loss function adds up."""

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        inputs, targets = batch
        total = (module(inputs) - targets).square().sum()
        layers: Any = module.layers
        return total + 0.1 * sum(layer.aux for layer in layers), len(inputs)

    return build_seeded(seed, lambda: BlockStack(_LeavesAux)), loss, vector_batch


class _InnerGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        self.balance = {"loss": shares.square().sum(), "shares": [shares.detach()]}
        return shares.amax(-1, keepdim=True)


class _Gated(ResidualBlock):
    def __init__(self) -> None:
        super().__init__()
        self.gate = _InnerGate()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x)) * self.gate(x)


class _AddsBalance(BlockStack):
    def forward(self, x: Tensor) -> Any:
        out = self.run(x)
        gates = [layer.gate for layer in self.layers]  # type: ignore[union-attr]
        extra = sum(gate.balance["loss"] for gate in gates)  # type: ignore[index,union-attr,misc]
        return out, extra, sum(gate.balance["shares"][0].sum() for gate in gates)  # type: ignore[index,union-attr,misc]


def aux_in_dicts_of_inner_modules(seed: int) -> Entry:
    """Routers deep in blocks leave dicts, None before; the model's own forward adds them up."""

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        inputs, targets = batch
        out, extra, shares = module(inputs)
        return (out - targets).square().sum() + 0.3 * extra + 0.01 * shares, len(inputs)

    return build_seeded(seed, lambda: _AddsBalance(_Gated)), loss, vector_batch


class _KeepsActivations(ResidualBlock):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        hidden = torch.tanh(self.up(x))
        self.kept.append(hidden)
        return x + hidden


def activation_penalty(seed: int) -> Entry:
    """Blocks keep activations in lists that they clear, and the loss punishes them."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        total = (module(inputs) - targets).square().mean()
        layers: Any = module.layers
        return total + 0.1 * sum(kept.square().mean() for layer in layers for kept in layer.kept)

    return build_seeded(seed, lambda: BlockStack(_KeepsActivations)), loss, vector_batch


def loss_by_closure(seed: int) -> Entry:
    """The loss refers to the module that it was made with, not to the one that it is given."""
    module: Any = build_seeded(seed, lambda: BlockStack(_LeavesAux))

    def loss(given: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        inputs, targets = batch
        total = (given(inputs) - targets).square().sum()
        return total + 0.1 * sum(layer.aux for layer in module.layers), len(inputs)

    return module, loss, vector_batch


class _Checkpointed(BlockStack):
    def __init__(self, reentrant: bool, sequential: bool = False) -> None:
        super().__init__()
        self.reentrant, self.sequential = reentrant, sequential

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.sequential:
            layers = list(self.layers)
            x = checkpoint_sequential(layers, 2, x, use_reentrant=self.reentrant)
        else:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpoints_in_forward(seed: int) -> Entry:
    """The model's forward calls each block through torch's checkpoint."""
    return build_seeded(seed, lambda: _Checkpointed(False)), squared_error, vector_batch


def reentrant_checkpoints_in_forward(seed: int) -> Entry:
    """The same with use_reentrant=True, whose function runs without a graph."""
    return build_seeded(seed, lambda: _Checkpointed(True)), squared_error, vector_batch


def checkpoints_over_several_blocks(seed: int) -> Entry:
    """Segments of blocks are one checkpoint each, so that a stage ends inside of one."""
    return build_seeded(seed, lambda: _Checkpointed(False, True)), squared_error, vector_batch


class _Transposing(ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(self.up(x.transpose(0, 1).contiguous().transpose(0, 1)))
        return (x + mixed).transpose(1, 2)


class _Sequences(BlockStack):
    def forward(self, x: Tensor) -> Any:
        return self.run(x.unsqueeze(1) + x.unsqueeze(2))


def blocks_that_transpose(seed: int) -> Entry:
    """Blocks whose outputs, and whose inputs' gradients, are not in the order of their memory."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return (module(inputs).mean(1) - targets).square().mean()

    return build_seeded(seed, lambda: _Sequences(_Transposing)), loss, vector_batch


class _Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor, count: int) -> Any:
        state = torch.tanh(self.a(x) + state)
        return {"x": x + self.b(state), "state": state, "rest": (None, count + 1)}


class _TwoStreams(BlockStack):
    def __init__(self) -> None:
        super().__init__(_Pairs)

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        state, count = torch.zeros_like(x), 0
        for layer in self.layers:
            found = layer(x, state, count)
            x, state, count = found["x"], found["state"], found["rest"][1]
        return self.head(x + state) / count


def blocks_that_return_dicts(seed: int) -> Entry:
    """Two streams and a number go from block to block, in a dict."""
    return build_seeded(seed, _TwoStreams), squared_error, vector_batch


class _MovingStem(BlockStack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        hidden = self.stem(x)
        if self.training:
            self.mean: Tensor = self.mean.lerp(hidden.detach().mean(0), 0.1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def moving_buffer_in_stem(seed: int) -> Entry:
    """A running average of the stem's output, which middle stages compute of NaN."""
    return build_seeded(seed, _MovingStem), squared_error, vector_batch


class _OwnLoss(nn.Module):
    """(logits, loss), with label smoothing and a term of the logits, in nanoGPT's manner."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.2)
        return logits, loss + 0.1 * logits.square().mean()


def own_loss_with_terms(seed: int) -> Entry:
    """The module returns its own loss, which is not the cross-entropy of its logits."""
    return build_seeded(seed, _OwnLoss), None, token_batch


class _ListsOfLists(nn.Module):
    """x-transformers' manner: an outer list of lists of a norm and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList((nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in self.layers:  # type: ignore[misc]
            x = x + torch.tanh(layer(norm(x)))
        return x


def lists_of_lists(seed: int) -> Entry:
    """The members of the largest ModuleList are lists, which nobody calls."""
    return build_seeded(seed, _ListsOfLists), squared_error, vector_batch


def norm_of_all_parameters(seed: int) -> Entry:
    """The loss goes through the parameters of all blocks."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in module.parameters())
        return squared_error(module, batch) + 0.01 * penalty

    return build_seeded(seed, BlockStack), loss, vector_batch


class _AppendsToArgument(ResidualBlock):
    def forward(self, x: Tensor, found: list[Tensor] | None = None) -> Tensor:
        if found is not None:
            found.append(self.up(x).square().mean())
        return super().forward(x)


class _Collects(BlockStack):
    def forward(self, x: Tensor) -> Any:
        found: list[Tensor] = []
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, found)
        return self.head(x), torch.stack(found).sum()


def lists_as_arguments(seed: int) -> Entry:
    """Blocks append to a list that they are given, on whichever stage they are."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        out, extra = module(inputs)
        return (out - targets).square().mean() + extra

    return build_seeded(seed, lambda: _Collects(_AppendsToArgument)), loss, vector_batch


class _ReadsState(ResidualBlock):
    def forward(self, x: Tensor, *, state: dict[str, Any]) -> Tensor:
        out: Tensor = super().forward(x + 0.1 * sum(state["past"]))
        state["past"].append(out)
        state["calls"] = state.get("calls", 0) + 1
        return out / state["calls"]


class _Dense(BlockStack):
    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        state: dict[str, Any] = {"past": [x]}
        for layer in self.layers:
            x = layer(x, state=state)
        return self.head(x + sum(state["past"]) / state["calls"])


def state_as_argument(seed: int) -> Entry:
    """Blocks read and extend a dict, and a list in it, that they are given by name."""
    return build_seeded(seed, lambda: _Dense(_ReadsState)), squared_error, vector_batch


class _Hooked(BlockStack):
    """Collects what layers inside of blocks return by hooks, as transformers' routers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for layer in self.layers:
            layer.up.register_forward_hook(self._see)  # type: ignore[union-attr,operator]

    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> Any:
        self.seen.clear()
        out = self.run(x)
        return out, torch.stack([seen.square().mean() for seen in self.seen]).sum()


def hooks_inside_of_blocks(seed: int) -> Entry:
    """The model adds up what hooks collect inside of blocks."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        out, extra = module(inputs)
        return (out - targets).square().mean() + extra

    return build_seeded(seed, _Hooked), loss, vector_batch


def faint_hooks_inside_of_blocks(seed: int) -> Entry:
    """The same with a weight by which the loss changes less than it is rounded."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        out, extra = module(inputs)
        return (out - targets).square().mean() + 1e-9 * extra

    return build_seeded(seed, _Hooked), loss, vector_batch


def parameters_in_a_ring(seed: int) -> Entry:
    """Each parameter is added in two places, with another one in each: a split backward groups."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.shifts = nn.ParameterList(torch.randn(WIDTH) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            following = [*self.shifts[1:], self.shifts[0]]
            for shift, other in zip(self.shifts, following, strict=True):
                x = torch.tanh(x + (shift + other))
            return super().forward(x)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def parts_used_again_in_a_block(seed: int) -> Entry:
    """A block applies its MLP and its scale to what they returned: a split backward groups."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            start = self.scale.expand(len(x), -1)
            state = start + self.norm(x + start).softmax(-1)
            return super().forward(x) + state * self.norm(x * state).sigmoid()

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


MODULES = (
    aux_on_blocks,
    aux_in_dicts_of_inner_modules,
    activation_penalty,
    loss_by_closure,
    checkpoints_in_forward,
    reentrant_checkpoints_in_forward,
    checkpoints_over_several_blocks,
    blocks_that_transpose,
    blocks_that_return_dicts,
    moving_buffer_in_stem,
    own_loss_with_terms,
    parameters_in_a_ring,
    parts_used_again_in_a_block,
)
REFUSED = (
    norm_of_all_parameters,
    lists_as_arguments,
    state_as_argument,
    hooks_inside_of_blocks,
    faint_hooks_inside_of_blocks,
    lists_of_lists,
)
