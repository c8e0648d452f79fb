"""The loss over a vocabulary, and attention with masks, by the package's own functions."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from gpu.check import Check, measured
from gpu.hardware import device_seconds, seconds
from outpace.nn.block import suited_attention
from outpace.nn.kernels import choose_kernel, takes_blocks
from outpace.nn.logits_functions import EAGER, compiled_passes
from outpace.nn.loss import LossKind, linear_loss_sum
from outpace.nn.masks import Visibility, visibility

_LOSSES = ((16384, 2048, 128256), (16384, 768, 50257))
_SMALL_LOSSES = ((64, 32, 512),)
# Samples, query heads, key and value heads, length, width of a head.
_ATTENTIONS = {
    "16 × 1,024, 12 heads of 64": (16, 12, 12, 1024, 64),
    "4 × 2,048, 32 heads of 64 over 8": (4, 32, 8, 2048, 64),
    "1 × 4,096, 32 heads of 128 over 8": (1, 32, 8, 4096, 128),
}
_SMALL_ATTENTIONS = {"1 × 64, 4 heads of 16 over 2": (1, 4, 2, 64, 16)}
_BLOCKS, _DENSE, _TORCH = "blocks", "dense mask", "torch"


def loss(check: Check) -> None:
    """Measure the head's loss with both gradients: milliseconds, FLOP/s and bytes."""
    for tokens, width, vocab in _SMALL_LOSSES if check.small else _LOSSES:
        shape = f"{tokens:,} × {width:,} × {vocab:,}"
        kinds: dict[str, tuple[LossKind, bool]] = {
            "compiled": ("auto", True), "eager": ("auto", False),
            "compiled, chunked": ("chunked", True),
        }  # fmt: skip
        for name, (kind, compiled) in kinds.items():
            if check.inductor or not compiled:
                check.clean()
                make = partial(_loss, check, (tokens, width, vocab), kind, compiled)
                check.row(f"{shape}, {name}", 8.0, make)


def _loss(
    check: Check, shape: tuple[int, int, int], kind: LossKind, compiled: bool
) -> dict[str, Any]:
    """Measure the loss as in training, with `compiled` or eager functions over the logits."""
    tokens, width, vocab = shape
    hidden = torch.randn(tokens, width, device=check.device, requires_grad=True)
    weight = (torch.randn(vocab, width, device=check.device) * 0.02).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=check.device)
    passes = compiled_passes() if compiled else EAGER

    def both_ways() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast(check.device, torch.bfloat16, cache_enabled=False):
            total = linear_loss_sum(
                hidden, weight, None, targets, kind, torch.bfloat16, passes=passes
            )
        (total / tokens).backward()

    # The bytes that the step creates: its gradients, and all temporaries, without its inputs.
    before_bytes = torch.cuda.memory_allocated() if check.cuda else 0
    times = seconds(check, both_ways, 0.4, 2)
    step_s = median(times)
    return {
        "step_time_s": step_s,
        "times_s": times[:50],
        "flops_per_s": 6 * tokens * width * vocab / step_s,
        "peak_bytes": torch.cuda.max_memory_allocated() - before_bytes if check.cuda else None,
    }


def attention(check: Check) -> None:
    """Measure forward and backward, causal and masked, and the NaN of pytorch#196678."""
    for name, shape in (_SMALL_ATTENTIONS if check.small else _ATTENTIONS).items():
        causal = check.row(f"{name}, causal", 4.0, partial(_attention, check, shape, "causal"))
        for sees in ("documents", "window"):
            for way in _ways(check, shape[-1]):
                row_name = f"{name}, {sees}" + (", dense mask" if way == _DENSE else "")
                make = partial(_attention, check, shape, sees, way)
                row = check.row(row_name, 6.0, make)
                if measured(row) and measured(causal):
                    over = row["device_time_s"] / causal["device_time_s"]
                    check.put(row_name, {**row, "over_causal": over})
    for way in _ways(check, 64):
        name = f"queries' gradients that are not finite, {way}"
        check.row(name, 6.0, partial(_not_finite, check, way))
    if check.cuda:
        check.row("the same, by the kernel that torch chooses", 4.0,
                  partial(_not_finite, check, _TORCH))  # fmt: skip


def _ways(check: Check, width: int) -> tuple[str, ...]:
    """Return the mask formats to test: the package's choice, and S × S values."""
    return (_BLOCKS, _DENSE) if takes_blocks(check.device, width, 0.0) else (_DENSE,)


def _attention(
    check: Check, shape: tuple[int, ...], sees: str, way: str = _DENSE
) -> dict[str, Any]:
    samples, heads, kv_heads, length, width = shape

    def states(count: int) -> torch.Tensor:
        made = torch.randn(samples, length, count, width, device=check.device, dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    q_BHSC, k_BKSC, v_BKSC = states(heads), states(kv_heads), states(kv_heads)
    seen = _seen(check, sees, samples, length, way)
    mask_times = seconds(check, lambda: _seen(check, sees, samples, length, way), 0.02)

    def both_ways() -> None:
        mixed_BHSC = suited_attention(q_BHSC, k_BKSC, v_BKSC, seen, 0.0)
        mixed_BHSC.backward(mixed_BHSC.detach())
        q_BHSC.grad = k_BKSC.grad = v_BKSC.grad = None

    times = seconds(check, both_ways)
    step_s = median(times)
    flops = 7 * samples * heads * length**2 * width  # both directions, of the causal half
    kernel = "flex" if seen.blocks is not None else choose_kernel(
        check.device, torch.bfloat16, length, heads != kv_heads, seen.mask is not None
    )  # fmt: skip
    device_s = device_seconds(check, both_ways) or step_s
    return {"step_time_s": step_s, "times_s": times[:50], "device_time_s": device_s,
            "causal_flops_per_s": flops / device_s, "kernel": kernel,
            "mask_time_s": median(mask_times)}  # fmt: skip


def _seen(check: Check, sees: str, samples: int, length: int, way: str) -> Visibility:
    documents_BS = None
    if sees == "documents":  # documents of 300 tokens each
        documents_S = torch.arange(length, device=check.device) // 300
        documents_BS = documents_S.int().expand(samples, length)
    window = length // 4 if sees == "window" else None
    device = torch.device(check.device)
    return visibility(length, length, True, window, documents_BS, None, device, way == _BLOCKS)


def _not_finite(check: Check, way: str) -> dict[str, int]:
    """Count non-finite values for a length of 128·n + 64, a mask and rows of low log-sum-exp."""
    length, width = (64, 16) if check.small else (704, 64)
    torch.manual_seed(0)
    make: Callable[..., torch.Tensor] = torch.randn
    q, k, v = (make(1, 1, length, width, device=check.device, dtype=torch.bfloat16)
               for _ in range(3))  # fmt: skip
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, -120 * width**0.5
    q.requires_grad_()
    seen = _seen(check, "documents", 1, length, way)
    if way == _TORCH:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.mask)
    else:
        mixed = suited_attention(q, k, v, seen, 0.0)
    mixed.backward(torch.randn_like(mixed))
    assert q.grad is not None
    return {"values": int((~torch.isfinite(q.grad)).sum()), "of": q.grad.numel()}
