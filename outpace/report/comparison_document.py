"""The report of a comparison."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from outpace.records.comparison import ArmResult, Comparison
from outpace.records.machine import Machine
from outpace.records.units import show_seconds
from outpace.report import runs_parts, where
from outpace.report.colours import colour
from outpace.report.comparison import (
    Column,
    column_notes,
    columns,
    opening,
    rounds_of,
    verdict_lines,
)
from outpace.report.document import (
    Cell,
    Document,
    Figure,
    Number,
    Part,
    Section,
    Table,
    Words,
    in_words,
    pairs,
)
from outpace.report.environment import command, machine_table, topology
from outpace.report.figures import (
    Along,
    Line,
    Unit,
    against,
    axis,
    bars,
    lines,
    listed,
    plain,
    seconds,
    shares,
)
from outpace.report.predicted import Prediction, predict
from outpace.report.run_source import Run, read_run
from outpace.train.run_dir import RUN_FILE

_HALF = ", and the middle half of them"
_QUARTERS = 4  # rounds, of which quarters can be told
_TICKS = 10
_COUNT = Unit("", 1.0, lambda value: f"{value or 0:,.0f}")


def comparison_document(
    comparison: Comparison, folder: Path | None = None, probe: Machine | None = None
) -> Document:
    """What may be claimed, how sure, and where the arms differ; runs are read from `folder`."""
    runs = first_runs(comparison, folder)
    names = [one.arm for one in comparison.arms]
    said = tuple(opening(comparison))
    trained = _of_trainings(comparison, runs, probe) if comparison.experiment.metric is None else ()
    return Document(
        "comparison", " against ".join(names) if len(names) < 4 else f"{len(names)} arms",
        said, tuple(_facts_of(comparison)),
        (
            Section("How they compare", tuple(_compared(comparison))), *trained,
            topology(comparison.machine, probe), _environment(comparison, runs),
        ),
    )  # fmt: skip


def _of_trainings(
    comparison: Comparison, runs: dict[str, Run], probe: Machine | None
) -> Iterable[Section]:
    """What commands of one's own do not tell."""
    yield Section("Where the time goes", tuple(_parts(comparison, runs)))
    yield Section("Loss", tuple(_losses(comparison, runs)))
    yield Section("Memory", tuple(_memory(comparison)))
    yield Section("Predicted against measured", tuple(_predicted(comparison, runs, probe)))
    yield Section("Utilisation", tuple(runs_parts.loads(runs)))


def _facts_of(comparison: Comparison) -> Iterable[tuple[str, str]]:
    if not comparison.experiment.in_turn:
        return []
    rounds = 1 + max((one.round for one in comparison.outcomes), default=-1)
    return [("rounds", str(rounds)), ("took", show_seconds(comparison.took_s)),
            ("why it ended", comparison.stopped)]  # fmt: skip


def first_runs(comparison: Comparison, folder: Path | None) -> dict[str, Run]:
    """Of each arm the first run that came to its end, where its folder is there."""
    found: dict[str, Run] = {}
    for one in comparison.outcomes:
        if folder is None or one.run is None or one.value is None or one.arm in found:
            continue
        path = folder / one.run
        if (path / RUN_FILE).is_file():
            found[one.arm] = read_run(path)
    return {arm.arm: found[arm.arm] for arm in comparison.arms if arm.arm in found}


def unit_of(comparison: Comparison) -> Unit:
    """Of what is compared: a step's time, or a command's own metric."""
    values = [one.value for one in comparison.outcomes]
    return seconds(values) if comparison.experiment.metric is None else plain("", 6)


def _compared(comparison: Comparison) -> Iterable[Part]:
    yield _differences(comparison)
    yield _values(comparison)
    yield _rounds(comparison)
    yield _table(comparison)
    notes = column_notes(comparison, columns(comparison))
    if notes:
        yield Words(notes)
    for note in (*comparison.differing, *comparison.beside):
        yield Words(note)


def _differences(comparison: Comparison) -> Figure:
    """Of each arm against the first, with the interval that holds at all times."""
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
        f"Difference to {first}, with its interval", listed(verdict_lines(comparison)),
        [one.arm for one in others], values, shares(), more, intervals, shades,
    )  # fmt: skip


def _values(comparison: Comparison) -> Figure:
    """Of each arm the median of its rounds, and between which the middle half of them lies."""
    found = {arm.arm: _quartiles(comparison, arm) for arm in comparison.arms}
    unit = unit_of(comparison)
    middle = [quartiles[1] for quartiles in found.values()]
    around = [(low, high) for low, _, high in found.values()]
    what = "time of a step" if comparison.experiment.metric is None else "metric"
    alt = listed([f"{name}: {unit.show(value)}" for name, value in zip(found, middle, strict=True)])
    half = _HALF if any(low is not None for low, _ in around) else ""
    return bars(
        f"{what.capitalize()}: the median of {rounds_of(comparison)}{half}", alt, list(found),
        middle, unit, what, around, [colour(place) for place in range(len(found))],
    )  # fmt: skip


