"""Rates of a device for matmuls, attention, memory and host, from the catalog or a probe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from outpace.catalog import collective_rates, efficiency
from outpace.catalog.links import LINKS
from outpace.planner.plan_columns import PRECISIONS, Bools, Floats, Ints
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator, Dtype
from outpace.records.precisions import PRECISION_TRAITS, Precision

# Height and width of a tile of a matmul's output, and the fraction of the best rate it reaches.
Tile = tuple[int, int, float]
# Dimensions of a measured matmul, and the ratio of its time to the prediction from tiles.
MeasuredMatmul = tuple[float, float, float, float]
_NEAR = 0.05  # squared doublings within which matmuls count as equal
_TILE_STEP = 64  # inner dimension that a multiprocessor processes per step
_SPLITS = (1, 2, 4, 8)
_FP32 = 4
_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class DeviceRates:
    """Achievable rates of one rank's device; only `peak_flops_per_s` is a peak.

    Matmuls:

    - Each of the `multiprocessors` computes one tile of a matmul at a time. A tile takes as long as
      if its inner dimension were `fill` longer.
    - `curve`, if measured, gives the fraction of the best rate by a matmul's FLOPs; otherwise,
      tiles and waves determine it.
    - Even short matmuls reach at most `limit` of the best rate; within a step, which is a sustained
      load, they reach at most `sustained` of it, or `sustained_fp8` in fp8.
    - Matmuls whose rows are not a multiple of 16 bytes reach the fraction `unaligned` of the rate.
      `unaligned_batches`, if given, are the fractions for batched 16-bit matmuls, forward and
      backward.
    - `measured_ratios`, by dtype: ratios of measured to predicted times of matmuls on this device.
    - `any_fp8_layout`: fp8 matmuls accept operands that are not transposed.

    Experts:

    - Triton's grouped matmuls of experts take `triton_experts` times as long as matmuls by tiles.
    - `uneven_experts`: the slowdown of grouped matmuls if some experts get most of the tokens, on
      one rank and on the slowest of many.

    Attention:

    - `attention_forward` and `attention_backward` are fractions of the 16-bit matmul rate.
      `attention_rates`, if given, replace that rate; they are the FLOP/s in fp32 and bf16.
    - Heads of width 64 reach `attention_narrow` of these rates. Causal attention reaches half of
      its rate at `attention_half` keys.
    - `attention_kernels` has the fractions of each kernel by name.
    - `fused_attention`: attention does not store its scores.

    Memory, host and other operators:

    - `memory_bytes` is the part of the manufacturer's `nominal_bytes` that a process can use.
    - `operator_s` is the minimum host time of an operator, and `unit_s` the host time to gather or
      reduce a sharding unit.
    - An optimizer reaches `optimizer_share` of the memory bandwidth.
    - `piecewise`: rotary embeddings, and RMS norms of tensors split over tp, run as several
      operators; other RMS norms are a single operator of outpace (nn.norms).
    - `compiles`: outpace can compile models for the device.

    Collectives and other ranks:

    - `hides` is the fraction of a collective that can overlap with computation; 0 if the same cores
      do both.
    - During a collective, matmuls take `beside_collectives` times as long; 1 means that they slow
      down like all other work.
    - `sharers` ranks share a core; while some of them wait, the others run proportionally faster.
    - `spread` is the relative standard deviation of the clocks of such devices.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int | None
    peak_flops_per_s: Mapping[str, float]
    best_flops_per_s: Mapping[str, float]
    multiprocessors: int
    tiles: tuple[Tile, ...]
    fixed_s: float
    memory_bytes_per_s: float
    operator_s: float
    attention_forward: float
    attention_backward: float
    attention_narrow: float
    host_bytes_per_s: float
    host_memory_bytes_per_s: float
    disk_bytes_per_s: float
    unaligned: float = 1.0
    unaligned_batches: tuple[float, float] | None = None
    optimizer_share: float = 1.0
    hides: float = 1.0
    beside_collectives: float = 1.0
    spread: float = 0.0
    sharers: float = 1.0
    unit_s: float = 0.0
    piecewise: bool = False
    attention_rates: Mapping[str, float] = field(default_factory=dict)
    nominal_bytes: int | None = None
    attention_half: float = 0.0
    attention_kernels: Mapping[str, efficiency.AttentionRate] = field(default_factory=dict)
    fill: float = 0.0
    limit: float = 1.0
    measured_ratios: Mapping[str, tuple[MeasuredMatmul, ...]] = field(default_factory=dict)
    sustained: float = 1.0
    sustained_fp8: float = 1.0
    triton_experts: float = 1.0
    overlaps_tiles: bool = False
    any_fp8_layout: bool = False
    fused_attention: bool = True
    compiles: bool = True
    uneven_experts: tuple[float, float] = efficiency.UNEVEN["hopper"]
    curve: tuple[tuple[float, float], ...] = ()
    sources: tuple[str, ...] = ()

    def is_fp8(self, rate: Floats) -> Bools:
        """Return which matmuls run at the fp8 rate, which is about twice the 16-bit rate."""
        return rate > 1.5 * self.rate("bf16")

    def rate(self, dtype: str) -> float:
        """Return the FLOP/s of large matmuls in a dtype, or in the next wider dtype with a rate."""
        wider = ("fp16" if dtype == "bf16" else "bf16", "tf32", "fp32")
        for name in (dtype, *(reversed(wider) if dtype == "tf32" else wider)):
            if name in self.best_flops_per_s:
                return self.best_flops_per_s[name]
        raise KeyError(dtype)


