"""Rotary positions: Su et al., "RoFormer", arXiv 2104.09864, eq. 34, in the half-split layout.

Legend: B batch, S positions, H heads, C width of a head.
"""

import math

import torch
from torch import Tensor

from outpace.nn.masks import at_places
from outpace.records.model import ModelSpec, RopeScaling

Tables = tuple[Tensor, Tensor]


def rotary_frequencies(spec: ModelSpec, device: torch.device) -> Tensor:
    """Return angles per position step in radians, fp32, shape (C/2,)."""
    exponents = torch.arange(0, spec.head_dim, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / spec.rope_theta ** (exponents / spec.head_dim)
    return (
        frequencies
        if spec.rope_scaling is None
        else _scale_frequencies(frequencies, spec.rope_scaling)
    )


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale frequencies by Llama 3's rule (arXiv 2407.21783, §3.4.2, and Llama 3.1's code).

    Low frequencies are divided by `factor`, high ones kept, and those between them interpolated.
    """
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_positions / wavelengths - low) / (high - low)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rotary_tables(spec: ModelSpec, positions: Tensor) -> Tables:
    """Return cosines and sines for `positions` of shape (S,) or (B, S), (1 or B, 1, S, C) in fp32.

    The first half of the sines is negated, so that a rotation is x·cos + swapped(x)·sin.
    """
    with torch.autocast(positions.device.type, enabled=False):
        frequencies = rotary_frequencies(spec, positions.device)
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat((cos, cos), dim=-1).unsqueeze(-3)
        sin = torch.cat((-sin, sin), dim=-1).unsqueeze(-3)
    return (cos, sin) if cos.dim() == 4 else (cos.unsqueeze(0), sin.unsqueeze(0))


def tables_at(tables: Tables, read_B: Tensor) -> Tables:
    """Return the tables for one position per sample, (B, 1, 1, C)."""
    cos, sin = (at_places(of[:, 0].expand(len(read_B), -1, -1), read_B) for of in tables)
    return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate(x_BHSC: Tensor, tables: Tables) -> Tensor:
    """Rotate each pair (x_i, x_{i+C/2}) by the angle of its position, in fp32."""
    cos, sin = tables
    first, second = x_BHSC.chunk(2, dim=-1)
    return x_BHSC * cos + torch.cat((second, first), dim=-1) * sin
