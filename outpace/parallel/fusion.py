"""Gradients of several parameters in one buffer, so that they are sent as one message.

Sergeev and Del Balso, "Horovod", arXiv 1802.05799, §4, "tensor fusion": many small messages cost
more than one large one.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class FusedGradients:
    """A buffer for the gradients of `parameters`, which have the same dtype and device.

    The buffer ends with one flag per parameter: 1 if the parameter has a gradient on this rank. If
    a flag's sum over ranks is 0, no rank has a gradient, and the optimizer skips the parameter.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None
    ) -> None:
        self.parameters = tuple(parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0]
        self.buffer = torch.zeros(
            sum(sizes) + len(sizes), dtype=dtype or first.dtype, device=first.device
        )
        *parts, self.present = self.buffer.split([*sizes, len(sizes)])
        self.parts = [
            part.view(parameter.shape)
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]

    @torch.no_grad()
    def move_gradient(self, index: int) -> None:
        """Move a parameter's gradient (zeros if it has none) into the buffer, and set its flag."""
        gradient = self.parameters[index].grad
        self.present[index] = gradient is not None
        if gradient is None:
            self.parts[index].zero_()
        else:
            self.parts[index].copy_(gradient)
        self.parameters[index].grad = None

    def take_all(self) -> None:
        """Move all gradients into the buffer."""
        for index in range(len(self.parameters)):
            self.move_gradient(index)

    def assign_gradients(self) -> None:
        """Set each gradient from the buffer, or to None if the flags show that no rank has one."""
        found = self.present.tolist()
        for parameter, part, count in zip(self.parameters, self.parts, found, strict=True):
            dtype = parameter.grad_dtype or parameter.dtype
            parameter.grad = part.to(dtype) if count else None


def fuse(
    parameters: Iterable[nn.Parameter],
    limit_bytes: int | None = None,
    dtype: torch.dtype | None = None,
) -> list[FusedGradients]:
    """Create gradient buffers of at most `limit_bytes` for the parameters, in the given order.

    A parameter larger than the limit gets a separate buffer. `dtype` is the buffers' dtype (None:
    the parameters').
    """
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * (dtype or parameter.dtype).itemsize
        within = limit_bytes is None or filled + size <= limit_bytes
        kind = (parameter.dtype, parameter.device)
        if groups and within and kind == (groups[-1][0].dtype, groups[-1][0].device):
            groups[-1].append(parameter)
            filled += size
        else:
            groups.append([parameter])
            filled = size
    return [FusedGradients(group, dtype) for group in groups]
