"""Modules with more in the backward than autograd's derivatives of the loss.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.common import (
    Batch,
    BlockStack,
    Entry,
    ResidualBlock,
    build_seeded,
    squared_error,
    vector_batch,
)


class _WithLoss(torch.autograd.Function):
    """Give the first argument, and let the backward add a gradient of one to the second."""

    @staticmethod
    def forward(context: Any, x: Tensor, more: Tensor) -> Tensor:
        context.dtype = more.dtype
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, torch.ones((), dtype=context.dtype)


class _LossInBackward(ResidualBlock):
    """DeepSeek's way: an auxiliary loss that is in no loss value, only in the gradients."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return _WithLoss.apply(made, 0.05 * made.square().mean())  # type: ignore[no-any-return]


def losses_in_the_backward(seed: int) -> Entry:
    """Blocks add the gradient of an auxiliary loss, whatever the loss is scaled by."""
    return build_seeded(seed, lambda: BlockStack(_LossInBackward)), squared_error, vector_batch


def losses_in_the_backward_with_counts(seed: int) -> Entry:
    """The same beside a loss of a sum and a number."""

    def loss(module: nn.Module, batch: Batch) -> Any:
        errors = (module(batch[0]) - batch[1]).square()
        return errors.sum(), errors.numel()

    return build_seeded(seed, lambda: BlockStack(_LossInBackward)), loss, vector_batch


class _StateOnClass(torch.autograd.Function):
    """Keep what the backward needs on the class, where the next forward writes over it."""

    last: ClassVar[Tensor]

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        _StateOnClass.last = torch.where(x > 0, 1.0, 0.1)
        return x * _StateOnClass.last

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * _StateOnClass.last


def function_with_state_on_its_class(seed: int) -> Entry:
    """A leaky ReLU by hand, used once, whose mask is on its class and not in the context."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            x = _StateOnClass.apply(self.stem(x))
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def state_for_the_backward_on_blocks(seed: int) -> Entry:
    """Blocks keep their input for a hook of the backward, which scales gradients by its norm."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(())
            self.register_full_backward_hook(self.scale)

        @staticmethod
        def scale(module: Any, given: Any, made: Any) -> Any:
            return (given[0] / (1 + module.kept.norm()),)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = x.detach()
            return super().forward(x)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def hooks_of_the_whole(seed: int) -> Entry:
    """Hooks of the module itself: inputs scaled before, outputs after, gradients behind."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))
            self.register_forward_hook(lambda module, given, made: made * 0.7)
            self.register_full_backward_pre_hook(lambda module, made: (made[0] * 0.5,))

    return build_seeded(seed, Model), squared_error, vector_batch


def gradients_of_unit_length(seed: int) -> Entry:
    """Hooks of parameters divide gradients by their norms."""

    def normalise(gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-3)

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            for parameter in self.parameters():
                parameter.register_hook(normalise)

    return build_seeded(seed, Model), squared_error, vector_batch


def activations_with_clipped_gradients(seed: int) -> Entry:
    """Hooks of activations clip their gradients by value."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            if made.requires_grad:
                made.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return made

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def optimizer_in_the_backward(seed: int) -> Entry:
    """Each parameter is updated as soon as its gradient is there, which is then dropped."""

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(0.05 * parameter.grad)  # type: ignore[operator]
        parameter.grad = None

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(update)

    return build_seeded(seed, Model), squared_error, vector_batch


class _AddsToGradient(torch.autograd.Function):
    """A matmul that adds its weight's gradient to `weight.grad` itself."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x)
        context.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = context.saved_tensors
        weight = context.weight
        slope = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        weight.grad = slope if weight.grad is None else weight.grad + slope
        return gradient @ weight, None


def gradients_added_by_hand(seed: int) -> Entry:
    """A fused matmul accumulates its weight's gradient in its backward, and gives none."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            made = _AddsToGradient.apply(self.norm(x), self.up.weight)
            return x + torch.tanh(made + self.up.bias)  # type: ignore[operator]

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


