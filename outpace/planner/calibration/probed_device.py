"""Rates of a probed device, from the probe's figures and from the catalog."""

import math
import statistics
from dataclasses import replace

import numpy as np

from outpace.catalog import efficiency
from outpace.catalog.links import LINKS
from outpace.planner.hardware.device import DeviceRates, MeasuredMatmul, matmul_s, of_accelerator
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure, Key
from outpace.records.hardware import Accelerator
from outpace.records.machine import Machine
from outpace.records.probe_results import ProbeRecord

_DTYPES = ("fp32", "bf16", "fp16", "tf32", "fp8")
_EVEN = 8  # rows are aligned if they are multiples of 16 bytes: 8 elements of 16 bits
_SMALL_SIDE = 64  # size of matmuls that take no longer than their launch


class ProbeFigures:
    """Lookup of a probe's figures by what they measure."""

    def __init__(self, probed: ProbeRecord) -> None:
        self.probed = probed
        self._unstable: set[Key] = set()

    def value_of(self, figure: Figure | None) -> float | None:
        """Return a figure's value, or the median of its samples if it is unstable."""
        if figure is None:
            return None
        if figure.value is None and figure.samples:
            self._unstable.add(figure.key)
            return statistics.median(figure.samples)
        return figure.value

    def matmuls(self, dtype: str) -> dict[float, float]:
        """Return the highest FLOP/s measured for each number of FLOPs."""
        best: dict[float, float] = {}
        for figure in self.probed.figures:
            key = figure.key
            if key.kind != "matmul" or key.what not in ("candidate", "curve", "best"):
                continue
            sizes = [key.of.get(name) for name in "mnk"]
            rate = self.value_of(figure)
            if key.has(dtype=dtype) and rate and all(isinstance(size, int) for size in sizes):
                flops = 2.0 * math.prod(int(size) for size in sizes if size is not None)
                best[flops] = max(best.get(flops, 0.0), rate)
        return best

    def matmul_points(self, dtype: str) -> dict[tuple[int, int, int], float]:
        """Return the median time in seconds of each measured matmul, by (m, n, k)."""
        found: dict[tuple[int, int, int], list[float]] = {}
        for figure in self.probed.figures:
            key = figure.key
            sides = tuple(key.of.get(name) for name in "mnk")
            if key.kind != "matmul" or not key.has(dtype=dtype):
                continue
            rate = self.value_of(figure)
            if rate and all(isinstance(side, int) for side in sides):
                m, n, k = (int(side) for side in sides if side is not None)
                found.setdefault((m, n, k), []).append(2.0 * m * n * k / rate)
        return {shape: statistics.median(seconds) for shape, seconds in found.items()}

    def launch_s(self) -> float | None:
        """Return the seconds to launch an operator: the median time of the smallest matmuls.

        Returns None if no small matmul was measured.
        """
        small = [
            seconds
            for dtype in _DTYPES
            for sides, seconds in self.matmul_points(dtype).items()
            if max(sides) <= _SMALL_SIDE
        ]
        return statistics.median(small) if small else None

    def memory_bytes_per_s(self, what: str) -> float | None:
        """Return the rate of one type of memory access on the largest probed array."""
        own = [f for f in self.probed.figures if (f.key.kind, f.key.what) == ("memory", what)]
        return self.value_of(max(own, key=lambda f: f.key.number("bytes"), default=None))

    def pinned_bytes_per_s(self) -> float | None:
        """Return the rate of copies between pinned memory and device, in the slower direction."""
        rates = [
            self.value_of(f) for f in self.probed.figures
            if f.key.kind == "memory" and f.key.what in ("to device", "to host")
            and f.key.has(memory="pinned")
        ]  # fmt: skip
        return min((rate for rate in rates if rate), default=None)

    def loader_tokens_per_s(self, ranks: int, cores: int) -> float:
        """Return the tokens/s that loaders of `ranks` ranks reach together; infinite if unknown.

        Loaders were probed one at a time. Several are assumed to run at full rate as long as every
        worker has a core.
        """
        found = []
        for figure in self.probed.figures:
            key, rate = figure.key, self.value_of(figure)
            if (key.kind, key.what) == ("loader", "tokens") and key.has(loader="outpace") and rate:
                at_once = cores / max(1, key.number("workers"))
                found.append(rate * max(1.0, min(ranks, at_once)))
        return max(found, default=math.inf)

    @property
    def notes(self) -> list[str]:
        """Return notes for the user about unstable figures."""
        if not self._unstable:
            return []
        return [
            f"{len(self._unstable)} figures of the probe were not stable; the median of their "
            "samples is used. For a better plan, probe again on a quiet machine."
        ]


