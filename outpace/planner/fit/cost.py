"""Cost of a plan's step, in memory and time, as far as choosing between plans needs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outpace.planner.model.flops import parameter_count
from outpace.records.memory import Kind
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan


@dataclass(frozen=True)
class Cost:
    """Peak memory of the fullest rank, and the FLOPs and bytes read and written in one step.

    `tensor_bytes` of the peak are tensors. `slow_bytes` go to slower storage than memory and back,
    to a disk or over a network. `by_kind` is the peak by the kinds of a memory account, if known.
    """

    peak_memory_bytes: int
    flops: int
    bytes_moved: int
    slow_bytes: int = 0
    tensor_bytes: int = 0
    by_kind: Mapping[Kind, int] = field(default_factory=dict)


# What a plan would cost. Raises BadInputError for one that cannot be.
Predict = Callable[[Plan], Cost]


@dataclass(frozen=True)
class CostRates:
    """Rates at which a rank computes, moves bytes in memory, and moves them to slower storage."""

    flops_per_s: float
    bytes_per_s: float
    slow_bytes_per_s: float

    def seconds(self, cost: Cost) -> float:
        """Return the time one after the other; no plan is faster by more than a factor of three."""
        return (
            cost.flops / self.flops_per_s
            + cost.bytes_moved / self.bytes_per_s
            + cost.slow_bytes / self.slow_bytes_per_s
        )


# fp32 weights, gradients and two moments, and as much again for copies and buckets.
_STATE_BYTES = 32


def most_bytes(spec: ModelSpec, seq_len: int, plan: Plan) -> int:
    """Return an upper bound of a rank's memory, by a quick rough count.

    It assumes that everything is unsharded, in fp32 and kept, and that attention is not fused.
    """
    tokens = plan.samples_read * seq_len  # of all ranks, where one of them computes the loss
    of_token = 24 * spec.hidden + 8 * spec.ffn + 4 * spec.heads * (spec.head_dim + seq_len)
    numbers = tokens * (spec.layers * of_token + 4 * spec.vocab)
    return _STATE_BYTES * parameter_count(spec) + 4 * numbers