def _quartiles(comparison: Comparison, arm: ArmResult) -> tuple[float | None, ...]:
    """Of the rounds' values: a quarter lies below the first, half below the second.

    Of few only the median: two values are no interval.
    """
    values = [one.value for one in comparison.outcomes
              if one.arm == arm.arm and one.value is not None]  # fmt: skip
    if len(values) < _QUARTERS:
        return (None, float(np.median(values)) if values else None, None)
    return tuple(np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def _rounds(comparison: Comparison) -> Figure:
    """Every outcome, round by round."""
    unit = unit_of(comparison)
    series, rows = [], []
    for arm in comparison.arms:
        own = [one for one in comparison.outcomes if one.arm == arm.arm]
        series.append(Line(arm.arm, ([one.round + 1 for one in own],),
                           [one.value for one in own], {"mode": "lines+markers"}))  # fmt: skip
        rows += [(Number(one.round + 1, str(one.round + 1)), arm.arm, unit.cell(one.value),
                  one.failure or "") for one in own]  # fmt: skip
    what = "time of a step" if comparison.experiment.metric is None else "metric"
    one = rounds_of(comparison).removesuffix("s")
    table = Table(f"Every {one}", (one, "arm", what, "failure"), tuple(rows))
    failed = sum(one.value is None for one in comparison.outcomes)
    runs = len({(one.arm, one.run or one.round) for one in comparison.outcomes})
    alt = f"{len(rows)} measurements in {runs} runs, {failed} of them failed."
    last = max((one.round + 1 for one in comparison.outcomes), default=1)
    whole = axis(one, tick0=1, dtick=-(-last // _TICKS))
    return lines(f"Every {one}", alt, series, [Along(one, one, _COUNT)], unit, what, table,
                 xaxis=whole)  # fmt: skip


def _table(comparison: Comparison) -> Table:
    """What is known of each arm."""
    known = columns(comparison)

    def cell(arm: ArmResult, column: Column) -> Number:
        value = column.value(arm)
        return Number(value[0] if isinstance(value, tuple) else value, column.text(arm))

    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (arm.arm, *(cell(arm, one) for one in known)) for arm in comparison.arms
    )
    return Table("The arms", ("arm", *(one.name for one in known)), rows)


def _parts(comparison: Comparison, runs: dict[str, Run]) -> Iterable[Part]:
    parts = {arm.arm: arm.parts for arm in comparison.arms if arm.parts is not None}
    if not parts:
        yield Words("These arms do not tell where their time goes.")
        return
    yield where.parts_figure("Time of a step by part, the median of runs", parts)
    yield from runs_parts.ranks(runs)


def _losses(comparison: Comparison, runs: dict[str, Run]) -> Iterable[Part]:
    yield from runs_parts.losses(runs)
    if comparison.losses:
        yield Words(comparison.losses)


def _memory(comparison: Comparison) -> Iterable[Part]:
    shades = [colour(place) for place in range(len(comparison.arms))]
    yield runs_parts.peak_memory(
        {arm.arm: arm.peak_memory_bytes for arm in comparison.arms}, shades
    )
    yield from runs_parts.memory_by_rank(
        {arm.arm: arm.peak_memory_by_rank for arm in comparison.arms}
    )


def _predicted(
    comparison: Comparison, runs: dict[str, Run], probe: Machine | None
) -> Iterable[Part]:
    said = {name: predict(run.record, run.hosts, probe) for name, run in runs.items()}
    known = {name: one for name, one in said.items() if isinstance(one, Prediction)}
    if not known:
        reasons = list(dict.fromkeys(str(one) for one in said.values()))
        yield Words(" ".join(["There are no predictions.", *reasons]))
        return
    bases = dict.fromkeys(one.basis for one in known.values())
    yield Words(" ".join(bases))
    arms = [arm for arm in comparison.arms if arm.arm in known]
    estimates = [known[arm.arm].planned.estimate for arm in arms]
    times, measured = [one.step_time_s for one in estimates], [arm.step_time_s for arm in arms]
    title = "Time of a step, as predicted with its interval"
    around: list[tuple[float | None, float | None]] = []
    if comparison.experiment.metric is None:  # else the rounds' values are no times
        around = [(low, high) for low, _, high in (_quartiles(comparison, arm) for arm in arms)]
        title += ", and as measured" + (" with the middle half of rounds" if any(around[0]) else "")
    yield against(
        title, [arm.arm for arm in arms], times, measured, seconds([*times, *measured]),
        "time of a step", [(one.low_s, one.high_s) for one in estimates], around,
    )  # fmt: skip


def _facts(comparison: Comparison) -> Iterable[Part]:
    """What determined each arm's runs; versions have tables of their own."""
    arms = [arm for arm in comparison.arms if arm.facts]
    names = dict.fromkeys(name for arm in arms for name in arm.facts if name != "versions")
    rows = tuple((name, *(arm.facts.get(name, "–") for arm in arms)) for name in names)
    if rows:
        columns = ("", *(arm.arm for arm in arms))
        yield Table("What determined their runs, with → where it changed", columns, rows)


def _environment(comparison: Comparison, runs: dict[str, Run]) -> Section:
    arms = tuple(
        (arm.name,
         ", ".join(f"{k}={in_words(v)}" for k, v in arm.settings.items()) or arm.command or "–",
         ", ".join(f"{k}={v}" for k, v in arm.environment.items()) or "–")
        for arm in comparison.experiment.arms
    )  # fmt: skip
    common = [(name, in_words(value)) for name, value in comparison.experiment.common.items()
              if value is not None]  # fmt: skip
    return Section("Environment and command", (
        command("The command that repeats it", comparison.command),
        Table("What the arms are", ("arm", "settings", "environment"), arms),
        *([pairs("What they have in common", common)] if common else []),
        *_facts(comparison),
        pairs("When", [("started", comparison.started)]),
        machine_table(comparison.machine),
        *(runs_parts.versions(runs) if comparison.experiment.metric is None else ()),
    ))  # fmt: skip