def probed_device(
    machine: Machine, known: ProbeFigures, ranks: int, chip: Accelerator | None
) -> DeviceRates:
    """Return a device with measured rates; on a CPU, the rates of one of `ranks` processes."""
    curves = {dtype: known.matmuls(dtype) for dtype in _DTYPES}
    best = {dtype: max(points.values()) for dtype, points in curves.items() if points}
    if not best:
        raise BadInputError(
            "this machine.json has no matmuls. Probe them: outpace probe matmul --out "
            "machine.json, or outpace probe all."
        )
    copies = [f for f in known.probed.figures if (f.key.kind, f.key.what) == ("memory", "copy")]
    largest = max(copies, key=lambda f: f.key.number("bytes"), default=None)
    memory = known.value_of(largest)
    if chip is not None:
        return _measured_accelerator(machine, known, chip, memory)
    main = max(curves, key=lambda dtype: len(curves[dtype]))
    curve = sorted((flops, rate / best[main]) for flops, rate in curves[main].items())
    if machine.devices:
        return _unlisted_accelerator(machine, best, memory, tuple(curve))
    share = 1 / ranks
    rates = {dtype: value * share for dtype, value in best.items()}
    found = cpu_device(machine, ranks, rates, (memory or 10e9) * share, tuple(curve))
    disk = known.value_of(known.probed.find("storage", "sequential write"))
    return found if disk is None else replace(found, disk_bytes_per_s=disk)


def _measured_accelerator(
    machine: Machine, figures: ProbeFigures, chip: Accelerator, memory: float | None
) -> DeviceRates:
    """Return the catalog's device with measured rates instead of typical ones.

    Measured matmuls correct predictions for similar shapes. Unaligned rows get their measured rate,
    and a launch takes as long as the smallest matmul.
    """
    base = of_accelerator(chip)
    launch_s = figures.launch_s()
    ratios, unaligned = _compare_matmuls(base, figures, 2 * (launch_s or 0.0))
    rate = memory or base.memory_bytes_per_s
    adamw = figures.memory_bytes_per_s("AdamW step")
    return replace(
        base,
        memory_bytes=machine.devices[0].memory_bytes or base.memory_bytes,
        measured_ratios=ratios,
        unaligned=statistics.geometric_mean(unaligned) if unaligned else base.unaligned,
        memory_bytes_per_s=rate,
        optimizer_share=min(adamw / rate, 1.0) if adamw else base.optimizer_share,
        operator_s=launch_s or base.operator_s,
        host_bytes_per_s=figures.pinned_bytes_per_s() or base.host_bytes_per_s,
        sources=("outpace probe", *base.sources),
    )


def _compare_matmuls(
    base: DeviceRates, figures: ProbeFigures, least_s: float
) -> tuple[dict[str, tuple[MeasuredMatmul, ...]], list[float]]:
    """Compare measured matmuls with their predictions.

    Returns two results: for each dtype, the ratios of measured to predicted time of aligned
    matmuls; and the rates of unaligned matmuls as fractions of their predictions. Aligned matmuls
    that take at most `least_s` are left out, because most of it is launching.
    """
    ratios, unaligned = {}, []
    for dtype in _DTYPES:
        even = []
        for (m, n, k), seconds in figures.matmul_points(dtype).items():
            if n % _EVEN or k % _EVEN:  # prediction from tiles, without the cost of unaligned rows
                unaligned.append(
                    _predict_matmul_s(replace(base, unaligned=1.0), dtype, m, n, k) / seconds
                )
            elif seconds > least_s:
                took = _predict_matmul_s(base, dtype, m, n, k)
                even.append((float(m), float(n), float(k), seconds / took))
        if even and dtype in base.best_flops_per_s:
            ratios[dtype] = tuple(even)
    return ratios, unaligned


