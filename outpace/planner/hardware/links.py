"""Times of collectives on the axes of the mesh, from the links between ranks.

Ranks are laid out on nodes in the order of `records.plan.AXES`, with the last axis closest
together. A ring over several nodes enters and leaves each node once; rings of other groups that
leave the node at the same time share its network cards. All-reduces can use trees instead: up and
down a chain in each node, and between nodes along two binary trees, each for half of the array.
Every node is an inner node of one tree and a leaf of the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from outpace.catalog.collective_rates import DispatchRate
from outpace.planner.plan_columns import Floats, Ints

_SMALLEST = 6  # log2 of the first size in `by_size`


class Protocol(NamedTuple):
    """A collective protocol: its latencies and its fraction of the bandwidth.

    The latency is `base_s` plus a term for each step inside and across nodes. Protocols with short
    steps use less of the bandwidth; the fastest protocol is used. A protocol with `by_size` is a
    tree: `by_size` is the fraction of the bandwidth by array size, in powers of two from 64 bytes.
    """

    base_s: float
    inside_s: float
    across_s: float
    share: float
    by_size: tuple[float, ...] = ()


@dataclass(frozen=True)
class Fabric:
    """Nodes of `per_node` devices, and the rates in bytes/s that a ring reaches in one direction.

    - `inside_bytes_per_s`: the rate between a device and all others of its node.
    - `pair_bytes_per_s`: the rate between two devices of a node.
    - `across_bytes_per_s`: the rate of all network cards of a node together.
    - `gather_share`, `scatter_share`: the fractions of these rates that collectives reach within a
      node. `group_shares` has the fractions for small groups, by size of the group.
    - `all_to_all_share`, `all_to_all_network_share`: the fractions for all-to-all within a node and
      across nodes.
    - `dispatch`: a model of a dispatcher that sends each token once per rank.
    - `scatter_rounds`: 2 if the library reduces whole arrays on every rank and then keeps a part,
      as gloo does.
    """

    per_node: int
    inside_bytes_per_s: float
    across_bytes_per_s: float
    pair_bytes_per_s: float
    protocols: tuple[Protocol, ...]
    sources: tuple[str, ...] = ()
    gather_share: float = 1.0
    scatter_share: float = 1.0
    scatter_rounds: int = 1
    group_shares: Mapping[int, float] = field(default_factory=dict)
    all_to_all_share: float = 1.0
    all_to_all_network_share: float = 1.0
    dispatch: DispatchRate | None = None

    def with_rates(self, inside: Floats | float, across: Floats | float) -> "Fabric":
        """Return the fabric with other rates, either common to all plans or one per plan.

        The ratio of the pair rate to the rate inside a node stays the same.
        """
        share = self.pair_bytes_per_s / self.inside_bytes_per_s
        pair = inside * share if self.inside_bytes_per_s < np.inf else inside
        rates: dict[str, Any] = {
            "inside_bytes_per_s": inside, "across_bytes_per_s": across, "pair_bytes_per_s": pair,
        }  # fmt: skip
        return replace(self, **rates)

    def spread(self, size: Ints, stride: Ints) -> tuple[Floats, Floats, Floats]:
        """Return a group's ranks per node, its number of nodes, and the groups per node.

        Groups have `size` ranks at distance `stride`. All groups communicate at the same time, so
        the groups on a node share its network cards.
        """
        together = np.clip(self.per_node // np.maximum(stride, 1), 1, None)
        within = np.minimum(size, together)
        return within, np.ceil(size / within), np.maximum(1, self.per_node // within)

    def _ring_link_rate(self, size: Ints, stride: Ints, share: float) -> tuple[Floats, Floats]:
        """Return the bytes/s per link of a ring, and the number of nodes that it spans.

        Groups have `size` ranks at distance `stride`. `share` is the fraction of a node's link rate
        that the collective reaches.
        """
        within, nodes, groups = self.spread(size, stride)
        inside = np.where(within > 1, self.inside_bytes_per_s, np.inf) * share
        for count, part in self.group_shares.items():
            inside = np.where((nodes == 1) & (within == count), inside * part, inside)
        across = np.minimum(self.across_bytes_per_s / groups, inside)
        return np.where(nodes > 1, across, inside), nodes

    def sum_s(self, nbytes: Floats, size: Ints, stride: Ints) -> Floats:
        """Return the seconds of an all-reduce of arrays of `nbytes` in each group."""
        return self._collective_s(nbytes, size, stride, 2, 1.0)

    def gather_s(self, nbytes: Floats, size: Ints, stride: Ints) -> Floats:
        """Return the seconds of an all-gather into arrays of `nbytes`."""
        return self._collective_s(nbytes, size, stride, 1, self.gather_share)

    def scatter_s(self, nbytes: Floats, size: Ints, stride: Ints) -> Floats:
        """Return the seconds of a reduce-scatter of arrays of `nbytes`."""
        return self._collective_s(nbytes, size, stride, self.scatter_rounds, self.scatter_share)

    def all_to_all_s(
        self, nbytes: Floats, copies: int, size: Ints, stride: Ints, *, once: bool = False,
        tokens: Floats | float = 0.0,
    ) -> Floats:  # fmt: skip
        """Return the seconds of an all-to-all of tokens to their experts, with `nbytes` per rank.

        Each token goes to `copies` experts, drawn uniformly from the experts on the `size` ranks of
        its group, and is sent once per expert. With `once`, a token is sent once per rank and,
        across the network, once per node, from where the node's own links distribute it
        (DeepSeek-AI, DeepEP); each of a rank's `tokens` then adds a fixed time. Links inside and
        across nodes work concurrently, and the devices of a node share its cards.
        """
        within, nodes, _ = self.spread(size, stride)
        link = self.inside_bytes_per_s * self.all_to_all_share
        card = self.across_bytes_per_s / self.per_node
        each: Floats | float = 0.0
        if once and self.dispatch is not None:
            link = self.inside_bytes_per_s * self.dispatch.link_share
            card = card * self.dispatch.card_share
            each = self.dispatch.fixed_s + tokens * self.dispatch.token_s
        else:
            card = card * self.all_to_all_network_share
        if once:
            own = _expected_remote_groups(size.astype(np.float64), copies)
            far = _expected_remote_groups(nodes, copies)
        else:
            own, far = copies * (within - 1) / size, copies * (size - within) / size
        own = np.where(within > 1, own, 0.0)
        across_s = np.where(nodes > 1, nbytes * far / card, 0.0)
        last = [one for one in self.protocols if not one.by_size][-1]
        late = last.base_s + last.inside_s + np.where(nodes > 1, last.across_s, 0.0)
        found = late + each + np.maximum(nbytes * own / link, across_s)
        return np.where((size > 1) & (nbytes > 0), found, 0.0)

    def broadcasts_s(self, nbytes: Floats, size: Ints, stride: Ints) -> Floats:
        """Return the seconds in which all ranks of a group broadcast their shards of `nbytes`.

        The broadcasts travel around the ring one after the other, each with a step per rank.
        """
        rate, nodes = self._ring_link_rate(size, stride, 1.0)
        crossing = np.where(nodes > 1, nodes, 0)
        best = np.full(np.broadcast(nbytes, size, stride).shape, np.inf)
        for one in self.protocols:
            if not one.by_size:
                steps_s = (size - 1 - crossing).clip(0) * one.inside_s + crossing * one.across_s
                took = size * (one.base_s + steps_s) + nbytes / (rate * one.share)
                best = np.minimum(best, took)
        return np.where((size > 1) & (nbytes > 0), best, 0.0)

    def _collective_s(
        self, nbytes: Floats, size: Ints, stride: Ints, rounds: int, share: float
    ) -> Floats:
        """Return the seconds of a collective by the fastest protocol.

        A ring takes `rounds` × (size − 1) steps; all-reduces over several nodes may use trees
        instead. `share` is the fraction of a node's link rate that the collective reaches.
        """
        rate, nodes = self._ring_link_rate(size, stride, share)
        steps = rounds * (size - 1)
        crossing = np.where(nodes > 1, np.minimum(rounds * nodes, steps), 0)
        wire = rounds * (size - 1) / size * nbytes
        best = np.full(np.broadcast(nbytes, size, stride).shape, np.inf)
        for one in self.protocols:
            if not one.by_size:
                steps_s = (steps - crossing) * one.inside_s + crossing * one.across_s
                best = np.minimum(best, one.base_s + steps_s + wire / (rate * one.share))
        if rounds == 2 and any(one.by_size for one in self.protocols) and (nodes > 1).any():
            best = np.where(
                nodes > 1, np.minimum(best, self._tree_sum_s(nbytes, size, stride)), best
            )
        return np.where((size > 1) & (nbytes > 0), best, 0.0)

    def _tree_sum_s(self, nbytes: Floats, size: Ints, stride: Ints) -> Floats:
        """Return the seconds of an all-reduce over several nodes by double binary trees.

        Within a node, each rank of a chain sends the array once up and once down. Between nodes,
        each tree carries half of the array; an inner node of a tree sends three halves to its
        neighbours in that tree, and one half in the other tree. With two nodes, each is the root of
        one tree and a leaf of the other, which halves this traffic. Latencies follow NCCL: the
        chain in both directions, and log2(nodes) hops in both.
        """
        within, nodes, groups = self.spread(size, stride)
        inside = np.where(within > 1, 2 * nbytes / self.inside_bytes_per_s, 0.0)
        across = np.where(nodes > 2, 2, 1) * nbytes / (self.across_bytes_per_s / groups)
        hops = np.floor(np.log2(np.maximum(nodes, 1)))
        best = np.full(np.broadcast(nbytes, size, stride).shape, np.inf)
        for one in self.protocols:
            if one.by_size:
                places = np.arange(_SMALLEST, _SMALLEST + len(one.by_size))
                share = one.share * np.interp(np.log2(np.maximum(nbytes, 1.0)), places, one.by_size)
                late = one.base_s + 2 * ((within - 1) * one.inside_s + hops * one.across_s)
                best = np.minimum(best, late + np.maximum(inside, across) / share)
        return best

    def send_s(self, nbytes: Floats, size: Ints, stride: Ints) -> Floats:
        """Return the seconds of a message to the next rank of an axis while all ranks send.

        The axis has `size` ranks at distance `stride`. If it spans several nodes, the slowest
        message crosses nodes and gets a device's share of its node's cards.
        """
        leaves = size * stride > self.per_node
        rate = np.where(leaves, self.across_bytes_per_s / self.per_node, self.pair_bytes_per_s)
        last = [one for one in self.protocols if not one.by_size][-1]
        return last.base_s + np.where(leaves, last.across_s, last.inside_s) + nbytes / rate


def _expected_remote_groups(groups: Floats, copies: int) -> Floats:
    """Return the expected number of other groups to which a token with `copies` experts is sent."""
    return groups * (1 - (1 - 1 / groups) ** copies) * (groups - 1) / groups
