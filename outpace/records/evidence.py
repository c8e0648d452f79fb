"""Evidence of which arm is faster from rounds of paired runs, valid however often it is checked.

See `experiment.sequential` for the derivation.
"""

import math

_LOG_PI = math.log(math.pi)  # of B(1/2, 1/2)


def log_evidence(rounds: int, one_way: int) -> float:
    """Return log E(n, k) against the hypothesis that both directions are equally likely."""
    other_way = rounds - one_way
    beta = math.lgamma(one_way + 0.5) + math.lgamma(other_way + 0.5) - math.lgamma(rounds + 1)
    return rounds * math.log(2) + beta - _LOG_PI


def fewest_rounds(alpha: float) -> int:
    """Return the fewest rounds that can support a claim at `alpha`, if all go the same way."""
    rounds = 1
    while log_evidence(rounds, 0) < -math.log(alpha):
        rounds += 1
    return rounds
