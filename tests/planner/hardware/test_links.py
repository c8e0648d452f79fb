"""How long collectives and messages take on the links that they cross."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.catalog import collective_rates
from outpace.planner.hardware.links import Fabric, Protocol

# 8 devices a node: 100 GB/s to each other, 80 GB/s out of the node, no latency.
PLAIN = Protocol(0.0, 0.0, 0.0, 1.0)
FABRIC = Fabric(8, 100e9, 80e9, 50e9, (PLAIN,))
LATE = Protocol(1e-5, 1e-6, 1e-5, 1.0)
# Trees of one share whatever the size, and NCCL's own.
TREE = Protocol(0.0, 0.0, 0.0, 0.5, (1.0,))
NCCL = tuple(
    Protocol(one.base_s, one.nvlink_s, one.network_s, one.bandwidth, one.by_size)
    for one in (*collective_rates.NCCL.values(), *collective_rates.NCCL_TREES.values())
)
POWERS = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 3, 6, 12, 24])


PROTOCOLS = st.sampled_from([(PLAIN, LATE), NCCL, (NCCL[0], *NCCL[3:])])


def collective(fabric, nbytes, size, stride=1, rounds=2):
    arrays = np.array([float(nbytes)]), np.array([size]), np.array([stride])
    seconds = fabric.sum_s(*arrays) if rounds == 2 else fabric.gather_s(*arrays)
    return float(seconds[0])


def send(fabric, nbytes, stride, size=2):
    arrays = np.array([float(nbytes)]), np.array([size]), np.array([stride])
    return float(fabric.send_s(*arrays)[0])


@pytest.mark.parametrize(
    ("size", "stride", "rounds", "seconds"),
    [
        (8, 1, 2, 2 * 7 / 8 * 1 / 100),  # an all-reduce of 1 GB in a node
        (8, 1, 1, 7 / 8 * 1 / 100),  # a gather
        (4, 2, 1, 3 / 4 * 1 / 100),  # every second device
        (16, 1, 1, 15 / 16 * 1 / 80),  # two whole nodes: one ring, all cards
        (2, 8, 2, 2 * 1 / 2 * 1 / 10),  # the same place on two nodes: 8 rings share the cards
        (4, 4, 1, 3 / 4 * 1 / 20),  # two devices on each of two nodes: 4 rings
        (1, 1, 2, 0.0),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(size, stride, rounds, seconds):
    assert collective(FABRIC, 1e9, size, stride, rounds) == pytest.approx(seconds)


def exchange(fabric, nbytes, copies, size, stride=1, *, once=True, tokens=0):
    arrays = np.array([float(nbytes)]), copies, np.array([size]), np.array([stride])
    return float(fabric.all_to_all_s(*arrays, once=once, tokens=tokens)[0])


def test_a_copy_goes_to_each_expert_where_no_dispatcher_sends_one_to_a_rank():
    """Eight experts of 16 ranks on two nodes: 7/16 of eight copies inside, half across."""
    assert exchange(FABRIC, 1e9, 8, 8, once=False) == pytest.approx(8 * 7 / 8 / 100)
    assert exchange(FABRIC, 1e9, 8, 16, once=False) == pytest.approx(8 / 2 / 10)
    slow_inside = replace(FABRIC, inside_bytes_per_s=1e9)
    assert exchange(slow_inside, 1e9, 8, 16, once=False) == pytest.approx(8 * 7 / 16)
    assert exchange(FABRIC, 1e9, 8, 1, once=False) == 0.0


def test_tokens_are_sent_once_to_each_rank_that_has_their_experts():
    """7/8 of what one expert needs leaves a rank of 8; eight reach 8(1 − (7/8)^8) ranks."""
    assert exchange(FABRIC, 1e9, 1, 8) == pytest.approx(7 / 8 / 100)
    ranks = 8 * (1 - (7 / 8) ** 8)
    assert exchange(FABRIC, 1e9, 8, 8) == pytest.approx(ranks * 7 / 8 / 100)
    assert exchange(FABRIC, 1e9, 8, 1) == 0.0
    shared = replace(FABRIC, all_to_all_share=0.5)
    assert exchange(shared, 1e9, 1, 8) == pytest.approx(2 * 7 / 8 / 100)


def test_a_dispatcher_that_sends_once_takes_time_for_each_token():
    """Beside its bytes, of which it reaches its own share of the link; all-to-alls do not."""
    rate = collective_rates.DispatchRate(
        fixed_s=1e-3, token_s=1e-6, link_share=0.5, source="a test"
    )
    measured = replace(FABRIC, dispatch=rate)
    alone = exchange(FABRIC, 1e9, 8, 8)
    assert exchange(measured, 1e9, 8, 8) == pytest.approx(1e-3 + alone / 0.5)
    assert exchange(measured, 1e9, 8, 8, tokens=4096) == pytest.approx(5.096e-3 + alone / 0.5)
    slow = replace(measured, across_bytes_per_s=8e9)
    across = exchange(replace(FABRIC, across_bytes_per_s=8e9), 1e9, 8, 16)
    card = collective_rates.DispatchRate.model_fields["card_share"].default
    assert exchange(slow, 1e9, 8, 16, tokens=4096) == pytest.approx(5.096e-3 + across / card)
    assert exchange(measured, 1e9, 8, 1, tokens=4096) == 0.0
    copies = exchange(FABRIC, 1e9, 8, 8, once=False)
    assert exchange(measured, 1e9, 8, 8, once=False, tokens=4096) == copies


def test_what_crosses_the_network_is_sent_once_to_a_node_by_each_devices_card():
    """Two nodes, a card of 10 GB/s for each device: slower than the links inside."""
    nodes = 2 * (1 - (1 / 2) ** 8)
    assert exchange(FABRIC, 1e9, 8, 16) == pytest.approx(nodes / 2 / 10)
    slow_inside = replace(FABRIC, inside_bytes_per_s=1e9)
    assert exchange(slow_inside, 1e9, 8, 16) == pytest.approx(16 * (1 - (15 / 16) ** 8) * 15 / 16)
    lossy = replace(FABRIC, all_to_all_network_share=0.5)
    assert exchange(lossy, 1e9, 8, 16) == pytest.approx(2 * nodes / 2 / 10)


def test_an_exchange_does_not_grow_with_its_group():
    """What a rank sends is bounded by its tokens' copies, however many ranks take part."""
    whole = replace(FABRIC, per_node=1024)
    times = [exchange(whole, 1e9, 4, 2**n) for n in range(1, 11)]
    assert times == sorted(times)
    assert times[-1] < 4 / 100


