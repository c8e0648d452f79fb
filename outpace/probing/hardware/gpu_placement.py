"""Advice on a topology: which GPUs to use for tensor parallelism, and which links are slow."""

from collections.abc import Iterator
from itertools import combinations

from outpace.records.topology import (
    Grouping,
    MissingNvlinks,
    NearNics,
    Placement,
    SlowPairs,
    Topology,
    goodness,
    nvlinks,
)

# Links through the CPU, which are too slow for tensor parallelism: it communicates in every layer.
_SLOW = ("PHB", "NODE", "SYS", "SOC")
_BETWEEN_NODES = ("SYS", "SOC")
_SLOWEST_FOR_TENSOR_PARALLEL = goodness("PXB")
# More GPUs than any host has. With more, an exact search could take long.
_MOST_SEARCHED = 16


def advise_placement(
    topology: Topology,
    nvlink_bytes_per_s: float | None = None,
    slot_bytes_per_s: float | None = None,
) -> Placement:
    """Advise on the placement of work on a host's GPUs, given the links between them.

    `nvlink_bytes_per_s` and `slot_bytes_per_s` are the one-way rates of an NVLink and of a PCIe
    slot.
    """
    gpus = topology.gpus
    sizes = [size for size in (2, 4, 8, 16) if size <= len(gpus)]
    if len(gpus) > 1 and len(gpus) not in sizes:
        sizes.append(len(gpus))
    found = tuple(group_gpus(topology, size, nvlink_bytes_per_s) for size in sizes)
    return Placement(
        groupings=found,
        tensor_parallel=_largest_grouping(found, len(gpus))
        or _partial_grouping(topology, nvlink_bytes_per_s),
        missing=missing_nvlinks(topology),
        bottleneck=None if topology.pcie_only else bottleneck(topology),
        slow=()
        if topology.pcie_only
        else slow_pairs(topology, _pcie_slowdown(topology, nvlink_bytes_per_s, slot_bytes_per_s)),
        nics=tuple(_near_nics(topology, gpu) for gpu in gpus) if topology.nics else (),
    )


def group_gpus(topology: Topology, size: int, nvlink_bytes_per_s: float | None = None) -> Grouping:
    """Form as many groups of `size` GPUs as possible, maximising the worst link within groups.

    The result is optimal for up to 16 GPUs. With more, neighbours in the driver's order are
    grouped.
    """
    gpus = topology.gpus
    score = {frozenset(pair): _score_link(topology, *pair) for pair in combinations(gpus, 2)}
    groups: tuple[tuple[str, ...], ...] | None = None
    if len(gpus) <= _MOST_SEARCHED:
        for least in sorted(set(score.values()), reverse=True):
            groups = _partition(gpus, size, len(gpus) % size, score, least)
            if groups is not None:
                break
    if groups is None:
        whole = len(gpus) - len(gpus) % size
        groups = tuple(gpus[at : at + size] for at in range(0, whole, size))
    return _make_grouping(topology, size, groups, score, nvlink_bytes_per_s)


def _make_grouping(
    topology: Topology,
    size: int,
    groups: tuple[tuple[str, ...], ...],
    score: dict[frozenset[str], int],
    nvlink_bytes_per_s: float | None,
) -> Grouping:
    worst = min(
        (topology.link_between(*pair) for group in groups for pair in combinations(group, 2)),
        key=goodness,
        default=None,
    )
    bonds = nvlinks(worst)
    rate = bonds * nvlink_bytes_per_s if bonds and nvlink_bytes_per_s is not None else None
    order = sorted(groups, key=lambda group: -_group_score(group, score))
    inside = {gpu for group in groups for gpu in group}
    return Grouping(
        size=size,
        groups=tuple(order),
        worst_link=worst,
        link_bytes_per_s=rate,
        left_out=tuple(gpu for gpu in topology.gpus if gpu not in inside),
    )


def _partial_grouping(topology: Topology, nvlink_bytes_per_s: float | None) -> Grouping | None:
    """Find the largest groups joined by NVLink, or else by PCIe switches, leaving some GPUs out.

    This is for hosts with unequal links, such as three GPUs with one bridge, or a GPU that lost its
    NVLinks. Returns None if no two GPUs are joined in this way.
    """
    gpus = topology.gpus
    score = {frozenset(pair): _score_link(topology, *pair) for pair in combinations(gpus, 2)}
    if len(gpus) > _MOST_SEARCHED:
        return None
    for least in (goodness("NV1"), _SLOWEST_FOR_TENSOR_PARALLEL):
        for size in (16, 8, 4, 2):
            for left_over in range(len(gpus) % size, len(gpus) - size + 1, size):
                groups = _partition(gpus, size, left_over, score, 2 * least)
                if groups:
                    return _make_grouping(topology, size, groups, score, nvlink_bytes_per_s)
    return None


def _score_link(topology: Topology, gpu: str, other: str) -> int:
    """Return a score of the link between two GPUs, higher for a faster link.

    A shared NUMA node breaks ties.
    """
    near = topology.device(gpu).numa_affinity
    same = near is not None and near == topology.device(other).numa_affinity
    return 2 * goodness(topology.link_between(gpu, other)) + same


def _group_score(group: tuple[str, ...], score: dict[frozenset[str], int]) -> int:
    return sum(score[frozenset(pair)] for pair in combinations(group, 2))


