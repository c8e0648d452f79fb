"""Adafactor over tensors that may be spread over ranks.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018,
algorithms 4 and 5, in the form of torch.optim.Adafactor: the learning rate is the upper bound of
the relative step. torch's own asks DTensors for operations that they do not have, and reads numbers
back from the device for each parameter.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.spread import is_spread, local, splits
from outpace.optim.compiled import CompiledStep
from outpace.optim.each import step_each

MEANS = ("variance", "row_var", "col_var")  # of squares, by their names in a state


class Adafactor(torch.optim.Adafactor):
    """torch's settings and states; sums over rows and columns are over the ranks that have them.

    `compiled`: parameters that are not spread are stepped by kernels that torch.compile makes.
    """

    def __init__(self, groups: Any, *, compiled: bool = False, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._compiled = CompiledStep(step_tensor) if compiled else None

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Zeros: means of squares over the columns and over the rows of a matrix."""
        state = {"step": torch.zeros((), dtype=torch.float32)}
        if parameter.ndim < 2:
            return {**state, "variance": torch.zeros_like(parameter)}
        last = parameter.ndim - 1
        return {
            **state,
            "row_var": _zeros_without(parameter, last),
            "col_var": _zeros_without(parameter, last - 1),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective where tensors are spread."""
        step_each(self, lambda parameter, _: self.initial_state(parameter), self._update)

    def _update(
        self, parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        least = group["eps"][0] or torch.finfo(parameter.dtype).eps
        weight, gradient = local(parameter), local(parameter.grad)  # type: ignore[arg-type]
        means = tuple(local(state[name]) for name in MEANS if name in state)
        numbers = (
            state["step"] ** group["beta2_decay"],
            (state["step"] ** -0.5).clamp(max=group["lr"]),
            state["step"].new_full((), 1 - group["lr"] * group["weight_decay"]),
        )
        constants = (least, group["eps"][1], group["d"])
        alike = weight.is_contiguous() and gradient.is_contiguous()
        if self._compiled is None or is_spread(parameter) or not alike:
            step_tensor(parameter, weight, gradient, means, numbers, constants)
            return
        kind = (weight.shape[1:], weight.ndim, weight.dtype, gradient.dtype, weight.device, least)
        plain = weight.detach()
        self._compiled(kind, plain, plain, gradient, means, numbers, constants)


def step_tensor(
    parameter: Tensor,
    weight: Tensor,
    gradient: Tensor,
    means: tuple[Tensor, ...],
    numbers: tuple[Tensor, Tensor, Tensor],
    constants: tuple[float, float, float],
) -> None:
    """Update this rank's part of a parameter, `weight`, in place.

    `means` are the running means of squares: of all elements, or over columns and over rows.
    `numbers`: 1 − β̂₂, the bound of the relative step, what is left of a weight when it decays.
    `constants`: ε₁, ε₂ and d of the paper.
    """
    new, bound, kept = numbers
    least, smallest, threshold = constants
    rate = _root_mean_square(weight, parameter).clamp(min=smallest) * bound
    weight.mul_(kept)
    estimate = _estimate(parameter, gradient.square(), means, new, least)
    update = estimate.clamp_(min=least**2).rsqrt_().mul_(gradient)
    size = _root_mean_square(update, parameter).div_(threshold).clamp_(min=1.0)
    weight.sub_(update.mul_(rate / size))


def _estimate(
    parameter: Tensor, square: Tensor, means: tuple[Tensor, ...], new: Tensor, least: float
) -> Tensor:
    """Of the squares' running mean, from its means over rows and over columns."""
    if len(means) == 1:
        return _blend(means[0], square, new).clone()
    rows, last = parameter.shape[-2], parameter.ndim - 1
    over_columns = _summed(square.sum(-1, keepdim=True), parameter, last) / parameter.shape[-1]
    over_rows = _summed(square.sum(-2, keepdim=True), parameter, last - 1) / rows
    row = _blend(means[0], over_columns, new)
    column = _blend(means[1], over_rows, new)
    mean = _summed(row.sum(-2, keepdim=True), parameter, last - 1) / rows
    return (row @ column).div_(mean.clamp_(min=least))


def _blend(running: Tensor, value: Tensor, new: Tensor) -> Tensor:
    """`running`, of which the share `new` becomes `value`; in place."""
    return running.mul_(1 - new).add_(value * new)


def _root_mean_square(part: Tensor, of: Tensor) -> Tensor:
    """Of all parts of a tensor that is spread as `of` is."""
    return (_summed(part.square().sum(), of, *range(of.ndim)) / of.numel()).sqrt_()


def _summed(value: Tensor, of: Tensor, *dims: int) -> Tensor:
    """`value` added up over the ranks that `of` is split over along one of `dims`; in place."""
    if is_spread(of):
        for axis, placed in enumerate(of.placements):
            if any(splits(placed, dim) for dim in dims):
                dist.all_reduce(value, group=of.device_mesh.get_group(axis))
    return value


def _zeros_without(parameter: Tensor, dim: int) -> Tensor:
    """Zeros of the parameter's shape with 1 in `dim`, spread as it is along the others."""
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
