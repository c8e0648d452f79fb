"""Adafactor over tensors that may be DTensors.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018,
algorithms 4 and 5. As in torch.optim.Adafactor, the learning rate is the upper bound of the
relative step. torch's implementation is not used: it needs operations that DTensors lack, and reads
values back from the device for each parameter.
"""

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.dtensor import is_spread, local, splits
from outpace.optim.compiled_step import CompiledStep
from outpace.optim.multi_tensor import group_parameters, step_counts
from outpace.optim.per_parameter import step_each

MEANS = ("variance", "row_var", "col_var")  # means of squares, by their names in the state


class Adafactor(torch.optim.Adafactor):
    """Adafactor with torch's settings and states; sums over sharded dimensions include all ranks.

    `compiled`: kernels of torch.compile update plain (not sharded) parameters. `together`: small
    parameters of one shape are stacked and updated as one, which is faster on a GPU. Compiled
    updates are not stacked, because Inductor fails on stacks.
    """

    def __init__(
        self, groups: Any, *, compiled: bool = False, together: bool = False, **settings: Any
    ) -> None:
        super().__init__(groups, **settings)
        self._compiled = CompiledStep(step_tensor) if compiled else None
        self._together = together

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's initial state: step count and running means of squares, all zero."""
        state = {"step": torch.zeros((), dtype=torch.float32)}
        if parameter.ndim < 2:
            return {**state, "variance": torch.zeros_like(parameter)}
        last = parameter.ndim - 1
        return {
            **state,
            "row_var": _zeros_with_size_1(parameter, last),
            "col_var": _zeros_with_size_1(parameter, last - 1),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective if parameters are sharded."""
        if not self._together:
            step_each(self, lambda parameter, _: self.initial_state(parameter), self._update_one)
            return
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            for parameter in stepped:
                if not self.state[parameter]:
                    self.state[parameter].update(self.initial_state(parameter))
            if stepped:
                self._step_in_stacks(stepped, group)

    def _step_in_stacks(self, stepped: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in stepped]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        # Sizes are global, because all ranks must stack the same parameters, whatever their shards.
        sizes = [parameter.numel() for parameter in stepped]
        kinds = [
            None if self._compiled and not is_spread(parameter) else _stacking_key(parameter, count)
            for parameter, count in zip(stepped, step_counts(torch.stack(steps)), strict=True)
        ]
        for places in group_parameters(sizes, kinds, stepped[0].device):
            if len(places) == 1:
                self._update_one(stepped[places[0]], states[places[0]], group)
            else:
                chosen = [stepped[place] for place in places]
                self._update_stacked(chosen, [states[place] for place in places], group)

    def _update_one(
        self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        weight, gradient = local(parameter), local(parameter.grad)  # type: ignore[arg-type]
        means = tuple(local(state[name]) for name in MEANS if name in state)
        numbers, constants = _step_arguments(state["step"], parameter, group)
        alike = weight.is_contiguous() and gradient.is_contiguous()
        if self._compiled is None or is_spread(parameter) or not alike:
            step_tensor(parameter, weight, gradient, means, numbers, constants)
            return
        least = constants[0]
        kind = (weight.shape[1:], weight.ndim, weight.dtype, gradient.dtype, weight.device, least)
        plain = weight.detach()
        self._compiled(kind, plain, plain, gradient, means, numbers, constants)

    def _update_stacked(
        self, parameters: list[nn.Parameter], states: list[dict[str, Any]], group: dict[str, Any]
    ) -> None:
        gradient = torch.stack([local(p.grad) for p in parameters])  # type: ignore[arg-type]
        names = [name for name in MEANS if name in states[0]]
        held = [[local(p) for p in parameters]]
        held += [[local(state[name]) for state in states] for name in names]
        weight, *means = (torch.stack(each) for each in held)
        told = _step_arguments(states[0]["step"], parameters[0], group)
        step_tensor(parameters[0], weight, gradient, tuple(means), *told)
        for into, stacked in zip(held, (weight, *means), strict=True):
            torch._foreach_copy_(into, stacked.unbind())


def _step_arguments(
    step: Tensor, parameter: Tensor, group: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[float, float, float]]:
    least = group["eps"][0] or torch.finfo(parameter.dtype).eps
    numbers = (
        step ** group["beta2_decay"],
        (step**-0.5).clamp(max=group["lr"]),
        step.new_full((), 1 - group["lr"] * group["weight_decay"]),
    )
    return numbers, (least, group["eps"][1], group["d"])


def _stacking_key(parameter: nn.Parameter, count: float) -> Hashable:
    """Return a key; parameters with equal keys can be stacked and updated as one.

    Returns None for a scalar, which is updated alone.
    """
    gradient = parameter.grad
    if gradient is None or not parameter.ndim:
        return None
    spread = (parameter.device_mesh, parameter.placements) if is_spread(parameter) else None
    return parameter.shape, parameter.dtype, gradient.dtype, count, spread


def step_tensor(
    parameter: Tensor,
    weight: Tensor,
    gradient: Tensor,
    means: tuple[Tensor, ...],
    numbers: tuple[Tensor, Tensor, Tensor],
    constants: tuple[float, float, float],
) -> None:
    """Update `weight`, this rank's part of `parameter`, in place.

    `weight` may be a stack of several parameters of one shape, along an extra first dimension.
    `means` are the running means of squared gradients: a single tensor with a mean for each
    element, or two tensors with means over columns and over rows. `numbers` are 1 − β̂₂, the upper
    bound of the relative step size, and 1 − lr · weight_decay. `constants` are Adafactor's ε₁, ε₂
    and d.
    """
    new, bound, kept = numbers
    least, smallest, threshold = constants
    rate = _root_mean_square(weight, parameter).clamp(min=smallest) * bound
    weight.mul_(kept)
    estimate = _update_means(parameter, gradient.square(), means, new, least)
    update = estimate.clamp_(min=least**2).rsqrt_().mul_(gradient)
    size = _root_mean_square(update, parameter).div_(threshold).clamp_(min=1.0)
    weight.sub_(update.mul_(rate / size))


def _update_means(
    parameter: Tensor, square: Tensor, means: tuple[Tensor, ...], new: Tensor, eps: float
) -> Tensor:
    """Update the running means of squared gradients, in place.

    `square` has the new squared gradients, which enter the means with the weight `new`. Returns an
    estimate of the running mean for each element. If `means` has means over columns and means over
    rows, this is their product, divided by the overall mean.
    """
    if len(means) == 1:
        return _blend(means[0], square, new).clone()
    rows, last = parameter.shape[-2], parameter.ndim - 1
    over_columns = (
        _sum_over_ranks(square.sum(-1, keepdim=True), parameter, last) / parameter.shape[-1]
    )
    over_rows = _sum_over_ranks(square.sum(-2, keepdim=True), parameter, last - 1) / rows
    row = _blend(means[0], over_columns, new)
    column = _blend(means[1], over_rows, new)
    mean = _sum_over_ranks(row.sum(-2, keepdim=True), parameter, last - 1) / rows
    # A matmul is avoided, because TF32 would round it.
    return (row * column).div_(mean.clamp_(min=eps))


def _blend(running: Tensor, value: Tensor, new: Tensor) -> Tensor:
    """Move `running` towards `value` by the fraction `new`, in place."""
    return running.mul_(1 - new).add_(value * new)


def _root_mean_square(part: Tensor, parameter: Tensor) -> Tensor:
    """Return the root mean square of the whole tensor of which `part` is this rank's shard.

    `part` is sharded like `parameter`, and sums include the shards of all ranks. If `part` has one
    dimension more than `parameter`, it is a stack of tensors along the first dimension, and the
    result has one value for each of them.
    """
    square = part.square()
    several = part.ndim > parameter.ndim
    total = square.sum(tuple(range(1, part.ndim)), keepdim=True) if several else square.sum()
    return (_sum_over_ranks(total, parameter, *range(parameter.ndim)) / parameter.numel()).sqrt_()


def _sum_over_ranks(value: Tensor, parameter: Tensor, *dims: int) -> Tensor:
    """Sum `value` in place over the ranks that shard `parameter` along one of `dims`."""
    if is_spread(parameter):
        for axis, placed in enumerate(parameter.placements):
            if any(splits(placed, dim) for dim in dims):
                dist.all_reduce(value, group=parameter.device_mesh.get_group(axis))
    return value


def _zeros_with_size_1(parameter: Tensor, dim: int) -> Tensor:
    """Return zeros, shaped and sharded like the parameter except for a size of 1 in `dim`."""
    shape = [1 if d == dim else size for d, size in enumerate(local(parameter).shape)]
    here = local(parameter).new_zeros(shape)
    if not is_spread(parameter):
        return here
    from torch.distributed.tensor import DTensor, Replicate

    whole_shape = [1 if d == dim else size for d, size in enumerate(parameter.shape)]
    placements = [Replicate() if splits(p, dim) else p for p in parameter.placements]
    stride = torch.empty(whole_shape, device="meta").stride()
    return DTensor.from_local(
        here, parameter.device_mesh, placements, run_check=False,
        shape=torch.Size(whole_shape), stride=stride,
    )  # fmt: skip
