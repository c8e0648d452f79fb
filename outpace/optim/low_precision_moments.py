"""AdamW's moments in 16, 8 or 4 bits: conversion to codes and back, and the update."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from outpace.nn.torchao import torchao_module
from outpace.optim.rounding import Streams, field_of, random_words, round_to_bf16

MOMENTS: dict[str, bool] = {"exp_avg": True, "exp_avg_sq": False}  # whether signed


class CodeTable:
    """A sorted table of values, by which values in [−1, 1] are converted to codes and back."""

    def __init__(self, bits: Literal[4, 8], signed: bool, device: torch.device) -> None:
        made = torchao_module("optim.quant_utils", f"--optimizer adamw-{bits}bit")
        with unset_fake_temporarily():  # the table's values are read
            if bits == 8:
                values = made.create_dynamic_map(signed)
            elif signed:
                values = made.create_dynamic_map(True, 3, 4)
            else:
                values = [number / 16 for number in range(1, 17)]
        self.bits = bits
        self.values = torch.tensor(values, dtype=torch.float32, device=device)
        self._between = (self.values[1:] + self.values[:-1]) / 2

    def codes(self, x: Tensor) -> Tensor:
        """Return the codes of the nearest values of the table, as uint8.

        Values (..., n) have codes (..., n), or (..., n / 2) if two 4-bit codes share a byte.
        """
        codes = torch.bucketize(x, self._between, right=True, out_int32=True).to(torch.uint8)
        return codes if self.bits == 8 else codes[..., ::2] << 4 | codes[..., 1::2]

    def read(self, codes: Tensor) -> Tensor:
        """Return the fp32 values that codes stand for."""
        if self.bits == 4:
            codes = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)
        # Indexing would need 64-bit codes.
        found = torch.index_select(self.values, 0, codes.reshape(-1).int())
        return found.view(codes.shape)


# A stored moment, and if it is stored as codes, the scales of its blocks and the table.
Moment = tuple[Tensor, Tensor | None, CodeTable | None]
# Random numbers for a bf16 moment or weight, or their generator; None if it is not rounded.
Randomness = torch.Generator | Tensor | None
Numbers = tuple[Tensor, Tensor, Tensor]  # see `step_numbers`


def step_moments(
    weight: Tensor,
    gradient: Tensor,
    moments: tuple[Moment, ...],
    noise: tuple[Randomness, ...],
    streams: Streams | None,
    numbers: Numbers,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update a weight and its two moments by AdamW, in place.

    Loshchilov and Hutter, ICLR 2019, algorithm 2. `noise` has random bits or a generator for
    rounding each moment and the weight, or None where nothing is rounded at random. If `streams` is
    given, counter-based random bits are drawn from it instead. `numbers` is the result of
    `step_numbers`.
    """
    if streams is not None:
        noise = _rounding_bits(weight, moments, streams)
    rate, root_of_share, kept = numbers
    gradient = gradient.float()
    mean = dequantize(*moments[0]).lerp_(gradient, 1 - betas[0])
    square = dequantize(*moments[1]).lerp_(gradient.square(), 1 - betas[1])
    for moment, value, random in zip(moments, (mean, square), noise[:2], strict=True):
        _store_moment(*moment, value, random)
    root = square.sqrt_().div_(root_of_share).add_(eps)
    change = mean.div_(root).mul_(rate)
    wide = weight.float()  # the weight itself if it is fp32
    wide.mul_(kept).sub_(change)
    random = noise[2]
    if random is not None:
        weight.copy_(round_to_bf16(wide, random))
    elif wide is not weight:
        weight.copy_(wide)


def _rounding_bits(
    weight: Tensor, moments: tuple[Moment, ...], streams: Streams
) -> tuple[Tensor | None, ...]:
    """Return 16 random bits per value for moments and weight; None for tensors not in bf16.

    The bits for one element of a parameter (its two moments and its weight) are parts of one 64-bit
    random word.
    """
    words = random_words(streams, weight.numel()).view(weight.shape)
    kept = (*(moment[0] for moment in moments), weight)
    return tuple(
        field_of(words, number) if one.dtype == torch.bfloat16 else None
        for number, one in enumerate(kept)
    )


def step_numbers(step: Tensor, group: dict[str, Any]) -> Numbers:
    """Return lr / (1 − β₁ᵗ), √(1 − β₂ᵗ) and 1 − lr · weight_decay as fp32 tensors; `step` is t."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    kept = torch.full_like(step, 1 - lr * group["weight_decay"])
    return lr / (1 - beta1**step), (1 - beta2**step).sqrt(), kept


def dequantize(held: Tensor, scale: Tensor | None, table: CodeTable | None) -> Tensor:
    """Return a copy of a stored moment in fp32."""
    if scale is None or table is None:
        return held.to(torch.float32, copy=True)
    blocks = table.read(held).unflatten(-1, (scale.shape[-1], -1))
    return torch.flatten(blocks.mul_(scale.unsqueeze(-1)), -2)


def _store_moment(
    held: Tensor, scale: Tensor | None, table: CodeTable | None, value: Tensor, random: Randomness
) -> None:
    if random is not None:
        held.copy_(round_to_bf16(value, random))
    elif scale is None or table is None:
        held.copy_(value)
    else:
        blocks = value.unflatten(-1, (scale.shape[-1], -1))
        scale.copy_(blocks.abs().amax(-1).clamp_(min=1e-12))
        shares = (blocks / scale.unsqueeze(-1)).flatten(-2)
        held.copy_(table.codes(shares))
