"""Modules with one trap each for strategies that reduce gradients over data-parallel ranks.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. Each loss is a mean over samples, or (sum, count), so
that a batch that is cut over ranks must come to the loss and gradients of one process exactly.
`MODULES` lists all entries.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.common import WIDTH, Batch, Entry, squared_error, vector_batch


def _routed(drawn: torch.Generator, samples: int) -> Batch:
    """Column 0 is 0 in the first half of a batch and 1 in the second: ranks see one kind each."""
    inputs, targets = vector_batch(drawn, samples)
    inputs[:, 0] = (torch.arange(samples) >= samples // 2).float()
    return inputs, targets


def _on_some(block: nn.Module, x: Tensor, chosen: Tensor) -> Tensor:
    """A residual block on chosen samples; not called where none is."""
    at = chosen.nonzero()[:, 0]
    return x.index_add(0, at, torch.tanh(block(x[at])).to(x.dtype)) if len(at) else x


class _Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=n > 0) for n in range(experts))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        for number, expert in enumerate(self.experts):
            x = _on_some(expert, x, kind == number)
        return x


class _Routed(nn.Module):
    """Blocks that are given each sample's kind."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kind = x[:, 0].long()
        for block in self.blocks:
            x = block(x, kind)
        return self.head(x)


def experts_without_tokens(seed: int) -> Entry:
    """Each rank uses one of two experts of a block; a third is used by nobody.

    Experts of equal size that are reduced in the order of those that have a gradient are taken for
    each other, and the third must keep its weights under weight decay.
    """
    torch.manual_seed(seed)
    return _Routed([_Experts(3), _Experts(3)]), squared_error, _routed


class _Dropped(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kind = x[:, 0]
        x = self.stem(x)
        for number, layer in enumerate(self.layers):
            if number % 2:
                x = _on_some(layer, x, kind == number // 2)
            elif number < len(self.layers) - 1:
                x = x + torch.tanh(layer(x))
        return self.head(x)


def layers_dropped_by_rank(seed: int) -> Entry:
    """Of five layers two are for one kind of sample each, and the last for none.

    A rank without such samples does not call the layer, whose parameters others gather.
    """
    torch.manual_seed(seed)
    return _Dropped(5), squared_error, _routed


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kind = x[:, 0]
        out = x.new_zeros(x.shape)
        for number, chosen in ((3, kind == 1), (0, kind == 0), (2, kind == 0), (1, kind == 1)):
            at = chosen.nonzero()[:, 0]
            if len(at):
                out = out.index_add(0, at, self.branches[number](x[at]).to(x.dtype))
        return out


def branches_on_raw_inputs(seed: int) -> Entry:
    """Ranks take different branches, in no order, on inputs that need no gradient."""
    torch.manual_seed(seed)
    return _Branches(), squared_error, _routed


class _Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kind = x[:, 0]
        for number in (2, 2, 0, 1, 0):
            x = x + torch.tanh(self.layers[number](x))
        return _on_some(self.layers[1], x, kind == 1)


def blocks_called_several_times(seed: int) -> Entry:
    """A recurrence over blocks in no order, at the end of which one rank calls one more."""
    torch.manual_seed(seed)
    return _Repeated(), squared_error, _routed


class _LeftOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kind = x[0, 0]
        hidden = self.layers[0](x)
        beside, out = self.layers[1](hidden), self.layers[2](hidden)
        return out + (beside.detach() if kind == 1 else beside)


def output_left_out_by_a_rank(seed: int) -> Entry:
    """All ranks call all blocks, but one leaves the output of one out of the backward.

    Its gradients are due at another place of the backward than the others'. One process over the
    whole batch sees the first kind only.
    """
    torch.manual_seed(seed)
    return _LeftOut(), squared_error, _routed


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.mask_token = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def pooler_never_used(seed: int) -> Entry:
    """A pooler and a mask token that no forward uses, as in many encoders."""
    torch.manual_seed(seed)
    return _Heads(), squared_error, vector_batch


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.bias = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.logit_scale.exp() + self.bias


def parameters_without_dimension(seed: int) -> Entry:
    """CLIP's `logit_scale`, which has no dimension to split."""
    torch.manual_seed(seed)
    return _Scaled(), squared_error, vector_batch


class _Filter(nn.Module):
    """A product in the frequency domain by complex numbers, scaled by one in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)
        return self.mix((filtered * self.scale).to(x.dtype))


def complex_and_float64_parameters(seed: int) -> Entry:
    """Three dtypes in a block, one of them complex, as in spectral layers."""
    torch.manual_seed(seed)
    return nn.Sequential(_Filter(), _Filter()), squared_error, vector_batch


def old_weight_norm(seed: int) -> Entry:
    """`nn.utils.weight_norm`: `weight` is a tensor with a history, made anew in each forward."""
    torch.manual_seed(seed)
    layers = [nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*layers), squared_error, vector_batch


def parametrized_weight_norm(seed: int) -> Entry:
    """The same as a parametrization."""
    torch.manual_seed(seed)
    norm = nn.utils.parametrizations.weight_norm
    layers: list[nn.Module] = [norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*layers), squared_error, vector_batch


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * (1 - 0.5**self.calls)


def buffer_counts_calls(seed: int) -> Entry:
    """An integer buffer that the forward changes and uses: recomputing must not count again."""
    torch.manual_seed(seed)
    return _Counting(), squared_error, vector_batch


class _Averaging(nn.Module):
    """Divides by a running average, which it moves, and counts in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.average: Tensor
        self.calls: Tensor
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x)) * self.scale
        if self.training:
            self.average.mul_(0.9).add_(y.detach().abs().mean(0), alpha=0.1)
            self.calls = self.calls + 1
        return x + y / (self.average + 0.1 / self.calls.clamp(min=1))


