"""Rates that a device reaches: products, attention, memory and the host, from catalog or probe."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from outpace.catalog import efficiency
from outpace.catalog.links import LINKS
from outpace.planner.columns import PRECISIONS, Floats, Ints
from outpace.records.hardware import Accelerator, Dtype
from outpace.records.optimizers import Precision

# Square tiles and those twice as long, as products' outputs are cut, with what they reach.
Tile = tuple[int, int, float]
_TILE_STEP = 64  # of the inner dimension that a multiprocessor takes at once
_SPLITS = (1, 2, 4, 8)
_FP32 = 4
_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Device:
    """One rank's device. Rates are reached ones, but for `peak_flops_per_s`.

    `multiprocessors` take a product's tiles, one each at a time. `operator_s` is what one operator
    takes on the host at least, however little it computes. `curve` has points of a product's FLOPs
    and what share of the best rate it reaches, where that was measured; else tiles and waves
    decide. `unaligned` is the share of the rate where rows are no multiple of 16 bytes.
    `memory_bytes` is what a process gets, of the `nominal_bytes` that the maker prints.
    `attention_forward` and `attention_backward` are shares of the rate of 16-bit products,
    `attention_narrow` the share of that for heads of 64. An optimizer reaches `optimizer_share` of
    the memory's rate. `hides` is the share of a collective that can proceed beside computing: none
    where the same cores do both. `sharers` ranks take turns on a core: while some wait, the others
    are that much faster. `unit_s` is what the host takes to gather or sum up one unit of shards.
    `piecewise`: rotations, and RMS norms of spread tensors, are put together from operators of
    their own; other RMS norms are the package's (nn.norms).
    `attention_rates` are FLOP/s that attention's shares are of in fp32 and bf16, where they are not
    those of products.
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
    optimizer_share: float = 1.0
    hides: float = 1.0
    sharers: float = 1.0
    unit_s: float = 0.0
    piecewise: bool = False
    attention_rates: Mapping[str, float] = field(default_factory=dict)
    nominal_bytes: int | None = None
    curve: tuple[tuple[float, float], ...] = ()
    sources: tuple[str, ...] = ()

    def rate(self, dtype: str) -> float:
        """FLOP/s of large products; of the next wider dtype where there is none."""
        wider = ("fp16" if dtype == "bf16" else "bf16", "tf32", "fp32")
        for name in (dtype, *(reversed(wider) if dtype == "tf32" else wider)):
            if name in self.best_flops_per_s:
                return self.best_flops_per_s[name]
        raise KeyError(dtype)


def dtype_of(precision: Precision) -> Dtype:
    """Return the dtype in which products are computed."""
    name = precision.split("-")[0]
    return "fp32" if name == "fp64" else name  # type: ignore[return-value]


def items(precision: Ints) -> Floats:
    """Bytes of a number in products, by precision."""
    sizes = [{"fp64": 8, "fp32": 4, "tf32": 4}.get(name, 2) for name in PRECISIONS]
    return np.asarray(sizes, float)[precision]


def of_accelerator(chip: Accelerator) -> Device:
    """Return the device by its architecture's published measurements."""
    curve = efficiency.product_curve(chip)
    attention = efficiency.ATTENTION[chip.architecture]
    peaks: dict[str, float] = {str(k): v for k, v in chip.peak.flops_per_s.items()}
    return Device(
        name=chip.name,
        kind="cuda",
        memory_bytes=chip.usable_bytes,
        nominal_bytes=chip.memory_bytes,
        peak_flops_per_s=peaks,
        best_flops_per_s={dtype: peak * curve.share for dtype, peak in peaks.items()},
        multiprocessors=chip.multiprocessors or 132,
        tiles=(
            (256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.0), (128, 64, curve.half_tile),
            (64, 128, curve.half_tile), (64, 64, curve.quarter_tile),
        ),
        fixed_s=curve.fixed_s,
        memory_bytes_per_s=chip.memory_bytes_per_s * efficiency.MEMORY_SHARE[chip.architecture],
        operator_s=efficiency.OPERATOR_S,
        attention_forward=attention.forward / curve.share,
        attention_backward=attention.backward / curve.share,
        attention_narrow=attention.narrow,
        host_bytes_per_s=LINKS[chip.host_link].bytes_per_s * efficiency.HOST_LINK_SHARE,
        host_memory_bytes_per_s=efficiency.HOST_MEMORY_BYTES_PER_S,
        disk_bytes_per_s=efficiency.DISK_BYTES_PER_S,
        unaligned=efficiency.UNALIGNED[chip.architecture],
        sources=(curve.source, attention.source, efficiency.MEMORY_SOURCE,
                 efficiency.OPERATOR_SOURCE, efficiency.BACKWARD_SOURCE),
    )  # fmt: skip


def product_s(
    device: Device,
    rate: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    item: Floats,
    batch: Floats | float = 1.0,
) -> Floats:
    """Return seconds of `batch` products of (m, k) by (k, n), at `rate` FLOP/s for large ones.

    Outputs are cut into tiles, which multiprocessors take in waves; the last wave may be nearly
    empty (wave quantisation), as may tiles at the edges (tile quantisation). Products with few
    tiles are split over k, whose parts are then summed. A batch is that many times the tiles.
    """  # fmt: skip
    m, n, k, rate = (np.asarray(x, float) for x in (m, n, k, rate))
    moved = batch * (m * k + k * n + m * n) * item / device.memory_bytes_per_s
    if device.curve:
        return device.fixed_s + np.maximum(_by_curve(device, rate, m, n, k, batch), moved)
    odd = (n * item % _ALIGNMENT != 0) | (k * item % _ALIGNMENT != 0)
    rate = rate * np.where(odd, device.unaligned, 1.0)
    depth = np.ceil(k / _TILE_STEP) * _TILE_STEP
    best = np.full(np.broadcast(m, n, k, rate, batch).shape, np.inf)
    for height, width, share in device.tiles:
        tiles = np.ceil(m / height) * np.ceil(n / width) * batch
        one = 2.0 * height * width * depth * device.multiprocessors / (rate * share)
        for parts in _SPLITS:
            waves = np.ceil(tiles * parts / device.multiprocessors)
            took = waves * one / parts
            if parts > 1:
                took = took + batch * m * n * _FP32 * parts / device.memory_bytes_per_s
                took = took + 1e-6
            best = np.minimum(best, took)
    seconds: Floats = device.fixed_s + np.maximum(best, moved)
    return seconds


def _by_curve(
    device: Device, rate: Floats, m: Floats, n: Floats, k: Floats, batch: Floats | float
) -> Floats:
    """Each product of a batch by itself, at the share of the best rate that its size reaches."""
    flops = 2.0 * m * n * k
    sizes, shares = np.array(device.curve).T
    share = np.interp(np.log(np.maximum(flops, 1.0)), np.log(sizes), shares)
    seconds: Floats = batch * flops / (rate * share)
    return seconds