def test_what_leaves_a_node_is_no_faster_than_what_stays():
    slow_inside = replace(FABRIC, inside_bytes_per_s=10e9)
    assert collective(slow_inside, 1e9, 16, 1, 1) == pytest.approx(15 / 16 * 1 / 10)


def test_steps_are_counted_inside_and_across():
    late = replace(FABRIC, protocols=(LATE,))
    # 8 ranks: 7 steps; twice of an all-reduce.
    assert collective(late, 1, 8, 1, 1) == pytest.approx(1e-5 + 7e-6, rel=1e-4)
    assert collective(late, 1, 8, 1, 2) == pytest.approx(1e-5 + 14e-6, rel=1e-4)
    # 16 ranks on two nodes: two of the 15 steps cross.
    assert collective(late, 1, 16, 1, 1) == pytest.approx(1e-5 + 13e-6 + 2e-5, rel=1e-4)


def test_the_protocol_that_is_faster_is_taken():
    quick = Protocol(0.0, 1e-7, 1e-6, 0.25)
    both = replace(FABRIC, protocols=(quick, LATE))
    for nbytes in (1, 1e3, 1e6, 1e9):
        each = [collective(replace(FABRIC, protocols=(one,)), nbytes, 8) for one in (quick, LATE)]
        assert collective(both, nbytes, 8) == min(each)
    assert collective(both, 1, 8) < collective(replace(FABRIC, protocols=(LATE,)), 1, 8)


@pytest.mark.parametrize(
    ("size", "stride", "seconds"),
    [
        (16, 1, 2 / 100 / 0.5),  # two whole nodes: 1 GB/80 GB/s across, twice as much in the chain
        (2, 8, 1 / 10 / 0.5),  # two ranks: half of each tree, over an eighth of the cards
        (32, 1, 2 / 80 / 0.5),  # four: a node that is inner sends twice the array
        (4, 4, 1 / 20 / 0.5),  # two devices on each of two nodes
    ],
)
def test_an_all_reduce_over_nodes_may_go_over_trees(size, stride, seconds):
    slow = Protocol(0.0, 1.0, 1.0, 1.0)  # a ring that is never taken
    assert collective(replace(FABRIC, protocols=(slow, TREE)), 1e9, size, stride) == pytest.approx(
        seconds
    )


