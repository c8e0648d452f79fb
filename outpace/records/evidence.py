"""Anytime-valid evidence of which of two arms is faster, from paired rounds.

See `experiment.sequential` for the derivation.
"""

import math

_LOG_PI = math.log(math.pi)  # log B(1/2, 1/2)


def log_evidence(rounds: int, one_way: int) -> float:
    """Return the logarithm of the evidence (e-value) that rounds favour one of two arms.

    `one_way` of the `rounds` favoured the same arm. Under the null hypothesis, each round favours
    either arm with equal probability.
    """
    other_way = rounds - one_way
    beta = math.lgamma(one_way + 0.5) + math.lgamma(other_way + 0.5) - math.lgamma(rounds + 1)
    return rounds * math.log(2) + beta - _LOG_PI


def fewest_rounds(alpha: float) -> int:
    """Return how many rounds are needed to find a difference at level `alpha` if all agree."""
    rounds = 1
    while log_evidence(rounds, 0) < -math.log(alpha):
        rounds += 1
    return rounds
