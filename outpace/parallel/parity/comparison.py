"""Comparison of two computations of a user's module: tolerances and differences.

Used by the check before the first step (first_batch.py), by a pipeline's inspection with its first
micro-batch (custom/pipeline_inspection.py) and by `outpace.verify`. docs/concepts/parity.md gives
the reasons for the tolerances.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.nn.dtensor import local, split_rows
from outpace.parallel.deferred_init import part_of
from outpace.parallel.parity.split_messages import SPLIT_LOSS, explain_parts
from outpace.records.errors import first_names
from outpace.records.pipelines import Schedule
from outpace.records.plan import Plan

# Number of random weights of a projection, repeated for larger gradients. It is prime, so equal
# rows get different weights.
_WEIGHTS = 8_191
_ROWS = 2_048  # rows of a gradient multiplied by the weights at once: 64 MiB in fp32

Taker = Callable[[str, Tensor], None]  # called with a parameter's name and its gradient

MISSING = "is missing, but exists in one process"


@dataclass(frozen=True)
class ComparisonLimits:
    """Tolerances for comparing two computations at a given precision.

    All limits are relative. A tensor may differ by `relative` times its scale, and its projection
    by `projection` times its scale. Each scale is at least `floor` times the largest scale of all
    tensors, because gradients of many samples may cancel. `loss` applies to sums of losses, and
    `micro_loss` to the loss of one micro-batch. Splitting the batch causes a warning if it changes
    the loss by more than `cut`.
    """

    precision: str
    relative: float
    floor: float
    projection: float
    loss: float
    micro_loss: float
    cut: float


DOUBLE = ComparisonLimits("fp64", 1e-9, 1e-6, projection=1e-6, loss=1e-9, micro_loss=1e-9, cut=1e-9)
# `relative` allows for modules that always compute in fp32.
SINGLE = ComparisonLimits("fp32", 3e-4, 1e-2, projection=0.02, loss=1e-5, micro_loss=1e-5, cut=1e-5)
# For matmuls that may be split differently across kernels, and for autocast; both change rounding.
SINGLE_IN_PARTS = replace(SINGLE, loss=1e-4)
HALF = ComparisonLimits("bf16", 0.05, 0.1, projection=0.2, loss=0.005, micro_loss=2e-3, cut=1e-2)


def choose_tolerance(plan: Plan, narrowest: int) -> ComparisonLimits:
    """Return the tolerances for comparing a layout under `plan` with a single process.

    `narrowest` is the number of bytes per element of the narrowest parameter. Under autocast,
    tolerances are close to those of fp32: the layout and the single process run the same kernels on
    the same samples, and sum over samples and ranks in fp32. If tp splits matmuls, or weights are
    gathered in 16 bits, the tolerances of bf16 apply instead.
    """
    found = _choose_by_dtypes(plan, narrowest)
    if plan.compress_gradients == "bf16":  # rounds gradients before ranks sum them
        return replace(found, projection=HALF.projection, floor=HALF.floor)
    return found


def _choose_by_dtypes(plan: Plan, narrowest: int) -> ComparisonLimits:
    casts = plan.precision not in ("fp32", "fp64")
    if narrowest <= 2 or (casts and (plan.fully_shards or plan.tp > 1)):
        return HALF
    if narrowest == 8 and not casts:
        return DOUBLE
    return SINGLE_IN_PARTS if casts or plan.tp > 1 else SINGLE


def parts_tolerance(plan: Plan, allowed: ComparisonLimits) -> ComparisonLimits:
    """Return the tolerances for comparing a batch with its parts.

    Kernels for smaller batches may round differently, so these are the tolerances of 16-bit
    computation unless the plan's precision is fp32 or fp64; then they are `allowed`.
    """
    return HALF if plan.precision not in ("fp32", "fp64") else allowed


def halves_tolerance(plan: Plan, allowed: ComparisonLimits) -> float:
    """Return the tolerance for the difference in loss between a batch and its halves."""
    return parts_tolerance(plan, allowed).cut


def micro_loss_tolerance(narrowest: int, casts: bool) -> float:
    """Return the tolerance for the loss of one micro-batch.

    `narrowest`: bytes per element of the narrowest parameter. `casts`: forwards run under autocast.
    """
    if casts or narrowest <= 2:
        return HALF.micro_loss
    return DOUBLE.micro_loss if narrowest == 8 else SINGLE.micro_loss


def difference(one: float, other: float) -> float:
    """Return the relative difference of two numbers; 0 if `other` is not finite."""
    if not math.isfinite(other):
        return 0.0
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


class Projection:
    """Inner products of gradients with fixed random weights, the same on all ranks.

    Projections are linear, so they can be summed over micro-batches, shards and ranks without
    gathering gradients. A gradient that is lost or counted twice changes the sum by its projection.
    The weights have random signs and magnitudes between 1/2 and 3/2, so every element counts, and
    equal elements do not cancel.
    """

    def __init__(self, largest: int, device: torch.device) -> None:
        """Draw weights for gradients with up to `largest` elements."""
        drawn = torch.Generator().manual_seed(0)
        count = max(1, min(_WEIGHTS, largest))
        sizes = torch.rand(count, generator=drawn, dtype=torch.float64) + 0.5
        signs = torch.randint(2, (count,), generator=drawn) * 2 - 1
        self._weights = (sizes * signs).to(device)
        self._single = self._weights.float()

    def project(self, gradient: Tensor) -> Tensor:
        """Return the projection of a whole gradient as a float64 scalar."""
        return self._project_from(_flatten(gradient), 0)

    def project_part(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        """Return the projection of this rank's shard of a parameter's gradient."""
        values = local(gradient)
        if values is gradient:
            return self.project(gradient)
        rows = split_rows(parameter)
        if rows is not None:
            return self._project_from(_flatten(values), rows.begin * math.prod(parameter.shape[1:]))
        weights = self._single.repeat(-(-parameter.numel() // len(self._single)))
        whole = weights[: parameter.numel()].view(parameter.shape)
        return self._project_from(_flatten(values), 0, part_of(whole, parameter).flatten())

    def _project_from(self, values: Tensor, begin: int, weights: Tensor | None = None) -> Tensor:
        """Return the projection of consecutive elements of a gradient, the first at index `begin`.

        `weights`, if given, has a weight for each element, to use instead of the random weights.
        """
        if weights is not None:
            return torch.dot(values.double(), weights.double())
        held = self._weights if values.dtype == torch.float64 else self._single
        if begin % len(held):
            held = held.roll(-begin)
        width = len(held)
        rows = values.numel() // width
        rest = values[rows * width :].to(held.dtype)
        total = torch.dot(rest, held[: len(rest)]).double()
        for some in values[: rows * width].view(rows, width).split(_ROWS) if rows else ():
            total = total + (some.to(held.dtype) @ held).double().sum()
        return total


def _flatten(gradient: Tensor) -> Tensor:
    values = gradient.to_dense() if gradient.is_sparse else gradient
    if values.is_complex():
        values = values.real + values.imag
    return values.detach().flatten()


def square(gradient: Tensor) -> Tensor:
    """Return a gradient's sum of squares as a float64 scalar."""
    values = gradient.to_dense() if gradient.is_sparse else gradient
    wide = torch.promote_types(values.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(values.detach(), dtype=wide)
    return norm.abs().double().square()


@dataclass(frozen=True)
class FoundDifference:
    """A difference between a layout and the user's module in a single process.

    `what` describes the difference, `cause` its likely cause, and `loss_apart` is the relative
    difference of the losses.
    """

    what: str
    cause: str
    loss_apart: float = 0.0


_LOST = (
    "Ranks that do not use a parameter leave its gradient out, or what was computed from it is not "
    "passed on."
)
LOST_IN_SPLIT = (
    "The schedule splits the backward into gradients of inputs and of weights, and misses weights "
    "that the loss does not reach through a gradient of the stage's input (because the input is "
    "frozen or detached, or a block keeps a loss). Use 1f1b, which does not split the backward."
)


class LayoutComparison:
    """A comparison of a layout with a single process, by sums over all ranks.

    All tensors contain this rank's sums; the constructor adds them up over ranks, so it is
    collective. `plain` is from the single process's computation: the sums of losses, targets and
    absolute losses, then the projection of each parameter's gradient, then each parameter's number
    of gradients. `layout` has the layout's sums of losses and targets. `gradients` (3, names) has
    the projections and squares of its gradients, and 1 for each gradient that this rank has.
    `schedule` is the pipeline's schedule, if any. `tp` is the number of tensor-parallel ranks; the
    gradients of parameters that are not split over them are averaged over them.
    """

    def __init__(
        self,
        names: Sequence[str],
        plain: Tensor,
        layout: Tensor,
        gradients: Tensor,
        allowed: ComparisonLimits,
        schedule: Schedule | None = None,
        tp: int = 1,
    ) -> None:
        self._tp = tp
        self._in_stages = schedule is not None
        self._lost = LOST_IN_SPLIT if schedule and schedule.splits_backward else _LOST
        sums = torch.cat([plain, layout, gradients.flatten()])
        dist.all_reduce(sums)
        first, second = len(plain), len(plain) + len(layout)
        self._plain, self._layout = sums[:first].tolist(), sums[first:second].tolist()
        self._products, squares, self._ranks = sums[second:].view(3, -1).tolist()
        self._names, self._allowed = list(names), allowed
        self._sizes = [math.sqrt(one) for one in squares]

    def first_wrong(self) -> FoundDifference | None:
        """Return the first difference and its likely cause; None if there is none."""
        loss, count, size = self._plain[:3]
        mine, mine_count = self._layout[:2]
        if not math.isfinite(loss):
            return None  # the step itself reports this, in one process too
        if abs(count - mine_count) > self._allowed.loss * max(abs(count), 1e-30):
            return FoundDifference(
                f"it counts {mine_count:g} targets instead of {count:g}",
                "Samples are lost or counted twice.",
            )
        if not abs(mine - loss) <= self._allowed.loss * max(size, 1e-30):
            return FoundDifference(
                f"the loss is {mine / (count or 1):.6g} instead of {loss / (count or 1):.6g}",
                SPLIT_LOSS
                if self._tp > 1
                else "The loss uses something that this strategy does not pass on, such as a term "
                "that submodules store in attributes, or parameters of other ranks.",
                abs(mine - loss) / max(size, 1e-30),
            )
        return self._find_wrong_gradient()

    def _find_wrong_gradient(self) -> FoundDifference | None:
        plain = self._plain[3:][: len(self._names)]
        largest = max([*self._sizes, *map(abs, plain)], default=0.0)
        lost: list[str] = []
        off: list[str] = []
        # names in `off`: gradients that are right if multiplied (parts) or divided (repeated) by tp
        parts: list[str] = []
        repeated: list[str] = []
        for number, name in enumerate(self._names):
            size, wanted = self._sizes[number], abs(plain[number])
            # Rounding never turns a whole gradient into zeros, so even a small one must be lost.
            if not size and wanted > self._allowed.cut * largest:
                lost.append(name)
                continue
            scale = max(size, wanted, self._allowed.floor * largest)
            if abs(self._products[number] - plain[number]) > self._allowed.projection * scale:
                off.append(name)
                found, least = self._products[number], self._allowed.projection * scale
                if abs(found * self._tp - plain[number]) <= least:
                    parts.append(name)
                elif abs(found / self._tp - plain[number]) <= least:
                    repeated.append(name)
        if lost:
            return FoundDifference(
                f"{first_names(lost)} {'has' if len(lost) == 1 else 'have'} no gradient",
                self._lost,
            )
        nothing = self._find_added_gradients()
        if nothing:
            return FoundDifference(
                f"{first_names(nothing)} {'gets' if len(nothing) == 1 else 'get'} a gradient of "
                "zeros, but none in one process",
                "Stages pass on zeros where the gradient stops (detach), so weight decay would "
                "change these parameters. Freeze them (requires_grad_(False)).",
            )
        if off:
            shown = off[0]
            number = self._names.index(shown)
            ratio = self._products[number] / plain[number] if plain[number] else math.inf
            return FoundDifference(
                f"the gradient of {first_names(off)} differs (for {shown}, it is {ratio:.4g} × "
                "the plain module's)",
                (self._tp > 1 and explain_parts(parts, len(parts) < len(off), self._tp, repeated))
                or "Ranks add up gradients that do not belong together, or leave some out.",
            )
        return None

    def _find_added_gradients(self) -> list[str]:
        """Return parameters with a gradient on a pipeline stage, but none in a single process."""
        if not self._in_stages:
            return []
        made = self._plain[3 + len(self._names) :]
        each = zip(self._names, made, self._ranks, strict=True)
        return [name for name, one, ranks in each if ranks and not one]


def scales(known: Mapping[str, Tensor], floor: float) -> dict[str, float]:
    """Return the scale of each tensor, by name.

    The scale is the tensor's largest absolute value, but at least `floor` times the largest
    absolute value in any tensor.
    """
    sizes = {name: largest(tensor) for name, tensor in known.items()}
    least = floor * max(sizes.values(), default=0.0)
    return {name: max(size, least) for name, size in sizes.items()}


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value; 0 for an empty tensor."""
    if not tensor.numel() or tensor.dtype == torch.bool:
        return 0.0
    return float(_widen(tensor).abs().max())


def _widen(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype that torch can compute with: neither 8-bit nor unsigned."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.float() if tensor.itemsize == 1 else tensor
    return tensor.long()


def relative(tensor: Tensor, known: Tensor | None, scale: float) -> float | None:
    """Return the largest difference divided by `scale`; None if the tensors cannot be compared.

    `known` is the single process's tensor. The two cannot be compared if their shapes differ, or if
    `known` is None and `tensor` is not all zeros.
    """
    if known is None:
        return 0.0 if not largest(tensor) else None
    if tensor.shape != known.shape:
        return None
    if not tensor.numel():
        return 0.0
    if tensor.dtype == known.dtype == torch.bool:
        return float((tensor != known).any())
    tensor, known = _widen(tensor), _widen(known)
    both = torch.promote_types(tensor.dtype, known.dtype)
    apart = (tensor.to(both), known.to(both))
    if both.is_floating_point or both.is_complex:
        nothing = apart[0].isnan() & apart[1].isnan()
        apart = (apart[0].masked_fill(nothing, 0), apart[1].masked_fill(nothing, 0))
    if bool((apart[0] == apart[1]).all()):
        return 0.0
    worst = float((apart[0] - apart[1]).abs().max())
    if math.isnan(worst):
        return math.inf
    return worst / scale if scale else math.inf


def mismatch(tensor: Tensor, known: Tensor | None) -> str:
    """Explain why a tensor cannot be compared with `known`, the single process's tensor."""
    if known is None:
        return "exists, but does not in one process"
    if known.numel() and not tensor.numel():
        return MISSING
    return f"has shape {tuple(tensor.shape)}, but {tuple(known.shape)} in one process"


def explain(name: str, tensor: Tensor, wanted: Mapping[str, Tensor]) -> str | None:
    """Describe how a gradient is wrong, for example by a constant factor; None if unknown.

    `wanted` has the single process's gradients, by parameter name.
    """
    known = wanted.get(name)
    if known is None or tensor.shape != known.shape or not largest(known):
        return None
    if not largest(tensor):
        return "is zero"
    a, b = tensor.flatten().double(), known.flatten().double()
    factor = float(a @ b / (b @ b))
    if float((a - factor * b).abs().max()) < 1e-6 * largest(a) and abs(factor - 1) > 1e-6:
        return f"is {factor:.4g} times one process's"
    for other, gradient in wanted.items():
        if other != name and gradient.shape == tensor.shape and gradient.numel() > 1:
            near = torch.allclose(gradient.double(), tensor.double(), rtol=1e-6, atol=0)
            if near and not torch.allclose(gradient.double(), known.double()):
                return f"is that of {other}"
    return None
