"""Tanh-approximated GELU on a CPU in 16 bits; the forward also computes the derivative.

torch's kernels compute one tanh for the value and another for the derivative; in a small model,
each takes as long as a matmul (docs/development/log.md). Here one sigmoid serves both, computed in
fp32 for chunks that stay in cache. The derivative is kept instead of the input, so the backward is
one multiplication.

Hendrycks and Gimpel, arXiv 1606.08415, §2: with w = 2·√(2/π)·(x + 0.044715·x³),
gelu(x) = x·σ(w), and its derivative is σ(w) + σ(w)·(1 − σ(w))·(3·w − 4·√(2/π)·x).
"""

import math
from typing import Any

import torch
from torch import Tensor

from outpace.nn.operators import chunks_to_run, operator

_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715
ELEMENTS = 1 << 18  # per chunk; three fp32 temporaries of this size stay in cache


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute gelu(x) and its derivative, in the dtype and shape of `x`, which is dense and 16-bit.

    The derivative is NaN for magnitudes beyond 10¹³, whose cube overflows fp32.
    """
    value, slope = torch.empty_like(x), torch.empty_like(x)
    flat = [one.view(-1) for one in (x, value, slope)]
    scratch = x.new_empty((3, min(ELEMENTS, x.numel())), dtype=torch.float32)
    linear = x.new_full((), _SLOPE, dtype=torch.float32)
    for chunk in chunks_to_run(x, x.numel(), ELEMENTS):
        low, its_value, its_slope = (one[chunk] for one in flat)
        wide, inner, sigmoid = (one[: len(low)] for one in scratch)
        wide.copy_(low)
        torch.addcmul(linear, wide, wide, value=_SLOPE * _CUBIC, out=inner).mul_(wide)
        torch.sigmoid(inner, out=sigmoid)
        # a third of 3·w − 4·√(2/π)·x, the derivative's inner term
        inner.sub_(wide, alpha=2 * _SLOPE / 3)
        its_value.copy_(wide.mul_(sigmoid))
        torch.ops.aten.sigmoid_backward.grad_input(inner, sigmoid, grad_input=inner)
        its_slope.copy_(sigmoid.add_(inner, alpha=3))
    return value, slope


def _fake_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _save_for_backward(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate_gelu(ctx: Any, grad: Tensor | None, _: None) -> Tensor | None:
    slope: Tensor = ctx.saved_tensors[0]
    return None if grad is None else grad * slope


gelu_tanh = operator(_gelu_tanh, _fake_gelu, _save_for_backward, _differentiate_gelu)
