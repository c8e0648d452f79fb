"""Gradients of several parameters in one buffer, so that they are sent as one message.

Sergeev and Del Balso, "Horovod", arXiv 1802.05799, §4, "tensor fusion": many small messages cost
more than one large one.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class FusedGradients:
    """A buffer for the gradients of `parameters`, which have the same dtype and device.

    The buffer ends with a flag for each parameter: 1 if it has a gradient on this rank. If the sum
    of a flag over ranks is 0, no rank has a gradient, and the optimizer skips the parameter.
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
        """Move a parameter's gradient into the buffer."""
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
        """Set gradients to their parts of the buffer, or to None if no rank has one."""
        found = self.present.tolist()
        for parameter, part, count in zip(self.parameters, self.parts, found, strict=True):
            dtype = parameter.grad_dtype or parameter.dtype
            parameter.grad = part.to(dtype) if count else None


def fuse(
    parameters: Iterable[nn.Parameter],
    limit_bytes: int | None = None,
    dtype: torch.dtype | None = None,
) -> list[FusedGradients]:
    """Create gradient buffers of at most `limit_bytes` for parameters in the given order.

    A larger parameter gets its own buffer. `dtype`: the buffers' dtype (default: the parameters').
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
