"""Curves over the steps of a run: losses, gradient norms, learning rates, times."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outpace.records.measurement import Evaluation
from outpace.records.units import show_seconds
from outpace.reporting.charts.downsample import Floats, means, thin
from outpace.reporting.charts.figures import (
    AxisChoice,
    LineSeries,
    Unit,
    axis,
    counts,
    join_items,
    lines,
    plain,
    seconds,
)
from outpace.reporting.charts.palette import GREEN, MEASURED, RED, SKY
from outpace.reporting.data.step_log import StepLog
from outpace.reporting.render.document import Chart, DataTable, Number

POINTS = 1600  # points per line, about as many as a screen has columns
_MEANS = 160
_TABLE_ROWS = 16
_TOWERS = 2.0  # ratio to the slowest step after warm-up above which a step is cut off
_NATS = plain("nats", 5)


def losses(steps: StepLog, evaluations: Sequence[Evaluation]) -> Chart:
    """Draw the loss of every step, its mean over groups of steps, and the loss on held-out data."""
    along = axis_choices(steps)
    series = [_thin_series("each step", steps, steps["loss"], along, _FAINT)]
    if len(steps) > 4 * _MEANS:
        series.append(_mean_series(steps, along))
    held = [one for one in evaluations if one.step <= steps["step"][-1]]
    if held:
        series.append(_evaluation_series(held, steps, along))
    first, last = float(steps["loss"][0]), float(steps["loss"][-1])
    alt = f"Loss over {len(steps):,} steps: {first:.4f} at first, {last:.4f} at the end"
    alt += f", {np.nanmin(steps['loss']):.4f} at its lowest."
    if held:
        alt += f" On held-out data: {held[0].loss:.4f} at first, {held[-1].loss:.4f} at the end."
    table = steps_table("Loss", steps, "loss", _NATS)
    return lines("Loss", alt, series, along, _NATS, "loss", table)


_FAINT: Mapping[str, Any] = {"opacity": 0.75, "line": {"color": SKY, "width": 1.1}}


def axis_choices(steps: StepLog) -> list[AxisChoice]:
    """Return the choices for the horizontal axis, including tokens if the data has any."""
    found = [AxisChoice("step", "step", Unit("", 1.0, lambda value: f"{value or 0:,.0f}"))]
    if np.isfinite(steps["tokens"]).any():
        found.append(AxisChoice("tokens", "tokens", counts("tokens")))
    passed = seconds([float(steps.passed_s[-1])] if len(steps) else [])
    return [*found, AxisChoice("time", "time in steps", passed)]


def _axis_columns(steps: StepLog, along: Sequence[AxisChoice]) -> list[Floats]:
    columns = {"step": steps["step"], "tokens": steps["tokens"], "time": steps.passed_s}
    return [columns[one.label] for one in along]


def _positions(
    steps: StepLog, along: Sequence[AxisChoice], places: Any
) -> tuple[list[float | None], ...]:
    return tuple(_to_list(column[places]) for column in _axis_columns(steps, along))


def _to_list(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def _thin_series(
    name: str,
    steps: StepLog,
    values: Floats,
    along: Sequence[AxisChoice],
    style: Mapping[str, Any],
    most: int = POINTS,
) -> LineSeries:
    places = thin(values, most)
    return LineSeries(name, _positions(steps, along, places), _to_list(values[places]), style)


def _mean_series(steps: StepLog, along: Sequence[AxisChoice]) -> LineSeries:
    places, values = means(steps["loss"], _MEANS)
    each = len(steps) // _MEANS
    style = {"line": {"color": MEASURED, "width": 2.4}}
    at = places.round().astype(np.int64)
    return LineSeries(
        f"mean of {each:,} steps", _positions(steps, along, at), _to_list(values), style
    )


def _evaluation_series(
    evaluations: Sequence[Evaluation], steps: StepLog, along: Sequence[AxisChoice]
) -> LineSeries:
    """Return the held-out losses over the axes `along`.

    An evaluation before the first step is drawn at 0 on every axis.
    """
    ends = np.concatenate([[0.0], steps["step"]])
    x = tuple(
        np.interp([one.step for one in evaluations], ends, np.concatenate([[0.0], column])).tolist()
        for column in _axis_columns(steps, along)
    )
    # A line between only two points, first and last, would look like a measured curve.
    mode = "lines+markers" if len(evaluations) > 2 else "markers"
    style = {"mode": mode, "line": {"color": RED, "width": 1.6, "dash": "dot"},
             "marker": {"size": 8, "symbol": "diamond", "color": RED}}  # fmt: skip
    return LineSeries("held-out data", x, [one.loss for one in evaluations], style)


def loss_by_arm(runs: Mapping[str, StepLog]) -> Chart:
    """Draw the losses of several runs in one chart."""
    along = axis_choices(max(runs.values(), key=len))
    has_tokens = all(np.isfinite(steps["tokens"]).any() for steps in runs.values())
    along = [one for one in along if one.label != "tokens" or has_tokens]
    most = max(200, POINTS * 2 // max(2, len(runs)))
    series = [
        _thin_series(name, steps, steps["loss"], along, {}, most) for name, steps in runs.items()
    ]
    ends = join_items([f"{name}: {float(steps['loss'][-1]):.4f}" for name, steps in runs.items()])
    rows = tuple(
        (name, Number(len(steps), f"{len(steps):,}"), _NATS.cell(float(steps["loss"][0])),
         _NATS.cell(float(np.nanmin(steps["loss"]))), _NATS.cell(float(steps["loss"][-1])))
        for name, steps in runs.items()
    )  # fmt: skip
    table = DataTable("Loss by arm", ("arm", "steps", "first", "lowest", "last"), rows)
    return lines("Loss by arm", f"Losses at the end: {ends}", series, along, _NATS, "loss", table)


def step_times(steps: StepLog, median_s: float) -> Chart:
    """Draw the time of every step. `median_s` is the median of the timed steps."""
    values, steady = steps["step_time_s"], steps.steady("step_time_s")
    unit, along = seconds([float(np.nanpercentile(steady, 99))]), axis_choices(steps)
    low, high = (float(np.nanpercentile(values, share)) for share in (5, 95))
    slowest = int(np.nanargmax(values))
    alt = (
        f"Time of a step: median {show_seconds(median_s)}; 90 % of all steps between "
        f"{show_seconds(low)} and {show_seconds(high)}; the slowest, step "
        f"{int(steps['step'][slowest]):,}, took {show_seconds(float(values[slowest]))}."
    )
    scale: dict[str, Any] = {"rangemode": "tozero"}
    top_s = float(np.nanmax(steady))
    if values[slowest] > _TOWERS * top_s:  # it would flatten the others
        scale = {"range": [0, *unit.scale([1.1 * top_s])]}
        alt += " Slow steps of the warm-up lie above the figure."
    series = [
        _thin_series("step", steps, values, along, {"line": {"color": MEASURED, "width": 1.2}})
    ]
    table = steps_table("Time of a step", steps, "step_time_s", unit)
    return lines(
        "Time of every step", alt, series, along, unit, "time of a step", table,
        yaxis=axis("time of a step", unit, **scale),
    )  # fmt: skip


def norms(steps: StepLog) -> Chart:
    """Draw gradient norms above learning rates."""
    along, unit = axis_choices(steps), plain("")
    series = [
        _thin_series("gradient norm", steps, steps["grad_norm"], along,
                 {"line": {"color": GREEN, "width": 1.2}}),
        _thin_series("learning rate", steps, steps["lr"], along,
                 {"line": {"color": RED, "width": 2}, "yaxis": "y2"}),
    ]  # fmt: skip
    known = steps["grad_norm"][np.isfinite(steps["grad_norm"])]
    most = f"{known.max():.4g}" if len(known) else "n/a"
    alt = f"Norm of the gradients before clipping, at most {most}; below, the learning rate."
    return lines(
        "Gradient norm and learning rate", alt, series, along, unit, "gradient norm",
        steps_table("Gradient norm", steps, "grad_norm", unit),
        xaxis=axis("step", anchor="y2"), yaxis=axis("gradient norm", domain=[0.38, 1]),
        yaxis2=axis("learning rate", domain=[0, 0.28], exponentformat="e"),
    )  # fmt: skip


def steps_table(title: str, steps: StepLog, name: str, unit: Unit) -> DataTable:
    """Return a table of a few steps, including those with extreme values."""
    places = thin(steps[name], _TABLE_ROWS)
    rows = tuple(
        (
            Number(float(steps["step"][place]), f"{steps['step'][place]:,.0f}"),
            unit.cell(None if np.isnan(steps[name][place]) else float(steps[name][place])),
        )
        for place in places
    )
    return DataTable(f"{title}, some of {len(steps):,} steps", ("step", title.lower()), rows)
