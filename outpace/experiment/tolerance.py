"""Tolerances, by precision, for differences between a plan and a single process.

docs/concepts/parity.md derives them.
"""

import math
from dataclasses import dataclass

from outpace.planner.model.flops import parameter_count
from outpace.records.model import ModelSpec
from outpace.records.plan import GATHERS, Plan
from outpace.records.precisions import MASTERS, SHARD_DTYPES

# Unit roundoffs: half the distance from 1 to the next number (IEEE 754; bf16 has 8 bits).
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8}
# Consecutive operations in a block, each of which rounds its result: norm, q·k·v, rotation, scores,
# softmax, mix, output, sum; norm, up, activation, gating, down, sum.
_ROUNDINGS_PER_BLOCK = 14
_BACKWARD = 2  # two matmuls per matmul of the forward
_COMPARED_KINDS = 5  # used parameter, gradient, two moments, parameter
# Probability that rounding alone pushes any compared value beyond the tolerance.
_FALSE_ALARM = 1e-6


@dataclass(frozen=True)
class Tolerance:
    """Tolerance for the difference of a tensor from the same tensor in one process.

    It is `relative` times the tensor's scale. The scale is usually the tensor's largest value, and
    at least `floor` times the largest scale among tensors of its kind. A parameter's scale is its
    largest change since the first step, or `held` times its largest value if that is more. For the
    copy of a parameter with which a forward computes, `used` replaces `held`. If ranks gather this
    copy in fewer bits, it is rounded once more than in one process, so each value may also differ
    by `gathered` times its size (|fl(x) − x| ≤ u·|fl(x)|: Higham, "Accuracy and Stability of
    Numerical Algorithms", 2002, theorem 2.3).
    """

    relative: float
    floor: float
    held: float = 1.0
    gathered: float = 0.0
    used: float = 1.0


def tolerance_of(plan: Plan, spec: ModelSpec, *, tokens: int, steps: int) -> Tolerance:
    """Return the tolerance for a global batch of `tokens` after `steps`.

    For fp64, it is 1e-9, a million times the rounding error. A tensor that is wrong by a constant
    factor differs at least a million times more than that. For other precisions, rounding errors
    are assumed to be independent with mean 0 (Higham and Mary, "A new approach to probabilistic
    rounding error analysis", SISC 2019, theorem 2.4: λ·√n·u instead of n·u for a sum of n terms,
    with λ depending on the probability).
    """
    precision = plan.precision
    if precision == "fp64":
        return Tolerance(1e-9, floor=1e-6)
    depth = _ROUNDINGS_PER_BLOCK * spec.layers * (1 + _BACKWARD)
    # The variance of a uniform error on ±u is u²/3; two computations are compared.
    spread = math.sqrt(2 / 3 * depth)
    compared = 2 * parameter_count(spec) * _COMPARED_KINDS * steps
    sigmas = math.sqrt(2 * math.log(compared / _FALSE_ALARM))
    terms = max(spec.hidden, spec.ffn, spec.vocab, tokens)
    fp32 = sigmas * spread * math.sqrt(terms) * ROUNDOFF["fp32"]
    if precision == "fp32":
        return Tolerance(fp32, floor=1 / spread)
    # Matmuls accumulate in fp32 and round once. Parameters are fp32, or rounded from fp32 before
    # use: if rounding goes up in one computation and down in the other, the last bit differs.
    low = sigmas * spread * ROUNDOFF["bf16"]
    held = fp32 / low
    used = 2 * ROUNDOFF["bf16"] / low if precision in MASTERS else held
    gathers = precision in SHARD_DTYPES and plan.strategy in GATHERS
    gathered = ROUNDOFF[SHARD_DTYPES[precision].gathered] if gathers else 0.0
    return Tolerance(low, floor=1 / spread, held=held, used=used, gathered=gathered)
