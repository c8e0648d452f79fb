"""The report of a tuning."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from outpace.experiment.tune import step_times_s
from outpace.records.machine import Machine
from outpace.records.tuning import PlanTrial, Tuning, shown_rate
from outpace.records.units import show_bytes, show_seconds, show_share
from outpace.reporting.charts.figures import (
    AxisChoice,
    LineSeries,
    deviation,
    join_items,
    lines,
    prediction_bars,
    seconds,
)
from outpace.reporting.charts.palette import GREY, MEASURED, RED
from outpace.reporting.data.run_folder import RunFolder, read_run
from outpace.reporting.render.document import (
    Cell,
    Chart,
    Code,
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
from outpace.reporting.sections import step_breakdown
from outpace.reporting.sections.environment import command, machine_table, topology
from outpace.reporting.terminal.tuning import (
    COMPARED,
    NOTHING_COMPARED,
    RATES,
    one_trial_words,
    rate_cell,
    shared_cores_notes,
    trial_name,
)
from outpace.training.run_dir import RUN_FILE


def tuning_document(
    tuning: Tuning, folder: Path | None = None, probe: Machine | None = None
) -> Document:
    """Show which plan was the fastest, and the prediction for each; runs are read from `folder`."""
    runs = _runs(tuning, folder)
    return Document(
        "tuning", f"{_model(tuning, runs)}: {len(tuning.trials)} trials",
        tuple(_verdict(tuning)), tuple(_facts(tuning)),
        (
            DocumentSection("Predicted against measured", tuple(_times(tuning))),
            DocumentSection("How it was found", tuple(_search(tuning))),
            DocumentSection("Where the time goes", tuple(_parts(runs))),
            DocumentSection("Loss", tuple(runs_parts.losses(runs))),
            DocumentSection("Memory", (_memory(tuning),)),
            DocumentSection("Utilisation", tuple(runs_parts.loads(runs))),
            topology(tuning.machine, probe),
            _environment(tuning, runs),
        ),
    )  # fmt: skip


def _model(tuning: Tuning, runs: Mapping[str, RunFolder]) -> str:
    """Return the model's name: as given, or from the runs for the default model."""
    given = tuning.settings.get("model")
    default = next((run.record.settings.model for run in runs.values()), None)
    return str(given or default or "a model")


def _runs(tuning: Tuning, folder: Path | None) -> dict[str, RunFolder]:
    """Read the runs of finished trials, fastest first."""
    done = [one for one in tuning.trials if one.step_time_s is not None]
    done.sort(key=lambda one: one.step_time_s or 0.0)
    paths = {_name(tuning, one): folder / one.run for one in done} if folder is not None else {}
    return {name: read_run(path) for name, path in paths.items() if (path / RUN_FILE).is_file()}


def _parts(runs: Mapping[str, RunFolder]) -> Iterable[Part]:
    known = {name: run.measurement.parts for name, run in runs.items()
             if run.measurement is not None and run.measurement.parts.total_s}  # fmt: skip
    if not known:
        yield Paragraph("The trials' runs, which have these times, are not here.")
        return
    yield step_breakdown.parts_figure("Time of a step by part", known)
    yield from runs_parts.ranks(runs)


def _verdict(tuning: Tuning) -> Iterable[str]:
    best = tuning.fastest
    if best is None:
        count = len(tuning.trials)
        none = "The only trial did not finish" if count == 1 else f"None of {count} trials finished"
        yield f"{none}: {tuning.stopped}."
        return
    default = None if tuning.default is None else tuning.trial(tuning.default)
    took = f"{show_seconds(tuning.step_time_s)} a step{one_trial_words(tuning)}"
    yield f"Fastest: {best.title}, {took}."
    if default is not None and default is not best and tuning.gain is not None:
        trials = [one.compared_s for one in tuning.trials if one.plan == default.plan]
        took_s = [one for one in trials if one is not None]
        how = "in turn" if any(one.raced for one in tuning.trials) else "undisturbed"
        yield (
            f"Compared {how}, the fastest takes {show_share(tuning.gain)} less time than the "
            f"default, {default.title}, which takes {show_seconds(took_s[-1])}."
        )
    elif default is best:
        yield "It is the default." if tuning.compares else NOTHING_COMPARED
    if tuning.step_time_s is not None:
        first, last = (show_seconds(one) for one in (best.first_predicted_s, best.predicted_s))
        share = deviation(best.predicted_s, tuning.step_time_s).text
        yield (
            f"It was predicted to take {first} before any trial, and {last} when it was chosen: "
            f"measured, {share} of the latter."
        )


def _facts(tuning: Tuning) -> Iterable[tuple[str, str]]:
    failed = sum(one.failure is not None for one in tuning.trials)
    return [
        ("trials", str(len(tuning.trials))), ("failed", str(failed)),
        ("plans considered", f"{tuning.considered:,}"), ("took", show_seconds(tuning.took_s)),
        ("why it ended", tuning.stopped),
    ]  # fmt: skip


def _name(tuning: Tuning, trial: PlanTrial) -> str:
    marks = {tuning.best: " (fastest)", tuning.default: " (default)"}
    return f"{trial_name(tuning, trial)}{marks.get(trial.number, '')}"


def _times(tuning: Tuning) -> Iterable[Part]:
    trials = tuning.trials
    if not trials:
        yield Paragraph("Nothing was tried.")
        return
    predicted = [one.predicted_s for one in trials]
    measured = [one.step_time_s for one in trials]
    yield prediction_bars(
        "Time of a step, as predicted when it was chosen", [_name(tuning, one) for one in trials],
        predicted, measured, seconds([*predicted, *measured]), "time of a step",
    )  # fmt: skip
    if any(value is not None for value in measured):
        yield _scatter(tuning)


