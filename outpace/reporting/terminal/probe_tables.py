"""Tables of a probe's figures, with sizes as rows and variants as columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace.probing.timing.link_model import COLLECTIVES, bus_factor
from outpace.probing.timing.measure import CONCLUSIVE
from outpace.records.figure import Figure
from outpace.records.probe_results import LinkFit, ProbeRecord
from outpace.records.units import show_count, show_share, show_size

Named = Callable[[Figure], str]
# Figures of sweeps over many sizes, which are not shown: the advice states their results.
_SWEEPS = {"unlucky", "fine", "candidate"}
_MOST_RANKS = 16


@dataclass(frozen=True)
class _Layout:
    title: str
    row: Named
    column: Named


def _matmul_name(figure: Figure) -> str:
    of = figure.key.of
    if figure.key.what in ("best", "peak"):
        return {"best": "best (MAMF)", "peak": "peak"}[figure.key.what]
    size = f"{of['m']} × {of['n']} × {of['k']}"
    return f"{of['part']}: {size}" if "part" in of else size


def _array_size(figure: Figure) -> str:
    of = figure.key.of
    return show_size(int(of["bytes"])) if "bytes" in of else str(of.get("of", ""))


def _by_key(*names: str) -> Named:
    """Return a function that names a figure, by joining the values that its key has for `names`."""

    def join_parts(figure: Figure) -> str:
        of = figure.key.of
        words = (_format_key_value(name, of[name]) for name in names if name in of)
        return ", ".join(word for word in words if word)

    return join_parts


def _format_key_value(name: str, value: str | int) -> str:
    if name.endswith("bytes"):
        return show_size(int(value))
    if name == "direct":
        return "" if value == "yes" else "cached"
    if name == "pin":
        return "pinned" if value == "yes" else ""
    return str(value) if isinstance(value, str) else f"{name.replace('_', ' ')} {value}"


def _by_figure(*names: str) -> Named:
    rest = _by_key(*names)
    return lambda figure: ", ".join(word for word in (figure.key.what, rest(figure)) if word)


def _join_names(one: Named, other: Named) -> Named:
    return lambda figure: ", ".join(word for word in (one(figure), other(figure)) if word)


def _rate_or_time(figure: Figure) -> str:
    return "time" if figure.unit == "s" else "rate"


_STREAMS = _Layout("Memory, by array size", _array_size, _by_figure())
_LAYOUTS = {
    "matmul": _Layout("Matmuls (m × n × k)", _matmul_name, _by_key("dtype")),
    "vocabulary": _Layout("The head's matmuls by vocabulary, forward and backward",
                          _by_key("vocab", "hidden", "tokens"), _by_key("dtype")),
    "attention": _Layout("Attention by number of heads", _by_key("heads", "head_dim", "seq_len"),
                         _by_figure("dtype")),
    "memory": _Layout("Operations and their memory",
                      _join_names(_by_figure("memory"), _array_size), _rate_or_time),
    "storage": _Layout("Storage", _by_figure("block_bytes", "bytes", "direct", "queue"),
                       _rate_or_time),
    "loader": _Layout("Data loading", _by_key("loader", "workers", "prefetch", "pin"),
                      _by_figure()),
    "tokenise": _Layout("Tokenising", _by_key("processes"), _by_figure()),
    "step": _Layout("Steps of small training runs", _by_key("reference"), _by_key("ranks")),
    "ranks": _Layout("All ranks at once", _by_key("rank"), _by_figure()),
    "overlap": _Layout(
        "Communication during computation", _by_figure("collective", "bytes"),
        _by_key("axis", "backend"),
    ),
}  # fmt: skip


def figure_tables(probed: ProbeRecord) -> Iterator[RenderableType]:
    """Yield a table, or several, for each kind of measured figures, and one for collectives."""
    for kind in dict.fromkeys(figure.key.kind for figure in probed.figures):
        if kind in COLLECTIVES:
            continue
        figures = [f for f in probed.figures if f.key.kind == kind and f.key.what not in _SWEEPS]
        tables: dict[_Layout, list[Figure]] = {}
        for figure in figures:
            tables.setdefault(_choose_layout(figure), []).append(figure)
        for layout, of in tables.items():
            yield _cross_table(layout, _select_slowest(of))
    by_size = [f for f in probed.figures if f.key.kind in COLLECTIVES and f.key.has(axis="all")]
    if by_size:
        yield _collectives_table(by_size)


def _choose_layout(figure: Figure) -> _Layout:
    if figure.key.kind == "memory" and figure.key.what in ("copy", "write", "read"):
        return _STREAMS
    layout = _LAYOUTS[figure.key.kind]
    place = figure.key.of.get("directory")
    return replace(layout, title=f"{layout.title}: {place}") if place else layout


def _select_slowest(figures: Sequence[Figure]) -> Sequence[Figure]:
    ranks = {figure.key.of["rank"] for figure in figures if "rank" in figure.key.of}
    if len(ranks) <= _MOST_RANKS:
        return figures
    took = {rank: max(median(f.samples) for f in figures if f.key.has(rank=rank))
            for rank in ranks}  # fmt: skip
    shown = sorted(ranks, key=lambda rank: -took[rank])[:_MOST_RANKS]
    return [figure for figure in figures if figure.key.of["rank"] in shown]


def _collectives_table(figures: Sequence[Figure]) -> RenderableType:
    """Tabulate collectives over all ranks by size. algbw and busbw are as in nccl-tests."""
    table = _empty_table()
    table.add_column("")
    for name in ("array", "time", "algbw", "busbw"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in dict.fromkeys(figure.key.kind for figure in figures):
        for number, figure in enumerate(f for f in figures if f.key.kind == kind):
            size, ranks = int(figure.key.of["bytes"]), int(figure.key.of["ranks"])
            rates = (Text(""), Text(""))
            if figure.value is not None:
                algbw = size / figure.value
                busbw = algbw * bus_factor(kind, ranks)
                rates = (Text(show_count(algbw, "B/s")), Text(show_count(busbw, "B/s")))
            table.add_row(kind if number == 0 else "", show_size(size), _cell(figure), *rates)
    return Group(Text("Collectives of all ranks, by size", style="bold"), table)


def _cross_table(layout: _Layout, figures: Sequence[Figure]) -> RenderableType:
    by_size = sorted(figures, key=lambda figure: int(figure.key.of.get("bytes", 0)))
    columns = list(dict.fromkeys(layout.column(figure) for figure in by_size))
    table = _empty_table()
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    cells: dict[tuple[str, str], Text] = {}
    for place, of in _group_by_cell(layout, figures).items():
        cells[place] = Text(" / ").join(_cell(figure) for figure in of)
    for row in dict.fromkeys(layout.row(figure) for figure in figures):
        table.add_row(row, *(cells.get((row, column), Text("")) for column in columns))
    return Group(Text(layout.title, style="bold"), table)


def _group_by_cell(
    layout: _Layout, figures: Sequence[Figure]
) -> dict[tuple[str, str], list[Figure]]:
    cells: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        cell = cells.setdefault((layout.row(figure), layout.column(figure)), [])
        if figure not in cell:
            cell.append(figure)
    return cells


def _empty_table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))


def _cell(figure: Figure) -> Text:
    """Format a figure's value and spread, and mark it if it is unstable or from the catalog."""
    if figure.origin == "catalog":
        return Text(f"{figure} catalog", style="cyan")
    if figure.value is None:
        return Text(f"unstable{_spread_text(figure, CONCLUSIVE)}", style="yellow")
    cell = Text(str(figure))
    cell.append(_spread_text(figure), style="dim")
    return cell


def _spread_text(figure: Figure, beyond: float = 0.0) -> str:
    """Format the relative spread of repeats, such as " ±3 %"; "" if it is at most `beyond`."""
    if figure.low is None or figure.high is None or figure.low + figure.high <= 0:
        return ""
    away = (figure.high - figure.low) / (figure.high + figure.low)
    return f" ±{100 * away:.0f} %" if away > beyond else ""


def links_table(fits: Sequence[LinkFit]) -> RenderableType:
    """Return a table of latencies and bandwidths, fitted to the times of collectives."""
    table = _empty_table()
    table.add_column("", no_wrap=True)
    for name in ("ranks", "axis", "by", "latency", "bandwidth", "points off by"):
        table.add_column(name, justify="right", no_wrap=True)
    for fit in fits:
        table.add_row(
            fit.collective, str(fit.ranks), fit.axis, fit.backend, _cell(fit.latency),
            _cell(fit.bandwidth), show_share(fit.residual) if fit.bandwidth.value else "",
        )  # fmt: skip
    title = "Collectives: latency and bandwidth (busbw), fitted over sizes"
    return Group(Text(title, style="bold"), table)
