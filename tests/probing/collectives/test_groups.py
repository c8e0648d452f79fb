"""Groups of ranks: everyone is in each axis once, and every pair meets once."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.probing.collectives.groups import axes_of, nodes_of, pair_slots
from outpace.records.errors import BadInputError


def places(*sizes):
    return [(local, size) for size in sizes for local in range(size)]


def test_one_node_has_one_axis():
    (axis,) = axes_of(nodes_of(places(4)))
    assert (axis.name, axis.groups, axis.ranks) == ("all", ((0, 1, 2, 3),), 4)


def test_two_nodes_have_an_axis_within_and_one_across():
    everyone, node, across = axes_of(nodes_of(places(3, 3)))
    assert everyone.groups == (tuple(range(6)),)
    assert (node.name, node.groups) == ("node", ((0, 1, 2), (3, 4, 5)))
    assert (across.name, across.groups) == ("across", ((0, 3), (1, 4), (2, 5)))
    assert across.group_of(4) == (1, 4)


def test_one_rank_for_each_node_is_across_already():
    assert [axis.name for axis in axes_of(nodes_of(places(1, 1, 1)))] == ["all"]


def test_unequal_nodes_meet_as_far_as_both_have_ranks():
    _, across = axes_of(nodes_of(places(3, 2)))
    assert across.groups == ((0, 3), (1, 4))
    assert across.group_of(2) == ()


def test_ranks_dealt_out_over_nodes_in_turn_are_refused():
    with pytest.raises(BadInputError, match="be consecutive"):
        nodes_of([(0, 2), (0, 2), (1, 2), (1, 2)])
    with pytest.raises(BadInputError, match="be consecutive"):
        nodes_of([(0, 2)])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=7))
def test_every_pair_within_nodes_and_between_them_is_timed_once_and_none_shares_a_link(sizes):
    nodes = nodes_of(places(*sizes))
    slots = list(pair_slots(nodes))
    pairs = [pair for slot in slots for pair in slot]
    within = [pair for node in nodes for pair in combinations(node, 2)]
    between = list(combinations([node[0] for node in nodes], 2))
    assert sorted(pairs) == sorted(within + between)
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    for slot in slots:
        used = [{node_of[a], node_of[b]} for a, b in slot]
        assert sum(map(len, used)) == len(set().union(*used))
