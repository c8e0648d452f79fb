"""Reliable timing of cases in rounds, in alternating order, with intervals.

A round takes samples of all cases, alternately forwards and backwards, so that a slow period
affects all of them. Other parts of a probe are measured between rounds, so each is measured over
the whole time of the probe. A figure is the median of all samples. Their spread and autocorrelation
predict the figure of a repeat; a trend or too large a spread shows that the machine is not steady.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from statistics import median
from typing import Any, Protocol

import torch

from outpace.probing.timing.interleave import Turns
from outpace.probing.timing.intervals import LEVEL, half_width, trend
from outpace.records.errors import OutpaceError
from outpace.records.figure import Figure, Key, Unit

# A figure with a wider interval than this would mean little, and is left out.
CONCLUSIVE = 0.25
# A sample that is this many times as long as usual consists of one long call.
_LONG = 5


class WrongResultError(OutpaceError):
    """Raised if a timed call computed a wrong result: the machine or a library is faulty."""


class Clock(Protocol):
    """Clock for calls. Processes that time calls together all get the same time."""

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Return the time of `count` successive calls, including all work that they started."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary moment."""


class HostClock:
    """Clock for calls that finish all their work before they return."""

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Time the calls by the host's clock."""
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - begin

    def now_s(self) -> float:
        """Return seconds by the host's clock."""
        return time.perf_counter()


class CudaClock:
    """Clock that measures the device's time between CUDA events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Time the calls between two events on the device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def now_s(self) -> float:
        """Return seconds by the host's clock."""
        return time.perf_counter()


