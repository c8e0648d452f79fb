"""Times cases so that the figures can be trusted: in rounds, in alternating order, with intervals.

Every round visits all cases, in turn forwards and backwards, so that a slow spell of the machine
falls on all of them and not on one. A round's value is the median of its samples, a figure the
median of its rounds. How far rounds lie apart says where a repeat's figure is to be expected; a
trend among them, or rounds too far apart, say that the machine does not hold still.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any, Protocol

import torch
from scipy.special import stdtrit

from outpace.records.errors import OutpaceError
from outpace.records.figure import Figure, Key, Unit

LEVEL = 0.95
# Beyond this a figure would say little: it is not given.
CONCLUSIVE = 0.25
# A trend of this share over a figure's rounds is drift, if it is no accident.
_DRIFT = 0.10
_DRIFT_T = 4.0
# The median of k normal values varies as the mean of k * 2 / pi.
_MEDIAN_COSTS = 1.2533
# A scale from median distances varies as one from 37 % as many values would, by squares.
_EFFICIENCY = 0.37
# Rounds of one probe lie nearer to each other than to those of the next.
_SLACK = 1.15
# Whether a case is done is asked this seldom: asked after each round, it would end when the
# interval is narrow by luck.
_ASKED_EVERY = 5
# So many are measured, however short the budget is.
_FEWEST_ROUNDS = 5
# A sample of so many times its usual length is one long call.
_LONG = 5


class WrongResultError(OutpaceError):
    """What was timed computed something wrong: the machine or a library is at fault."""


class Clock(Protocol):
    """Times calls. Where several processes time together, all are told the same."""

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """For all of `count` calls, one after the other, until what they began has ended."""

    def now(self) -> float:
        """Seconds since some moment."""


class HostClock:
    """For what has ended when its call returns."""

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """By the host's clock."""
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - begin

    def now(self) -> float:
        """By the host's clock."""
        return time.perf_counter()


class CudaClock:
    """By events on the current stream, so that the host's launching is not what is timed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Between two events on the device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def now(self) -> float:
        """By the host's clock."""
        return time.perf_counter()


