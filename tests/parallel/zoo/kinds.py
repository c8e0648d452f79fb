"""Kinds of modules that users write: several heads, contrast, codebooks, graphs, ragged batches.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

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


def several_tasks_with_learned_weights(seed: int) -> Entry:
    """A head for each task, of samples that have it, weighted by learned variances."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 1), "b": nn.Linear(WIDTH, 3)})
            self.log_variances = nn.ParameterDict(
                {name: nn.Parameter(torch.zeros(())) for name in self.heads}
            )

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.run(x)
            return {name: head(hidden) for name, head in self.heads.items()}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, variances = module(batch["x"]), module.log_variances
        terms = {
            "a": (made["a"][:, 0] - batch["a"]).square().mean(),
            "b": F.cross_entropy(made["b"], batch["b"]),
        }
        weighted = [terms[n] * torch.exp(-variances[n]) + variances[n] for n in terms]  # type: ignore[index,operator]
        return torch.stack(weighted).sum()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return {
            "x": torch.randn(samples, WIDTH, generator=drawn),
            "a": torch.randn(samples, generator=drawn),
            "b": torch.randint(3, (samples,), generator=drawn),
        }

    return build_seeded(seed, Model), loss, make


def contrast_with_learned_temperature(seed: int) -> Entry:
    """Two encoders, and each sample's pair against those of all others in the batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.images, self.words = BlockStack(), BlockStack()
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def forward(self, images: Tensor, words: Tensor) -> Tensor:
            one = F.normalize(self.images(images), dim=-1)
            other = F.normalize(self.words(words), dim=-1)
            return self.temperature.exp() * one @ other.T

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        scores = module(*batch)
        pairs = torch.arange(len(scores))
        return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2

    return build_seeded(seed, Model), loss, vector_batch


def one_encoder_for_triplets(seed: int) -> Entry:
    """A Siamese net: one stack of blocks, called for each of three inputs."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, others = batch
        anchors, near, far = module(inputs), module(inputs + 0.1 * others), module(others)
        return F.triplet_margin_loss(anchors, near, far, margin=2.0)

    return build_seeded(seed, BlockStack), loss, vector_batch


class _Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.codes[torch.cdist(x.detach(), self.codes.detach()).argmin(-1)]
        commitment = (x - codes.detach()).square().mean() + (x.detach() - codes).square().mean()
        return x + (codes - x).detach(), commitment


def codebook_straight_through(seed: int) -> Entry:
    """VQ-VAE's: the nearest codes, of which some are of no sample, and a loss of their own."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.codebook = _Codebook()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            codes, commitment = self.codebook(self.run(x))
            return self.head(codes), commitment

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        out, commitment = module(batch[0])
        return (out - batch[1]).square().mean() + 0.25 * commitment

    return build_seeded(seed, Model), loss, vector_batch


def codebook_by_running_averages(seed: int) -> Entry:
    """Codes are buffers, which each forward moves towards the samples that took them."""

    class Model(BlockStack):
        codes: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(5, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.run(x)
            taken = torch.cdist(hidden.detach(), self.codes).argmin(-1)
            codes = self.codes[taken]
            if self.training:
                with torch.no_grad():
                    for number in range(5):
                        mine = hidden[taken == number]
                        if len(mine):
                            self.codes[number].lerp_(mine.mean(0), 0.3)
            return hidden + (codes - hidden).detach() + 0.1 * hidden

    return build_seeded(seed, Model), squared_error, vector_batch


def experts_with_noise(seed: int) -> Entry:
    """Sparsely gated experts whose router's scores have noise in training."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.router(x)
            if self.training:
                scores = scores + 0.1 * torch.randn_like(scores)
            weights, chosen = scores.softmax(-1).topk(2)
            out = x
            for number, expert in enumerate(self.experts):
                share = (weights * (chosen == number)).sum(-1, keepdim=True)
                out = out + share * expert(x)
            return out

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def stochastic_depth(seed: int) -> Entry:
    """Each sample leaves a block out by chance, drawn by torch's own generator."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return super().forward(x)
            kept = (torch.rand(len(x), 1, dtype=x.dtype) < 0.8).to(x.dtype) / 0.8
            return x + kept * (super().forward(x) - x)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def translation_with_cross_attention(seed: int) -> Entry:
    """Encoder and decoder, of which each block reads what the encoder's last one returns."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            read, _ = self.attention(self.norm(x), memory, memory, need_weights=False)
            return x + torch.tanh(self.up(x + read))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.encoder = nn.ModuleList(ResidualBlock() for _ in range(2))
            self.decoder = nn.ModuleList(Reader() for _ in range(2))
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory, x = self.embed(source), self.embed(target)
            for block in self.encoder:
                memory = block(memory)
            for block in self.decoder:
                x = block(x, memory)
            return self.head(x)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        scores = module(batch["tokens"].flip(1), batch["tokens"])
        return F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten())

    return build_seeded(seed, Model), loss, token_batch


