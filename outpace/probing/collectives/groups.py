"""Groups of communicating ranks: all, within a node, across nodes, and pairs.

The network between nodes is measured as training uses it: one group per local rank, all at the same
time, because they share the network cards of a node.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from outpace.records.errors import BadInputError

Nodes = tuple[tuple[int, ...], ...]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Axis:
    """Groups of equal size that run the same collective at the same time."""

    name: str
    groups: Nodes

    @property
    def ranks(self) -> int:
        """Return the number of ranks in each group."""
        return len(self.groups[0])

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank, or () if it is in none."""
        return next((group for group in self.groups if rank in group), ())


def nodes_of(places: Sequence[tuple[int, int]]) -> Nodes:
    """Return the ranks of each node, from the (local rank, local world size) of every rank.

    Raises BadInputError if a node's ranks are not consecutive, as torchrun numbers them.
    """
    nodes: list[tuple[int, ...]] = []
    rank = 0
    while rank < len(places):
        size = places[rank][1]
        node = places[rank : rank + size]
        if node != [(local, size) for local in range(size)]:
            raise BadInputError(
                f"the ranks from {rank} on have (local rank, local world size) {list(node)}, "
                f"but the {size} ranks of a node must be consecutive. Start with torchrun, "
                "or with mpirun --map-by slot."
            )
        nodes.append(tuple(range(rank, rank + size)))
        rank += size
    return tuple(nodes)


def axes_of(nodes: Nodes) -> list[Axis]:
    """Return the axis of all ranks, and the axes within and across nodes where these differ."""
    world = tuple(rank for node in nodes for rank in node)
    axes = [Axis("all", (world,))]
    sizes = {len(node) for node in nodes}
    if len(nodes) > 1 and sizes != {1}:
        if len(sizes) == 1:
            axes.append(Axis("node", nodes))
        across = zip(*nodes, strict=False)  # for the local ranks that all nodes have
        axes.append(Axis("across", tuple(across)))
    return axes


def pair_slots(nodes: Nodes) -> Iterator[tuple[Pair, ...]]:
    """Yield sets of pairs of ranks that can be timed at the same time, because they share no links.

    Together, the sets have every pair of ranks within a node, and every pair of nodes, represented
    by their first ranks.
    """
    largest = max(map(len, nodes))
    for a, b in combinations(range(largest), 2):
        yield tuple((node[a], node[b]) for node in nodes if b < len(node))
    yield from _round_robin([node[0] for node in nodes])


def _round_robin(ranks: Sequence[int]) -> Iterator[tuple[Pair, ...]]:
    """Yield rounds of disjoint pairs that together contain every pair (circle method)."""
    ring: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    for _ in range(len(ring) - 1):
        facing = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        round_ = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        if round_:
            yield tuple(round_)
        ring = [ring[0], ring[-1], *ring[1:-1]]
