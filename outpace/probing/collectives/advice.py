"""Advice on measured links: whether they suffice for large runs, and which ranks are slow."""

from collections.abc import Mapping, Sequence
from statistics import median

from outpace.probing.collectives.groups import Nodes, Pair
from outpace.probing.collectives.stragglers import slow_links, slow_ranks
from outpace.probing.timing.intervals import normal_deviation
from outpace.records.figure import Figure
from outpace.records.probe_results import Advice, LinkFit, network_fit, node_bytes_per_s
from outpace.records.units import show_count

# Bekman, "Machine Learning Engineering", "Inter-node speed requirements": "at least 400Gbps"; BLOOM
# was trained on 50.
_WANTED_BITS_PER_S, _BLOOM_BITS_PER_S = 400e9, 50e9
_RECOMMENDED_NODES = 4
_FIRST_NAMED = 5
# The network is unsteady if rounds across nodes vary by more than this fraction, and by more than
# this many times the variation within nodes.
_WANDERS, _TIMES_NODE = 0.10, 3.0
_LARGE_BYTES, _LEAST_ROUNDS = 1 << 16, 4


def link_sentence(fit: LinkFit) -> str:
    """Describe a fitted link, as in 'all-reduce over 4 ranks (gloo): 21 µs + 3.20 GB/s (busbw)'."""
    latency = fit.latency.value
    shown = "n/a" if latency is None else f"{1e6 * latency:.3g} µs"
    rate = show_count(fit.bandwidth.value, "B/s")
    return f"{fit.collective} over {fit.ranks} ranks ({fit.backend}): {shown} + {rate} (busbw)"


def network_advice(fits: Sequence[LinkFit], nodes: Nodes) -> list[Advice]:
    """Compare the network between nodes, if any, with what large runs need."""
    fit = network_fit(fits, len(nodes))
    if len(nodes) < 2:
        return []
    if fit is None:
        text = (
            "the bandwidth between nodes is unknown: larger arrays took no longer than small ones, "
            "or too few were measured. Probe longer, with nothing else running"
        )
        return [Advice(about="network", text=text)]
    at_once = min(map(len, nodes))
    rate = node_bytes_per_s(fit, at_once)
    if rate is None:
        text = f"the bandwidth between nodes is unknown: {fit.bandwidth.unstable}"
        return [Advice(about="network", text=text, of=(fit.bandwidth.key,))]
    bits_per_s = 8 * rate
    text = (
        f"{link_sentence(fit)} between nodes, {at_once} at once from each node: "
        f"{show_count(bits_per_s, 'bit/s')} per node. {_compare_rate(bits_per_s)} `outpace "
        "network` shows what a given run needs."
    )
    return [Advice(about="network", text=text, of=(fit.bandwidth.key,))]


def _compare_rate(bits_per_s: float) -> str:
    wanted = "Large runs need 400 Gbit/s or more between nodes"
    if bits_per_s >= _WANTED_BITS_PER_S:
        return f"{wanted}: this is enough."
    share = f"{wanted}, {_WANTED_BITS_PER_S / bits_per_s:.2g} times as much"
    if bits_per_s >= _BLOOM_BITS_PER_S:
        return f"{share}; BLOOM was trained on 50."
    return f"{share}; BLOOM was trained on 50. Parameters sharded across nodes (ZeRO-3) will wait."


def world_notes(nodes: Nodes) -> list[str]:
    """Return notes on what cannot be measured with so few nodes, and how many to use."""
    if len(nodes) == 1:
        return [
            "all ranks are on one node, so the network between nodes is unknown. "
            f"To measure it, probe under torchrun on at least {_RECOMMENDED_NODES} nodes, or "
            "on all that you will use"
        ]
    if len(nodes) < _RECOMMENDED_NODES:
        return [
            f"with {len(nodes)} nodes, the probe does not load the network as larger runs do. "
            f"Probe on at least {_RECOMMENDED_NODES}, or on all that you will use"
        ]
    return []


def wander_notes(figures: Sequence[Figure]) -> list[str]:
    """Return a note if the network between nodes is unsteady, but links within nodes are not.

    The criterion is the variation between rounds of the same collective, at sizes large enough to
    depend on the links.
    """
    apart = {axis: _median_spread(figures, axis) for axis in ("across", "node")}
    across, node = apart["across"], apart["node"]
    if across is None or node is None or across <= max(_WANDERS, _TIMES_NODE * node):
        return []
    return [
        "the network between nodes is not steady: from round to round, collectives across nodes "
        f"differ by {across:.0%} in the median, those within nodes by {node:.0%}. Others may be "
        "using it: probe again when they are not, and expect the same variation in training"
    ]


def _median_spread(figures: Sequence[Figure], axis: str) -> float | None:
    """Return the median relative spread between rounds, over all large collectives of an axis."""
    large = [
        figure
        for figure in figures
        if figure.key.what == "time"
        and figure.key.has(axis=axis)
        and int(figure.key.of["bytes"]) >= _LARGE_BYTES
        and len(figure.rounds) >= _LEAST_ROUNDS
    ]
    middles = [[median(samples) for samples in figure.rounds] for figure in large]
    return median(normal_deviation(of) / median(of) for of in middles) if middles else None


def rank_advice(figures: Sequence[Figure]) -> list[Advice]:
    """Report ranks that take longer than the others for the same computation."""
    found = []
    for what in dict.fromkeys(figure.key.what for figure in figures):
        of = {int(f.key.of["rank"]): f for f in figures if f.key.what == what}
        for slow in slow_ranks({rank: figure.samples for rank, figure in of.items()})[
            :_FIRST_NAMED
        ]:
            text = (
                f"rank {slow.who} is a straggler: {slow} than the others in {what}, and all "
                "ranks wait for the slowest. Check its clocks, temperature and power limit, "
                "and which other programs run on its cores"
            )
            found.append(
                Advice(about="straggler", text=text, gain=slow.times - 1, low=slow.low - 1,
                       high=slow.high - 1, of=(of[slow.who].key,))
            )  # fmt: skip
    return found


def pair_advice(figures: Mapping[Pair, Sequence[Figure]], nodes: Nodes) -> list[Advice]:
    """Report slow links, and ranks with only slow links, compared within and between nodes."""
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    found: list[Advice] = []
    for within in (True, False):
        largest = {
            pair: max(of, key=lambda figure: int(figure.key.of["bytes"]))
            for pair, of in figures.items()
            if (node_of[pair[0]] == node_of[pair[1]]) == within
        }
        slow = slow_links({pair: figure.samples for pair, figure in largest.items()})
        for rank in slow.ranks[:_FIRST_NAMED]:
            keys = tuple(figure.key for pair, figure in largest.items() if rank.who in pair)
            whose = f"rank {rank.who}" if within else f"rank {rank.who}'s node"
            text = (
                f"all links of {whose} are slow: {rank} than those of the others. "
                f"{_suggest_link_check(within)}"
            )
            found.append(Advice(about="slow link", text=text, of=keys))
        for link in slow.links[:_FIRST_NAMED]:
            a, b = link.who
            text = (
                f"the link between ranks {a} and {b} is slow: {link} than the others. "
                f"{_suggest_link_check(within)}"
            )
            found.append(Advice(about="slow link", text=text, of=(largest[link.who].key,)))
    return found


def _suggest_link_check(within: bool) -> str:
    if within:
        return "`outpace topology` shows how they are connected"
    return "Check the cable, the port's speed and its errors, and the switch between them"