def dtype_of(precision: Precision) -> Dtype:
    """Return the dtype of matmuls in a precision."""
    return PRECISION_TRAITS[precision].matmuls


def check_dtype(precision: Precision, device: DeviceRates) -> None:
    """Raise BadInputError if an accelerator has no matmuls in the precision's dtype."""
    has = sorted(device.best_flops_per_s)
    if device.kind == "cuda" and dtype_of(precision) not in (*has, "fp32"):
        raise BadInputError(
            f"precision {precision}: {device.name} has no matmuls in "
            f"{dtype_of(precision)}. It has {', '.join(has)}."
        )


def items(precision: Ints) -> Floats:
    """Return the bytes per element of matmul operands, by precision."""
    sizes = [PRECISION_TRAITS[name].operand_bytes for name in PRECISIONS]
    return np.asarray(sizes, float)[precision]


# For chips without a fused kernel, whose attention consists of matmuls.
_UNFUSED = efficiency.AttentionRate(
    forward=1.0, backward=1.0, narrow=1.0, half_length=0.0, source="no fused attention"
)


def of_accelerator(chip: Accelerator) -> DeviceRates:
    """Return an accelerator's rates, from published measurements of it or its architecture."""
    curve = efficiency.matmul_curve(chip)
    kernels = efficiency.attention_rates(chip)
    attention = kernels.get("cudnn") or kernels.get("flash2") or _UNFUSED
    peaks: dict[str, float] = {str(k): v for k, v in chip.peak.flops_per_s.items()}
    best = {
        dtype: peak * (curve.share_fp8 if dtype == "fp8" else curve.share)
        for dtype, peak in peaks.items()
    }
    held = efficiency.power_share(chip)
    low = peaks.get("bf16") or peaks.get("fp16") or peaks["fp32"]
    return DeviceRates(
        name=chip.name,
        kind="cuda",
        memory_bytes=chip.usable_bytes,
        nominal_bytes=chip.memory_bytes,
        peak_flops_per_s=peaks,
        best_flops_per_s=best,
        multiprocessors=chip.multiprocessors or 132,
        tiles=(
            (256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.0), (128, 64, curve.half_tile),
            (64, 128, curve.half_tile), (64, 64, curve.quarter_tile),
        ),
        fixed_s=curve.fixed_s,
        fill=curve.fill,
        limit=curve.limit,
        sustained=held * curve.sustained / curve.share,
        sustained_fp8=held * curve.sustained_fp8 / curve.share_fp8,
        memory_bytes_per_s=chip.memory_bytes_per_s * efficiency.MEMORY_SHARE[chip.architecture],
        operator_s=efficiency.OPERATOR_S,
        attention_forward=attention.forward,
        attention_backward=attention.backward,
        attention_narrow=attention.narrow,
        attention_half=attention.half_length,
        # Attention also reaches the board's power limit (efficiency.ATTENTION_POWER_SOURCE).
        attention_rates={"bf16": low * held, "fp32": min(low, best["fp32"])},
        attention_kernels={str(name): rate for name, rate in kernels.items()},
        # If host and device share their memory, a copy both reads and writes it.
        host_bytes_per_s=min(
            LINKS[chip.host_link].bytes_per_s * efficiency.HOST_LINK_SHARE,
            chip.memory_bytes_per_s / 2,
        ),
        host_memory_bytes_per_s=efficiency.HOST_MEMORY_BYTES_PER_S,
        disk_bytes_per_s=efficiency.DISK_BYTES_PER_S,
        unaligned=efficiency.UNALIGNED[chip.architecture],
        unaligned_batches=efficiency.UNALIGNED_BATCHES.get(chip.architecture),
        triton_experts=efficiency.TRITON_EXPERTS[chip.architecture],
        overlaps_tiles=efficiency.overlaps_tiles(chip),
        any_fp8_layout=efficiency.takes_any_fp8_layout(chip),
        fused_attention=efficiency.has_fused_attention(chip),
        compiles=chip.compiles,
        uneven_experts=efficiency.uneven_load(chip),
        hides=1 - collective_rates.COLLECTIVE_MULTIPROCESSORS / (chip.multiprocessors or 132),
        beside_collectives=collective_rates.PERSISTENT_MATMULS.get(chip.architecture, 1.0),
        spread=efficiency.DEVICE_SPREAD,
        sources=(curve.source, attention.source, efficiency.ATTENTION_POWER_SOURCE,
                 efficiency.MEMORY_SOURCE,
                 efficiency.OPERATOR_SOURCE, efficiency.BACKWARD_SOURCE,
                 collective_rates.COLLECTIVE_SOURCE, collective_rates.PERSISTENT_SOURCE,
                 efficiency.DEVICE_SPREAD_SOURCE),
    )  # fmt: skip


