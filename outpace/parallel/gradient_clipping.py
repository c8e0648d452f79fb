"""Gradient clipping: `scale_by_norm` limits the norm of the whole model's gradient."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from outpace.optim.master import masters_within

CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def scale_by_norm(
    norm: Tensor,
    limit: float,
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    scale_gradients: Callable[[Tensor], None],
) -> None:
    """Clip gradients whose norm is `norm` to a norm of at most `limit`; 0 disables clipping.

    If `optimizer` has fp32 master weights and any gradient of `parameters` has 16 bits, the
    optimizer scales the gradients in its next step, in fp32. Otherwise, `scale_gradients` scales
    them now.
    """
    if limit <= 0:
        return
    factor = (limit / (norm + CLIP_EPS)).clamp(max=1.0)
    masters = masters_within(optimizer)
    narrow = any(one.grad is not None and one.grad.itemsize == 2 for one in parameters)
    if masters is not None and narrow:
        masters.factor = factor
    else:
        scale_gradients(factor)