class _GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            sent = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
            nodes = nodes + torch.tanh(layer(nodes + sent))
        return self.head(nodes)


def graphs_in_one_with_edges(seed: int) -> Entry:
    """Graphs of several sizes as one: nodes, edges by nodes' numbers, and each node's graph."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch["nodes"], batch["edges"])
        sums = made.new_zeros(len(batch["y"])).index_add(0, batch["graph"], made[:, 0])
        return (sums - batch["y"]).square().mean()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        sizes = [3 + number % 2 for number in range(samples)]
        starts = torch.tensor([0, *sizes]).cumsum(0)
        rings = [
            torch.stack((torch.arange(size), (torch.arange(size) + 1) % size)) + start
            for size, start in zip(sizes, starts, strict=False)
        ]
        return {
            "nodes": torch.randn(sum(sizes), WIDTH, generator=drawn),
            "edges": torch.cat(rings, 1),
            "graph": torch.repeat_interleave(torch.arange(samples), torch.tensor(sizes)),
            "y": torch.randn(samples, generator=drawn),
        }

    return build_seeded(seed, _GraphNet), loss, make


def graphs_padded_with_masks(seed: int) -> Entry:
    """Graphs padded to one size, with dense edges, and a mask of nodes that are there."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + edges @ x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, nodes: Tensor, edges: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                nodes = layer(nodes, edges) * mask[..., None]
            return self.head(nodes).squeeze(-1).sum(1) / mask.sum(1)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch["nodes"], batch["edges"], batch["mask"]) - batch["y"]).square().mean()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        mask = (torch.arange(LENGTH)[None] < 2 + torch.arange(samples)[:, None] % 3).float()
        edges = torch.randint(2, (samples, LENGTH, LENGTH), generator=drawn).float()
        return {
            "nodes": torch.randn(samples, LENGTH, WIDTH, generator=drawn),
            "edges": edges * mask[:, None] * mask[:, :, None] / LENGTH,
            "mask": mask,
            "y": torch.randn(samples, generator=drawn),
        }

    return build_seeded(seed, Model), loss, make


