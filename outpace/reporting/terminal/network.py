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


def network_text(report: NetworkReport) -> Group:
    """Format the answer of `outpace network`.

    It shows the bandwidth that plans need, the time that each kind of network would cost them, and
    conclusions.
    """
    parts: list[RenderableType] = [*_head_lines(report), _needs_table(report)]
    if len(report.needs) == 1:
        parts.append(_traffic_table(report.needs[0]))
    links = _choose_links(report)
    if links is not None and report.needs:
        parts += _costs_tables(report, links)
    parts += [Text("• " + line) for line in _list_findings(report)]
    if report.measured:
        parts.append(Text("Measured by outpace probe (busbw):"))
        parts += [Padding(Text(f"{_figure_name(f)}: {_format_rate(f.value)}"), (0, 0, 0, 2))
                  for f in report.measured]  # fmt: skip
    return Group(*parts)


@dataclass(frozen=True)
class _ComparedLinks:
    """Links to compare: networks between nodes, or on a single node those between its devices.

    `what` is "network" or "link", and `present` the one that the cluster has. The functions take
    the needs of a plan. They return the costs of all networks (`costs`) and of the present one
    (`mine`), the slowest that suffices (`slowest`), and the lowest sufficient rate as text
    (`least`). `rate` formats a rate.
    """

    what: str  # network or link
    of: str  # heading of the column
    present: Network | None
    costs: Callable[[Need], tuple[NetworkCost, ...]]
    mine: Callable[[Need], NetworkCost | None]
    slowest: Callable[[Need], Network | None]
    least: Callable[[Need], str]
    rate: Callable[[float], str]


def _choose_links(report: NetworkReport) -> _ComparedLinks | None:
    """Return the kind of links to compare: networks between nodes, or links within a single node.

    Return None for a single device.
    """
    if report.nodes > 1:
        return _ComparedLinks(
            what="network", of="a node's network", present=report.present,
            costs=lambda need: need.costs, mine=lambda need: need.present_cost,
            slowest=lambda need: need.cheapest, rate=_format_bits,
            least=lambda need: f"{_format_bits(need.least_node_bytes_per_s)} per node",
        )  # fmt: skip
    if report.inside is None:
        return None
    return _ComparedLinks(
        what="link", of="a device's link", present=report.inside,
        costs=lambda need: need.device_costs, mine=lambda need: need.present_device_cost,
        slowest=lambda need: need.cheapest_inside, rate=_format_rate,
        least=lambda need: f"{_format_rate(need.least_device_bytes_per_s)} per device",
    )  # fmt: skip


def _figure_name(figure: Figure) -> str:
    return " ".join([figure.key.kind, *map(str, figure.key.of.values())])


def _head_lines(report: NetworkReport) -> list[Text]:
    world = report.nodes * report.devices_per_node
    rate = f"{show_count(report.rate.value, 'FLOP/s')} per device, {report.rate.origin}"
    if report.share is not None:
        rate = (
            f"{show_count(report.rate.value, 'FLOP/s')} per device, ASSUMED: "
            f"{report.share:g} of the catalog's peak, {report.share_source}"
        )
    own = report.present
    network = "not known"
    if own is not None:
        rates = f"{show_count(own.bytes_per_s, 'B/s')} ({8 * own.bytes_per_s / 1e9:,.0f} Gbit/s)"
        network = f"{own.name}, {rates} per node, {own.origin}"
    link = report.inside
    inside = "one device"
    if link is not None:
        inside = f"{link.name}, {_format_rate(link.bytes_per_s)} per device, {link.origin}"
    lines = [
        f"{report.model}, {show_count(report.parameters)} parameters, sequences of "
        f"{report.seq_len:,} tokens, on {report.nodes} × {report.devices_per_node} = {world} "
        f"devices ({report.machine}).",
        f"Computation: {rate}; memory {show_count(report.memory_rate.value, 'B/s')}, "
        f"{report.memory_rate.origin}; step times are the planner's.",
        f"Within a node: {inside}. Between nodes: {network}.",
    ]
    return [Text(line) for line in lines]


def _empty_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))


def _needs_table(report: NetworkReport) -> Table:
    table = _empty_table()
    table.collapse_padding = True  # to fit 80 columns
    table.add_column("plan", no_wrap=True)
    for head in ("compute", "sent per\ndevice", "leaves\na node", "a device\nneeds",
                 "a node\nneeds", "slowest\nenough"):  # fmt: skip
        table.add_column(head, justify="right", no_wrap=True)
    for need in report.needs:
        sent = sum(one.sent_bytes for one in need.traffic)
        table.add_row(
            _break_title(need.title) + (" †" if need.fits is False else ""),
            _format_seconds(need.compute_s),
            _format_three_digits(sent, "B"),
            _format_three_digits(need.node_bytes, "B"),
            _format_three_digits(need.least_device_bytes_per_s, "B/s"),
            _format_bits(need.least_node_bytes_per_s),
            _slowest_enough(report, need),
        )
    table.caption = (
        "needs: bandwidth of a device's link within its node, and of a node's network, at which "
        f"each costs at most {100 * report.tolerance:g} % of a step. slowest enough: the "
        "slowest one listed below that provides it."
    )
    if any(need.fits is False for need in report.needs):
        table.caption += " † does not fit on a device."
    table.caption_justify = "left"
    return table