def matmul_s(
    device: DeviceRates,
    rate: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    item: Floats,
    batch: Floats | float = 1.0,
) -> Floats:
    """Return the seconds of `batch` matmuls of (m, k) by (k, n); large ones run at `rate` FLOP/s.

    Multiprocessors compute the output in waves of tiles. The last wave may be nearly empty (wave
    quantisation), and so may tiles at the edges (tile quantisation). Matmuls with few tiles may be
    split along k, with a sum over the partial results. A batch multiplies the number of tiles.
    """
    m, n, k, rate = (np.asarray(x, float) for x in (m, n, k, rate))
    moved = batch * (m * k + k * n + m * n) * item / device.memory_bytes_per_s
    if device.curve:
        return device.fixed_s + np.maximum(_curve_matmul_s(device, rate, m, n, k, batch), moved)
    odd = (n * item % _ALIGNMENT != 0) | (k * item % _ALIGNMENT != 0)
    asked = rate
    rate = rate * np.where(odd, device.unaligned, 1.0)
    depth = np.ceil(k / _TILE_STEP) * _TILE_STEP
    fill = 0.0 if device.fill == 0 else device.fill * np.where(device.is_fp8(rate), 2.0, 1.0)
    best = np.full(np.broadcast(m, n, k, rate, batch).shape, np.inf)
    # The depth of each part, and the seconds in which the partial results are summed.
    splits = [
        (parts, depth / parts + fill, batch * m * n * _FP32 * parts / device.memory_bytes_per_s)
        for parts in _SPLITS
    ]
    for height, width, share in device.tiles:
        tiles = np.ceil(m / height) * np.ceil(n / width) * batch
        one = 2.0 * height * width * device.multiprocessors / (rate * share)
        for parts, part_depth, sum_s in splits:
            took = np.ceil(tiles * parts / device.multiprocessors) * one * part_depth
            if parts > 1:
                took = took + sum_s + 1e-6
            np.minimum(best, took, out=best)
    least = 2.0 * batch * m * n * k / (rate * device.limit)
    seconds: Floats = device.fixed_s + np.maximum(np.maximum(best, least), moved)
    if device.measured_ratios:
        seconds = seconds * np.where(odd, 1.0, _measured_ratio(device, m, n, k, asked))
    return seconds


