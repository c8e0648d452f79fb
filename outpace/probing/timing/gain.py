"""Gains of one option over another, from two figures of one probe."""

from dataclasses import dataclass
from statistics import median

from outpace.probing.timing.intervals import LEVEL, half_width
from outpace.records.figure import Figure


@dataclass(frozen=True)
class Gain:
    """A relative gain (0.03 is 3 % faster), from `low` to `high` at `intervals.LEVEL`."""

    value: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Return whether the whole interval is above 0."""
        return self.low > 0

    def __str__(self) -> str:
        return f"{self.value:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


def gain(before: Figure, after: Figure, among: int = 1) -> Gain | None:
    """Return the gain from `before` to `after`, by the ratio of samples taken side by side.

    A slow period affects both and cancels out. `among`: the number of gains from which the largest
    will be chosen, for which each interval needs a higher probability (Bonferroni). Returns None if
    there are fewer than four samples of either.
    """
    both = zip(before.rounds, after.rounds, strict=False)
    ratios = [a / b for samples in both for a, b in zip(*samples, strict=False)]
    if before.unit != "s":
        ratios = [1 / ratio for ratio in ratios]
    if len(ratios) < 4:
        return None
    value = median(ratios)
    # This width is for the median of a repeat; the ratio itself is more precise by a factor of √2.
    half = half_width(ratios, 1 - (1 - LEVEL) / among) / 2**0.5
    return Gain(value - 1, value - half - 1, value + half - 1)
