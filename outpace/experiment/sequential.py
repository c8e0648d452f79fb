"""Anytime-valid verdicts on paired ratios: you may check them after every round.

Two arms run once per round, in random order. If they are equally fast, each wins a round with
probability 1/2, whatever the noise and its drift. If one bets on the winner with a Beta(1/2, 1/2)
mixture, the wealth after n rounds, of which one arm won k, is

    E(n, k) = 2^n · B(k + 1/2, n − k + 1/2) / B(1/2, 1/2)

By Ville's inequality, the probability that E ever reaches 1/α is at most α (Robbins, "Statistical
methods related to the law of the iterated logarithm", 1970; Howard and Ramdas, "Sequential
estimation of quantiles", 2022). The medians that E does not reject form an interval of order
statistics, which contains the true median at all times with probability 1 − α.
"""

import math
from collections.abc import Sequence
from statistics import median

from outpace.records.comparison import Verdict
from outpace.records.evidence import log_evidence


def interval(values: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return an interval that contains the true median with probability 1 − α.

    The probability holds even if you look after every new value. The interval is infinite if there
    are too few values.
    """
    ordered, count = sorted(values), len(values)
    outside = 0  # how many of the smallest and of the largest values the interval excludes
    while outside < count / 2 and log_evidence(count, outside) >= -math.log(alpha):
        outside += 1
    if outside == 0:
        return -math.inf, math.inf
    return ordered[outside - 1], ordered[count - outside]


def verdict(
    times: Sequence[float],
    against: Sequence[float],
    alpha: float,
    level: float,
    in_turn: bool = True,
) -> Verdict:
    """Return a verdict on how much slower the `times` are than `against`, compared round by round.

    The verdict claims a difference once the evidence against equal speed (E in the module's
    docstring) reaches 1/`alpha`. It claims none if the two arms did not run in turn (`in_turn`).
    Its interval for the slowdown contains the true value with probability `level`.
    """
    logs = [math.log(a / b) for a, b in zip(times, against, strict=True)]
    slower = _find_claim(logs, alpha) if in_turn else None
    low, high = interval(logs, 1 - level)
    return Verdict(
        rounds=len(logs),
        slowdown=math.expm1(median(logs)) if logs else None,
        low=_as_fraction(low),
        high=_as_fraction(high),
        level=level,
        claimed=slower is not None,
        slower=slower,
        alpha=alpha,
        in_turn=in_turn,
    )


def _find_claim(logs: Sequence[float], alpha: float) -> bool | None:
    """Return whether an arm is slower (True) or faster (False) than the arm compared with it.

    `logs` are the logarithms of the ratios of their times, by round. The answer is given at the
    first round at which the evidence against equal speed (E in the module's docstring) reaches
    1/`alpha`; None if it never does.
    """
    decided = slower = 0
    for log in logs:
        if log == 0:  # a tie counts for neither arm
            continue
        decided, slower = decided + 1, slower + (log > 0)
        if log_evidence(decided, slower) >= -math.log(alpha):
            return 2 * slower > decided
    return None


def _as_fraction(log: float) -> float | None:
    return None if math.isinf(log) else math.expm1(log)
