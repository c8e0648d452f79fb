"""A network that others use, too, is told from nodes that do not hold still."""

import random

import pytest

from outpace.probing.collectives.advice import wander_notes
from outpace.probing.timing.measure import figure_of
from outpace.records.figure import Key


def times(axis, apart, size=1 << 20, rounds=8):
    """Rounds whose middles lie so far apart, of samples that hardly do."""
    rng = random.Random(0)
    middles = [1 + apart * (-1) ** number for number in range(rounds)]
    of = [[middle * rng.uniform(0.999, 1.001) for _ in range(4)] for middle in middles]
    return figure_of(Key(kind="all-reduce", what="time", of={"axis": axis, "bytes": size}), "s", of)


@pytest.mark.parametrize(
    ("across", "node", "named"),
    [(0.3, 0.02, True), (0.3, 0.25, False), (0.02, 0.02, False), (0.02, 0.3, False)],
)
def test_the_network_is_named_when_only_it_wanders(across, node, named):
    notes = wander_notes([times("all", 0.3), times("across", across), times("node", node)])
    assert len(notes) == named
    if named:
        assert "the network between nodes is not steady" in notes[0]


def test_without_both_axes_in_enough_rounds_nothing_is_said():
    assert wander_notes([times("all", 0.3), times("across", 0.3)]) == []
    assert wander_notes([times("across", 0.3, size=4), times("node", 0.0)]) == []
    assert wander_notes([times("across", 0.3, rounds=3), times("node", 0.0)]) == []
