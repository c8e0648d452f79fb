"""The report of a comparison."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from outpace.records.comparison import ArmResult, Comparison
from outpace.records.machine import Machine
from outpace.records.run import RUN_FILE
from outpace.reporting.answers.comparison import (
    arms_parts,
    comparison_answer,
    comparison_notes,
    rounds_name,
    step_parts,
    verdict_lines,
)
from outpace.reporting.charts.figures import (
    AxisChoice,
    LineSeries,
    Unit,
    axis,
    bars,
    join_items,
    lines,
    plain,
    prediction_bars,
    seconds,
    shares,
)
from outpace.reporting.charts.palette import colour
from outpace.reporting.data.prediction import Prediction, predict
from outpace.reporting.data.run_folder import RunFolder, read_run
from outpace.reporting.render.document import (
    Chart,
    DataTable,
    Document,
    DocumentSection,
    Number,
    Paragraph,
    Part,
    in_words,
    pairs,
)
from outpace.reporting.sections import runs as runs_parts
from outpace.reporting.sections.environment import command, machine_table, topology

_HALF = ", with quartiles"
_QUARTERS = 4  # minimum number of rounds for quartiles
_TICKS = 10
_COUNT = Unit("", 1.0, lambda value: f"{value or 0:,.0f}")


def comparison_document(
    comparison: Comparison, folder: Path | None = None, probe: Machine | None = None
) -> Document:
    """Create the report on an experiment that compared several commands ("arms").

    It says which one is faster, how certain that is, and how their settings differ. Their runs are
    read from `folder`.
    """
    runs = first_runs(comparison, folder)
    names = [one.arm for one in comparison.arms]
    answer = comparison_answer(comparison)
    trained = (
        _training_sections(comparison, runs, probe) if comparison.experiment.metric is None else ()
    )
    return Document(
        "comparison", " against ".join(names) if len(names) < 4 else f"{len(names)} arms",
        answer.verdict, answer.facts,
        (
            DocumentSection("How they compare", tuple(_comparison_parts(comparison))), *trained,
            topology(comparison.machine, probe), _environment_section(comparison, runs),
        ),
    )  # fmt: skip


def _training_sections(
    comparison: Comparison, runs: dict[str, RunFolder], probe: Machine | None
) -> Iterable[DocumentSection]:
    yield DocumentSection("Where the time goes", tuple(_time_parts(comparison, runs)))
    yield DocumentSection("Loss", tuple(_loss_parts(comparison, runs)))
    yield DocumentSection("Memory", tuple(_memory_parts(comparison)))
    yield DocumentSection(
        "Predicted against measured", tuple(_prediction_parts(comparison, runs, probe))
    )
    yield DocumentSection("Utilisation", tuple(runs_parts.loads(runs)))


def first_runs(comparison: Comparison, folder: Path | None) -> dict[str, RunFolder]:
    """Read the first finished run of each arm from `folder`, without runs that are not there."""
    found: dict[str, RunFolder] = {}
    for one in comparison.outcomes:
        if folder is None or one.run is None or one.value is None or one.arm in found:
            continue
        path = folder / one.run
        if (path / RUN_FILE).is_file():
            found[one.arm] = read_run(path)
    return {arm.arm: found[arm.arm] for arm in comparison.arms if arm.arm in found}


def unit_of(comparison: Comparison) -> Unit:
    """Return the unit of the compared values: seconds for step times, none for other metrics."""
    values = [one.value for one in comparison.outcomes]
    return seconds(values) if comparison.experiment.metric is None else plain("", 6)


def _comparison_parts(comparison: Comparison) -> Iterable[Part]:
    yield _difference_chart(comparison)
    yield _medians_chart(comparison)
    yield _outcomes_chart(comparison)
    yield from arms_parts(comparison)
    yield from map(Paragraph, (*comparison_notes(comparison), *comparison.beside))


def _difference_chart(comparison: Comparison) -> Chart:
    others = [one for one in comparison.arms[1:] if one.verdict is not None]
    first = comparison.arms[0].arm
    values, intervals = [], []
    for one in others:
        assert one.verdict is not None
        values.append(one.verdict.slowdown)
        intervals.append((one.verdict.low, one.verdict.high))
    shades = [colour(comparison.arms.index(one)) for one in others]
    more = "more time" if comparison.experiment.metric is None else "higher"
    return bars(
        f"Difference from {first}, with its interval", join_items(verdict_lines(comparison)),
        [one.arm for one in others], values, shares(), more, intervals, shades,
    )  # fmt: skip


def _medians_chart(comparison: Comparison) -> Chart:
    quartiles_of = {arm.arm: _quartiles(comparison, arm) for arm in comparison.arms}
    unit = unit_of(comparison)
    middle = [quartiles[1] for quartiles in quartiles_of.values()]
    around = [(low, high) for low, _, high in quartiles_of.values()]
    what = "time of a step" if comparison.experiment.metric is None else "metric"
    alt = join_items(
        [f"{name}: {unit.show(value)}" for name, value in zip(quartiles_of, middle, strict=True)]
    )
    half = _HALF if any(low is not None for low, _ in around) else ""
    return bars(
        f"{what.capitalize()}: median of {rounds_name(comparison)}{half}", alt, list(quartiles_of),
        middle, unit, what, around, [colour(place) for place in range(len(quartiles_of))],
    )  # fmt: skip


def _quartiles(comparison: Comparison, arm: ArmResult) -> tuple[float | None, ...]:
    """Return the quartiles of an arm's values, or (None, median, None) for fewer than four."""
    values = [one.value for one in comparison.outcomes
              if one.arm == arm.arm and one.value is not None]  # fmt: skip
    if len(values) < _QUARTERS:
        return (None, float(np.median(values)) if values else None, None)
    return tuple(np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def _outcomes_chart(comparison: Comparison) -> Chart:
    unit = unit_of(comparison)
    series, rows = [], []
    for arm in comparison.arms:
        own = [one for one in comparison.outcomes if one.arm == arm.arm]
        series.append(LineSeries(arm.arm, ([one.round + 1 for one in own],),
                           [one.value for one in own], {"mode": "lines+markers"}))  # fmt: skip
        rows += [(Number(one.round + 1, str(one.round + 1)), arm.arm, unit.cell(one.value),
                  one.failure or "") for one in own]  # fmt: skip
    what = "time of a step" if comparison.experiment.metric is None else "metric"
    one = rounds_name(comparison).removesuffix("s")
    table = DataTable(f"Every {one}", (one, "arm", what, "failure"), tuple(rows))
    failed = sum(one.value is None for one in comparison.outcomes)
    runs = len({(one.arm, one.run or one.round) for one in comparison.outcomes})
    alt = f"{len(rows)} measurements in {runs} runs, {failed} of them failed."
    last = max((one.round + 1 for one in comparison.outcomes), default=1)
    whole = axis(one, tick0=1, dtick=-(-last // _TICKS))
    return lines(f"Every {one}", alt, series, [AxisChoice(one, one, _COUNT)], unit, what, table,
                 xaxis=whole)  # fmt: skip


def _time_parts(comparison: Comparison, runs: dict[str, RunFolder]) -> Iterable[Part]:
    parts = step_parts(comparison)
    if parts is None:
        yield Paragraph("The time by part is not recorded for these arms.")
        return
    yield parts
    yield from runs_parts.ranks(runs)


def _loss_parts(comparison: Comparison, runs: dict[str, RunFolder]) -> Iterable[Part]:
    yield from runs_parts.losses(runs)
    if comparison.losses:
        yield Paragraph(comparison.losses)


def _memory_parts(comparison: Comparison) -> Iterable[Part]:
    shades = [colour(place) for place in range(len(comparison.arms))]
    yield runs_parts.peak_memory(
        {arm.arm: arm.peak_memory_bytes for arm in comparison.arms}, shades
    )
    yield from runs_parts.memory_by_rank(
        {arm.arm: arm.peak_memory_by_rank for arm in comparison.arms}
    )


def _prediction_parts(
    comparison: Comparison, runs: dict[str, RunFolder], probe: Machine | None
) -> Iterable[Part]:
    predictions = {name: predict(run.record, run.hosts, probe) for name, run in runs.items()}
    known = {name: one for name, one in predictions.items() if isinstance(one, Prediction)}
    if not known:
        reasons = list(dict.fromkeys(str(one) for one in predictions.values()))
        yield Paragraph(" ".join(["There are no predictions.", *reasons]))
        return
    bases = dict.fromkeys(one.basis for one in known.values())
    yield Paragraph(" ".join(bases))
    arms = [arm for arm in comparison.arms if arm.arm in known]
    estimates = [known[arm.arm].planned.estimate for arm in arms]
    times, measured = [one.step_time_s for one in estimates], [arm.step_time_s for arm in arms]
    title = "Time of a step, as predicted with its interval"
    around: list[tuple[float | None, float | None]] = []
    if comparison.experiment.metric is None:  # otherwise the values are not times
        around = [(low, high) for low, _, high in (_quartiles(comparison, arm) for arm in arms)]
        title += ", and as measured" + (" with quartiles" if any(around[0]) else "")
    yield prediction_bars(
        title, [arm.arm for arm in arms], times, measured, seconds([*times, *measured]),
        "time of a step", [(one.low_s, one.high_s) for one in estimates], around,
    )  # fmt: skip


def _facts_table(comparison: Comparison) -> Iterable[Part]:
    arms = [arm for arm in comparison.arms if arm.facts]
    names = dict.fromkeys(name for arm in arms for name in arm.facts if name != "versions")
    rows = tuple((name, *(arm.facts.get(name, "–") for arm in arms)) for name in names)
    if rows:
        columns = ("", *(arm.arm for arm in arms))
        yield DataTable(
            "Facts that determined their runs (→ marks values that changed between rounds)",
            columns,
            rows,
        )


def _environment_section(comparison: Comparison, runs: dict[str, RunFolder]) -> DocumentSection:
    arms = tuple(
        (arm.name,
         ", ".join(f"{k}={in_words(v)}" for k, v in arm.settings.items()) or arm.command or "–",
         ", ".join(f"{k}={v}" for k, v in arm.environment.items()) or "–")
        for arm in comparison.experiment.arms
    )  # fmt: skip
    common = [(name, in_words(value)) for name, value in comparison.experiment.common.items()
              if value is not None]  # fmt: skip
    return DocumentSection("Environment and command", (
        command("The command that repeats it", comparison.command),
        DataTable("What the arms are", ("arm", "settings", "environment"), arms),
        *([pairs("Common settings", common)] if common else []),
        *_facts_table(comparison),
        pairs("When", [("started", comparison.started)]),
        machine_table(comparison.machine),
        *(runs_parts.versions(runs) if comparison.experiment.metric is None else ()),
    ))  # fmt: skip
