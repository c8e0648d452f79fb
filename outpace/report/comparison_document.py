"""The report of a comparison."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from outpace.records.comparison import ArmResult, Comparison, Outcome
from outpace.records.machine import Machine
from outpace.records.units import show_bytes, show_seconds
from outpace.report import runs_parts, where
from outpace.report.colours import MEASURED, PREDICTED, colour
from outpace.report.comparison import columns, verdict_lines
from outpace.report.document import (
    Cell,
    Document,
    Figure,
    Number,
    Part,
    Section,
    Table,
    Words,
    pairs,
)
from outpace.report.environment import command, machine_table, topology
from outpace.report.figures import (
    Along,
    Line,
    Unit,
    against,
    bars,
    lines,
    listed,
    plain,
    seconds,
    shares,
    sizes,
)
from outpace.report.predicted import Prediction, predict
from outpace.report.run_source import Run, read_run
from outpace.train.run_dir import RUN_FILE

_COUNT = Unit("", 1.0, lambda value: f"{value or 0:,.0f}")


def comparison_document(
    comparison: Comparison, folder: Path | None = None, probe: Machine | None = None
) -> Document:
    """What may be claimed, how sure, and where the arms differ; runs are read from `folder`."""
    runs = first_runs(comparison, folder)
    names = [one.arm for one in comparison.arms]
    rounds = 1 + max((one.round for one in comparison.outcomes), default=-1)
    return Document(
        "comparison", " against ".join(names) if len(names) < 4 else f"{len(names)} arms",
        tuple(verdict_lines(comparison)),
        (("rounds", str(rounds)), *_took(comparison), ("stopped since", comparison.stopped)),
        (
            Section("How they compare", tuple(_compared(comparison))),
            Section("Where the time goes", tuple(_parts(comparison, runs))),
            Section("Loss", tuple(_losses(comparison, runs))),
            Section("Memory", tuple(_memory(comparison))),
            Section("Predicted against measured", tuple(_predicted(runs, probe))),
            Section("Utilisation", tuple(runs_parts.loads(runs))),
            topology(comparison.machine),
            _environment(comparison),
        ),
    )  # fmt: skip


def _took(comparison: Comparison) -> list[tuple[str, str]]:
    """Of runs that were over already, nothing."""
    return [("took", show_seconds(comparison.took_s))] if comparison.took_s else []


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
    for note in comparison.differing:
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
    shades = [colour(1 + place) for place in range(len(others))]
    more = "more time" if comparison.experiment.metric is None else "higher"
    return bars(
        f"Difference to {first}, with its interval", listed(verdict_lines(comparison)),
        [one.arm for one in others], values, shares(), more, intervals, shades,
    )  # fmt: skip


def _values(comparison: Comparison) -> Figure:
    """Of each arm the median of its rounds, and where half of them lie."""
    by_arm = {arm.arm: _known(comparison.outcomes, arm.arm) for arm in comparison.arms}
    unit = unit_of(comparison)
    middle = [_quantile(values, 0.5) for values in by_arm.values()]
    around = [(_quantile(v, 0.25), _quantile(v, 0.75)) for v in by_arm.values()]
    what = "time of a step" if comparison.experiment.metric is None else "metric"
    alt = listed(
        [f"{name}: {unit.show(value)}" for name, value in zip(by_arm, middle, strict=True)]
    )
    return bars(
        f"{what.capitalize()}: the median of rounds, and half of them", alt, list(by_arm),
        middle, unit, what, around, [colour(place) for place in range(len(by_arm))],
    )  # fmt: skip


def _known(outcomes: Sequence[Outcome], arm: str) -> list[float]:
    return sorted(one.value for one in outcomes if one.arm == arm and one.value is not None)


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Of sorted values, between the two beside it."""
    if not values:
        return None
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def _rounds(comparison: Comparison) -> Figure:
    """Every outcome, round by round."""
    unit = unit_of(comparison)
    series, rows = [], []
    for place, arm in enumerate(comparison.arms):
        own = [one for one in comparison.outcomes if one.arm == arm.arm]
        style = {"mode": "lines+markers", "line": {"color": colour(place), "width": 1.4}}
        series.append(Line(arm.arm, ([one.round + 1 for one in own],),
                           [one.value for one in own], style))  # fmt: skip
        rows += [(Number(one.round + 1, str(one.round + 1)), arm.arm, unit.cell(one.value),
                  one.failure or "") for one in own]  # fmt: skip
    what = "time of a step" if comparison.experiment.metric is None else "metric"
    table = Table("Every round", ("round", "arm", what, "failure"), tuple(rows))
    failed = sum(one.value is None for one in comparison.outcomes)
    alt = f"{len(rows)} runs, {failed} of them failed."
    return lines("Every round", alt, series, [Along("round", "round", _COUNT)], unit, what, table)


