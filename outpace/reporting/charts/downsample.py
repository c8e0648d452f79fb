"""Reduction of long series to fewer points, without hiding spikes."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def thin(values: Floats, most: int) -> NDArray[np.int64]:
    """Return the positions of at most `most` values that represent a series, in order.

    The series is split into buckets. The lowest and highest value of each bucket are kept, and the
    first and last value of the series, so that a line through them shows all peaks. Unknown values
    (NaN) are skipped. Raises ValueError if `most` is below four.
    """
    if most < 4:
        raise ValueError(f"{most} points cannot show a series: use 4 or more")
    if len(values) <= most:
        return np.arange(len(values), dtype=np.int64)
    unknown = np.isnan(values)
    low, high = np.where(unknown, np.inf, values), np.where(unknown, -np.inf, values)
    kept = {0, len(values) - 1}
    for begin, end in pairwise(edges(len(values), (most - 2) // 2)):
        kept.add(begin + int(low[begin:end].argmin()))
        kept.add(begin + int(high[begin:end].argmax()))
    return np.array(sorted(kept), dtype=np.int64)


def edges(count: int, buckets: int) -> list[int]:
    """Return the boundaries of buckets of nearly equal size."""
    return [count * bucket // buckets for bucket in range(buckets + 1)]


def means(values: Floats, buckets: int) -> tuple[Floats, Floats]:
    """Return the mean index and the mean value of each bucket; NaN if its values are unknown."""
    cuts = np.array(edges(len(values), min(buckets, len(values))))
    known = ~np.isnan(values)
    count = np.add.reduceat(known.astype(float), cuts[:-1])
    total = np.add.reduceat(np.where(known, values, 0.0), cuts[:-1])
    with np.errstate(invalid="ignore"):
        return (cuts[:-1] + cuts[1:] - 1) / 2, total / count