def test_trees_are_for_sums_over_nodes_alone_and_messages_know_none():
    both, rings = (replace(FABRIC, protocols=some) for some in ((LATE, TREE), (LATE,)))
    assert collective(both, 1e9, 8) == collective(rings, 1e9, 8)
    assert collective(both, 1e3, 64, 1, 1) == collective(rings, 1e3, 64, 1, 1)
    assert send(both, 1e9, 8) == send(rings, 1e9, 8)


def test_a_trees_latency_grows_with_the_logarithm_of_the_nodes():
    tree = replace(FABRIC, protocols=(LATE, Protocol(1e-5, 1e-6, 1e-5, 1.0, (1.0,))))
    took = [collective(tree, 1, 8 * nodes) for nodes in (2, 4, 16, 128, 1024)]
    hand = [1e-5 + 2 * (7e-6 + hops * 1e-5) for hops in (1, 2, 4, 7, 10)]
    assert took == pytest.approx(hand, rel=1e-4)
    ring = [collective(replace(FABRIC, protocols=(LATE,)), 1, 8 * 1024)]
    assert ring[0] > 50 * took[-1]


def test_a_library_without_scattering_sums_sums_up_all():
    nbytes, size, stride = np.array([1e9]), np.array([4]), np.array([1])
    ring, gloo = FABRIC, replace(FABRIC, scatter_rounds=2)
    assert ring.scatter_s(nbytes, size, stride) == ring.gather_s(nbytes, size, stride)
    assert gloo.scatter_s(nbytes, size, stride) == gloo.sum_s(nbytes, size, stride)
    slow = replace(FABRIC, gather_share=0.5, scatter_share=0.25)
    assert slow.gather_s(nbytes, size, stride) == 2 * ring.gather_s(nbytes, size, stride)
    assert slow.scatter_s(nbytes, size, stride) == 4 * ring.scatter_s(nbytes, size, stride)
    assert slow.sum_s(nbytes, size, stride) == ring.sum_s(nbytes, size, stride)


def test_nccls_trees_win_small_sums_on_many_nodes_and_rings_large_ones():
    both, rings = (replace(FABRIC, protocols=NCCL[:count]) for count in (6, 3))
    assert collective(both, 1e6, 1024) < collective(rings, 1e6, 1024) / 5
    assert collective(both, 1e11, 64) == collective(rings, 1e11, 64)


def test_a_message_goes_to_the_neighbour_or_out_of_the_node():
    assert send(FABRIC, 1e9, 4) == pytest.approx(1 / 50)
    assert send(FABRIC, 1e9, 8) == pytest.approx(1 / 10)  # 8 devices share 80 GB/s
    # Stages of one device and of four: the slowest message is between two nodes.
    assert send(FABRIC, 1e9, 1, size=8) == pytest.approx(1 / 50)
    assert send(FABRIC, 1e9, 1, size=16) == send(FABRIC, 1e9, 4, size=4) == pytest.approx(1 / 10)
    late = replace(FABRIC, protocols=(PLAIN, LATE))
    assert send(late, 0, 4) == pytest.approx(11e-6)
    assert send(late, 0, 8) == send(late, 0, 1, size=16) == pytest.approx(20e-6)


@given(
    nbytes=st.floats(0, 1e12), size=POWERS, stride=POWERS, rounds=st.sampled_from([1, 2]),
    faster=st.floats(1, 1e3), which=st.integers(0, 2), draw=PROTOCOLS,
)  # fmt: skip
def test_a_faster_link_never_makes_a_collective_slower(
    nbytes, size, stride, rounds, faster, which, draw
):
    name = ("inside_bytes_per_s", "across_bytes_per_s", "pair_bytes_per_s")[which]
    fabric = replace(FABRIC, protocols=draw)
    better = replace(fabric, **{name: getattr(fabric, name) * faster})
    before = collective(fabric, nbytes, size, stride, rounds)
    assert 0 <= collective(better, nbytes, size, stride, rounds) <= before < math.inf
    assert send(better, nbytes, stride) <= send(fabric, nbytes, stride)


@given(
    nbytes=st.floats(1, 1e12), more=st.floats(0, 1e12) | st.floats(0, 1e6), size=POWERS,
    stride=POWERS, draw=PROTOCOLS,
)  # fmt: skip
def test_more_bytes_never_take_less(nbytes, more, size, stride, draw):
    fabric = replace(FABRIC, protocols=draw)
    assert collective(fabric, nbytes + more, size, stride) >= collective(
        fabric, nbytes, size, stride
    )
