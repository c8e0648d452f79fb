"""Links between ranks: how long a collective takes on the axis of a mesh.

Ranks lie on nodes in the order of `records.plan.AXES`, the last axis closest together. A ring
through the ranks of several nodes enters and leaves each once; the rings of other groups that
cross at the same time share the node's network cards.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outpace.planner.columns import Floats, Ints


class Protocol(NamedTuple):
    """How a collective is sent: seconds once and a step, inside nodes and across, and its share.

    Protocols with short steps use less of the bandwidth; the fastest is taken.
    """

    base_s: float
    inside_s: float
    across_s: float
    share: float


@dataclass(frozen=True)
class Fabric:
    """Nodes of `per_node` devices. Rates are bytes/s in one direction, as a ring reaches them.

    `inside_bytes_per_s` is a device's to the others of its node, `across_bytes_per_s` all network
    cards' of a node together, `pair_bytes_per_s` a device's to one other of its node.
    """

    per_node: int
    inside_bytes_per_s: float
    across_bytes_per_s: float
    pair_bytes_per_s: float
    protocols: tuple[Protocol, ...]
    sources: tuple[str, ...] = ()

    def _ring(self, size: Ints, stride: Ints) -> tuple[Floats, Floats]:
        """Of groups of `size` ranks, `stride` apart: bytes/s of a link, and nodes they are on."""
        together = np.clip(self.per_node // stride, 1, None)
        within = np.minimum(size, together)
        nodes = np.ceil(size / within)
        groups = np.maximum(1, self.per_node // within)  # that cross the same cards
        inside = np.where(within > 1, self.inside_bytes_per_s, np.inf)
        across = np.minimum(self.across_bytes_per_s / groups, inside)
        return np.where(nodes > 1, across, self.inside_bytes_per_s), nodes

    def collective_s(self, nbytes: Floats, size: Ints, stride: Ints, rounds: int) -> Floats:
        """Seconds of a collective of `nbytes` (of the whole array) over each group.

        `rounds` is 2 for all-reduce, 1 for all-gather, reduce-scatter and all-to-all: each goes
        round the ring in size − 1 steps.
        """
        rate, nodes = self._ring(size, np.maximum(stride, 1))
        steps = rounds * (size - 1)
        crossing = np.where(nodes > 1, np.minimum(rounds * nodes, steps), 0)
        wire = rounds * (size - 1) / size * nbytes
        best = np.full(np.broadcast(nbytes, size, stride).shape, np.inf)
        for one in self.protocols:
            steps_s = (steps - crossing) * one.inside_s + crossing * one.across_s
            best = np.minimum(best, one.base_s + steps_s + wire / (rate * one.share))
        return np.where((size > 1) & (nbytes > 0), best, 0.0)

    def send_s(self, nbytes: Floats, stride: Ints) -> Floats:
        """Seconds of a message to the rank `stride` further on, all ranks sending."""
        leaves = stride >= self.per_node
        rate = np.where(leaves, self.across_bytes_per_s / self.per_node, self.pair_bytes_per_s)
        last = self.protocols[-1]
        found: Floats = last.base_s + np.where(leaves, last.across_s, last.inside_s) + nbytes / rate
        return found
