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


def _matmul(figure: Figure) -> str:
    of = figure.key.of
    if figure.key.what in ("best", "peak"):
        return {"best": "best (MAMF)", "peak": "peak"}[figure.key.what]
    size = f"{of['m']} × {of['n']} × {of['k']}"
    return f"{of['part']}: {size}" if "part" in of else size


def _array_size(figure: Figure) -> str:
    of = figure.key.of
    return show_size(int(of["bytes"])) if "bytes" in of else str(of.get("of", ""))


def _key_words(*names: str) -> Named:
    """Return a function that joins these values of a figure's key as words."""

    def join_parts(figure: Figure) -> str:
        of = figure.key.of
        words = (_word(name, of[name]) for name in names if name in of)
        return ", ".join(word for word in words if word)

    return join_parts


def _word(name: str, value: str | int) -> str:
    if name.endswith("bytes"):
        return show_size(int(value))
    if name == "direct":
        return "" if value == "yes" else "cached"
    if name == "pin":
        return "pinned" if value == "yes" else ""
    return str(value) if isinstance(value, str) else f"{name.replace('_', ' ')} {value}"


def _figure_words(*more: str) -> Named:
    rest = _key_words(*more)
    return lambda figure: ", ".join(word for word in (figure.key.what, rest(figure)) if word)


def _join_words(one: Named, other: Named) -> Named:
    return lambda figure: ", ".join(word for word in (one(figure), other(figure)) if word)


def _rate_or_time(figure: Figure) -> str:
    return "time" if figure.unit == "s" else "rate"


_STREAMS = _Layout("Memory, by array size", _array_size, _figure_words())
_LAYOUTS = {
    "matmul": _Layout("Matmuls (m × n × k)", _matmul, _key_words("dtype")),
    "vocabulary": _Layout("The head's matmuls by vocabulary, forward and backward",
                          _key_words("vocab", "hidden", "tokens"), _key_words("dtype")),
    "attention": _Layout("Attention by number of heads", _key_words("heads", "head_dim", "seq_len"),
                         _figure_words("dtype")),
    "memory": _Layout("Operations and their memory",
                      _join_words(_figure_words("memory"), _array_size), _rate_or_time),
    "storage": _Layout("Storage", _figure_words("block_bytes", "bytes", "direct", "queue"),
                       _rate_or_time),
    "loader": _Layout("Data loading", _key_words("loader", "workers", "prefetch", "pin"),
                      _figure_words()),
    "tokenise": _Layout("Tokenising", _key_words("processes"), _figure_words()),
    "step": _Layout("Steps of small training runs", _key_words("reference"), _key_words("ranks")),
    "ranks": _Layout("All ranks at once", _key_words("rank"), _figure_words()),
    "overlap": _Layout(
        "Communication during computation", _figure_words("collective", "bytes"),
        _key_words("axis", "backend"),
    ),
}  # fmt: skip


def figure_tables(probed: ProbeRecord) -> Iterator[RenderableType]:
    """Yield a table for each kind of figure. Collectives share one."""
    for kind in dict.fromkeys(figure.key.kind for figure in probed.figures):
        if kind in COLLECTIVES:
            continue
        figures = [f for f in probed.figures if f.key.kind == kind and f.key.what not in _SWEEPS]
        tables: dict[_Layout, list[Figure]] = {}
        for figure in figures:
            tables.setdefault(_layout(figure), []).append(figure)
        for layout, of in tables.items():
            yield _cross_table(layout, _slowest(of))
    by_size = [f for f in probed.figures if f.key.kind in COLLECTIVES and f.key.has(axis="all")]
    if by_size:
        yield _collectives(by_size)


def _layout(figure: Figure) -> _Layout:
    """Return the layout of the table that contains a figure."""
    if figure.key.kind == "memory" and figure.key.what in ("copy", "write", "read"):
        return _STREAMS
    layout = _LAYOUTS[figure.key.kind]
    place = figure.key.of.get("directory")
    return replace(layout, title=f"{layout.title}: {place}") if place else layout


def _slowest(figures: Sequence[Figure]) -> Sequence[Figure]:
    """Return the figures of the slowest ranks, if there are many."""
    ranks = {figure.key.of["rank"] for figure in figures if "rank" in figure.key.of}
    if len(ranks) <= _MOST_RANKS:
        return figures
    took = {rank: max(median(f.samples) for f in figures if f.key.has(rank=rank))
            for rank in ranks}  # fmt: skip
    shown = sorted(ranks, key=lambda rank: -took[rank])[:_MOST_RANKS]
    return [figure for figure in figures if figure.key.of["rank"] in shown]


def _collectives(figures: Sequence[Figure]) -> RenderableType:
    """Tabulate collectives of all ranks by size, with bandwidths as defined by nccl-tests."""
    table = _empty()
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
    table = _empty()
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    cells: dict[tuple[str, str], Text] = {}
    for place, of in _by_cell(layout, figures).items():
        cells[place] = Text(" / ").join(_cell(figure) for figure in of)
    for row in dict.fromkeys(layout.row(figure) for figure in figures):
        table.add_row(row, *(cells.get((row, column), Text("")) for column in columns))
    return Group(Text(layout.title, style="bold"), table)


def _by_cell(layout: _Layout, figures: Sequence[Figure]) -> dict[tuple[str, str], list[Figure]]:
    """Return the figures of each cell, without duplicates."""
    cells: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        cell = cells.setdefault((layout.row(figure), layout.column(figure)), [])
        if figure not in cell:
            cell.append(figure)
    return cells


def _empty() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))


def _cell(figure: Figure) -> Text:
    """Format the value with its spread, or mark it as unstable or published."""
    if figure.origin == "catalog":
        return Text(f"{figure} catalog", style="cyan")
    if figure.value is None:
        return Text(f"unstable{_spread_text(figure, CONCLUSIVE)}", style="yellow")
    cell = Text(str(figure))
    cell.append(_spread_text(figure), style="dim")
    return cell


def _spread_text(figure: Figure, beyond: float = 0.0) -> str:
    """Format the spread of repeats; "" if it is at most `beyond`."""
    if figure.low is None or figure.high is None or figure.low + figure.high <= 0:
        return ""
    away = (figure.high - figure.low) / (figure.high + figure.low)
    return f" ±{100 * away:.0f} %" if away > beyond else ""


def links_table(fits: Sequence[LinkFit]) -> RenderableType:
    """Return a table of the latency and bandwidth fitted to collectives."""
    table = _empty()
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
