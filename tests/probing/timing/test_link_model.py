"""Lines through times: exact ones are found, disturbed ones nearly, and busbw is nccl-tests'."""

import random
import sys
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.probing.timing.link_model import COLLECTIVES, LinkLine, bus_factor, fit_line, fit_link
from outpace.probing.timing.measure import figure_of
from outpace.records.figure import Key

SIZES = [4**power for power in range(1, 15)]
latencies = st.floats(1e-6, 1e-3)
bandwidths = st.floats(1e7, 1e12)


@given(latencies, bandwidths, st.lists(st.sampled_from(SIZES), min_size=2, unique=True))
def test_exact_times_give_their_line(latency_s, bytes_per_s, sizes):
    true = LinkLine(latency_s, 1 / bytes_per_s)
    points = [(float(size), true.time_s(size)) for size in sizes]
    found = fit_line(points)
    # The largest time is known to its last digit only, which may be much of the smallest.
    seconds = [time_s for _, time_s in points]
    rounding = 4 * sys.float_info.epsilon * max(seconds) / min(seconds)
    assert max(found.distance(points)) < 1e-9 + rounding
    # Each part of it, where the sizes tell: latency and transfer each a tenth of some time or more.
    if latency_s > 0.1 * points[sizes.index(min(sizes))][1]:
        slope_tells = max(sizes) / bytes_per_s > 0.1 * latency_s
        if slope_tells:
            assert found.latency_s == pytest.approx(latency_s, rel=1e-6)
            assert 1 / found.s_per_byte == pytest.approx(bytes_per_s, rel=1e-6)


@given(latencies, bandwidths, st.randoms(use_true_random=False))
def test_no_other_line_is_nearer(latency_s, bytes_per_s, rng):
    true = LinkLine(latency_s, 1 / bytes_per_s)
    points = [(float(s), true.time_s(s) * rng.uniform(0.7, 1.4)) for s in SIZES]
    found = fit_line(points)
    assert found.latency_s >= 0 and found.s_per_byte >= 0
    least = sum(found.distance(points))
    for _ in range(20):
        other = LinkLine(
            found.latency_s * rng.uniform(0.9, 1.1), found.s_per_byte * rng.uniform(0.9, 1.1)
        )
        assert sum(other.distance(points)) >= least * (1 - 1e-9)


@given(st.floats(1e-5, 1e-4), st.floats(1e8, 1e11), st.randoms(use_true_random=False))
def test_times_that_are_off_do_not_pull_the_line_away(latency_s, bytes_per_s, rng):
    true = LinkLine(latency_s, 1 / bytes_per_s)
    points = [(float(s), true.time_s(s) * rng.uniform(0.99, 1.01)) for s in SIZES]
    # One slow spell, though not where latency ends and bandwidth begins, that few points tell.
    spoiled = rng.choice([0, 1, 2])
    points[spoiled] = (points[spoiled][0], points[spoiled][1] * 5)
    found = fit_line(points)
    assert found.latency_s == pytest.approx(latency_s, rel=0.1)
    if true.time_s(SIZES[-3]) > 10 * latency_s:
        assert 1 / found.s_per_byte == pytest.approx(bytes_per_s, rel=0.1)


def test_a_line_needs_two_points_above_zero():
    for points in ([], [(4.0, 1.0)], [(4.0, 1.0), (8.0, 0.0)], [(0.0, 1.0), (8.0, 1.0)]):
        with pytest.raises(ValueError, match="two points"):
            fit_line(points)


@pytest.mark.parametrize(
    ("collective", "factor"),  # nccl-tests, doc/PERFORMANCE.md, for 4 ranks
    [("all-reduce", 1.5), ("all-gather", 0.75), ("reduce-scatter", 0.75), ("all-to-all", 0.75),
     ("broadcast", 1.0), ("send/recv", 1.0)],
)  # fmt: skip
def test_busbw_is_nccl_tests(collective, factor):
    assert bus_factor(collective, 4) == factor
    assert collective in COLLECTIVES


def times(latency_s, bus_bytes_per_s, spread, rounds=20, sizes=SIZES, ranks=4):
    """Figures of an all-reduce; `spread`: how far samples lie from the truth, as a share."""
    rng = random.Random(1)
    true = LinkLine(latency_s, 1 / bus_bytes_per_s)
    of = {"axis": "all", "backend": "gloo", "device": "cpu", "ranks": ranks}
    return [
        figure_of(
            Key(kind="all-reduce", what="time", of={**of, "bytes": size}), "s",
            [[true.time_s(1.5 * size) * rng.uniform(1 - spread, 1 + spread) for _ in range(3)]
             for _ in range(rounds)],
        )
        for size in sizes
    ]  # fmt: skip


def test_a_link_has_its_busbw_and_intervals_that_hold_the_truth():
    fit = fit_link(times(20e-6, 5e9, 0.02))
    assert (fit.collective, fit.axis, fit.backend, fit.ranks) == ("all-reduce", "all", "gloo", 4)
    assert fit.bandwidth.low < 5e9 < fit.bandwidth.high
    assert fit.latency.low < 20e-6 < fit.latency.high
    assert fit.bandwidth.half_width < 0.03
    assert len(fit.bandwidth.rounds) == 60  # a line for each sample
    assert fit.residual < 0.02


def test_what_does_not_lie_on_a_line_has_a_residual():
    figures = times(20e-6, 5e9, 0.0)
    for number, figure in enumerate(figures[::2]):
        slower = tuple(tuple(2 * time_s for time_s in samples) for samples in figure.rounds)
        figures[2 * number] = figure.model_copy(update={"rounds": slower})
    assert fit_link(figures).residual > 0.2


def test_what_lies_on_a_line_has_none():
    figures = times(20e-6, 5e9, 0.0)
    assert fit_link(figures).residual < 1e-9


def test_too_few_sizes_or_no_growth_fit_nothing():
    assert fit_link([]) is None
    assert fit_link(times(20e-6, 5e9, 0.0, sizes=SIZES[:2])) is None
    flat = [f.model_copy(update={"rounds": ((1e-3,),) * 8}) for f in times(20e-6, 5e9, 0.0)]
    assert fit_link(flat) is None


def test_noise_beyond_measure_gives_no_figure_but_says_so():
    fit = fit_link(times(20e-6, 5e9, 0.9, rounds=8))
    assert fit.latency.value is None and fit.latency.unstable
    assert median(map(median, fit.latency.rounds)) > 0
