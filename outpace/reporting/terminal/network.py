"""A network report as tables for the terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outpace.records.figure import Figure
from outpace.records.network import Need, Network, NetworkCost, NetworkReport
from outpace.records.units import show_count, show_seconds

# Ratio to the required bandwidth above which a network is reported to be faster than needed.
_PLENTY = 1.5
_NAME_WIDTH = 20
_MOST_COLUMNS = 4


def network_text(answered: NetworkReport) -> Group:
    """Show the training and machine, the needs of plans, the cost of networks, and conclusions."""
    parts: list[RenderableType] = [*_head(answered), _needs_table(answered)]
    if len(answered.needs) == 1:
        parts.append(_traffic_table(answered.needs[0]))
    ladder = _ladder(answered)
    if ladder is not None and answered.needs:
        parts += _costs_tables(answered, ladder)
    parts += [Text("• " + line) for line in _findings(answered)]
    if answered.measured:
        parts.append(Text("Measured by outpace probe (busbw):"))
        parts += [Padding(Text(f"{_key(f)}: {_rate(f.value)}"), (0, 0, 0, 2))
                  for f in answered.measured]  # fmt: skip
    return Group(*parts)


@dataclass(frozen=True)
class _Ladder:
    """The networks between nodes to compare or, on one host, the links between devices."""

    what: str  # network or link
    of: str  # heading of the column
    present: Network | None
    costs: Callable[[Need], tuple[NetworkCost, ...]]
    mine: Callable[[Need], NetworkCost | None]
    slowest: Callable[[Need], Network | None]
    least: Callable[[Need], str]
    rate: Callable[[float], str]


def _ladder(answered: NetworkReport) -> _Ladder | None:
    """Return what to compare: networks, or the links of a single node; None for a single device."""
    if answered.nodes > 1:
        return _Ladder(
            what="network", of="a node's network", present=answered.present,
            costs=lambda need: need.costs, mine=lambda need: need.present_cost,
            slowest=lambda need: need.cheapest, rate=_bits,
            least=lambda need: f"{_bits(need.least_node_bytes_per_s)} per node",
        )  # fmt: skip
    if answered.inside is None:
        return None
    return _Ladder(
        what="link", of="a device's link", present=answered.inside,
        costs=lambda need: need.device_costs, mine=lambda need: need.present_device_cost,
        slowest=lambda need: need.cheapest_inside, rate=_rate,
        least=lambda need: f"{_rate(need.least_device_bytes_per_s)} per device",
    )  # fmt: skip


def _key(figure: Figure) -> str:
    return " ".join([figure.key.kind, *map(str, figure.key.of.values())])


def _head(answered: NetworkReport) -> list[Text]:
    world = answered.nodes * answered.devices_per_node
    rate = f"{show_count(answered.rate.value, 'FLOP/s')} per device, {answered.rate.origin}"
    if answered.share is not None:
        rate = (
            f"{show_count(answered.rate.value, 'FLOP/s')} per device, ASSUMED: "
            f"{answered.share:g} of the catalog's peak, {answered.share_source}"
        )
    own = answered.present
    network = "not known"
    if own is not None:
        rates = f"{show_count(own.bytes_per_s, 'B/s')} ({8 * own.bytes_per_s / 1e9:,.0f} Gbit/s)"
        network = f"{own.name}, {rates} per node, {own.origin}"
    link = answered.inside
    inside = "one device"
    if link is not None:
        inside = f"{link.name}, {_rate(link.bytes_per_s)} per device, {link.origin}"
    lines = [
        f"{answered.model}, {show_count(answered.parameters)} parameters, sequences of "
        f"{answered.seq_len:,} tokens, on {answered.nodes} × {answered.devices_per_node} = {world} "
        f"devices ({answered.machine}).",
        f"Computation: {rate}; memory {show_count(answered.memory_rate.value, 'B/s')}, "
        f"{answered.memory_rate.origin}; step times are the planner's.",
        f"Within a node: {inside}. Between nodes: {network}.",
    ]
    return [Text(line) for line in lines]


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))


def _needs_table(answered: NetworkReport) -> Table:
    table = _table()
    table.collapse_padding = True  # to fit 80 columns
    table.add_column("plan", no_wrap=True)
    for head in ("compute", "sent per\ndevice", "leaves\na node", "a device\nneeds",
                 "a node\nneeds", "slowest\nenough"):  # fmt: skip
        table.add_column(head, justify="right", no_wrap=True)
    for need in answered.needs:
        sent = sum(one.sent_bytes for one in need.traffic)
        table.add_row(
            _break_title(need.title) + (" †" if need.fits is False else ""),
            _seconds(need.compute_s),
            _digits(sent, "B"),
            _digits(need.node_bytes, "B"),
            _digits(need.least_device_bytes_per_s, "B/s"),
            _bits(need.least_node_bytes_per_s),
            _slowest(answered, need),
        )
    table.caption = (
        "needs: bandwidth of a device's link within its node, and of a node's network, at which "
        f"each costs at most {100 * answered.tolerance:g} % of a step. slowest enough: the "
        "slowest one listed below that provides it."
    )
    if any(need.fits is False for need in answered.needs):
        table.caption += " † does not fit on a device."
    table.caption_justify = "left"
    return table


def _break_title(title: str) -> str:
    """Break a title into lines for a narrow column."""
    return title.replace(" × ", "\n× ").replace(", ", ",\n")


def _digits(count: float, unit: str) -> str:
    """Format with three digits, which fit a narrow terminal."""
    number, _, rest = show_count(count, unit).partition(" ")
    return f"{float(number):.3g} {rest}" if number.replace(".", "").isdigit() else number + rest


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else show_seconds(seconds)


def _slowest(answered: NetworkReport, need: Need) -> str:
    ladder = _ladder(answered)
    if ladder is None:
        return "–"
    enough = ladder.slowest(need)
    return "none" if enough is None else ladder.rate(enough.bytes_per_s)


def _traffic_table(need: Need) -> Table:
    table = _table()
    table.add_column("a step communicates")
    for head in ("axis", "sent per device", "leaves a node", "behind", "which takes"):
        table.add_column(head, justify="left" if head in ("axis", "behind") else "right")
    for one in need.traffic:
        hidden = show_seconds(one.hide_s) if one.hide_s else ""
        table.add_row(one.part, one.axis, show_count(one.sent_bytes, "B"),
                      show_count(one.node_bytes, "B"), one.behind, hidden)  # fmt: skip
    return table


def _costs_tables(answered: NetworkReport, ladder: _Ladder) -> list[Table]:
    needs = answered.needs
    count = -(-len(needs) // _MOST_COLUMNS)
    width = -(-len(needs) // count)
    tables = [
        _costs_table(answered, ladder, needs[at : at + width]) for at in range(0, len(needs), width)
    ]
    tables[-1].caption = (
        f"How much longer a step takes than with an infinitely fast {ladder.what}."
        + (f" ◂ this machine's {ladder.what}." if ladder.present else "")
    )
    tables[-1].caption_justify = "left"
    return tables


def _costs_table(answered: NetworkReport, ladder: _Ladder, needs: Sequence[Need]) -> Table:
    table = _table()
    table.add_column(ladder.of, justify="right", no_wrap=True)
    table.add_column("", max_width=_NAME_WIDTH)
    for need in needs:
        table.add_column(_break_title(need.title), justify="right", no_wrap=True)
    for index, cost in enumerate(ladder.costs(needs[0])):
        network = cost.network
        own = ladder.present is not None and ladder.present.bytes_per_s == network.bytes_per_s
        cells = [_slowdown(ladder.costs(need)[index], answered.tolerance) for need in needs]
        name = _short(network) + " ◂" * own
        table.add_row(ladder.rate(network.bytes_per_s), name, *cells)
    return table


def _short(network: Network) -> str:
    return network.name.split(", ")[0]


def _slowdown(cost: NetworkCost, tolerance: float) -> Text:
    if cost.slowdown >= 1:
        words = f"{1 + cost.slowdown:.1f} ×"
    else:
        words = f"+{100 * cost.slowdown:.1f} %"
    return Text(words, style="green" if cost.slowdown <= tolerance else "red")


def _findings(answered: NetworkReport) -> list[str]:
    found = []
    ladder = _ladder(answered)
    if ladder is not None:
        found = [
            f"{need.title}: {present}{_inside_finding(answered, need)}"
            for need in answered.needs
            if (present := _present_finding(answered, ladder, need))
        ]
    batches: dict[str, list[str]] = {}
    for need in answered.needs:
        batches.setdefault(need.identity, []).append(need.title)
    found += [f"{', '.join(titles)}: {identity}." for identity, titles in batches.items()]
    found += answered.notes
    found += [f"{title}: {why}" for title, why in answered.refused.items()]
    return found


def _present_finding(answered: NetworkReport, ladder: _Ladder, need: Need) -> str:
    own, enough = ladder.mine(need), ladder.slowest(need)
    if own is None:
        return ""
    if own.slowdown > answered.tolerance:
        return (
            f"this machine's {ladder.what} is too slow: a step takes {100 * own.slowdown:.0f} % "
            f"longer. {_short(own.network)} carries {ladder.rate(own.network.bytes_per_s)}, but "
            f"the plan needs {ladder.least(need)}."
        )
    if enough is not None and own.network.bytes_per_s >= _PLENTY * enough.bytes_per_s:
        return (
            f"this machine's {ladder.what} is faster than needed: "
            f"{ladder.rate(enough.bytes_per_s)} ({_short(enough)}) would be enough."
        )
    return (
        f"this machine's {ladder.what} is fast enough: it costs {100 * own.slowdown:.1f} % of a "
        "step."
    )


def _inside_finding(answered: NetworkReport, need: Need) -> str:
    """Describe the cost of links within nodes, if there are several nodes and they are too slow."""
    own = need.present_device_cost
    if answered.nodes == 1 or own is None or own.slowdown <= answered.tolerance:
        return ""
    return (
        f" The links within a node are too slow: they cost {100 * own.slowdown:.0f} % of a "
        f"step. {_short(own.network)} carries {_rate(own.network.bytes_per_s)}, but the plan "
        f"needs {_rate(need.least_device_bytes_per_s)} per device."
    )


def _rate(value: float | None) -> str:
    return "–" if value == 0 else show_count(value, "B/s")


def _bits(bytes_per_s: float) -> str:
    rate = 8 * bytes_per_s / 1e9
    return f"{rate:{',.0f' if rate >= 1000 else '.4g'}} Gbit/s" if bytes_per_s else "–"
