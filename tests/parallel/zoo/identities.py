"""Modules and losses that find parameters and parts by object, name, class or attribute.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.common import (
    WIDTH,
    Batch,
    BlockStack,
    Entry,
    ResidualBlock,
    build_seeded,
    squared_error,
    vector_batch,
)


def _half_masks(module: nn.Module) -> dict[str, Tensor]:
    """Masks that leave out every second entry of matrices."""
    matrices = [(name, p) for name, p in module.named_parameters() if p.dim() == 2]
    masks = {name: torch.arange(p.numel()).view_as(p) % 2 for name, p in matrices}
    return {name: mask.to(torch.float32) for name, mask in masks.items()}


class _PrunedStack(BlockStack):
    """A stack whose matrices are masked once, when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.found = _half_masks(self)
        with torch.no_grad():
            for name, mask in self.found.items():
                self.get_parameter(name).mul_(mask)


def masks_by_parameter(seed: int) -> Entry:
    """RigL's: masks are kept in a dict by parameter, and applied again by each forward."""

    class Model(_PrunedStack):
        def __init__(self) -> None:
            super().__init__()
            self.masks = {self.get_parameter(name): mask for name, mask in self.found.items()}

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for parameter in self.parameters():
                    if parameter in self.masks:
                        parameter.data.mul_(self.masks[parameter].to(parameter.dtype))
            return self.run(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def masks_by_name(seed: int) -> Entry:
    """The same with a dict by name, where names that it lacks are passed by."""

    class Model(_PrunedStack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    mask = self.found.get(name)
                    if mask is not None:
                        parameter.data.mul_(mask.to(parameter.dtype))
            return self.run(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def masks_on_parameters(seed: int) -> Entry:
    """Masks are attributes of the parameters; the forward multiplies by those that are there."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.up.weight.mask = (torch.arange(WIDTH * WIDTH) % 2).view(WIDTH, WIDTH)  # type: ignore

        def forward(self, x: Tensor) -> Tensor:
            weight = self.up.weight
            mask = getattr(weight, "mask", None)
            if mask is not None:
                weight = weight * mask
            return x + torch.tanh(F.linear(self.norm(x), weight, self.up.bias))

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def masks_of_gradients(seed: int) -> Entry:
    """Fine-tuning of a part of each matrix: hooks multiply gradients by masks of the whole."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            for name, mask in _half_masks(self).items():
                kept = functools.partial(self.keep, mask)
                self.get_parameter(name).register_hook(kept)

        @staticmethod
        def keep(mask: Tensor, gradient: Tensor) -> Tensor:
            return gradient * mask.to(gradient.dtype)

    return build_seeded(seed, Model), squared_error, vector_batch


def consolidated_weights(seed: int) -> Entry:
    """Elastic weight consolidation: importances and anchors by name, in the loss's closure."""
    module = build_seeded(seed, BlockStack)
    anchors = {name: p.detach().clone() + 0.3 for name, p in module.named_parameters()}
    importances = {name: 0.1 + anchor.abs() for name, anchor in anchors.items()}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        value = squared_error(module, batch)
        for name, p in module.named_parameters():
            if name in anchors:
                drift = (p - anchors[name].to(p.dtype)).square()
                value = value + 0.1 * (importances[name].to(p.dtype) * drift).sum()
        return value

    return module, loss, vector_batch


def anchors_made_by_the_first_loss(seed: int) -> Entry:
    """FedProx: the first call of the loss keeps the weights, from which it pulls later ones."""
    anchors: dict[str, Tensor] = {}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        if not anchors:
            anchors.update({name: p.detach().clone() for name, p in module.named_parameters()})
        value = squared_error(module, batch)
        for name, p in module.named_parameters():
            value = value + 0.5 * (p - anchors[name].to(p.dtype)).square().sum()
        return value

    return build_seeded(seed, BlockStack), loss, vector_batch


def penalty_by_state_dict(seed: int) -> Entry:
    """The loss takes weights from `state_dict(keep_vars=True)`."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        weights = module.state_dict(keep_vars=True)
        norms = [w.square().sum() for name, w in weights.items() if name.endswith("weight")]
        return squared_error(module, batch) + 0.01 * torch.stack(norms).sum()

    return build_seeded(seed, BlockStack), loss, vector_batch


def penalty_by_class(seed: int) -> Entry:
    """Network slimming: the loss finds norms by their exact class, and makes them sparse."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        value = squared_error(module, batch)
        for part in module.modules():
            if type(part) is nn.LayerNorm:
                value = value + 0.1 * part.weight.abs().sum()
        return value

    return build_seeded(seed, BlockStack), loss, vector_batch


def blocks_found_by_class_name(seed: int) -> Entry:
    """The forward scales what comes from blocks that it knows by the name of their class."""

    class Model(BlockStack):
        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                scale = 1.5 if layer.__class__.__name__ == "ResidualBlock" else 1.0
                x = scale * layer(x)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def partials_of_weights(seed: int) -> Entry:
    """Functions with a weight bound to them, and a bound method of a part, are attributes."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))
            self.project = functools.partial(F.linear, weight=self.mix)
            self.end = self.head.forward

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(self.project(x))
            for layer in self.layers:
                x = layer(x)
            return self.end(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def methods_of_common_names(seed: int) -> Entry:
    """Blocks have methods that sharded modules of torch have, too: `reshard`, `unshard`."""

    class Block(ResidualBlock):
        def unshard(self, x: Tensor) -> Tensor:
            return x.flip(-1)

        def reshard(self, x: Tensor) -> Tensor:
            return 0.5 * x

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.unshard(x)) + self.reshard(x)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def attributes_of_common_names(seed: int) -> Entry:
    """Parts and numbers have names that wrappers use: module, rank, stage, device, loss, plan."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = BlockStack()
            self.stage = nn.Linear(WIDTH, WIDTH)
            self.rank, self.world_size, self.device, self.plan = 3, 7, "cpu", [1, 2]

        def loss(self, made: Tensor, wanted: Tensor) -> Tensor:
            return (made - wanted).square().mean() * self.world_size / self.rank

        def forward(self, x: Tensor) -> Tensor:
            return self.stage(self.module(x)) + sum(self.plan)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module.loss(module(batch[0]), batch[1])  # type: ignore[operator]

    return build_seeded(seed, Model), loss, vector_batch


def call_overridden(seed: int) -> Entry:
    """Blocks override `__call__`, which scales what the forward gives."""

    class Block(ResidualBlock):
        def __call__(self, x: Tensor) -> Tensor:
            return 0.8 * super().__call__(x)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def parameters_overridden(seed: int) -> Entry:
    """`parameters` gives those that are to be trained alone, as adapters' wrappers do."""

    class Model(BlockStack):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            for name, parameter in self.named_parameters(recurse=recurse):
                if "norm" not in name:
                    yield parameter

    return build_seeded(seed, Model), squared_error, vector_batch


class _ScaledParameter(nn.Parameter):
    """A parameter with a factor of its own, which every operation multiplies by."""

    factor = 2.0

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.linear:
                x, weight, *rest = arguments
                return function(x * cls.factor, weight, *rest, **(named or {}))
            return function(*arguments, **(named or {}))


def parameters_of_a_subclass(seed: int) -> Entry:
    """A weight is of a subclass of nn.Parameter that changes what `F.linear` does with it."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.up.weight = _ScaledParameter(self.up.weight.data)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def traced_by_fx(seed: int) -> Entry:
    """The module is a graph that torch.fx has traced."""
    module = build_seeded(seed, BlockStack)
    return torch.fx.symbolic_trace(module), squared_error, vector_batch


def compiled_as_a_whole(seed: int) -> Entry:
    """The module is what torch.compile gives, whose names begin with `_orig_mod.`."""
    module = torch.compile(build_seeded(seed, BlockStack), backend="eager")
    return module, squared_error, vector_batch  # type: ignore[return-value]


def copied_by_the_loss(seed: int) -> Entry:
    """First-order meta-learning: the loss trains a copy by one step, and takes its loss."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        fast = copy.deepcopy(module)
        held = [p for p in fast.parameters() if p.requires_grad]
        if not torch.is_grad_enabled():
            return squared_error(module, batch)
        slopes = torch.autograd.grad(squared_error(fast, batch), held)
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        here = dict(module.named_parameters())
        moved = {n: here[n] - 0.1 * slope for n, slope in zip(names, slopes, strict=True)}
        made = torch.func.functional_call(module, moved, (batch[0],))
        return (made - batch[1]).square().mean()

    return build_seeded(seed, BlockStack), loss, vector_batch


def weights_dropped_by_setattr(seed: int) -> Entry:
    """AWD-LSTM's: a recurrent weight is computed from a raw parameter, and set on nn.LSTM."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.raw = nn.Parameter(self.cells.weight_hh_l0.detach().clone())
            del self.cells._parameters["weight_hh_l0"]
            self.cells.weight_hh_l0 = self.raw * 1.0
            self.head = nn.Linear(WIDTH, WIDTH)
            self.set()

        def set(self) -> None:
            mask = (torch.arange(self.raw.numel()) % 3 > 0).view_as(self.raw)
            self.cells.weight_hh_l0 = self.raw * mask

        def forward(self, x: Tensor) -> Tensor:
            self.set()
            return self.head(self.cells(x)[0])

    def make(drawn: torch.Generator, samples: int) -> Batch:
        x = torch.randn(samples, 5, WIDTH, generator=drawn)
        return x, torch.randn(samples, 5, WIDTH, generator=drawn)

    return build_seeded(seed, Model), squared_error, make


def modules_swapped_by_the_forward(seed: int) -> Entry:
    """The forward sets the head that it then calls, one of several, by the batch's content."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            self.head = self.heads[int(x[0, 0] > 0)]
            return self.run(x)

    return build_seeded(seed, Model), squared_error, vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    masks_by_parameter, masks_by_name, masks_on_parameters, masks_of_gradients,
    consolidated_weights, anchors_made_by_the_first_loss, penalty_by_state_dict, penalty_by_class,
    blocks_found_by_class_name, partials_of_weights, methods_of_common_names,
    attributes_of_common_names, call_overridden, parameters_overridden, parameters_of_a_subclass,
    traced_by_fx, compiled_as_a_whole, copied_by_the_loss, weights_dropped_by_setattr,
    modules_swapped_by_the_forward,
)  # fmt: skip
