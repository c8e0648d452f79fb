"""Verdicts that hold however often one looks."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.experiment.sequential import interval, verdict
from outpace.records.evidence import fewest_rounds, log_evidence


def test_evidence_by_hand():
    # 2^10 · B(1/2, 21/2) / π, with B(1/2, 21/2) = Γ(1/2) Γ(21/2) / Γ(11).
    expected = 2**10 * math.gamma(0.5) * math.gamma(10.5) / math.gamma(11) / math.pi
    assert math.exp(log_evidence(10, 0)) == pytest.approx(expected)
    assert math.exp(log_evidence(10, 0)) == pytest.approx(180.4, abs=0.1)


@given(st.integers(0, 40))
def test_evidence_is_a_fair_bet_and_looks_both_ways(rounds):
    worth = [math.comb(rounds, k) / 2**rounds * math.exp(log_evidence(rounds, k))
             for k in range(rounds + 1)]  # fmt: skip
    assert sum(worth) == pytest.approx(1)
    for k in range(rounds + 1):
        assert log_evidence(rounds, k) == pytest.approx(log_evidence(rounds, rounds - k))


def test_where_nothing_differs_hardly_anything_is_claimed_at_any_time():
    """Not once in 60 looks, with probability 0.99; noise drifts and has outliers."""
    drawn, claims = random.Random(1), 0
    for _ in range(400):
        times: list[float] = []
        others: list[float] = []
        for number in range(60):
            level = 1 + 0.5 * math.sin(number / 9)  # both alike
            pair = [level * math.exp(0.02 * drawn.gauss(0, 1) + (drawn.random() < 0.1) * 0.5)
                    for _ in range(2)]  # fmt: skip
            times.append(pair[0])
            others.append(pair[1])
            if verdict(times, others, 0.01, 0.95).claimed:
                claims += 1
                break
    assert claims <= 8  # 4 are expected at most


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=80), st.sampled_from([0.05, 0.01]))
def test_an_interval_is_of_the_values_and_holds_their_median(values, alpha):
    low, high = interval(values, alpha)
    middle = sorted(values)[len(values) // 2]
    assert low <= middle <= high
    assert math.isinf(low) == math.isinf(high)
    assert math.isinf(low) or {low, high} <= set(values)
    wider = interval(values, alpha / 10)
    assert wider[0] <= low and high <= wider[1]


def test_a_median_is_missed_as_rarely_as_is_said():
    drawn, missed = random.Random(2), 0
    for _ in range(300):
        values: list[float] = []
        for _ in range(50):
            values.append(drawn.expovariate(1.0))  # its median is log 2
            low, high = interval(values, 0.05)
            if not low <= math.log(2) <= high:
                missed += 1
                break
    assert missed <= 24  # 15 are expected at most


def test_a_difference_is_found_and_its_size():
    drawn = random.Random(3)
    against = [math.exp(0.03 * drawn.gauss(0, 1)) for _ in range(40)]
    times = [1.08 * one * math.exp(0.01 * drawn.gauss(0, 1)) for one in against]
    found = verdict(times, against, 0.01, 0.95)
    assert found.claimed and found.low is not None and found.high is not None
    assert found.low <= 0.08 <= found.high and found.high - found.low < 0.02
    assert "slower than" in found.words("b", "a")
    few = verdict(times[:3], against[:3], 0.01, 0.95)
    assert not few.claimed and few.low is None and "cannot decide" in few.words("b", "a")


def test_ties_do_not_turn_a_claim_round():
    found = verdict([2.0] * 12 + [1.0] * 13, [1.0] * 25, 0.01, 0.95)
    assert found.claimed and found.slowdown == 0.0
    assert found.words("b", "a").startswith("b is 0.0 % slower than a (95 %: 0.0 % to")


def test_a_claim_that_was_reached_is_kept():
    times = [1.1] * 10 + [0.9, 1.2] * 8
    reached, later = (verdict(times[:n], [1.0] * n, 0.01, 0.95) for n in (10, 26))
    assert reached.claimed and later.claimed and later.slower
    assert log_evidence(26, 18) < math.log(100)  # by the last look alone it would not be


def test_an_interval_that_is_not_enough_for_a_claim_is_told_as_it_is():
    times = [0.99, *(1.0 + 0.01 * n for n in range(1, 12))]
    found = verdict(times, [1.0] * 12, 0.01, 0.95)
    assert not found.claimed and found.low > 0
    said = found.words("b", "a")
    assert said.startswith("b and a: no significant difference at 1 %: +1.0 % to +")


def test_an_interval_of_rounds_that_are_too_few_for_a_claim_says_so():
    found = verdict([1.1] * 8, [1.0] * 8, 0.01, 0.95)
    assert found.low is not None and not found.claimed
    assert found.words("b", "a").startswith(
        "8 rounds cannot decide between b and a: at least 10 are needed. In the median so far, b is"
    )


def test_of_runs_that_are_over_nothing_is_claimed():
    found = verdict([0.9] * 30, [1.0] * 30, 0.01, 0.95, in_turn=False)
    assert not found.claimed
    assert found.words("b", "a").startswith(
        "a step of b took 10.0 % less time than one of a in these two runs (-10.0 % to -10.0 % "
        "over parts of the runs). Two identical runs may differ by as much. To claim a "
        "difference, let outpace compare train the arms in turn: give it arms instead of runs"
    )


def test_so_few_rounds_that_nothing_could_be_claimed_say_how_many_it_takes():
    """And as many, all one way, are enough."""
    for alpha in (0.01, 0.005, 0.001):
        said = verdict([1.5, 1.6], [1.0, 1.0], alpha, 0.95).words("b", "a")
        enough = fewest_rounds(alpha)
        assert said == (
            f"2 rounds cannot decide between b and a: at least {enough} are needed. In the median "
            "so far, b is 54.9 % slower than a"
        )
        assert verdict([1.5] * enough, [1.0] * enough, alpha, 0.95).claimed
        assert not verdict([1.5] * (enough - 1), [1.0] * (enough - 1), alpha, 0.95).claimed
    assert fewest_rounds(0.01) == 10


def test_more_than_twice_as_long_is_a_factor():
    few = verdict([2.545] * 2, [1.0] * 2, 0.01, 0.95)
    many = verdict([2.5] * 40, [1.0] * 40, 0.01, 0.95)
    assert few.words("b", "a").endswith("b takes 2.5 times as long as a")
    assert many.words("b", "a").startswith("b takes 2.5 times as long as a (95 %: 2.5 to 2.5)")