def clock_of(device: torch.device) -> Clock:
    """What times calls on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Case:
    """Something to time. `amount`: of the unit's numerator, for each call ("s": 1 call).

    `make` gives what is called; what it holds is let go after the round. `check` says what is wrong
    with a call's result, and is asked once, before anything is timed. All is done `within`.
    """

    key: Key
    unit: Unit
    make: Callable[[], Callable[[], Any]]
    amount: float = 1.0
    check: Callable[[Any], str | None] | None = None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def value(self, call_s: float) -> float:
        """The figure of a call that takes this long."""
        return call_s / self.amount if self.unit == "s" else self.amount / call_s


@dataclass(frozen=True)
class Effort:
    """How long to measure. Cases are done when their interval is as narrow as `half_width`.

    On shared machines speed changes from one tenth of a second to the next: many short rounds say
    more than few long ones (docs/log.md).
    """

    budget_s: float
    sample_s: float = 0.006
    samples: int = 1
    least_rounds: int = 15
    most_rounds: int = 400
    half_width: float = 0.02


@dataclass
class _Timing:
    case: Case
    clock: Clock
    effort: Effort
    count: int = 1
    samples: int = 0
    sample_s: float = 0.0
    rounds: list[tuple[float, ...]] = field(default_factory=list)

    def warm_up(self) -> None:
        """Check the result once, and find how many calls make a sample."""
        call = self.case.make()
        wrong = self.case.check(call()) if self.case.check else None
        if wrong:
            raise WrongResultError(f"{self.case.key}: {wrong}")
        self.clock.seconds(call, 1)
        took_s = self.clock.seconds(call, 1)
        while took_s < self.effort.sample_s:
            more = self.effort.sample_s / max(took_s / self.count, 1e-9)
            self.count = max(self.count + 1, min(int(more * 1.1), 10 * self.count))
            took_s = self.clock.seconds(call, self.count)
        self.samples, self.sample_s = self.effort.samples, took_s

    def round(self) -> None:
        """One round of samples, after half of one that wakes threads and fills caches.

        A long call has woken them before it is half done. With an effort whose samples are single
        calls the first is never timed, however long.
        """
        call = self.case.make()
        long = 0 < _LONG * self.effort.sample_s <= self.sample_s
        if not long or not self.rounds:
            self.clock.seconds(call, -(-self.count // 2))
        samples = (self.clock.seconds(call, self.count) for _ in range(self.samples))
        self.rounds.append(tuple(self.case.value(took_s / self.count) for took_s in samples))

    def done(self) -> bool:
        if len(self.rounds) < self.effort.least_rounds or len(self.rounds) % _ASKED_EVERY:
            return False
        medians = [median(samples) for samples in self.rounds]
        return half_width(medians) <= self.effort.half_width * median(medians)

    def figure(self) -> Figure:
        return figure_of(self.case.key, self.case.unit, self.rounds)


def measure(
    cases: Sequence[Case],
    clock: Clock,
    effort: Effort,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Figure]:
    """Time all cases. `progress` is told the share of the budget that is used.

    Raises WrongResultError if a case computes something wrong.
    """
    begin_s = clock.now()
    timings = [_Timing(case, clock, effort) for case in cases]
    for timing in timings:
        with timing.case.within():
            timing.warm_up()
        progress((clock.now() - begin_s) / effort.budget_s)
    effort = _fit_in(timings, effort, clock.now() - begin_s)
    todo = timings
    for number in range(effort.most_rounds):
        for timing in todo if number % 2 == 0 else todo[::-1]:
            with timing.case.within():
                timing.round()
        spent_s = clock.now() - begin_s
        progress(spent_s / effort.budget_s)
        todo = [timing for timing in todo if not timing.done()]
        if not todo or (number + 1 >= effort.least_rounds and spent_s > effort.budget_s):
            break
    return [timing.figure() for timing in timings]


def _fit_in(timings: Sequence[_Timing], effort: Effort, spent_s: float) -> Effort:
    """Take fewer samples a round, then fewer rounds, where the least would go beyond the budget."""
    left_s = effort.budget_s - spent_s
    once_s = max(sum(timing.sample_s for timing in timings), 1e-9)
    samples = int(left_s / effort.least_rounds / once_s) - 1
    rounds = int(left_s / (2 * once_s)) if samples < 1 else effort.least_rounds
    least = max(_FEWEST_ROUNDS, min(effort.least_rounds, rounds))
    for timing in timings:
        timing.samples = max(1, min(timing.samples, samples))
        timing.effort = replace(effort, least_rounds=least)
    return replace(effort, least_rounds=least)


def figure_of(key: Key, unit: Unit, rounds: Sequence[tuple[float, ...]]) -> Figure:
    """The figure that rounds of samples give."""
    medians = [median(samples) for samples in rounds]
    value, half = median(medians), half_width(medians)
    known = half < inf
    return Figure(
        key=key, unit=unit, origin="measured", rounds=tuple(rounds),
        low=max(0.0, value - half) if known else None, high=value + half if known else None,
        level=LEVEL, **_conclusion(value, half, medians),
    )  # fmt: skip


def interval(rounds: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """Their median, and from where to where that of a repeat with as many rounds will lie."""
    value, half = median(rounds), half_width(rounds, level)
    return value, value - half, value + half


def half_width(rounds: Sequence[float], level: float = LEVEL) -> float:
    """How far from their median that of a repeat with as many rounds lies at most, at a level.

    Student's t for the difference of two such medians. Their scale is from the median distance to
    the median, which a few rounds that something disturbed do not widen; rounds that resemble the
    ones before them count for fewer (von Storch & Zwiers, "Statistical Analysis in Climate
    Research", eq. 6.26). Infinite for fewer than three rounds, which say nothing about it.
    """
    count = len(rounds)
    if count < 3:
        return inf
    scale = spread(rounds)
    alike = max(0.0, _autocorrelation(rounds, scale))
    apart = scale * _MEDIAN_COSTS * ((1 + alike) / (1 - alike) * 2 / count) ** 0.5
    return float(_SLACK * stdtrit(_EFFICIENCY * (count - 1), (1 + level) / 2) * apart)


def spread(values: Sequence[float]) -> float:
    """The standard deviation of normal values with this median distance from the median."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def _autocorrelation(values: Sequence[float], scale: float) -> float:
    """Of neighbours, disturbed ones held back; 0.9 at most, beyond which it is drift."""
    middle = median(values)
    away = [min(max(value - middle, -3 * scale), 3 * scale) for value in values]
    total = sum(one * one for one in away)
    if total == 0:
        return 0.0
    return min(0.9, sum(a * b for a, b in pairwise(away)) / total)


def _conclusion(value: float, half: float, rounds: Sequence[float]) -> dict[str, Any]:
    """The value, or why there is none."""
    if value <= 0:
        return {"value": None, "unstable": "it cannot be told from 0"}
    trend = _trend(rounds)
    if trend:
        return {
            "value": None,
            "unstable": f"it drifted by {trend:+.0%} of its median while it was measured",
        }
    if half > CONCLUSIVE * value:
        away = "anywhere" if half == inf else f"{half / value:.0%} of its median away"
        return {"value": None, "unstable": f"a repeat may lie {away}"}
    return {"value": value, "unstable": None}


def _trend(rounds: Sequence[float]) -> float:
    """How far the last third's median is from the first's, of the whole's; 0.0 if no drift."""
    third = len(rounds) // 3
    if third < 2:
        return 0.0
    first, last = rounds[:third], rounds[-third:]
    apart = (median(last) - median(first)) / median(rounds)
    within = max(spread(first), spread(last)) / median(rounds)
    beyond = _MEDIAN_COSTS * within * (2 / third) ** 0.5
    return apart if abs(apart) > max(_DRIFT, _DRIFT_T * beyond) else 0.0