def _break_title(title: str) -> str:
    return title.replace(" × ", "\n× ").replace(", ", ",\n")


def _format_three_digits(count: float, unit: str) -> str:
    """Format a count with three digits, so that the table fits a narrow terminal."""
    number, _, rest = show_count(count, unit).partition(" ")
    return f"{float(number):.3g} {rest}" if number.replace(".", "").isdigit() else number + rest


def _format_seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else show_seconds(seconds)


def _slowest_enough(report: NetworkReport, need: Need) -> str:
    links = _choose_links(report)
    if links is None:
        return "–"
    enough = links.slowest(need)
    return "none" if enough is None else links.rate(enough.bytes_per_s)


def _traffic_table(need: Need) -> Table:
    table = _empty_table()
    table.add_column("a step communicates")
    for head in ("axis", "sent per device", "leaves a node", "behind", "which takes"):
        table.add_column(head, justify="left" if head in ("axis", "behind") else "right")
    for one in need.traffic:
        hidden = show_seconds(one.hide_s) if one.hide_s else ""
        table.add_row(one.part, one.axis, show_count(one.sent_bytes, "B"),
                      show_count(one.node_bytes, "B"), one.behind, hidden)  # fmt: skip
    return table


def _costs_tables(report: NetworkReport, links: _ComparedLinks) -> list[Table]:
    needs = report.needs
    count = -(-len(needs) // _MOST_COLUMNS)
    width = -(-len(needs) // count)
    tables = [
        _costs_table(report, links, needs[at : at + width]) for at in range(0, len(needs), width)
    ]
    tables[-1].caption = (
        f"How much longer a step takes than with an infinitely fast {links.what}."
        + (f" ◂ this machine's {links.what}." if links.present else "")
    )
    tables[-1].caption_justify = "left"
    return tables


def _costs_table(report: NetworkReport, links: _ComparedLinks, needs: Sequence[Need]) -> Table:
    table = _empty_table()
    table.add_column(links.of, justify="right", no_wrap=True)
    table.add_column("", max_width=_NAME_WIDTH)
    for need in needs:
        table.add_column(_break_title(need.title), justify="right", no_wrap=True)
    for index, cost in enumerate(links.costs(needs[0])):
        network = cost.network
        own = links.present is not None and links.present.bytes_per_s == network.bytes_per_s
        cells = [_slowdown_text(links.costs(need)[index], report.tolerance) for need in needs]
        name = _short(network) + " ◂" * own
        table.add_row(links.rate(network.bytes_per_s), name, *cells)
    return table


def _short(network: Network) -> str:
    return network.name.split(", ")[0]


def _slowdown_text(cost: NetworkCost, tolerance: float) -> Text:
    if cost.slowdown >= 1:
        words = f"{1 + cost.slowdown:.1f} ×"
    else:
        words = f"+{100 * cost.slowdown:.1f} %"
    return Text(words, style="green" if cost.slowdown <= tolerance else "red")


def _list_findings(report: NetworkReport) -> list[str]:
    found = []
    links = _choose_links(report)
    if links is not None:
        found = [
            f"{need.title}: {present}{_inside_finding(report, need)}"
            for need in report.needs
            if (present := _network_finding(report, links, need))
        ]
    batches: dict[str, list[str]] = {}
    for need in report.needs:
        batches.setdefault(need.identity, []).append(need.title)
    found += [f"{', '.join(titles)}: {identity}." for identity, titles in batches.items()]
    found += report.notes
    found += [f"{title}: {why}" for title, why in report.refused.items()]
    return found


def _network_finding(report: NetworkReport, links: _ComparedLinks, need: Need) -> str:
    own, enough = links.mine(need), links.slowest(need)
    if own is None:
        return ""
    if own.slowdown > report.tolerance:
        return (
            f"this machine's {links.what} is too slow: a step takes {100 * own.slowdown:.0f} % "
            f"longer. {_short(own.network)} carries {links.rate(own.network.bytes_per_s)}, but "
            f"the plan needs {links.least(need)}."
        )
    if enough is not None and own.network.bytes_per_s >= _PLENTY * enough.bytes_per_s:
        return (
            f"this machine's {links.what} is faster than needed: "
            f"{links.rate(enough.bytes_per_s)} ({_short(enough)}) would be enough."
        )
    return (
        f"this machine's {links.what} is fast enough: it costs {100 * own.slowdown:.1f} % of a "
        "step."
    )


def _inside_finding(report: NetworkReport, need: Need) -> str:
    own = need.present_device_cost
    if report.nodes == 1 or own is None or own.slowdown <= report.tolerance:
        return ""
    return (
        f" The links within a node are too slow: they cost {100 * own.slowdown:.0f} % of a "
        f"step. {_short(own.network)} carries {_format_rate(own.network.bytes_per_s)}, but the "
        f"plan needs {_format_rate(need.least_device_bytes_per_s)} per device."
    )


def _format_rate(value: float | None) -> str:
    return "–" if value == 0 else show_count(value, "B/s")


def _format_bits(bytes_per_s: float) -> str:
    rate = 8 * bytes_per_s / 1e9
    return f"{rate:{',.0f' if rate >= 1000 else '.4g'}} Gbit/s" if bytes_per_s else "–"
