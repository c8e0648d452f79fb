"""Gains of one option over another, from two figures of the same probe."""

from dataclasses import dataclass
from statistics import median

from outpace.probing.timing.intervals import LEVEL, half_width
from outpace.records.figure import Figure


@dataclass(frozen=True)
class Gain:
    """A relative gain in speed (0.03 means 3 % faster), with the ends of its interval."""

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
    """Return how much faster `after` is than `before`, from samples taken at the same time.

    A slow period of the machine affects both figures and cancels out in their ratio. If the largest
    of several gains will be chosen, `among` is the number of gains, and widens the interval
    (Bonferroni). Returns None for fewer than four pairs of samples.
    """
    both = zip(before.rounds, after.rounds, strict=False)
    ratios = [a / b for samples in both for a, b in zip(*samples, strict=False)]
    if before.unit != "s":
        ratios = [1 / ratio for ratio in ratios]
    if len(ratios) < 4:
        return None
    value = median(ratios)
    # This width is for the median of a repeat. The median ratio itself is more precise by √2.
    half = half_width(ratios, 1 - (1 - LEVEL) / among) / 2**0.5
    return Gain(value - 1, value - half - 1, value + half - 1)
