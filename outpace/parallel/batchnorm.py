"""Batch normalisation (Ioffe and Szegedy, arXiv 1502.03167) for batches that are split into parts.

With replicas, statistics cover each replica's samples, as under DistributedDataParallel, or the
samples of all replicas. In a pipeline, training normalises by the statistics of each micro-batch,
and the running averages for evaluation are updated with the statistics of the whole mini-batch
(Huang et al., arXiv 1811.06965, §2.3). Modules are converted in place and keep their names,
parameters and buffers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from outpace.nn.block import to_fp32
from outpace.records.errors import BadInputError

_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch normalisation layers of a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}


def require_run_once(module: nn.Module, recomputes: bool) -> None:
    """Raise BadInputError if the backward recomputes activations and the module has BatchNorms.

    Activation checkpointing would run each BatchNorm twice per step.
    """
    if recomputes and batch_norms(module):
        raise BadInputError(
            "activation checkpointing runs a BatchNorm twice, so its moving averages would be "
            "updated twice per step. Use checkpointing none, or nn.GroupNorm or nn.LayerNorm."
        )


def synchronise(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make all batch normalisations use statistics over the samples of all ranks in `group`.

    Unlike nn.SyncBatchNorm, this works on any device.
    """
    members = Members(group)
    for part in _convertible_norms(module):
        part.__class__ = SynchronisedBatchNorm
        part.members = members


def by_micro_batch(module: nn.Module) -> None:
    """Convert all batch normalisation layers to `MicroBatchNorm`, in place."""
    for part in _convertible_norms(module):
        part.__class__ = MicroBatchNorm
        part.seen = None


def commit(module: nn.Module) -> None:
    """Update the running averages of all `MicroBatchNorm` layers at the end of a mini-batch."""
    for part in module.modules():
        if isinstance(part, MicroBatchNorm):
            part.commit()


def _convertible_norms(module: nn.Module) -> list[Any]:
    found: list[Any] = []
    for name, part in batch_norms(module).items():
        if type(part) not in _KNOWN:
            raise BadInputError(
                f"{name} is a {type(part).__name__}, a batch normalisation that outpace cannot "
                "convert to statistics over other samples. Use nn.BatchNorm1d, 2d or 3d, "
                "nn.SyncBatchNorm, or nn.LayerNorm."
            )
        found.append(part)
    return found


class Members:
    """The process group whose ranks share batch statistics.

    Deep copies of a module share this object, because a process group cannot be copied.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "Members":
        return self


class _ConvertedNorm(_BatchNorm):
    """Base of the classes to which batch normalisation layers are converted.

    To convert a layer, its `__class__` is set, so its tensors stay in place.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (N, C, …), got {input.dim()}")

    def _update_running_averages(self, mean_C: Tensor, variance_C: Tensor, count: int) -> None:
        """Update the running averages with the mean and the biased variance of a batch.

        The running variance is unbiased; `count` is the number of values per channel.
        """
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # a cumulative average over batches
            momentum = 1 / float(self.num_batches_tracked)
        unbiased_C = variance_C * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), momentum)


class MicroBatchNorm(_ConvertedNorm):
    """Batch normalisation by each micro-batch's statistics, which are merged until `commit`."""

    seen: tuple[int, Tensor, Tensor] | None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise as nn.BatchNorm does, but leave the running averages to `commit`."""
        if not self.training or self.running_mean is None:
            return super().forward(input)
        self._check_input_dim(input)
        self._add_statistics(input.detach())
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _add_statistics(self, input: Tensor) -> None:
        part = _channel_statistics(to_fp32(input))
        self.seen = part if self.seen is None else _merge_statistics(self.seen, part)

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running averages with all samples since the last call."""
        if self.seen is not None:
            count, mean_C, squares_C = self.seen
            self.seen = None
            self._update_running_averages(mean_C, squares_C / count, count)


