"""Figures can be trusted: intervals hold repeats, drift is said, wrong results refused."""

import random
from contextlib import contextmanager, nullcontext
from itertools import chain, pairwise
from statistics import median

import pytest

from outpace.probing.timing.gain import gain
from outpace.probing.timing.interleave import run_turns, wrap_turns
from outpace.probing.timing.intervals import half_width
from outpace.probing.timing.measure import Case, Effort, WrongResultError, measure
from outpace.records.figure import Figure, Key


class Planned:
    """A clock on which each call takes what is said, times noise; nothing waits."""

    def __init__(self, seed, noise=0.02, drift=0.0, bursts=0.0, wander=0.0):
        self._random = random.Random(seed)
        self._noise, self._drift, self._bursts, self._now = noise, drift, bursts, 0.0
        self._wander, self._slow = wander, 1.0

    def turn(self):
        """Others have had theirs: the machine may be slower or faster now."""
        self._slow = self._random.gauss(1, self._wander)

    def seconds(self, call, count):
        slow = self._slow * (1 + self._drift * self._now)
        if self._random.random() < self._bursts:
            slow *= self._random.uniform(1.5, 10)
        took = count * call() * slow * max(0.1, self._random.gauss(1, self._noise))
        self._now += took
        return took

    def now_s(self):
        return self._now

    def wait(self, seconds):
        self._now += seconds


def cases(*seconds):
    return [
        Case(Key(kind="test", what=str(number)), "s", lambda s=s: lambda: s)
        for number, s in enumerate(seconds)
    ]


EFFORT = Effort(budget_s=3, rounds=24, sample_s=0.01, most_samples=5)
CALLS = (0.001, 0.01, 0.0003)


def probed(seed, **how):
    clock = Planned(seed, **how)

    @contextmanager
    def others():
        clock.turn()
        yield

    return run_turns(wrap_turns(measure(cases(*CALLS), clock, EFFORT), others))


@pytest.mark.parametrize(
    "clock",
    [{}, {"noise": 0.1}, {"bursts": 0.1}, {"wander": 0.03}, {"noise": 0.05, "wander": 0.03}],
)
def test_a_repeat_lies_in_the_interval_as_often_as_is_stated(clock):
    probes = [probed(seed, **clock) for seed in range(80)]
    held = [
        one.contains(other)
        for first, second in pairwise(probes)
        for one, other in zip(first, second, strict=True)
    ]
    assert None not in held
    assert sum(held) / len(held) >= 0.93


def test_the_value_is_the_median_and_bursts_do_not_move_it():
    figures = probed(1, bursts=0.15)
    for figure, true in zip(figures, CALLS, strict=True):
        assert figure.value == pytest.approx(true, rel=0.03)
        assert figure.value == median(chain(*figure.rounds))
        assert figure.low < figure.value < figure.high


def test_what_drifts_is_not_concluded_from():
    figures = probed(2, drift=0.2)
    assert all(figure.value is None for figure in figures)
    assert all("drifted by +" in figure.unstable for figure in figures)


def test_what_scatters_too_far_is_not_concluded_from():
    effort = Effort(1, rounds=5, sample_s=0.01, most_samples=1)
    figures = run_turns(measure(cases(*CALLS), Planned(3, noise=0.6), effort))
    assert all(figure.value is None for figure in figures)
    assert all("a repeat may differ" in figure.unstable for figure in figures)


def test_rounds_are_as_long_as_each_other_and_others_turns_do_not_count():
    clock = Planned(4)
    turns, begun = (
        measure(cases(*CALLS), clock, Effort(6, rounds=6, sample_s=0.01, most_samples=1000)),
        [],
    )
    while True:
        begun.append(clock.now_s())
        try:
            next(turns)
        except StopIteration as end:
            figures = end.value
            break
        clock.wait(100)
    assert len(begun) == 6
    took = [later - sooner - 100 for sooner, later in pairwise(begun)] + [clock.now_s() - begun[-1]]
    assert all(0.7 < one < 1.3 for one in took)
    assert {len(figure.rounds) for figure in figures} == {6}
    assert len({tuple(map(len, figure.rounds)) for figure in figures}) == 1  # in the same rounds


def test_the_budget_is_kept_when_calls_are_long():
    clock = Planned(5)
    begun = []
    turns = measure(cases(0.5, 0.5), clock, Effort(10, rounds=24))
    figures = run_turns(wrap_turns(turns, lambda: nullcontext(begun.append(clock.now_s()))))
    assert clock.now_s() < 13
    assert len(begun) == 24
    rounds = {len(figure.rounds) for figure in figures}
    assert rounds == {5}
    # They are spread over the turns, not at their beginning.
    assert sum(later > sooner for sooner, later in pairwise(begun[12:])) >= 2


def test_a_round_goes_forwards_and_backwards():
    order = []
    watched = [
        Case(Key(kind="test", what=name), "s", lambda name=name: lambda: order.append(name) or 0.02)
        for name in "abc"
    ]
    effort = Effort(1e9, rounds=2, sample_s=0.01, most_samples=2)
    run_turns(measure(watched, Planned(6, noise=0.3), effort))
    # For each sample a call that is not timed, and one that is.
    assert order[-24:] == list("aabbcc" + "ccbbaa") * 2


def test_a_wrong_result_ends_the_probe():
    wrong = Case(Key(kind="matmul", what="rate"), "s", lambda: lambda: 0.01, check=lambda _: "is 3")
    with pytest.raises(WrongResultError, match="matmul rate: is 3"):
        run_turns(measure([wrong], Planned(7), EFFORT))


def test_an_interval_widens_with_samples_that_resemble_their_neighbours():
    shuffled = [1.0, 1.2] * 20
    in_runs = [1.0] * 20 + [1.2] * 20
    assert half_width(in_runs) > 2 * half_width(shuffled)


def figure_of(rounds, unit="s"):
    return Figure(
        key=Key(kind="test", what="time"), unit=unit, origin="measured",
        value=1.0 if unit == "s" else 1e12,
        rounds=tuple((one,) for one in rounds),
    )  # fmt: skip


def test_a_gain_is_by_the_ratio_of_samples_so_that_slow_spells_fall_out():
    rng = random.Random(8)
    spells = [rng.choice((1.0, 3.0)) for _ in range(30)]
    before = figure_of([1.1 * s * rng.gauss(1, 0.005) for s in spells])
    after = figure_of([s * rng.gauss(1, 0.005) for s in spells])
    found = gain(before, after)
    assert found.value == pytest.approx(0.1, abs=0.01)
    assert found.is_certain
    assert not gain(after, after).is_certain
    rate = figure_of([1e12 / value for (value,) in before.rounds], "FLOP/s")
    other = figure_of([1e12 / value for (value,) in after.rounds], "FLOP/s")
    assert gain(rate, other).value == pytest.approx(found.value)
