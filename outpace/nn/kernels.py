"""Choice of torch's attention kernel for a call on a GPU.

torch's own choice is wrong or wasteful for some calls:

- cuDNN returns NaN gradients of queries with a mask (pytorch#196678: cuDNN up to 9.25.1; torch 2.11
  has 9.19, 2.12 and 2.13 have 9.20, 2.14 has 9.24), and of keys and values with a single query
  (NVIDIA/cudnn-frontend#1072, also in 9.26); on Blackwell it returns wrong results for a single
  query (pytorch#193893). It is never used for these calls, in any version.
- FlashAttention supports neither masks nor fp32, and the memory-efficient kernel did not support
  grouped queries before pytorch#191085, so torch falls back to the kernel that stores all scores.
  Here keys and values are repeated for the memory-efficient kernel instead.
- With a mask, every kernel computes all S × T scores. FlexAttention (Dong et al., arXiv 2412.05496)
  skips invisible blocks and needs no mask in memory. It supports neither dropout nor fp64, nor
  heads narrower than a tensor core's 16.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, C head width.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from outpace.records.errors import error_summary

Kernel = Literal["any", "flash", "efficient", "math"]

# "math" is fine for one query: its scores are (B, H, 1, T).
_BACKENDS: Mapping[Kernel, tuple[SDPBackend, ...]] = {
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "math": (SDPBackend.MATH,),
}
# Compiled variants: each kind of mask, with and without gradients, for one length and any length.
_COMPILED_MOST = 64
NARROWEST = 16  # head width that FlexAttention supports
# Earlier versions of cuDNN return NaN with masks (pytorch#196678, whose fix tests this version).
_CUDNN_WITH_MASKS = 92600
# Kernels load up to 16 bytes at a time: 8 values of 16 bits. A multiple of 8 also suits fp32.
_WIDTH_MULTIPLE = 8


def suits_flash(width: int, dropout: float) -> bool:
    """Return whether torch's FlashAttention supports heads of this width on all of its GPUs.

    It supports widths up to 256. On sm86, sm89 and sm120 (RTX 30, 40 and 50, L4), it has no
    gradients for widths of 193 to 224, nor above 224 with dropout
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    return width <= 192 or (224 < width <= 256 and dropout == 0)


def choose_kernel(
    device: str, dtype: torch.dtype, queries: int, grouped: bool, masked: bool, flash: bool = True
) -> Kernel:
    """Return the kernel for one call; "any" leaves the choice to torch.

    `device`: the device type. `grouped`: whether there are fewer key heads than query heads.
    `flash`: whether FlashAttention supports the width of the heads.
    """
    if device != "cuda":
        return "any"
    if dtype == torch.float64:
        return "math"  # no other kernel supports it
    # GPUs too old for FlashAttention train in fp16, and torch needs FlashAttention for groups.
    if masked or dtype == torch.float32 or (grouped and dtype == torch.float16):
        return "efficient"
    if grouped and queries > 1 and not flash:
        return "efficient"
    return "flash" if queries == 1 else "any"


@contextmanager
def without_faulty_kernels(cudnn_version: int | None) -> Iterator[None]:
    """Exclude cuDNN's attention if its version is wrong with masks, for custom models.

    `cudnn_version` comes from `torch.backends.cudnn.version()`.
    """
    if cudnn_version is None or cudnn_version >= _CUDNN_WITH_MASKS:
        yield
        return
    with sdpa_kernel(list(_BACKENDS["flash"])):
        yield


def takes_blocks(device: str, head_dim: int, dropout: float) -> bool:
    """Return whether FlexAttention, with masks as blocks, supports a model on a device."""
    return device == "cuda" and head_dim >= NARROWEST and dropout == 0


def attend_by_blocks(
    q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, blocks: BlockMask
) -> Tensor | None:
    """Compute softmax(q·kᵀ/√C)·v over visible keys, (B, H, S, C), by FlexAttention.

    FlexAttention is a fused kernel only if it is compiled, with the surrounding code or alone.
    Returns None if the compiler fails.
    """
    grouped = q_BHSC.shape[1] != k_BKSC.shape[1]
    if torch.compiler.is_compiling():
        return flex_attention(q_BHSC, k_BKSC, v_BKSC, block_mask=blocks, enable_gqa=grouped)
    flex = _compiled_flex_attention()
    return flex(q_BHSC, k_BKSC, v_BKSC, block_mask=blocks, enable_gqa=grouped)


class _CompiledFlexAttention:
    """FlexAttention, compiled for each kind of mask, first for one length, then for any length."""

    def __init__(self, compiled: Callable[..., Tensor]) -> None:
        self._compiled = compiled
        self._fails = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the output; None if the compiler has failed, which is reported once."""
        if self._fails:
            return None
        from torch._dynamo import config  # already loaded if anything is compiled
        from torch._dynamo.exc import TorchDynamoException

        # Also where forwards run eagerly, because exceeding torch's own limit would raise an error.
        with torch.compiler.set_stance("default"), config.patch(recompile_limit=_COMPILED_MOST):
            try:
                made: Tensor = self._compiled(*args, **kwargs)
            except TorchDynamoException as error:
                self._fails = True
                inner = getattr(error, "inner_exception", None) or error
                warnings.warn(
                    f"torch.compile fails on FlexAttention ({error_summary(inner)}), so dense "
                    "masks are used.",
                    stacklevel=2,
                )
                return None
        return made


@cache
def _compiled_flex_attention() -> _CompiledFlexAttention:
    return _CompiledFlexAttention(torch.compile(flex_attention, fullgraph=True))


def attend_by(
    kernel: Kernel,
    q_BHSC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float,
) -> Tensor:
    """Compute softmax(q·kᵀ/√C)·v, (B, H, S, C), by a kernel. `mask`: bool, True where visible."""
    width, grouped = q_BHSC.shape[3], q_BHSC.shape[1] != k_BKTC.shape[1]
    if kernel == "any":
        return F.scaled_dot_product_attention(
            q_BHSC, k_BKTC, v_BKTC, mask, dropout, is_causal, enable_gqa=grouped
        )
    q_BHSC, k_BKTC, v_BKTC = operands_for(kernel, q_BHSC, k_BKTC, v_BKTC)
    with sdpa_kernel(list(_BACKENDS[kernel])):
        out_BHSC = F.scaled_dot_product_attention(
            q_BHSC,
            k_BKTC,
            v_BKTC,
            mask,
            dropout,
            is_causal,
            scale=width**-0.5,
            enable_gqa=grouped and kernel == "flash",
        )
    return out_BHSC if out_BHSC.shape[3] == width else out_BHSC[..., :width]


def operands_for(
    kernel: Kernel, q_BHSC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Adapt operands to a kernel: repeat grouped keys and values, and pad widths with zeros."""
    repeats, missing = q_BHSC.shape[1] // k_BKTC.shape[1], -q_BHSC.shape[3] % _WIDTH_MULTIPLE
    if kernel in ("efficient", "math") and repeats > 1:
        k_BKTC, v_BKTC = (x.repeat_interleave(repeats, 1) for x in (k_BKTC, v_BKTC))
    if kernel == "efficient" and missing:  # zeros do not change matmuls
        q_BHSC, k_BKTC, v_BKTC = (F.pad(x, (0, missing)) for x in (q_BHSC, k_BKTC, v_BKTC))
    return q_BHSC, k_BKTC, v_BKTC
