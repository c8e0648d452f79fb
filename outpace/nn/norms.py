"""RMSNorm on a CPU as one operator.

torch runs several operators with about fifteen passes over memory, and keeps the normalised values
in addition to the input. Here three passes compute the value, and torch's LayerNorm kernel the
gradients, corrected for the mean.

Zhang and Sennrich, arXiv 1910.07467, eq. 4: y = x / √(mean(x²) + ε) · weight.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.nn.operators import chunks_to_run, operator

ROW_BYTES = 1 << 20  # per chunk of rows; the scaling pass still finds them in cache


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise `x` (…, D), which must be dense, over its last dimension; also return 1/rms.

    The normalised `x` keeps its dtype; 1/rms of each row, (rows, 1), is in fp32, or in fp64 if `x`
    is. 16-bit values are computed in fp32.
    """
    rows = _fp32_rows(x)
    factor = torch.linalg.vector_norm(rows, 2, -1, keepdim=True)
    factor = factor.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    weight = weight.to(rows.dtype)
    made = torch.empty_like(rows)
    count = max(1, ROW_BYTES // (rows.element_size() * rows.shape[1]))
    for chunk in chunks_to_run(x, len(rows), count):
        torch.mul(rows[chunk], factor[chunk], out=made[chunk]).mul_(weight)
    return made.to(x.dtype).view(x.shape), factor


def _fake_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    return torch.empty_like(x), x.new_empty((rows, 1), dtype=_fp32_or_wider(x))


def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor, trains: bool
) -> list[Tensor]:
    """Compute the gradients of `x` and, if `trains`, of `weight`, in their dtypes.

    With x̂ = x/rms and g = grad·weight, the gradient of x is (g − x̂·mean(g·x̂))/rms, which is
    LayerNorm's for a mean of 0, plus mean(g)/rms.
    """
    rows, its_grad, wide = _fp32_rows(x), _fp32_rows(grad), weight.to(factor.dtype)
    x_grad, weight_grad, _ = torch.ops.aten.native_layer_norm_backward(
        its_grad, rows, [x.shape[-1]], torch.zeros_like(factor), factor, wide, None,
        [True, trains, False],
    )  # fmt: skip
    mean = torch.mv(its_grad, wide).div_(x.shape[-1]).unsqueeze(1)
    grads = [x_grad.add_(mean.mul_(factor)).to(x.dtype).view(x.shape)]
    return [*grads, weight_grad.to(weight.dtype)] if trains else grads


def _fake_rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor, trains: bool
) -> list[Tensor]:
    return [torch.empty_like(one) for one in (x, weight)[: 1 + trains]]


def _fp32_or_wider(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _fp32_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).to(_fp32_or_wider(x))


def _save_for_backward(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate_rms_norm(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    trains = ctx.needs_input_grad[1]
    grads = iter(rms_norm_backward(grad, *ctx.saved_tensors, trains))
    return next(grads), next(grads, None), None


rms_norm_backward = operator(_rms_norm_backward, _fake_rms_norm_backward)
rms_norm = operator(_rms_norm, _fake_rms_norm, _save_for_backward, _differentiate_rms_norm)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that uses the operator above on a CPU, for plain dense tensors."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, D) to (…, D)."""
        if self.eps is not None and suits_operator(x, self.weight):
            normed: Tensor = rms_norm(x, self.weight, self.eps)[0]
            return normed
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def suits_operator(x: Tensor, weight: Tensor | None = None) -> bool:
    """Return whether an operator in Python can compute with these tensors.

    They must be dense, local and on a CPU. The compiler is not supported, because it fuses torch's
    operators into one kernel, nor are transforms of torch.func, because they need rules that an
    operator in Python lacks.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    spread = any(hasattr(one, "device_mesh") for one in (x, weight))
    here = x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0
    return here and not spread
