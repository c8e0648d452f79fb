"""A collective's time by size: latency + traffic / bandwidth, fitted to measured times.

Distances from the line are relative to a point's time, so that microseconds count as much as
seconds. The fit minimises absolute distances, not squares, so a size at which a library switches
algorithms does not shift the whole line. Sizes with widely spread times have less weight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import fsum
from operator import mul
from statistics import median

from outpace.probing.timing.intervals import normal_deviation
from outpace.probing.timing.measure import figure_of
from outpace.records.figure import Figure, Key
from outpace.records.probe_results import LinkFit

# As counted by nccl-tests ("doc/PERFORMANCE.md"): the part of the whole array that each link
# carries. With `n` ranks, a reduced array crosses each link twice, except for the rank's own part.
_BUS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send/recv": lambda n: 1.0,
}
COLLECTIVES = tuple(_BUS)
_LEAST_SIZES = 3
# Sizes whose times vary by less than this between rounds have equal weight, because no line is
# more accurate than that.
_STEADY = 0.02


def bus_factor(collective: str, ranks: int) -> float:
    """Return busbw / algbw of a collective over `ranks` ranks."""
    return _BUS[collective](ranks)


@dataclass(frozen=True)
class LinkLine:
    """time_s = latency_s + traffic_bytes * s_per_byte."""

    latency_s: float
    s_per_byte: float

    def time_s(self, traffic_bytes: float) -> float:
        return self.latency_s + traffic_bytes * self.s_per_byte

    def distance(self, points: Sequence[tuple[float, float]]) -> list[float]:
        """Return how far the line is from each point, relative to the point's time."""
        return [abs(self.time_s(traffic) / time_s - 1) for traffic, time_s in points]


def fit_line(
    points: Sequence[tuple[float, float]], weights: Sequence[float] | None = None
) -> LinkLine:
    """Return the line with the least relative distances from points (traffic_bytes, time_s).

    Neither latency nor time per byte is negative. The best line goes through two points, or through
    one if its latency or time per byte is 0 (Bloomfield & Steiger, "Least Absolute Deviations"), so
    all such lines are tried. Raises ValueError for fewer than two points, and for traffic or times
    that are not positive.
    """
    if len(points) < 2 or any(traffic <= 0 or time_s <= 0 for traffic, time_s in points):
        raise ValueError(f"a line needs two points or more, all above 0: {list(points)}")
    factors = weights or [1.0] * len(points)
    return min(_candidates(points), key=lambda line: fsum(map(mul, factors, line.distance(points))))


def _candidates(points: Sequence[tuple[float, float]]) -> Iterator[LinkLine]:
    for traffic, time_s in points:
        yield LinkLine(0.0, time_s / traffic)
        yield LinkLine(time_s, 0.0)
    for (x, s), (y, t) in combinations(points, 2):
        if x == y:
            continue
        slope = (t - s) / (y - x)
        line = LinkLine(s - slope * x, slope)
        if line.latency_s >= 0 and slope >= 0:
            yield line


def fit_link(figures: Sequence[Figure]) -> LinkFit | None:
    """Fit latency and bandwidth to the times of a collective at several sizes.

    One line is fitted to the first samples of all sizes, one to the second samples, and so on. The
    result is the median over the lines, and the differences between lines give its intervals. The
    keys of `figures` differ only in their bytes. Returns None if there are too few sizes, or if the
    time does not rise with the size.
    """
    first = min(figures, key=lambda figure: figure.key.of["bytes"], default=None)
    series = [figure.samples for figure in figures]
    count = min(map(len, series), default=0)
    if first is None or len({f.key.of["bytes"] for f in figures}) < _LEAST_SIZES or count == 0:
        return None
    of = {name: value for name, value in first.key.of.items() if name != "bytes"}
    collective, ranks = first.key.kind, int(of["ranks"])
    factor = bus_factor(collective, ranks)
    traffic = [factor * int(figure.key.of["bytes"]) for figure in figures]
    weights = [1 / max(_STEADY, normal_deviation(times) / median(times)) for times in series]
    lines = [
        fit_line([(x, times[number]) for x, times in zip(traffic, series, strict=True)], weights)
        for number in range(count)
    ]
    told = [line for line in lines if line.s_per_byte > 0]
    if 2 * len(told) <= count:
        return None  # equal times for all sizes do not determine the bandwidth
    middles = [(x, median(times)) for x, times in zip(traffic, series, strict=True)]
    away = fit_line(middles, weights).distance(middles)
    return LinkFit(
        collective=collective,
        axis=str(of["axis"]),
        backend=str(of["backend"]),
        device=str(of["device"]),
        ranks=ranks,
        latency=figure_of(
            Key(kind=collective, what="latency", of=of), "s", [(line.latency_s,) for line in lines]
        ),
        bandwidth=figure_of(
            Key(kind=collective, what="bandwidth", of=of),
            "B/s",
            [(1 / line.s_per_byte,) for line in told],
        ),
        residual=median(away),
    )
