"""Charts of reports, each with a table of its data."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.records.units import show_bytes, show_count, show_seconds, show_share
from outpace.reporting.charts.palette import MEASURED, PREDICTED, colour, dash
from outpace.reporting.render.document import Cell, Chart, Choice, DataTable, Number

_LABEL_WIDTH, _LABEL_LINES = 24, 3
_LABEL_PX = 14  # height of a line
_ROW_PX, _FRAME_PX = 16, 110
_DOTTED = 40  # maximum number of points of a line to mark
_ERROR = "#777777"  # visible on light and dark pages
Values = Sequence[float | None]
Intervals = Sequence[tuple[float | None, float | None]]
_PART_OF_A_BAR = "%{customdata[0]}<br>%{fullData.name}: %{customdata[1]}<extra></extra>"


@dataclass(frozen=True)
class Unit:
    """Unit of a chart's values, which are multiplied by `factor`. `name` is shown on axes.

    `si`: whether the axis has SI prefixes, as in 5M.
    """

    name: str
    factor: float
    show: Callable[[float | None], str]
    si: bool = False

    def scale(self, values: Values) -> list[float | None]:
        """Convert values to the unit with six digits, for plotly; None if unknown or not finite."""
        return [
            None
            if value is None or not math.isfinite(value)
            else _format_six_digits(value * self.factor)
            for value in values
        ]

    def cell(self, value: float | None) -> Number:
        """Return a value as a cell of a table."""
        return Number(value, self.show(value))


def _format_six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def seconds(values: Values) -> Unit:
    """Return the unit that suits the largest value: µs, ms, s, min or h."""
    top = _largest(values)
    for name, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if top >= (2 * size if size > 1 else size):
            return Unit(name, 1 / size, show_seconds)
    return Unit("µs", 1e6, show_seconds)


def sizes(values: Values) -> Unit:
    """Return the unit that suits the largest value: TiB, GiB, MiB or KiB."""
    top = _largest(values)
    for name, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if top >= size:
            return Unit(name, 1 / size, show_bytes)
    return Unit("KiB", 1 / 2**10, show_bytes)


def shares() -> Unit:
    """Return the unit of percentages."""
    return Unit("%", 100.0, show_share)


def counts(name: str) -> Unit:
    """Return the unit of a rate or count, with SI prefixes."""

    def show(value: float | None) -> str:
        if value is None or name in ("FLOP/s", "B/s"):
            return show_count(value, name)
        return f"{show_count(value)} {name}"

    return Unit(name, 1.0, show, si=True)


def plain(name: str, digits: int = 4) -> Unit:
    """Return the unit of a plain number."""

    def show(value: float | None) -> str:
        return "n/a" if value is None or not math.isfinite(value) else f"{value:,.{digits}g}"

    return Unit(name, 1.0, show)


def _largest(values: Values) -> float:
    """Return the largest absolute value; 0 if none is known and finite."""
    known = (abs(value) for value in values if value is not None and math.isfinite(value))
    return max(known, default=0.0)


def label(name: str) -> str:
    """Wrap a name for an axis into a few short lines."""
    lines = textwrap.wrap(name, _LABEL_WIDTH) or [""]
    if len(lines) > _LABEL_LINES:
        lines = [*lines[:_LABEL_LINES]]
        lines[-1] += " …"
    return "\n".join(lines)


def rows_axis(names: Sequence[str], every: int = 1) -> dict[str, Any]:
    """Return the vertical axis of horizontal bars: one row per name, the first on top.

    `every`: number of rows per label.
    """
    places = list(range(0, len(names), every))
    return {"tickvals": places, "ticktext": [label(names[place]) for place in places],
            "range": [len(names) - 0.5, -0.5], "fixedrange": True,
            "tickfont": {"size": 11}, "ticklabelstandoff": 6,
            "showgrid": False, "zeroline": False}  # fmt: skip


def axis(title: str, unit: Unit | None = None, **more: Any) -> dict[str, Any]:
    """Return an axis with a title and its unit."""
    words = f"{title} ({unit.name})" if unit is not None and unit.name else title
    found: dict[str, Any] = {"title": {"text": words}, **more}
    if unit is not None and unit.si:
        found["tickformat"] = "~s"
    return found


def join_items(items: Sequence[str], most: int = 5) -> str:
    """Join at most `most` items into a sentence, and count the others."""
    more = len(items) - most
    return "; ".join(items[:most]) + (f"; and {more} more." if more > 0 else ".")


def height_of(names: Sequence[str]) -> int:
    """Return the height in px of a chart with one row per name."""
    most = max((label(name).count("\n") + 1 for name in names), default=1)
    return _FRAME_PX + (_ROW_PX + _LABEL_PX * most) * max(len(names), 2)


def bars(
    title: str,
    alt: str,
    names: Sequence[str],
    values: Values,
    unit: Unit,
    axis_title: str,
    intervals: Intervals = (),
    colours: Sequence[str] = (),
) -> Chart:
    """Draw a bar per name, with the interval of each value if there are `intervals`."""
    trace: dict[str, Any] = {
        "type": "bar", "orientation": "h", "x": unit.scale(values), "y": list(range(len(names))),
        "marker": {"color": list(colours) or colour(0)}, "width": 0.62, "showlegend": False,
        "customdata": _hover_texts(names, values, unit),
        "hovertemplate": "%{customdata[0]}: %{customdata[1]}<extra></extra>",
    }  # fmt: skip
    columns = ["", axis_title]
    if intervals:
        trace["error_x"] = _error_bars(values, intervals, unit)
        columns += ["from", "to"]
    cells = _interval_cells(values, intervals, unit)
    return Chart(
        title, alt, (trace,),
        {"yaxis": rows_axis(names), "xaxis": axis(axis_title, unit, zeroline=True)},
        DataTable(title, tuple(columns), tuple(
            (name, *row) for name, row in zip(names, cells, strict=True)
        )),
        height_of(names) - 30,
    )  # fmt: skip


def _interval_cells(values: Values, intervals: Intervals, unit: Unit) -> list[tuple[Number, ...]]:
    if not intervals:
        return [(unit.cell(value),) for value in values]
    return [
        (unit.cell(value), unit.cell(low), unit.cell(high))
        for value, (low, high) in zip(values, intervals, strict=True)
    ]


def _error_bars(values: Values, intervals: Intervals, unit: Unit) -> dict[str, Any]:
    above: list[float | None] = []
    below: list[float | None] = []
    for value, (low, high) in zip(values, intervals, strict=True):
        if value is None or low is None or high is None:
            above, below = [*above, None], [*below, None]
            continue
        above += unit.scale([high - value])
        below += unit.scale([value - low])
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below,
            "color": _ERROR, "thickness": 2, "width": 6}  # fmt: skip


def _hover_texts(names: Sequence[str], values: Values, unit: Unit) -> list[list[str]]:
    return [[name, unit.show(value)] for name, value in zip(names, values, strict=True)]


def stacked_bars(
    title: str,
    alt: str,
    names: Sequence[str],
    parts: Mapping[str, Values],
    unit: Unit,
    axis_title: str,
    colours: Mapping[str, str],
    limit: tuple[str, float] | None = None,
) -> Chart:
    """Draw a stacked bar for each name. `limit` is a line's label and value."""
    shown = {part: values for part, values in parts.items() if any(values)}
    traces = [
        {
            "type": "bar", "orientation": "h", "name": part, "x": unit.scale(values),
            "y": list(range(len(names))), "width": 0.62,
            "marker": {"color": colours.get(part) or colour(place),
                       "line": {"width": 0.5, "color": "rgba(255,255,255,0.7)"}},
            "customdata": _hover_texts(names, values, unit),
            "hovertemplate": _PART_OF_A_BAR,
        }
        for place, (part, values) in enumerate(shown.items())
    ]  # fmt: skip
    layout: dict[str, Any] = {
        "barmode": "stack", "legend": {"traceorder": "normal"}, "yaxis": rows_axis(names),
        "xaxis": axis(axis_title, unit),
    }  # fmt: skip
    if limit is not None:
        layout |= _limit_line(limit[0], _format_six_digits(limit[1] * unit.factor))
    columns = ("", *shown, "all")
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *(unit.cell(values[place]) for values in shown.values()),
         unit.cell(sum(values[place] or 0.0 for values in shown.values())))
        for place, name in enumerate(names)
    )  # fmt: skip
    return Chart(title, alt, tuple(traces), layout, DataTable(title, columns, rows),
                  height_of(names) + 12 * len(shown) // 3)  # fmt: skip


def _limit_line(words: str, x: float) -> dict[str, Any]:
    return {
        "shapes": [{"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper",
                    "line": {"color": _ERROR, "width": 2, "dash": "dash"}}],
        "annotations": [{"x": x, "y": 0, "yref": "paper", "text": words, "showarrow": False,
                         "xanchor": "right", "yanchor": "bottom"}],
    }  # fmt: skip


@dataclass(frozen=True)
class LineSeries:
    """A line of a chart. `x` has its values on every horizontal axis that the reader can choose."""

    name: str
    x: tuple[Values, ...]
    y: Values
    style: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AxisChoice:
    """A choice for the horizontal axis: the label of its button, the axis title, and the unit."""

    label: str
    title: str
    unit: Unit


def lines(
    title: str,
    alt: str,
    series: Sequence[LineSeries],
    along: Sequence[AxisChoice],
    unit: Unit,
    axis_title: str,
    table: DataTable,
    **layout: Any,
) -> Chart:
    """Draw lines over the first axis of `along`; the reader can choose another one."""
    drawn = [[one.unit.scale(x) for one, x in zip(along, line.x, strict=True)] for line in series]
    traces = [
        {
            "type": "scatter", "name": line.name, "x": xs[0],
            "mode": "lines+markers" if len(line.y) <= _DOTTED else "lines",
            "y": unit.scale(line.y), **line.style,
            "line": {"color": colour(place), "dash": dash(place), "width": 1.8,
                     **line.style.get("line", {})},
        }
        for place, (line, xs) in enumerate(zip(series, drawn, strict=True))
    ]  # fmt: skip
    titles = [f"{one.title} ({one.unit.name})" if one.unit.name else one.title for one in along]
    choices = tuple(
        Choice(one.label, titles[place], tuple(xs[place] for xs in drawn))
        for place, one in enumerate(along)
    )
    whole = {"xaxis": axis(titles[0]), "yaxis": axis(axis_title, unit), "hovermode": "x",
             "showlegend": len(series) > 1, **layout}  # fmt: skip
    return Chart(title, alt, tuple(traces), whole, table, 380, choices if len(along) > 1 else ())


def heat(
    title: str,
    alt: str,
    names: Sequence[str],
    x: Values,
    rows: Sequence[Values],
    unit: Unit,
    x_title: str,
    x_unit: Unit,
    table: DataTable,
) -> Chart:
    """Draw a heat map with one row per name. Its values are fractions from 0 to 1."""
    trace = {
        "type": "heatmap", "x": x_unit.scale(x), "y": list(names),
        "z": [unit.scale(row) for row in rows], "zmin": 0, "zmax": unit.factor,
        "colorscale": "Cividis", "colorbar": {"title": {"text": unit.name}, "thickness": 12},
        "hovertemplate": "%{y}: %{z:.0f}<extra></extra>",
    }  # fmt: skip
    rows_px = max(120, min(24 * len(names), 640))
    every = math.ceil(_LABEL_PX * len(names) / rows_px)
    layout = {"xaxis": axis(x_title, x_unit),
              "yaxis": {**rows_axis(names, every), "type": "category"}}  # fmt: skip
    return Chart(title, alt, (trace,), layout, table, _FRAME_PX + rows_px)


def prediction_bars(
    title: str, names: Sequence[str], predicted: Values, measured: Values, unit: Unit,
    axis_title: str, intervals: Intervals = (), around: Intervals = (),
) -> Chart:  # fmt: skip
    """Draw each name's prediction above its measurement.

    `intervals` are those of the predictions, and `around` those of the measurements.
    """
    both = (
        ("predicted", predicted, intervals, -0.2, PREDICTED),
        ("measured", measured, around, 0.2, MEASURED),
    )
    traces, columns = [], [""]
    rows: list[list[Cell]] = [[name] for name in names]
    for name, values, bounds, shift, shade in both:
        trace: dict[str, Any] = {
            "type": "bar", "orientation": "h", "name": name, "x": unit.scale(values),
            "y": [place + shift for place in range(len(names))], "width": 0.36,
            "marker": {"color": shade}, "customdata": _hover_texts(names, values, unit),
            "hovertemplate": _PART_OF_A_BAR,
        }  # fmt: skip
        columns.append(name)
        if bounds:
            trace["error_x"] = _error_bars(values, bounds, unit)
            columns += [f"{name}, from", f"{name}, to"]
        traces.append(trace)
        for row, cells in zip(rows, _interval_cells(values, bounds, unit), strict=True):
            row += cells
    for row, one, other in zip(rows, predicted, measured, strict=True):
        row.append(deviation(one, other))
    alt = join_items([
        f"{name}: predicted {unit.show(one)}, measured {unit.show(other)}"
        for name, one, other in zip(names, predicted, measured, strict=True)
    ])  # fmt: skip
    return Chart(
        title, alt, tuple(traces),
        {"barmode": "overlay", "yaxis": rows_axis(names), "xaxis": axis(axis_title, unit)},
        DataTable(title, (*columns, "measured is"), tuple(map(tuple, rows))),
        height_of(names) + 10 * len(names),
    )  # fmt: skip


def deviation(predicted: float | None, measured: float | None) -> Number:
    """Return the relative difference measured / predicted - 1 as a cell; "n/a" if unknown."""
    if not predicted or measured is None:
        return Number(None, "n/a")
    share = measured / predicted - 1
    return Number(share, f"{100 * share:+.1f} %")