def running_averages_in_the_forward(seed: int) -> Entry:
    """Running averages of a rank's own samples, by which the forward divides.

    What one process would have of the whole batch differs by construction: rank 0's count.
    """
    torch.manual_seed(seed)
    return nn.Sequential(*[_Averaging() for _ in range(3)]), squared_error, vector_batch


class _Uncounted(nn.Module):
    """Moves buffers in ways of which torch's versions of tensors do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.average: Tensor
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        if self.training:
            self.average.data.mul_(0.9).add_(y.detach().abs().mean(0), alpha=0.1)
        y = F.batch_norm(y / self.average, self.mean, self.variance, training=self.training)
        return x + y * self.average


def buffers_moved_without_a_version(seed: int) -> Entry:
    """Running averages that fused batch normalisation and `.data` move; rank 0's count."""
    torch.manual_seed(seed)
    return nn.Sequential(*[_Uncounted() for _ in range(3)]), squared_error, vector_batch


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layers[1].bias = self.layers[0].bias
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def tied_across_blocks(seed: int) -> Entry:
    """A head tied to the embedding, and a bias that two blocks share."""
    torch.manual_seed(seed)
    return _Tied(), squared_error, vector_batch


def one_block_repeated(seed: int) -> Entry:
    """ALBERT's sharing: one block that is in the list four times."""
    torch.manual_seed(seed)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(*[block] * 4, nn.Linear(WIDTH, WIDTH)), squared_error, vector_batch


def frozen_beside_trained(seed: int) -> Entry:
    """A frozen stem, a frozen block, and blocks of which the weights are frozen."""
    torch.manual_seed(seed)
    module = _Dropped(4)
    module.stem.requires_grad_(False)
    module.layers[0].requires_grad_(False)
    module.layers[2].weight.requires_grad_(False)
    return module, squared_error, _routed


def _penalised(module: nn.Module, batch: Batch) -> Tensor:
    weights = sum(p.square().sum() for p in module.parameters() if p.dim() > 1)
    error = squared_error(module, batch)
    norms = sum(p.norm() for name, p in module.named_parameters() if name.endswith("weight"))
    return error + 1e-2 * weights + 1e-3 * norms


def penalty_of_parameters(seed: int) -> Entry:
    """A loss that goes through `module.parameters()`, before the forward and after it."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]), _penalised, vector_batch


class _ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _images(drawn: torch.Generator, samples: int) -> Batch:
    inputs = torch.randn(samples, 3, 5, 5, generator=drawn)
    return inputs, torch.randn(samples, 3, 5, 5, generator=drawn)


def parameters_not_contiguous(seed: int) -> Entry:
    """Convolutions in channels-last, whose weights are not contiguous."""
    torch.manual_seed(seed)
    return _ChannelsLast(), squared_error, _images


class _LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(_Experts(2) for _ in range(2))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, batch: Batch) -> Tensor:
        tokens, targets, kind = batch
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = block(x, kind)
        return F.cross_entropy(self.head(x), targets)


def _classes(drawn: torch.Generator, samples: int) -> Batch:
    tokens = torch.randint(20, (samples, 4), generator=drawn)
    kind = (torch.arange(samples) >= samples // 2).long()
    return tokens, torch.randint(20, (samples,), generator=drawn), kind


def experts_with_their_own_loss(seed: int) -> Entry:
    """The module returns its loss; experts see the samples of one rank each."""
    torch.manual_seed(seed)
    return _LossInside(), lambda module, batch: module(batch), _classes


MODULES: tuple[Callable[[int], Entry], ...] = (
    experts_without_tokens,
    layers_dropped_by_rank,
    branches_on_raw_inputs,
    blocks_called_several_times,
    pooler_never_used,
    parameters_without_dimension,
    complex_and_float64_parameters,
    old_weight_norm,
    parametrized_weight_norm,
    buffer_counts_calls,
    tied_across_blocks,
    one_block_repeated,
    frozen_beside_trained,
    penalty_of_parameters,
    parameters_not_contiguous,
    experts_with_their_own_loss,
)

# Whose buffers are of the samples that a rank has seen: equal to a process with rank 0's buffers.
RUNNING: tuple[Callable[[int], Entry], ...] = (
    running_averages_in_the_forward,
    buffers_moved_without_a_version,
)
# What ZeRO-2 and ZeRO-3 refuse in the midst of a step.
REFUSED: tuple[Callable[[int], Entry], ...] = (output_left_out_by_a_rank,)