def sustained_matmul_s(
    device: DeviceRates,
    rate: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    item: Floats,
    batch: Floats | float = 1.0,
    more_bytes: Floats | float = 0.0,
) -> Floats:
    """Return the seconds of `matmul_s` within a training step, where power and caches limit rates.

    No matmul exceeds the sustained rate; slower ones take as long as in isolation. At the end of
    each tile, `more_bytes` are moved in addition to operands and results. This takes additional
    time unless the device computes the next tiles meanwhile.
    """
    short = matmul_s(device, rate, m, n, k, item, batch)
    rate = np.asarray(rate, float)
    share = np.where(device.is_fp8(rate), device.sustained_fp8, device.sustained)
    # fp32 without tensor cores draws less power.
    share = np.where(rate <= device.rate("fp32"), 1.0, share)
    flops, moved = 2.0 * batch * m * n * k, batch * (m * k + k * n + m * n) * item
    seconds: Floats = np.maximum(short, flops / (rate * share))
    if device.overlaps_tiles:
        return np.maximum(seconds, (moved + more_bytes) / device.memory_bytes_per_s)
    return seconds + more_bytes / device.memory_bytes_per_s


def _measured_ratio(device: DeviceRates, m: Floats, n: Floats, k: Floats, rate: Floats) -> Floats:
    """Return the ratio of measured to predicted time for matmuls of this shape.

    Measured matmuls of the same dtype are weighted by their closeness in the logarithms of m, n and
    k. At a measured shape, the result is close to its ratio; far from all of them, it approaches
    the mean.
    """
    m, n, k, rate = np.broadcast_arrays(*(np.asarray(x, float) for x in (m, n, k, rate)))
    found = np.ones(rate.shape)
    for dtype, points in device.measured_ratios.items():
        own = np.isclose(rate, device.rate(dtype), rtol=1e-6)
        if own.any():
            found = np.where(own, _interpolate_ratio(points, m, n, k), found)
    return found


def _interpolate_ratio(points: Sequence[MeasuredMatmul], m: Floats, n: Floats, k: Floats) -> Floats:
    at, ratios = np.log2([point[:3] for point in points]), np.log([p[3] for p in points])
    asked = np.log2(np.stack([m, n, k], axis=-1))
    apart = np.sum((asked[..., None, :] - at) ** 2, axis=-1)
    weights = 1 / (apart + _NEAR) ** 2
    found: Floats = np.exp((weights @ ratios) / weights.sum(axis=-1))
    return found


def _curve_matmul_s(
    device: DeviceRates, rate: Floats, m: Floats, n: Floats, k: Floats, batch: Floats | float
) -> Floats:
    flops = 2.0 * m * n * k
    sizes, shares = np.array(device.curve).T
    share = np.interp(np.log(np.maximum(flops, 1.0)), np.log(sizes), shares)
    seconds: Floats = batch * flops / (rate * share)
    return seconds
