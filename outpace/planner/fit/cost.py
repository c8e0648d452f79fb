"""Cost of a plan in memory and time, for choosing among plans."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outpace.planner.model.flops import parameter_count
from outpace.records.memory import Kind
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan


@dataclass(frozen=True)
class Cost:
    """The peak memory of a plan's fullest rank and, if known, its predicted step time.

    `tensor_bytes` is the part of the peak that tensors occupy. `by_kind` divides the peak by kind
    of memory, if known.
    """

    peak_memory_bytes: int
    step_s: float | None
    tensor_bytes: int = 0
    by_kind: Mapping[Kind, int] = field(default_factory=dict)


# Returns a plan's cost. Raises BadInputError for impossible plans.
Predict = Callable[[Plan], Cost]


# Per parameter: fp32 weight, gradient and two moments, and as much again for copies and buckets.
_STATE_BYTES = 32


def most_bytes(spec: ModelSpec, seq_len: int, plan: Plan) -> int:
    """Return a quick upper bound on a rank's memory.

    The bound assumes unsharded fp32 tensors that are never freed, and attention that is not fused.
    Each run computes it before its first step, where loading the planner's formula would take 0.05
    s.
    """
    tokens = plan.samples_read * seq_len  # of all ranks if one of them computes the loss
    of_token = 24 * spec.hidden + 8 * spec.ffn + 4 * spec.heads * (spec.head_dim + seq_len)
    numbers = tokens * (spec.layers * of_token + 4 * spec.vocab)
    return _STATE_BYTES * parameter_count(spec) + 4 * numbers