class _Adjoint(torch.autograd.Function):
    """Euler's steps of an equation, solved backwards in the backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, field: nn.Module, *parameters: Tensor) -> Tensor:
        context.field, context.parameters = field, parameters
        with torch.no_grad():
            for _ in range(3):
                x = x + 0.1 * field(x)
        context.save_for_backward(x)
        return x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = context.saved_tensors
        sums = [torch.zeros_like(one) for one in context.parameters]
        for _ in range(3):
            with torch.enable_grad():
                start = x.detach().requires_grad_()
                made = context.field(start)
                slopes = torch.autograd.grad(made, (start, *context.parameters), 0.1 * gradient)
            x = x - 0.1 * made.detach()
            gradient = gradient + slopes[0]
            sums = [a + b for a, b in zip(sums, slopes[1:], strict=True)]
        return gradient, None, *sums


class _Equation(nn.Module):
    """A block that follows the field of a net for some time, with an adjoint backward."""

    def __init__(self) -> None:
        super().__init__()
        self.field = ResidualBlock()

    def forward(self, x: Tensor) -> Tensor:
        return _Adjoint.apply(x, self.field, *self.field.parameters())  # type: ignore


def equations_by_adjoints(seed: int) -> Entry:
    """Neural differential equations: a Function is given a block's parameters beside its input."""
    return build_seeded(seed, lambda: BlockStack(_Equation)), squared_error, vector_batch


def weights_within_checkpoints(seed: int) -> Entry:
    """Checkpoints of both kinds, one in the other, over functions that reach for parameters."""

    class Block(ResidualBlock):
        def inner(self, x: Tensor) -> Tensor:
            return torch.tanh(self.up(x))

        def outer(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.inner, self.norm(x), use_reentrant=True)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.outer, x, use_reentrant=False)  # type: ignore[no-any-return]

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def gradients_of_tasks_projected(seed: int) -> Entry:
    """PCGrad: gradients of two tasks are projected in the loss, and given by a surrogate."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch[0])
        tasks = (made - batch[1]).square().mean(), (made + batch[1]).abs().mean()
        value = torch.stack(tasks).sum()
        if not torch.is_grad_enabled():
            return value
        held = [p for p in module.parameters() if p.requires_grad]
        first, second = (torch.autograd.grad(one, held, retain_graph=True) for one in tasks)
        inner = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        size = sum(a.square().sum() for a in first) + 1e-6
        slopes = [b - inner / size * a + a for a, b in zip(first, second, strict=True)]
        surrogate = sum((p * s.detach()).sum() for p, s in zip(held, slopes, strict=True))
        return value.detach() + surrogate - surrogate.detach()

    return build_seeded(seed, BlockStack), loss, vector_batch


def output_penalised_by_its_slope(seed: int) -> Entry:
    """R1: the squared gradient of outputs by inputs, with its graph, every time."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs = batch[0].detach().requires_grad_()
        with torch.enable_grad():
            made = module(inputs)
            (slope,) = torch.autograd.grad(made.sum(), inputs, create_graph=True)
        penalty = slope.square().sum(-1).mean()
        return (made - batch[1]).square().mean() + 0.5 * penalty

    return build_seeded(seed, BlockStack), loss, vector_batch


def features_by_hooks(seed: int) -> Entry:
    """Hooks of blocks collect what blocks make in a list of the loss's closure."""
    collected: list[Tensor] = []

    def build() -> nn.Module:
        module = BlockStack()
        for layer in module.layers:
            layer.register_forward_hook(lambda part, given, made: collected.append(made))
        return module

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        collected.clear()
        value = squared_error(module, batch)
        for one in collected:
            value = value + 0.1 * one.square().mean()
        return value

    return build_seeded(seed, build), loss, vector_batch


_AUXILIARY: list[Tensor] = []


def losses_in_a_global_list(seed: int) -> Entry:
    """Blocks append losses to a list of the file, which the loss empties."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            _AUXILIARY.append(0.1 * made.square().mean())
            return made

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        value = squared_error(module, batch)
        for one in _AUXILIARY:
            value = value + one
        _AUXILIARY.clear()
        return value

    return build_seeded(seed, lambda: BlockStack(Block)), loss, vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    losses_in_the_backward, losses_in_the_backward_with_counts, function_with_state_on_its_class,
    state_for_the_backward_on_blocks, hooks_of_the_whole, gradients_of_unit_length,
    activations_with_clipped_gradients, optimizer_in_the_backward, gradients_added_by_hand,
    equations_by_adjoints, weights_within_checkpoints, gradients_of_tasks_projected,
    output_penalised_by_its_slope, features_by_hooks, losses_in_a_global_list,
)  # fmt: skip
