"""What changes from step to step: losses, gradients' norms, learning rates, times."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outpace.records.measurement import Evaluation
from outpace.records.units import show_seconds
from outpace.report.colours import GREEN, MEASURED, RED, SKY
from outpace.report.document import Figure, Number, Table
from outpace.report.figures import Along, Line, Unit, axis, counts, lines, listed, plain, seconds
from outpace.report.steps import Steps
from outpace.report.thin import Floats, means, thin

POINTS = 1600  # of a line; a screen has about as many columns
_MEANS = 160
_TABLE_ROWS = 16
_NATS = plain("nats", 5)


def losses(steps: Steps, evaluations: Sequence[Evaluation]) -> Figure:
    """The loss of every step, its mean, and what held-out data gave."""
    along = along_of(steps)
    series = [_thinned("each step", steps, steps["loss"], along, _FAINT)]
    if len(steps) > 4 * _MEANS:
        series.append(_smoothed(steps, along))
    held = [one for one in evaluations if one.step <= steps["step"][-1]]
    if held:
        series.append(_held_out(held, steps, along))
    first, last = float(steps["loss"][0]), float(steps["loss"][-1])
    alt = f"Loss over {len(steps):,} steps: {first:.4f} at first, {last:.4f} at the end"
    alt += f", {np.nanmin(steps['loss']):.4f} at its lowest."
    if held:
        alt += f" On held-out data {held[0].loss:.4f} at first, {held[-1].loss:.4f} at the end."
    table = steps_table("Loss", steps, "loss", _NATS)
    return lines("Loss", alt, series, along, _NATS, "loss", table)


_FAINT: Mapping[str, Any] = {"opacity": 0.75, "line": {"color": SKY, "width": 1.1}}


def along_of(steps: Steps) -> list[Along]:
    """What the steps of a run may be drawn over; tokens where the data is text."""
    found = [Along("step", "step", Unit("", 1.0, lambda value: f"{value or 0:,.0f}"))]
    if np.isfinite(steps["tokens"]).any():
        found.append(Along("tokens", "tokens", counts("tokens")))
    passed = seconds([float(steps.passed_s[-1])] if len(steps) else [])
    return [*found, Along("time", "time in steps", passed)]


def _columns(steps: Steps, along: Sequence[Along]) -> list[Floats]:
    """Where each step is, by everything that they may be drawn over."""
    found = {"step": steps["step"], "tokens": steps["tokens"], "time": steps.passed_s}
    return [found[one.label] for one in along]


def _positions(steps: Steps, along: Sequence[Along], places: Any) -> tuple[list[float | None], ...]:
    """Of the steps at `places`."""
    return tuple(_plain(column[places]) for column in _columns(steps, along))


def _plain(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def _thinned(
    name: str, steps: Steps, values: Floats, along: Sequence[Along], style: Mapping[str, Any],
    most: int = POINTS,
) -> Line:  # fmt: skip
    places = thin(values, most)
    return Line(name, _positions(steps, along, places), _plain(values[places]), style)


def _smoothed(steps: Steps, along: Sequence[Along]) -> Line:
    places, values = means(steps["loss"], _MEANS)
    each = len(steps) // _MEANS
    style = {"line": {"color": MEASURED, "width": 2.4}}
    at = places.round().astype(np.int64)
    return Line(f"mean of {each:,} steps", _positions(steps, along, at), _plain(values), style)


def _held_out(held: Sequence[Evaluation], steps: Steps, along: Sequence[Along]) -> Line:
    """Before the first step is at 0 of everything."""
    ends = np.concatenate([[0.0], steps["step"]])
    x = tuple(
        np.interp([one.step for one in held], ends, np.concatenate([[0.0], column])).tolist()
        for column in _columns(steps, along)
    )
    style = {"mode": "lines+markers", "line": {"color": RED, "width": 1.6, "dash": "dot"},
             "marker": {"size": 8, "symbol": "diamond"}}  # fmt: skip
    return Line("held-out data", x, [one.loss for one in held], style)


def loss_by_arm(runs: Mapping[str, Steps]) -> Figure:
    """Losses of several runs in one figure."""
    along = along_of(max(runs.values(), key=len))
    has_tokens = all(np.isfinite(steps["tokens"]).any() for steps in runs.values())
    along = [one for one in along if one.label != "tokens" or has_tokens]
    most = max(200, POINTS * 2 // max(2, len(runs)))
    series = [_thinned(name, steps, steps["loss"], along, {}, most) for name, steps in runs.items()]
    ends = listed([f"{name}: {float(steps['loss'][-1]):.4f}" for name, steps in runs.items()])
    rows = tuple(
        (name, Number(len(steps), f"{len(steps):,}"), _NATS.cell(float(steps["loss"][0])),
         _NATS.cell(float(np.nanmin(steps["loss"]))), _NATS.cell(float(steps["loss"][-1])))
        for name, steps in runs.items()
    )  # fmt: skip
    table = Table("Loss by arm", ("arm", "steps", "first", "lowest", "last"), rows)
    return lines("Loss by arm", f"Losses at the end: {ends}", series, along, _NATS, "loss", table)


def step_times(steps: Steps) -> Figure:
    """How long every step took."""
    values = steps["step_time_s"]
    unit, along = seconds([float(np.nanpercentile(values, 99))]), along_of(steps)
    low, middle, high = (float(np.nanpercentile(values, share)) for share in (5, 50, 95))
    slowest = int(np.nanargmax(values))
    alt = (
        f"Time of a step: {show_seconds(middle)} in the median, 90 % of steps between "
        f"{show_seconds(low)} and {show_seconds(high)}; the slowest, step "
        f"{int(steps['step'][slowest]):,}, took {show_seconds(float(values[slowest]))}."
    )
    series = [_thinned("step", steps, values, along, {"line": {"color": MEASURED, "width": 1.2}})]
    table = steps_table("Time of a step", steps, "step_time_s", unit)
    return lines(
        "Time of every step", alt, series, along, unit, "time of a step", table,
        yaxis=axis("time of a step", unit, rangemode="tozero"),
    )  # fmt: skip


def norms(steps: Steps) -> Figure:
    """Gradient norms above learning rates."""
    along, unit = along_of(steps), plain("")
    series = [
        _thinned("gradient norm", steps, steps["grad_norm"], along,
                 {"line": {"color": GREEN, "width": 1.2}}),
        _thinned("learning rate", steps, steps["lr"], along,
                 {"line": {"color": RED, "width": 2}, "yaxis": "y2"}),
    ]  # fmt: skip
    known = steps["grad_norm"][np.isfinite(steps["grad_norm"])]
    most = f"{known.max():.4g}" if len(known) else "n/a"
    alt = f"Norm of the gradients before clipping, {most} at its highest; the learning rate below."
    return lines(
        "Gradient norm and learning rate", alt, series, along, unit, "gradient norm",
        steps_table("Gradient norm", steps, "grad_norm", unit),
        xaxis=axis("step", anchor="y2"), yaxis=axis("gradient norm", domain=[0.38, 1]),
        yaxis2=axis("learning rate", domain=[0, 0.28], exponentformat="e"),
    )  # fmt: skip


def steps_table(title: str, steps: Steps, name: str, unit: Unit) -> Table:
    """A few steps of the course, its extremes among them."""
    places = thin(steps[name], _TABLE_ROWS)
    rows = tuple(
        (
            Number(float(steps["step"][place]), f"{steps['step'][place]:,.0f}"),
            unit.cell(None if np.isnan(steps[name][place]) else float(steps[name][place])),
        )
        for place in places
    )
    return Table(f"{title}, some of {len(steps):,} steps", ("step", title.lower()), rows)
