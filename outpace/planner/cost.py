"""What a step of a plan takes, in memory and in time, as far as choosing between plans needs it."""

from collections.abc import Callable
from dataclasses import dataclass

from outpace.records.plan import Plan


@dataclass(frozen=True)
class Cost:
    """Of the fullest rank: its peak, and the FLOPs and bytes read and written of one step.

    `slow_bytes` go to a slower place than memory and back: to a disk, or over a wire.
    """

    peak_memory_bytes: int
    flops: int
    bytes_moved: int
    slow_bytes: int = 0


# What a plan would cost. Raises BadInputError for one that cannot be.
Predict = Callable[[Plan], Cost]


@dataclass(frozen=True)
class Rates:
    """How fast a rank computes, moves bytes, and moves them to slower places."""

    flops_per_s: float
    bytes_per_s: float
    slow_bytes_per_s: float

    def seconds(self, cost: Cost) -> float:
        """One after the other, which no plan is better than by more than a factor of three."""
        return (
            cost.flops / self.flops_per_s
            + cost.bytes_moved / self.bytes_per_s
            + cost.slow_bytes / self.slow_bytes_per_s
        )
