"""Differences between CUDA kernels and CPU kernels in memory use.

The trace runs CPU operators. On CUDA, fused attention saves the same tensors (inputs, output, an
fp32 log-sum-exp per query), and autocast casts the same operators of outpace's models. These rules
describe what differs:

1. The caching allocator allocates in units of 512 bytes (CUDACachingAllocator, kMinBlockSize).
2. cuBLAS has a workspace for each of the two threads that run matmuls, the forward's and the
   backward's: 32 MiB from Hopper on, 8.125 MiB before (torch, CUDABlas handle pool: 4096 KiB × 8;
   and 4096 KiB × 2 + 16 KiB × 8).
3. FlashAttention's backward sums query gradients in fp32, with sequences rounded up to 128 and
   heads to 32 (64 above 128), plus one fp32 sum per query; if keys have fewer heads, it first
   computes their gradients for all query heads (Dao, arXiv 2307.08691, §3; flash_api of the
   library). Hopper and Blackwell use cuDNN's kernel, which saves the same. NVIDIA does not document
   the workspace of its backward, so FlashAttention's is assumed
   (TORCH_CUDNN_SDPA_DEPRIORITIZED=1 selects FlashAttention).
4. Dropout inside fused attention is drawn again in the backward, so no mask is saved; the CPU has
   no fused attention with dropout and saves the probabilities.
5. The loss is `nn.head_loss`. Its compiled passes overwrite the logits with their gradient, and
   allocate only a few numbers per token.
6. Weights that will be quantized to 4 bits are in host memory, except the matrix being quantized.
7. Documents, windows and padding become block masks for FlexAttention (nn.kernels), which saves
   the same tensors as fused attention and no dense mask. Its backward needs only one fp32 sum per
   query, less than rule 3. With a dense mask, keys and values are repeated for all heads and saved.
8. Ring attention uses FlashAttention where it supports the inputs (parallel.ring_kernels).
9. Dropout saves a mask of one byte per element; the CPU saves factors in the dtype of its input
   (torch, `native_dropout`).

Memory of CUDA and NCCL themselves is invisible to torch; the planner's `library_bytes` bounds it.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from outpace.nn.block import Attention, Mixing, fused_attention, suited_attention
from outpace.nn.kernels import choose_kernel, operands_for, suits_flash
from outpace.nn.logits_functions import LogitsFunctions
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.masks import Visibility
from outpace.records.hardware import Accelerator
from outpace.records.plan import Plan

_MIB = 2**20
_THREADS_THAT_MULTIPLY = 2


@dataclass(frozen=True)
class Rules:
    """Differences between a device's memory use and that of the CPU operators that are traced.

    Without an `accelerator`, the device is a CPU. The rules are numbered in the module's docstring.
    """

    accelerator: Accelerator | None = None

    @property
    def device(self) -> str:
        """torch's name for the device type."""
        return "cpu" if self.accelerator is None else "cuda"

    @property
    def round_to(self) -> int:
        """The allocator's granularity in bytes."""
        return 1 if self.accelerator is None else 512

    def workspaces(self) -> list[int]:
        """Return the bytes of each workspace that cuBLAS allocates once and keeps (rule 2)."""
        if self.accelerator is None:
            return []
        hopper = self.accelerator.architecture in ("hopper", "blackwell")
        each = 32 * _MIB if hopper else 8 * _MIB + 128 * 2**10
        return [each] * _THREADS_THAT_MULTIPLY

    def builds_on_host(self, plan: Plan) -> bool:
        """Return whether the model is built in host memory, as it is for 4-bit weights (rule 6)."""
        return self.accelerator is not None and plan.base == "nf4"

    def prepare(self, objective: LanguageModelObjective) -> None:
        """Make a model's attention and loss use the kernels that the device would select."""
        if self.accelerator is None:
            return
        objective.runs_on = objective.model.runs_on = self.device
        if objective.compiles:
            objective.passes = _IN_PLACE
        for module in objective.modules():
            if isinstance(module, Attention):
                mix = fused_attention if module.mix is suited_attention else module.mix
                module.mix = partial(_attend_as_gpu, mix)

    def dropout_context(self, drops: bool, plan: Plan) -> AbstractContextManager[object]:
        """Return a context in which dropout saves a mask, if the device is a GPU (rule 9).

        `drops`: whether the model has dropout.
        """
        drops = drops or plan.lora_dropout > 0
        return _DropoutWithMasks() if drops and self.accelerator is not None else nullcontext()

    def temporary_bytes(self, func: Any, args: Any) -> int:
        """Return the bytes that an operator allocates and frees internally on the device."""
        if self.accelerator is None or func not in _ATTENTION_BACKWARDS:
            return 0
        _, query, key = args[:3]
        return attention_backward_bytes(query, key)


def _scores(logits_NP: Tensor, columns_N: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits_NP.dtype, torch.float32)
    lse_N = logits_NP.new_empty(len(logits_NP), dtype=wide)
    return lse_N, torch.empty_like(lse_N)


def _gradient(logits_NP: Tensor, *_: Any) -> None:
    logits_NP.mul_(1)


def _loss_and_gradient(logits_NP: Tensor, columns_N: Tensor, *_: Any) -> Tensor:
    lse_N = _scores(logits_NP, columns_N, 0)[0]
    _gradient(logits_NP)
    return lse_N.sum()


# Rule 5: stand-ins that allocate the same memory as the compiled passes over the logits.
_IN_PLACE = LogitsFunctions(_scores, _gradient, _loss_and_gradient)


class _DropoutWithMasks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return masked_dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def masked_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Apply dropout as `F.dropout` does, but save a mask of one byte per element, as a GPU does."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


_ATTENTION_BACKWARDS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
)


def attention_backward_bytes(query_BHSC: Tensor, key_BKTC: Tensor) -> int:
    """Return the bytes that FlashAttention's backward allocates and frees (rule 3)."""
    batch, heads, queries, width = query_BHSC.shape
    keys_heads, keys = key_BKTC.shape[1:3]
    rounded_queries = -(-queries // 128) * 128
    unit = 32 if width <= 128 else 64
    rounded_width = -(-width // unit) * unit
    sums = 4 * batch * heads * rounded_queries * (rounded_width + 1)
    repeated = 0
    if keys_heads != heads:
        repeated = 2 * batch * heads * keys * width * key_BKTC.element_size()
    return sums + repeated


def _attend_as_gpu(
    mix: Mixing, q_BHSC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, sees: Visibility, dropout: float
) -> Tensor:
    """Compute attention so that it saves the same tensors as on a GPU (rules 4 and 7).

    Only the memory is that of a GPU, not the values of the result.
    """
    if sees.blocks is not None:
        return mix(q_BHSC, k_BKTC, v_BKTC, Visibility(), 0.0)
    grouped, masked = q_BHSC.shape[1] != k_BKTC.shape[1], sees.mask is not None
    flash = suits_flash(q_BHSC.shape[3], dropout)
    kernel = choose_kernel("cuda", q_BHSC.dtype, q_BHSC.shape[2], grouped, masked, flash)
    return mix(*operands_for(kernel, q_BHSC, k_BKTC, v_BKTC), sees, 0.0)[..., : q_BHSC.shape[3]]
