"""Evidence of which arm is faster, from rounds of paired runs, however often one looks.

See `experiment.sequential`, where it comes from.
"""

import math

_LOG_PI = math.log(math.pi)  # of B(1/2, 1/2)


def log_evidence(rounds: int, one_way: int) -> float:
    """log E(n, k) against the other way being as likely."""
    other_way = rounds - one_way
    beta = math.lgamma(one_way + 0.5) + math.lgamma(other_way + 0.5) - math.lgamma(rounds + 1)
    return rounds * math.log(2) + beta - _LOG_PI


def fewest_rounds(alpha: float) -> int:
    """Return the fewest rounds that may lead to a claim at `alpha`: all of them go one way."""
    rounds = 1
    while log_evidence(rounds, 0) < -math.log(alpha):
        rounds += 1
    return rounds