def clock_of(device: torch.device) -> Clock:
    """Return the clock that times calls on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Case:
    """A function whose calls are timed.

    `make` returns the function; its objects are released after a sample. `amount` is what a call
    processes, in FLOP, bytes or other units; it is 1 if the unit is "s". `check` describes what is
    wrong with a call's result, and is called once, before anything is timed. Everything runs in the
    context `within`.
    """

    key: Key
    unit: Unit
    make: Callable[[], Callable[[], Any]]
    amount: float = 1.0
    check: Callable[[Any], str | None] | None = None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def value(self, call_s: float) -> float:
        """Convert the seconds of a call into the unit of this case, such as FLOP/s."""
        return call_s / self.amount if self.unit == "s" else self.amount / call_s


@dataclass(frozen=True)
class Effort:
    """Time that a measurement may take, and its division into rounds of samples.

    The whole budget is used, or less if every round has `most_samples` samples. On shared machines,
    speed changes from one tenth of a second to the next. Many short samples are therefore more
    informative than a few long ones (docs/development/log.md). If time is short, there are fewer
    rounds, spread over the same number of turns. `wakes`: run half a sample untimed before each
    sample.
    """

    budget_s: float
    rounds: int
    sample_s: float = 0.003
    least_rounds: int = 5
    least_samples: int = 1
    most_samples: int = 10
    wakes: bool = True


def rounds_of(quick: bool) -> int:
    """Return in how many rounds each part of a probe takes its samples."""
    return 8 if quick else 24


@dataclass
class _CaseTiming:
    case: Case
    clock: Clock
    effort: Effort
    count: int = 1
    took_s: float = 0.0
    rounds: list[list[float]] = field(default_factory=list)

    def warm_up(self) -> None:
        """Check the result once, and find the number of calls per sample."""
        call = self.case.make()
        wrong = self.case.check(call()) if self.case.check else None
        if wrong:
            raise WrongResultError(f"{self.case.key}: {wrong}")
        self.clock.seconds(call, 1)
        self.took_s = self.clock.seconds(call, 1)
        while self.took_s < self.effort.sample_s:
            more = self.effort.sample_s / max(self.took_s / self.count, 1e-9)
            self.count = max(self.count + 1, min(int(more * 1.1), 10 * self.count))
            self.took_s = self.clock.seconds(call, self.count)

    def sample(self) -> None:
        """Measure one sample of the round, after half a sample to wake threads and fill caches.

        Long calls warm up within their first half, except for the first call of a round, which
        follows other cases. If samples are single calls, the first is not timed.
        """
        call = self.case.make()
        long = 0 < _LONG * self.effort.sample_s <= self.took_s
        if self.effort.wakes and (not long or not self.rounds[-1]):
            self.clock.seconds(call, -(-self.count // 2))
        took_s = self.clock.seconds(call, self.count)
        self.rounds[-1].append(self.case.value(took_s / self.count))


def measure(
    cases: Sequence[Case],
    clock: Clock,
    effort: Effort,
    progress: Callable[[float], None] = lambda share: None,
) -> Turns[list[Figure]]:
    """Time all cases. In each turn, one round of samples is taken of every case.

    `progress` is called with the fraction of the budget that is used. Raises WrongResultError if a
    case computes a wrong result.
    """
    begin_s = clock.now_s()
    timings = [_CaseTiming(case, clock, effort) for case in cases]
    for timing in timings:
        with timing.case.within():
            timing.warm_up()
        progress(min(1.0, (clock.now_s() - begin_s) / effort.budget_s))
    order = list(timings)

    def visit(begins: bool) -> None:
        for timing in timings if begins else ():
            timing.rounds.append([])
        for timing in order:
            with timing.case.within():
                timing.sample()
        order.reverse()

    yield from in_rounds(visit, clock, effort, clock.now_s() - begin_s, progress)
    return [figure_of(t.case.key, t.case.unit, t.rounds) for t in timings]


def in_rounds(
    visit: Callable[[bool], None],
    clock: Clock,
    effort: Effort,
    spent_s: float,
    progress: Callable[[float], None] = lambda share: None,
) -> Turns[None]:
    """Call `visit` repeatedly, in rounds that are spread over turns, until the budget is used up.

    There are `effort.rounds` turns, and at most one round in each. `visit(True)` begins a round,
    and `visit(False)` continues it. `spent_s` is the part of the budget that was used before. A
    turn has no round if earlier turns already used its time, unless there would be too few rounds.
    """
    left_s, used_s, made = max(0.0, effort.budget_s - spent_s), 0.0, 0
    least = min(effort.least_rounds, effort.rounds)
    for turn in range(effort.rounds):
        if turn:
            yield
        until_s = left_s * (turn + 1) / effort.rounds
        if used_s >= until_s and made >= least * (turn + 1) // effort.rounds:
            continue
        made += 1
        begin_s = clock.now_s() - used_s  # without the time of other parts' turns
        for number in range(effort.most_samples):
            visit(number == 0)
            used_s = clock.now_s() - begin_s
            progress(min(1.0, (spent_s + used_s) / effort.budget_s))
            if used_s >= until_s and number + 1 >= effort.least_samples:
                break


def figure_of(key: Key, unit: Unit, rounds: Sequence[Sequence[float]]) -> Figure:
    """Summarise samples in a figure: their median, and an interval for the median of a repeat.

    If the samples are too unstable, the figure has no value, and `unstable` says why.
    """
    samples = list(chain.from_iterable(rounds))
    medians = [median(of) for of in rounds]
    # Use rounds, which vary like repeats; neighbouring samples vary less.
    half = max(half_width(samples), half_width(medians, slack=1.0))
    value = median(samples)
    known, why = half < inf, _explain_instability(value, half, medians)
    return Figure(
        key=key, unit=unit, origin="measured", rounds=tuple(map(tuple, rounds)), level=LEVEL,
        low=max(0.0, value - half) if known else None, high=value + half if known else None,
        value=value if why is None else None, unstable=why,
    )  # fmt: skip


def _explain_instability(value: float, half: float, rounds: Sequence[float]) -> str | None:
    if value <= 0:
        return "it cannot be distinguished from 0"
    if drift := trend(rounds):
        return f"it drifted by {drift:+.0%} of its median during the measurement"
    if half > CONCLUSIVE * value:
        away = "any amount" if half == inf else f"{half / value:.0%} of its median"
        return f"a repeat may differ by {away}"
    return None
