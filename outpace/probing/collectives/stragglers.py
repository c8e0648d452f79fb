"""Detection of ranks and links that are slower than others timed at the same time.

A rank or link counts as slow if a repeated measurement would still exceed `_RANK_SLOWER` or
`_LINK_SLOWER`. A rank that is slow on all links is reported once, without its links.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import Generic, TypeVar

from outpace.probing.collectives.groups import Pair
from outpace.probing.timing.intervals import half_width, normal_deviation

_RANK_SLOWER, _LINK_SLOWER = 1.10, 1.25
# Minimum distance from the others, in units of their standard deviation.
_APART = 4.0
_LEAST_ROUNDS = 4
_FALSE_ALARMS = 0.005  # share of probes in which equal ranks may seem slow

Who = TypeVar("Who")


@dataclass(frozen=True)
class Slowness(Generic[Who]):
    """A rank or link that is slower than the others, by the factor `times`.

    A repeated probe would measure a factor from `low` to `high`.
    """

    who: Who
    times: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.times:.2g} times slower (from {self.low:.2g} to {self.high:.2g})"


def slow_ranks(seconds: Mapping[int, Sequence[float]]) -> list[Slowness[int]]:
    """Return the ranks that compute more slowly than the others, slowest first.

    `seconds` holds each rank's times for the same work, one per round; ranks run the rounds
    together.
    """
    ratios = {
        rank: [
            own / median(seconds[other][number] for other in seconds if other != rank)
            for number, own in enumerate(rounds)
        ]
        for rank, rounds in seconds.items()
        if len(seconds) > 1
    }
    middles = {rank: median(of) for rank, of in ratios.items()}
    found = []
    for one in _find_slower(ratios, _RANK_SLOWER):
        others = [middle for rank, middle in middles.items() if rank != one.who]
        if one.times - median(others) > _APART * normal_deviation(others):
            found.append(one)
    return found


@dataclass(frozen=True)
class SlowLinks:
    """The `ranks` that are slow on all their links, and other slow `links`."""

    ranks: tuple[Slowness[int], ...] = ()
    links: tuple[Slowness[Pair], ...] = ()


def slow_links(seconds: Mapping[Pair, Sequence[float]]) -> SlowLinks:
    """Find links that are slower than the others, and ranks whose links are all slow.

    `seconds` holds each pair's times for sending the same data, one per round. Links are compared
    with the first quartile of all links, because a single slow rank out of four makes half of the
    links slow.
    """
    rounds = min(map(len, seconds.values()), default=0)
    if len(seconds) < 2:
        return SlowLinks()
    usual = [
        sorted(of[number] for of in seconds.values())[(len(seconds) - 1) // 4]
        for number in range(rounds)
    ]
    ratios = {
        pair: [own / common for own, common in zip(of, usual, strict=False)]
        for pair, of in seconds.items()
    }
    slow = _find_slower(ratios, _LINK_SLOWER)
    ranks = []
    for rank in sorted({rank for pair in seconds for rank in pair}):
        own = [one for one in slow if rank in one.who]
        if len(own) > 1 and len(own) == sum(rank in pair for pair in seconds):
            ranks.append(
                Slowness(rank, median(one.times for one in own), min(one.low for one in own),
                     max(one.high for one in own))
            )  # fmt: skip
    blamed = {one.who for one in ranks}
    return SlowLinks(tuple(ranks), tuple(one for one in slow if not blamed & set(one.who)))


def _find_slower(ratios: Mapping[Who, Sequence[float]], slower: float) -> list[Slowness[Who]]:
    """Return the ranks or links that are slower than the others by more than the factor `slower`.

    Noise is taken into account. `ratios` has the times of each rank or link, divided by those of
    the others, one per round. The result is sorted, slowest first.
    """
    found = []
    for who, of in ratios.items():
        if len(of) < _LEAST_ROUNDS:
            continue
        # Logarithms, so that rounds have equal weight whether the others were fast or slow.
        logs = [log(ratio) for ratio in of]
        middle, half = median(logs), half_width(logs)
        # The more ranks there are, the more likely one seems slow by chance (one-sided test).
        sure = half_width(logs, 1 - 2 * _FALSE_ALARMS / len(ratios))
        # Use the uncertainty of this median, not that of its difference from a repeat's median.
        if middle - sure / 2**0.5 > log(slower):
            found.append(Slowness(who, exp(middle), exp(middle - half), exp(middle + half)))
    return sorted(found, key=lambda one: -one.times)
