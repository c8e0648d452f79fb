"""How much of a collective hides: a share with an interval, and none where noise is as large."""

import random

import pytest

from outpace.probing.collectives.overlap import hidden_share, share_hidden
from outpace.probing.timing.measure import figure_of
from outpace.records.figure import Key


def found(shares):
    """Rounds in which computing and the collective take 1 s each, and both as the share says."""
    rounds = ([1.0] * len(shares), [1.0] * len(shares), [2.0 - share for share in shares])
    key = Key(kind="overlap", what="")
    times = [figure_of(key, "s", [[one] for one in of]) for of in rounds]
    return share_hidden(Key(kind="overlap", what="hidden share"), times)


@pytest.mark.parametrize(
    ("computing", "collective", "both", "share"),
    [(1.0, 2.0, 2.0, 1.0), (1.0, 2.0, 3.0, 0.0), (2.0, 1.0, 2.5, 0.5), (1.0, 1.0, 2.5, -0.5)],
)
def test_of_the_shorter_the_longer_hides(computing, collective, both, share):
    assert hidden_share(computing, collective, both) == pytest.approx(share)


def test_a_steady_share_is_said_with_its_interval():
    rng = random.Random(0)
    figure = found([0.6 + rng.uniform(-0.05, 0.05) for _ in range(20)])
    assert figure.value == pytest.approx(0.6, abs=0.03)
    assert 0.5 < figure.low < figure.value < figure.high < 0.7


@pytest.mark.parametrize("share", [0.05, 0.95])
def test_noise_that_reaches_beyond_the_limits_counts_in_full(share):
    """Between 0 and 1 there is little room next to these, but the next probe may be far away."""
    rng = random.Random(0)
    figure = found([share + rng.uniform(-0.7, 0.7) for _ in range(20)])
    assert figure.value is None
    assert "may differ by" in figure.unstable
    assert 0 <= figure.low <= figure.high <= 1


def test_a_share_beyond_the_limits_is_all_or_nothing():
    assert found([1.1 + 0.001 * number for number in range(12)]).value == 1
    assert found([-0.2 + 0.001 * number for number in range(12)]).value == 0
