"""Prediction intervals for the median of a repeated measurement, and detection of drift."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from statistics import median

LEVEL = 0.95
# The median of k normal values varies like the mean of k * 2 / pi.
_MEDIAN_COSTS = 1.2533
# A median absolute deviation varies like a standard deviation of 37 % as many values.
_EFFICIENCY = 0.37
# Factor on widths: values of one measurement are closer to each other than to those of a repeat.
SLACK = 1.15
# A larger trend than this fraction is drift, unless it may be due to chance.
_DRIFT = 0.10
_DRIFT_T = 4.0


def half_width(samples: Sequence[float], level: float = LEVEL, slack: float = SLACK) -> float:
    """Return the half width of a prediction interval for the median of a repeated measurement.

    The interval around the median of `samples` contains the median of an equally long repeat with
    probability `level`. `slack` is a factor that widens it, since repeats differ more than the
    samples of one measurement.

    The width is computed with Student's t for the difference of two such medians. The scale is the
    median absolute deviation, which a few disturbed samples do not widen; autocorrelated samples
    count as fewer samples (von Storch & Zwiers, "Statistical Analysis in Climate Research", eq.
    6.26). Infinite for fewer than three samples.
    """
    count = len(samples)
    if count < 3:
        return inf
    from scipy.special import stdtrit  # slow to import, and only needed here

    scale = normal_deviation(samples)
    alike = max(0.0, _autocorrelation(samples, scale))
    apart = scale * _MEDIAN_COSTS * ((1 + alike) / (1 - alike) * 2 / count) ** 0.5
    return float(slack * stdtrit(_EFFICIENCY * (count - 1), (1 + level) / 2) * apart)


def normal_deviation(values: Sequence[float]) -> float:
    """Return a robust standard deviation, computed from the median absolute deviation."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def _autocorrelation(values: Sequence[float], scale: float) -> float:
    """Return the correlation of neighbouring values, limited to 0.9: a higher one means drift."""
    middle = median(values)
    away = [min(max(value - middle, -3 * scale), 3 * scale) for value in values]
    total = sum(one * one for one in away)
    if total == 0:
        return 0.0
    return min(0.9, sum(a * b for a, b in pairwise(away)) / total)


def trend(rounds: Sequence[float]) -> float:
    """Return how a measured value changed from the first third of the rounds to the last.

    The change is relative to the median of all rounds; 0.0 if it may be due to chance.
    """
    third = len(rounds) // 3
    if third < 2:
        return 0.0
    first, last = rounds[:third], rounds[-third:]
    apart = (median(last) - median(first)) / median(rounds)
    within = max(normal_deviation(first), normal_deviation(last)) / median(rounds)
    beyond = _MEDIAN_COSTS * within * (2 / third) ** 0.5
    return apart if abs(apart) > max(_DRIFT, _DRIFT_T * beyond) else 0.0
