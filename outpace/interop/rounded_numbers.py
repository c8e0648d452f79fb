"""Whole numbers behind the rounded numbers of a trainer's log."""

import math
from dataclasses import dataclass

# Suffixes of nanotron's human_format.
POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_DIGITS = 3  # significant digits of human_format
_DECIMALS = 3  # of transformers' rates


@dataclass(frozen=True)
class Range:
    """The numbers that a log may have rounded to what it says."""

    low: float
    high: float

    def divide(self, other: "Range") -> "Range":
        """Return the range of the quotient of two positive numbers."""
        return Range(self.low / other.high, self.high / max(other.low, math.ulp(1.0)))

    def scale(self, factor: float) -> "Range":
        """Return the range of the number times a factor."""
        return Range(self.low * factor, self.high * factor)

    def only_whole_number(self, multiple_of: int = 1) -> int | None:
        """Return the only multiple of a number in the range, from 1; None if there are several."""
        first = max(1, math.ceil(self.low / multiple_of))
        last = math.floor(self.high / multiple_of)
        return first * multiple_of if first == last else None


def abbreviation_range(number: float, suffix: str) -> Range:
    """Return the range of a number such as 1.05M, of which nanotron writes three digits."""
    value = number * POWERS[suffix]
    if not suffix and number.is_integer():
        return Range(value, value)
    half = 0.5 * 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS) if value > 0 else 0.0
    return Range(value - half, value + half)


def rate_range(value: float) -> Range:
    """Return the range of a rate of transformers' Trainer, which has three decimals."""
    half = 0.5 * 10.0**-_DECIMALS
    return Range(max(0.0, value - half), value + half)


def batch_of_epochs(mean: Range, steps: float, multiple_of: int = 1) -> tuple[int | None, bool]:
    """Return the batch, from the mean number of samples in a step, and whether no other fits.

    The last step of an epoch of `steps` may have fewer samples, so the mean may be less than the
    batch, which is a multiple of each device's. None if the mean is not a whole number, and several
    batches fit.
    """
    exact = mean.only_whole_number(multiple_of)
    if steps < 2:
        return exact, exact is not None
    # ceil(samples / batch) is the number of steps.
    below = math.nextafter(mean.high * steps / (steps - 1), 0.0)
    only = Range(mean.low, below).only_whole_number(multiple_of)
    return (exact, False) if only is None else (only, True)