def _scatter(tuning: Tuning) -> Chart:
    """Plot each trial's first and latest prediction against the measured time."""
    done = [one for one in tuning.trials if one.step_time_s is not None]
    seen = [one.step_time_s for one in done]
    everything = [
        *seen,
        *(one.predicted_s for one in done),
        *(one.first_predicted_s for one in done),
    ]
    unit = seconds(everything)
    ends: list[float | None] = [0.0, 1.05 * max(value or 0.0 for value in everything)]

    def dots(colour: str, symbol: str) -> dict[str, object]:
        return {"mode": "markers", "marker": {"color": colour, "symbol": symbol, "size": 10},
                "text": [_name(tuning, one) for one in done],
                "hovertemplate": "%{text}<extra></extra>"}  # fmt: skip

    series = [
        LineSeries("before any trial", ([one.first_predicted_s for one in done],), seen,
             dots(GREY, "circle-open")),
        LineSeries("when it was chosen", ([one.predicted_s for one in done],), seen,
             dots(MEASURED, "circle")),
        LineSeries("as predicted", (ends,), ends, {"line": {"color": "#777777", "dash": "dash"}}),
    ]  # fmt: skip
    rows = tuple(
        (_name(tuning, one), unit.cell(one.first_predicted_s), unit.cell(one.predicted_s),
         unit.cell(one.step_time_s), deviation(one.predicted_s, one.step_time_s))
        for one in done
    )  # fmt: skip
    columns = ("trial", "before any", "when chosen", "measured", "measured to when chosen")
    alt = "Error of each trial's prediction:" + join_items(
        [f"{one.title} {deviation(one.predicted_s, one.step_time_s).text}" for one in done]
    )
    return lines(
        "Predictions before any trial, and when each was chosen", alt, series,
        [AxisChoice("predicted", "predicted", unit)], unit, "measured",
        DataTable("Predictions", columns, rows), hovermode="closest",
    )  # fmt: skip


def _search(tuning: Tuning) -> Iterable[Part]:
    if any(one.step_time_s is not None for one in tuning.trials):
        yield _progress(tuning)
    rate = shown_rate(tuning.trials)
    rows = tuple(_row(tuning, one, getattr(one, rate)) for one in tuning.trials)
    columns = ("trial", "plan", "step", RATES[rate], "compared", "memory", "took",
               "why it was tried", "failure", "run")  # fmt: skip
    yield DataTable("The trials", columns, rows)
    for note in (f"step: the median of its steps. {COMPARED}", *shared_cores_notes(tuning)):
        yield Paragraph(note)


def _row(tuning: Tuning, one: PlanTrial, per_s: float | None) -> tuple[Cell, ...]:
    return (
        Number(one.number, str(one.number)), _name(tuning, one).partition(" ")[2],
        Number(one.step_time_s, show_seconds(one.step_time_s)),
        Number(per_s, rate_cell(per_s)),
        Number(one.compared_s, show_seconds(one.compared_s)),
        Number(one.peak_memory_bytes, show_bytes(one.peak_memory_bytes)),
        Number(one.took_s, show_seconds(one.took_s)), one.why, one.failure or "", one.run,
    )  # fmt: skip


def _progress(tuning: Tuning) -> Chart:
    """Plot the fastest step so far over the time spent."""
    spent_s = 0.0
    x: list[float | None] = []
    best: list[float | None] = []
    each: list[float | None] = []
    for number, one in enumerate(tuning.trials, 1):
        spent_s += one.took_s
        x.append(spent_s)
        each.append(one.compared_s)
        best.append(min(step_times_s(tuning.trials[:number]).values(), default=None))
    unit, time = seconds([*each, *best]), seconds(x)
    series = [
        LineSeries("fastest so far", (x,), best, {"line": {"color": MEASURED, "shape": "hv"}}),
        LineSeries("trial", (x,), each, {"mode": "markers", "marker": {"color": RED, "size": 9}}),
    ]
    rows = tuple(
        (_name(tuning, one), time.cell(at), unit.cell(one.step_time_s), unit.cell(known))
        for one, at, known in zip(tuning.trials, x, best, strict=True)
    )
    table = DataTable("The search", ("trial", "after", "its step", "fastest so far"), rows)
    return lines(
        "The fastest step, by time spent on trials",
        f"After {show_seconds(spent_s)} of trials: {show_seconds(best[-1])} a step.",
        series, [AxisChoice("time", "time spent", time)], unit, "time of a step", table,
    )  # fmt: skip


def _memory(tuning: Tuning) -> Part:
    return runs_parts.peak_memory(
        {_name(tuning, one): one.peak_memory_bytes for one in tuning.trials}
    )


def _environment(tuning: Tuning, runs: Mapping[str, RunFolder]) -> DocumentSection:
    best = tuning.fastest
    parts: list[Part] = [command("The command", tuning.command)]
    if best is not None:
        parts.append(Code("The fastest plan, for outpace train --plan",
                          best.plan.model_dump_json(indent=2, exclude_defaults=True)))  # fmt: skip
    given = [
        (name, in_words(value)) for name, value in tuning.settings.items() if value is not None
    ]
    return DocumentSection("Environment and command", (
        *parts, pairs("Settings of every trial", given),
        pairs("When", [("started", tuning.started)]), machine_table(tuning.machine),
        *runs_parts.versions(runs),
    ))  # fmt: skip