def _table(comparison: Comparison) -> Table:
    """What is known of each arm."""
    known = columns(comparison)

    def row(arm: ArmResult) -> tuple[Cell, ...]:
        return (arm.arm, *(_cell(arm, name, show(arm)) for name, show in known.items()))

    rows = tuple(row(arm) for arm in comparison.arms)
    return Table("The arms", ("arm", *known), rows)


_SORTED_BY = {
    "metric": "metric", "step": "step_time_s", "tokens/s": "tokens_per_s",
    "FLOP/s": "model_flops_per_s", "MFU": "mfu", "memory": "peak_memory_bytes",
    "loss": "final_loss", "per M tokens": "price_per_million_tokens",
}  # fmt: skip


def _cell(arm: ArmResult, name: str, text: str) -> Cell:
    if name in _SORTED_BY:
        return Number(getattr(arm, _SORTED_BY[name]), text)
    slowdown = None if arm.verdict is None else arm.verdict.slowdown
    return Number(slowdown, text) if name == "ratio" else text


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
    known = {arm.arm: arm.peak_memory_bytes for arm in comparison.arms
             if arm.peak_memory_bytes is not None}  # fmt: skip
    if not known:
        yield Words("How much memory these arms took is not recorded.")
        return
    values = [float(value) for value in known.values()]
    alt = listed([f"{name}: {show_bytes(value)}" for name, value in known.items()])
    yield bars("Peak memory, of the fullest rank", alt, list(known), values, sizes(values),
               "memory", (), [colour(place) for place in range(len(known))])  # fmt: skip


def _predicted(runs: dict[str, Run], probe: Machine | None) -> Iterable[Part]:
    said = {name: predict(run.record, run.hosts, probe) for name, run in runs.items()}
    known = {name: one for name, one in said.items() if isinstance(one, Prediction)}
    if not known:
        reasons = list(dict.fromkeys(str(one) for one in said.values()))
        yield Words(" ".join(["There are no predictions.", *reasons]))
        return
    bases = dict.fromkeys(one.basis for one in known.values())
    yield Words(" ".join(bases))
    estimates = {name: one.planned.estimate for name, one in known.items()}
    measured = [_step_time(runs[name]) for name in known]
    times = [one.step_time_s for one in estimates.values()]
    unit = seconds([*times, *measured])
    alt = listed(
        [
            f"{name}: predicted {unit.show(time)}, measured {unit.show(seen)}"
            for name, time, seen in zip(known, times, measured, strict=True)
        ]
    )
    yield against(
        "Time of a step", alt, list(known), times, measured, unit, "time of a step",
        [(one.low_s, one.high_s) for one in estimates.values()], (PREDICTED, MEASURED),
    )  # fmt: skip


def _step_time(run: Run) -> float | None:
    return None if run.measurement is None else run.measurement.step_time_s


def _environment(comparison: Comparison) -> Section:
    arms = tuple(
        (arm.name, ", ".join(f"{k}={v}" for k, v in arm.settings.items()) or arm.command or "–",
         ", ".join(f"{k}={v}" for k, v in arm.environment.items()) or "–")
        for arm in comparison.experiment.arms
    )  # fmt: skip
    common = [(name, str(value)) for name, value in comparison.experiment.common.items()
              if value is not None]  # fmt: skip
    return Section("Environment and command", (
        command("The command that repeats it", comparison.command),
        Table("What the arms are", ("arm", "settings", "environment"), arms),
        pairs("What they have in common", common),
        pairs("When", [("started", comparison.started)]),
        machine_table(comparison.machine),
    ))  # fmt: skip
