"""Recovery of integers from rounded numbers in a trainer's log."""

import math
from dataclasses import dataclass

# Suffixes in nanotron's human_format.
POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_DIGITS = 3  # significant digits of human_format
# Decimals to which transformers rounds rates and times (trainer_utils.speed_metrics), and
# significant digits that version 5 prints (trainer_callback.PrinterCallback).
_RATE_DECIMALS, _RUNTIME_DECIMALS, _PRINTED_DIGITS = 3, 4, 4


@dataclass(frozen=True)
class Range:
    """The range of numbers that round to a logged value."""

    low: float
    high: float

    def divide(self, other: "Range") -> "Range":
        """Return the range of the quotient of two positive numbers."""
        return Range(self.low / other.high, self.high / max(other.low, math.ulp(1.0)))

    def multiply(self, other: "Range") -> "Range":
        """Return the range of the product of two positive numbers."""
        return Range(self.low * other.low, self.high * other.high)

    def only_whole_number(self, multiple_of: int = 1) -> int | None:
        """Return the only multiple of `multiple_of` in the range; None if not exactly one."""
        first = max(1, math.ceil(self.low / multiple_of))
        last = math.floor(self.high / multiple_of)
        return first * multiple_of if first == last else None


def abbreviation_range(number: float, suffix: str) -> Range:
    """Return the range of a number that nanotron abbreviated to three digits, such as 1.05M.

    Numbers of 1,000 or more without a suffix are exact.
    """
    value = number * POWERS[suffix]
    if not suffix and number >= 10.0**_DIGITS:
        return Range(value, value)
    half = _half_last_digit(value, _DIGITS)
    return Range(value - half, value + half)


def rate_range(value: float, *, printed: bool = False) -> Range:
    """Return the range of a rate from transformers' Trainer; `printed` rates have fewer digits."""
    half = 0.5 * 10.0**-_RATE_DECIMALS
    if printed:
        half = max(half, _half_last_digit(value, _PRINTED_DIGITS))
    return Range(max(0.0, value - half), value + half)


def runtime_range(value_s: float) -> Range:
    """Return the range of a time from transformers' Trainer."""
    half = 0.5 * 10.0**-_RUNTIME_DECIMALS
    return Range(max(0.0, value_s - half), value_s + half)


def _half_last_digit(value: float, digits: int) -> float:
    """Return half a unit of the last digit of a value with `digits` significant digits."""
    return 0.5 * 10.0 ** (math.floor(math.log10(value)) + 1 - digits) if value > 0 else 0.0


def infer_batch_size(mean: Range, steps: float, multiple_of: int = 1) -> tuple[int | None, bool]:
    """Return the batch size that fits a mean number of samples per step, and whether it is certain.

    `steps` is the number of steps per epoch. The last step of an epoch may have fewer samples, so
    the mean may be below the batch size. The batch size is a multiple of `multiple_of`. Returns
    None if the mean is not such a multiple, and more than one batch size is possible.
    """
    exact = mean.only_whole_number(multiple_of)
    if steps < 2:
        return exact, exact is not None
    # ceil(samples / batch) is the number of steps.
    below = math.nextafter(mean.high * steps / (steps - 1), 0.0)
    only = Range(mean.low, below).only_whole_number(multiple_of)
    return (exact, False) if only is None else (only, True)
