"""4-bit weights: NF4 with double quantization, by bitsandbytes.

Dettmers et al., "QLoRA", arXiv 2305.14314, §3: each block of 64 values is scaled by its largest
magnitude and rounded to 16 levels, the quantiles of a normal distribution. The scales themselves
are quantized to 8 bits, in blocks of 256. That is 4.127 bits per value.

A quantized matrix is stored as plain tensors, so code that shards, sends or copies a model's
tensors needs no changes. Blocks need not be aligned with rows.
"""

import importlib.util
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from outpace.records.errors import BadInputError

BLOCK, SCALES_BLOCK = 64, 256
# Tensors of a quantized matrix: values (two per byte), a quantized scale per block, the scales and
# offset of the scales, and the 256 levels of scales.
PARTS = ("codes", "scales", "scale_scales", "scale_mean", "scale_levels")


def require_nf4() -> None:
    """Raise BadInputError if bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise BadInputError(
            "--base nf4 needs bitsandbytes, which is not installed: pip install 'outpace[qlora]'. "
            "Or use --base fp32."
        )


@cache
def _load_bitsandbytes() -> Any:
    """Return bitsandbytes.functional, ready for use in traces with fake tensors.

    The first call of bitsandbytes computes levels of scales for all later calls in the process. In
    a trace, these levels would have no values, so the first call is made here with real tensors.
    Log messages about downloading kernels are hidden.
    """
    speaking = logging.getLogger("bitsandbytes")
    level = speaking.level
    speaking.setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional
    finally:
        speaking.setLevel(level)
    with _disable_current_modes():
        bitsandbytes.functional.quantize_4bit(torch.zeros(BLOCK), compress_statistics=True)
    return bitsandbytes.functional


@torch.no_grad()
def quantize(weight: Tensor) -> dict[str, Tensor]:
    """Quantize a matrix to NF4; return its PARTS as flat tensors on its device.

    They are equal on every machine.
    """
    codes, state = _load_bitsandbytes().quantize_4bit(
        weight.float().contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    tensors = (codes, state.absmax, state.state2.absmax, state.offset, state.state2.code)
    return {name: held.detach().reshape(-1) for name, held in zip(PARTS, tensors, strict=True)}


@torch.no_grad()
def dequantize(parts: list[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the matrix from its quantized `parts`, in the order of PARTS.

    For fp64, values are computed in fp32.
    """
    codes, scales, scale_scales, scale_mean, scale_levels = parts
    # Call the operators that bitsandbytes registers: compilers and fake tensors support them.
    blocks = torch.ops.bitsandbytes
    scales = blocks.dequantize_blockwise.default(
        scales, scale_scales.float(), scale_levels.float(), SCALES_BLOCK, torch.float32
    )
    low = torch.float32 if dtype == torch.float64 else dtype
    made: Tensor = blocks.dequantize_4bit.default(
        codes.view(-1, 1), scales + scale_mean.float(), BLOCK, "nf4", list(shape), low
    )
    return made.to(dtype)


class NF4Matmul(torch.autograd.Function):
    """x · Wᵀ with a frozen 4-bit W, which is dequantized in forward and backward and never kept.

    bitsandbytes has this matmul for 16 and 32 bits. This one also computes in fp64, so that
    verification runs the same code as training.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, *parts: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        ctx.save_for_backward(*parts)
        ctx.shape = shape
        return F.linear(x, dequantize(list(parts), shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `x`; W is frozen."""
        parts = ctx.saved_tensors
        made = dequantize(list(parts), ctx.shape, grad.dtype)
        return grad @ made, None, *(None for _ in parts)
