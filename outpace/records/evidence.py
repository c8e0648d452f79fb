"""Anytime-valid evidence of which of two arms is faster, from paired rounds.

See `experiment.sequential` for the derivation.
"""

import math

_LOG_PI = math.log(math.pi)  # log B(1/2, 1/2)


def log_evidence(rounds: int, one_way: int) -> float:
    """Return the log of the e-value against equally likely directions of a round.

    `one_way` of the `rounds` had the same direction.
    """
    other_way = rounds - one_way
    beta = math.lgamma(one_way + 0.5) + math.lgamma(other_way + 0.5) - math.lgamma(rounds + 1)
    return rounds * math.log(2) + beta - _LOG_PI


def fewest_rounds(alpha: float) -> int:
    """Return how many rounds, all with the same direction, support a claim at `alpha`."""
    rounds = 1
    while log_evidence(rounds, 0) < -math.log(alpha):
        rounds += 1
    return rounds