def _partition(
    gpus: tuple[str, ...], size: int, left_over: int, score: dict[frozenset[str], int], least: int
) -> tuple[tuple[str, ...], ...] | None:
    """Return disjoint groups whose links score at least `least`, leaving out `left_over` GPUs.

    Returns None if there is no such partition.
    """
    if len(gpus) < size:
        return ()
    first, *others = gpus
    for group in _connected_groups(first, others, size, score, least):
        rest = tuple(gpu for gpu in others if gpu not in group)
        found = _partition(rest, size, left_over, score, least)
        if found is not None:
            return (group, *found)
    if left_over:
        return _partition(gpus[1:], size, left_over - 1, score, least)
    return None


def _connected_groups(
    first: str, others: list[str], size: int, score: dict[frozenset[str], int], least: int
) -> Iterator[tuple[str, ...]]:
    """Yield groups of `size` GPUs that contain `first`, best links first.

    All links within a group score at least `least`.
    """
    near = [gpu for gpu in others if score[frozenset((first, gpu))] >= least]
    groups = (
        (first, *rest)
        for rest in combinations(near, size - 1)
        if all(score[frozenset(pair)] >= least for pair in combinations(rest, 2))
    )
    yield from sorted(groups, key=lambda group: -_group_score(group, score))


def _largest_grouping(groupings: tuple[Grouping, ...], gpus: int) -> Grouping | None:
    """Return the grouping with the largest groups that are joined by NVLink.

    Without NVLinks, it is the one with the largest groups that PCIe switches join, or None.
    Groupings that leave no GPU out are preferred.
    """
    even = [grouping for grouping in groupings if gpus % grouping.size == 0] or list(groupings)
    by_nvlink = [grouping for grouping in even if nvlinks(grouping.worst_link)]
    if by_nvlink:
        return by_nvlink[-1]
    switched = [one for one in even if goodness(one.worst_link) >= _SLOWEST_FOR_TENSOR_PARALLEL]
    return switched[-1] if switched else None


def missing_nvlinks(topology: Topology) -> MissingNvlinks | None:
    """Return the GPUs and pairs with fewer NVLinks than the others; None if there is no pattern.

    There is a pattern if at least half of all pairs have the best connection on the host. This
    holds on hosts whose GPUs are all connected in the same way, but not if bridges connect pairs.
    """
    pairs = list(combinations(topology.gpus, 2))
    links = [topology.link_between(*pair) for pair in pairs]
    usual = max(links, key=nvlinks, default=None)
    if len(topology.gpus) < 3 or not nvlinks(usual) or 2 * links.count(usual) < len(pairs):
        return None
    odd = {pair: link for pair, link in zip(pairs, links, strict=True) if link != usual}
    lost: list[str] = []
    while odd_left := [pair for pair in odd if not set(pair) & set(lost)]:
        touched = [gpu for pair in odd_left for gpu in pair]
        worst = max(topology.gpus, key=touched.count)
        if touched.count(worst) < max(2, (len(topology.gpus) - len(lost)) / 2):
            break
        lost.append(worst)
    if not odd:
        return None
    kinds = sorted({str(link or "n/a") for link in odd.values()}, key=_link_sort_key)
    return MissingNvlinks(
        usual=str(usual), links=tuple(kinds), gpus=tuple(lost), pairs=tuple(odd_left)
    )


def _link_sort_key(link: str) -> int:
    return 0 if link == "n/a" else -goodness(link)


def bottleneck(topology: Topology) -> str | None:
    """Return the slowest link that no collective over all GPUs can avoid.

    It is the slowest link of the spanning tree with the fastest links. Returns None for fewer than
    two GPUs.
    """
    joined = {gpu: {gpu} for gpu in topology.gpus}
    pairs = sorted(
        combinations(topology.gpus, 2), key=lambda pair: -goodness(topology.link_between(*pair))
    )
    last = None
    for one, other in pairs:  # Kruskal: the last edge of the best spanning tree
        if joined[one] is joined[other]:
            continue
        last = topology.link_between(one, other)
        joined[one] |= joined[other]
        for gpu in joined[other]:
            joined[gpu] = joined[one]
    return last


def _pcie_slowdown(
    topology: Topology, nvlink_bytes_per_s: float | None, slot_bytes_per_s: float | None
) -> float | None:
    pairs = combinations(topology.gpus, 2)
    most = max((nvlinks(topology.link_between(*pair)) for pair in pairs), default=0)
    if not most or nvlink_bytes_per_s is None or slot_bytes_per_s is None:
        return None
    times = most * nvlink_bytes_per_s / slot_bytes_per_s
    return times if times > 1 else None


def slow_pairs(topology: Topology, times_slower: float | None = None) -> tuple[SlowPairs, ...]:
    """Return the pairs of GPUs whose link goes through the CPU, by kind of link, slowest first.

    `times_slower` is stored with each kind; see `SlowPairs`.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for pair in combinations(topology.gpus, 2):
        link = topology.link_between(*pair)
        if link in _SLOW:
            found.setdefault(str(link), []).append(pair)
    kinds = sorted(found, key=goodness)
    return tuple(
        SlowPairs(link=kind, pairs=tuple(found[kind]), times_slower=times_slower) for kind in kinds
    )


def _near_nics(topology: Topology, gpu: str) -> NearNics:
    links = {nic: topology.link_between(gpu, nic) for nic in topology.nics}
    best = max(links.values(), key=goodness)
    if best in _BETWEEN_NODES and topology.device(gpu).gpu_numa_id is not None:
        # A GPU that is a NUMA node itself (Grace) is not on the node of any card, near or far.
        return NearNics(gpu=gpu, nics=(), link=None)
    return NearNics(
        gpu=gpu, nics=tuple(nic for nic, link in links.items() if link == best), link=best
    )