def nested_tensors(seed: int) -> Entry:
    """Sequences of several lengths in one nested tensor, which no padding fills."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.run(one).mean(0) for one in x.unbind()])

    def make(drawn: torch.Generator, samples: int) -> Batch:
        some = [torch.randn(2 + n % 3, WIDTH, generator=drawn) for n in range(samples)]
        nested = torch.nested.nested_tensor(some, layout=torch.jagged)
        return nested, torch.randn(samples, WIDTH, generator=drawn)

    return build_seeded(seed, Model), squared_error, make


def keywords_and_nested_outputs(seed: int) -> Entry:
    """The forward takes keywords alone, and returns lists in dicts."""

    class Model(BlockStack):
        def forward(self, *, values: Tensor, scale: float, labels: Any = None) -> Any:
            hidden = [self.run(values), self.run(values * scale)]
            out: dict[str, Any] = {"hidden": hidden, "about": {"scale": scale}}
            if labels is not None:
                out["losses"] = [(one - labels).square().mean() for one in hidden]
            return out

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return torch.stack(module(**batch)["losses"]).sum()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return {"values": inputs, "labels": targets, "scale": 0.5}

    return build_seeded(seed, Model), loss, make


def lazy_layers(seed: int) -> Entry:
    """Layers that learn the width of their input from the first batch."""

    def build() -> nn.Module:
        layers = [nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(WIDTH), nn.Tanh()]
        return nn.Sequential(*layers, nn.LazyLinear(WIDTH))

    return build_seeded(seed, build), squared_error, vector_batch


def weights_by_a_second_net(seed: int) -> Entry:
    """A hypernetwork: another net makes the weights with which the blocks are called."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
            self.codes = nn.Parameter(torch.randn(LAYERS, 3))
            self.maker = nn.Linear(3, WIDTH * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for layer, code in zip(self.layers, self.codes, strict=True):
                made = {"up.weight": 0.1 * self.maker(code).view(WIDTH, WIDTH)}
                x = functional_call(layer, made, (x,))
            return x

    return build_seeded(seed, Model), squared_error, vector_batch


class _Reversible(torch.autograd.Function):
    """Keeps its output alone, and finds its input again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, block: nn.Module, *parameters: Tensor) -> Any:
        ctx.block = block
        with torch.no_grad():
            out = y + block(x)
        ctx.save_for_backward(x, out)
        return x.clone(), out

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_y: Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        parameters = list(ctx.block.parameters())
        with torch.enable_grad():
            made = ctx.block(x)
        mine, *others = torch.autograd.grad(made, (x, *parameters), grad_y)
        return grad_x + mine, grad_y, None, *others


def reversible_blocks(seed: int) -> Entry:
    """A function of autograd's computes each block again, from what it keeps."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ResidualBlock()

        def forward(self, x: Tensor) -> Tensor:
            one, other = x.chunk(2, -1)
            made = _Reversible.apply(one, other, self.inner, *self.inner.parameters())
            return torch.cat(made[::-1], -1)

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = torch.cat((x, x), -1)
            for layer in self.layers:
                x = layer(x)
            return self.head(x[..., :WIDTH] + x[..., WIDTH:])

    return build_seeded(seed, Model), squared_error, vector_batch


def gradients_within_the_backward(seed: int) -> Entry:
    """A function whose backward calls backward itself, which adds to the weights' gradients."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
            ctx.block = block
            ctx.save_for_backward(x)
            with torch.no_grad():
                return block(x)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                made = ctx.block(x)
            torch.autograd.backward(made, gradient)
            return x.grad, None

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ResidualBlock()

        def forward(self, x: Tensor) -> Any:
            return Again.apply(x, self.inner)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def fixed_point_layer(seed: int) -> Entry:
    """A deep equilibrium: iterations without a graph, and a hook that solves for the gradient."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            given = self.stem(x)
            with torch.no_grad():
                found = torch.zeros_like(given)
                for _ in range(8):
                    found = self.step(found, given)
            found = self.step(found, given)
            if found.requires_grad:
                begin = found.detach().requires_grad_()
                again = self.step(begin, given)

                def solve(gradient: Tensor) -> Tensor:
                    total = gradient
                    for _ in range(4):
                        (more,) = torch.autograd.grad(again, begin, total, retain_graph=True)
                        total = gradient + more
                    return total

                found.register_hook(solve)
            return self.head(found)

        def step(self, z: Tensor, x: Tensor) -> Tensor:
            for layer in self.layers:
                z = 0.3 * torch.tanh(layer(z) + x)
            return z

    return build_seeded(seed, Model), squared_error, vector_batch


def overlap_of_the_batch(seed: int) -> Entry:
    """Dice: a ratio of sums over the batch, which is no mean over samples."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        shares, wanted = module(batch[0]).sigmoid(), (batch[1] > 0).to(batch[1].dtype)
        return 1 - 2 * (shares * wanted).sum() / (shares.sum() + wanted.sum())

    return build_seeded(seed, BlockStack), loss, vector_batch


def pruned_weights(seed: int) -> Entry:
    """Masks of torch's pruning: weights are made by a hook before each forward."""

    def build() -> nn.Module:
        stack = BlockStack()
        for layer in stack.layers:
            prune.l1_unstructured(layer.up, "weight", amount=0.5)  # type: ignore[arg-type]
        return stack

    return build_seeded(seed, build), squared_error, vector_batch


def packed_sequences(seed: int) -> Entry:
    """A recurrent net over packed sequences, with their lengths in the batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=LENGTH)
            return self.head(out)

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        out = module(batch["x"], batch["lengths"])
        there = torch.arange(LENGTH)[None] < batch["lengths"][:, None]
        errors = (out - batch["y"]).square().mean(-1)
        return (errors * there).sum(), there.sum()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = _sequences(drawn, samples)
        return {"x": inputs, "y": targets, "lengths": 1 + torch.arange(samples) % LENGTH}

    return build_seeded(seed, Model), loss, make


def time_before_samples(seed: int) -> Entry:
    """Batches of (time, samples, width), as recurrent nets take them by default."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    def make(drawn: torch.Generator, samples: int) -> Batch:
        shape = (samples, 3, WIDTH)
        return torch.randn(*shape, generator=drawn), torch.randn(*shape, generator=drawn)

    return build_seeded(seed, Model), squared_error, make


MODULES: tuple[Callable[[int], Entry], ...] = (
    several_tasks_with_learned_weights, contrast_with_learned_temperature, one_encoder_for_triplets,
    codebook_straight_through, codebook_by_running_averages, experts_with_noise, stochastic_depth,
    translation_with_cross_attention, graphs_in_one_with_edges, graphs_padded_with_masks,
    nested_tensors, keywords_and_nested_outputs, lazy_layers, weights_by_a_second_net,
    reversible_blocks, gradients_within_the_backward, fixed_point_layer, overlap_of_the_batch,
    pruned_weights, packed_sequences, time_before_samples,
)  # fmt: skip