def _predict_matmul_s(device: DeviceRates, dtype: str, m: int, n: int, k: int) -> float:
    item = np.array([{"fp32": 4.0, "tf32": 4.0}.get(dtype, 2.0)])
    one, other, inner = (np.array([float(side)]) for side in (m, n, k))
    rate = np.array([device.rate(dtype)])
    return float(matmul_s(device, rate, one, other, inner, item)[0])


def _unlisted_accelerator(
    machine: Machine,
    rates: dict[str, float],
    bytes_per_s: float | None,
    curve: tuple[tuple[float, float], ...],
) -> DeviceRates:
    """Return the rates of an accelerator outside the catalog: measured ones, and typical others.

    Raises BadInputError if the memory's rate was not measured.
    """
    if bytes_per_s is None:
        raise BadInputError(
            f"{machine.devices[0].name} is not in the catalog, and this machine.json does not say "
            "how fast its memory is. Probe it: outpace probe memory --out machine.json."
        )
    attention, share = efficiency.ATTENTION["ampere"]["flash2"], efficiency.MATMULS["ampere"].share
    first = machine.devices[0]
    return replace(
        _device_without_tiles(first.name, first.memory_bytes, rates, bytes_per_s, curve),
        kind="cuda",
        operator_s=efficiency.OPERATOR_S,
        attention_forward=attention.forward / share,
        attention_backward=attention.backward / share,
        attention_narrow=attention.narrow,
        host_bytes_per_s=LINKS["PCIe 4 x16"].bytes_per_s * efficiency.HOST_LINK_SHARE,
        host_memory_bytes_per_s=efficiency.HOST_MEMORY_BYTES_PER_S,
        sources=("outpace probe", attention.source, efficiency.OPERATOR_SOURCE),
    )


def cpu_device(
    machine: Machine,
    ranks: int,
    rates: dict[str, float],
    bytes_per_s: float,
    curve: tuple[tuple[float, float], ...],
) -> DeviceRates:
    """Return the rates of one of `ranks` processes that share a host's cores and memory."""
    share = machine.host_memory_bytes // ranks
    found = _device_without_tiles(machine.cpu, share, rates, bytes_per_s, curve)
    # The same cores communicate and compute.
    sharers = max(1.0, ranks / machine.host_cores)
    # A CPU's attention is no faster in 16 bits than in fp32 (docs/development/log.md).
    rate = found.rate("fp32")
    return replace(
        found, hides=0.0, sharers=sharers, unit_s=efficiency.CPU_UNIT_S, piecewise=True,
        attention_rates={"fp32": rate, "bf16": rate},
    )  # fmt: skip


def _device_without_tiles(
    name: str,
    memory_bytes: int | None,
    rates: dict[str, float],
    bytes_per_s: float,
    curve: tuple[tuple[float, float], ...],
) -> DeviceRates:
    """Return a device whose matmul tiles are unknown.

    The device is a CPU; for an accelerator, the caller replaces `kind`.
    """
    return DeviceRates(
        name=name,
        kind="cpu",
        memory_bytes=memory_bytes,
        peak_flops_per_s={},
        best_flops_per_s=rates,
        multiprocessors=1,
        tiles=((64, 64, 1.0),),
        fixed_s=0.0,
        memory_bytes_per_s=bytes_per_s,
        operator_s=efficiency.CPU_OPERATOR_S,
        attention_forward=0.5,
        attention_backward=0.5,
        attention_narrow=1.0,
        host_bytes_per_s=bytes_per_s,
        host_memory_bytes_per_s=bytes_per_s,
        disk_bytes_per_s=efficiency.DISK_BYTES_PER_S,
        curve=curve,
        sources=("outpace probe" if curve else "vector width", efficiency.CPU_OPERATOR_SOURCE),
    )