def _channel_statistics(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the number of values per channel, their mean, and the sum of squared deviations."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    mean_C = x.mean(dims)
    return x.numel() // x.shape[1], mean_C, (x - _broadcast(mean_C, x)).square().sum(dims)


def _merge_statistics(
    one: tuple[int, Tensor, Tensor], other: tuple[int, Tensor, Tensor]
) -> tuple[int, Tensor, Tensor]:
    """Merge the statistics of two sets of values, given as by `_channel_statistics`.

    This formula (Chan, Golub and LeVeque, 1979) loses no digits to cancellation.
    """
    count, apart_C = one[0] + other[0], other[1] - one[1]
    mean_C = one[1] + apart_C * (other[0] / count)
    return count, mean_C, one[2] + other[2] + apart_C.square() * (one[0] * other[0] / count)


def _broadcast(values_C: Tensor, like: Tensor) -> Tensor:
    return values_C.view(1, -1, *[1] * (like.dim() - 2))


class SynchronisedBatchNorm(_ConvertedNorm):
    """Batch normalisation over the samples of all ranks in `members`, as in a single process."""

    members: Members

    def forward(self, input: Tensor) -> Tensor:
        """Normalise as nn.BatchNorm does. Collective in training, or without running averages."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        y, mean_C, variance_C, count = NormaliseAcrossRanks.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.members.group
        )
        if self.training and self.running_mean is not None:
            with torch.no_grad():
                self._update_running_averages(mean_C, variance_C, int(count))
        normalised: Tensor = y
        return normalised


class NormaliseAcrossRanks(torch.autograd.Function):
    """(x − mean)/√(variance + eps) · weight + bias, with statistics over all ranks of a group.

    The forward runs one all-reduce of R · (2C + 1) numbers for R ranks, and the backward one of 2C
    numbers. The gradient of the input contains two sums over the batch (Ioffe and Szegedy 2015,
    §3). Here they run over all ranks, because every rank's loss depends on every rank's samples.
    The gradients of weight and bias cover only this rank's samples; the usual gradient reduction
    adds them up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalised input, and the mean, biased variance and count over all ranks."""
        x = to_fp32(input)
        count, mean_C, variance_C = _gather_statistics(x, group)
        scale_C = (variance_C + eps).rsqrt()
        unit = (x - _broadcast(mean_C, x)) * _broadcast(scale_C, x)
        y = unit if weight is None else unit * _broadcast(to_fp32(weight), x)
        y = y if bias is None else y + _broadcast(to_fp32(bias), x)
        ctx.save_for_backward(unit, scale_C, weight, count)
        ctx.group, ctx.dtype = group, input.dtype
        ctx.mark_non_differentiable(mean_C, variance_C, count)
        return y.to(input.dtype), mean_C, variance_C, count

    @staticmethod
    def backward(ctx: Any, y_grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return dx = scale·weight·(dy − mean(dy) − unit·mean(dy·unit)), with means over ranks.

        `unit` is the normalised input, before weight and bias, and `scale` is 1/√(variance + eps).
        """
        unit, scale_C, weight, count = ctx.saved_tensors
        dy = to_fp32(y_grad)
        dims = [dim for dim in range(dy.dim()) if dim != 1]
        own = torch.stack((dy.sum(dims), (dy * unit).sum(dims)))
        of_all = own.clone()
        dist.all_reduce(of_all, group=ctx.group)
        means = of_all / count
        dx = dy - _broadcast(means[0], dy) - unit * _broadcast(means[1], dy)
        scale_C = scale_C if weight is None else scale_C * to_fp32(weight)
        weight_grad = own[1].to(weight.dtype) if weight is not None else None
        bias_grad = own[0].to(weight.dtype) if weight is not None else None
        return ((dx * _broadcast(scale_C, dy)).to(ctx.dtype), weight_grad, bias_grad, None, None)


def _gather_statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance of each channel over all ranks. Collective.

    Squared deviations are combined around the common mean, because subtracting the squared mean
    from the mean of squares would lose precision. Each rank fills its row of a matrix of zeros, so
    an all-reduce gathers all rows.
    """
    count, mean_C, squares_C = _channel_statistics(x)
    rows = x.new_zeros(dist.get_world_size(group), 1 + 2 * x.shape[1])
    rows[dist.get_rank(group)] = torch.cat((x.new_tensor([count]), mean_C, squares_C))
    dist.all_reduce(rows, group=group)
    counts_R1, means_RC, squares_RC = rows.split([1, x.shape[1], x.shape[1]], dim=1)
    total = counts_R1.sum()
    mean_C = (counts_R1 * means_RC).sum(0) / total
    spread_C = squares_RC.sum(0) + (counts_R1 * (means_RC - mean_C).square()).sum(0)
    return total, mean_C, spread_C / total
