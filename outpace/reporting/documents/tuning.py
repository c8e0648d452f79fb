"""The report of a tuning run."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from outpace.experiment.tune import step_times_s
from outpace.records.machine import Machine
from outpace.records.run import RUN_FILE
from outpace.records.tuning import Tuning
from outpace.records.units import show_seconds
from outpace.reporting.answers.tuning import trial_name, tuning_answer
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
from outpace.reporting.charts.step_parts import parts_figure
from outpace.reporting.data.run_folder import RunFolder, read_run
from outpace.reporting.render.document import (
    Answer,
    Chart,
    Code,
    DataTable,
    Document,
    DocumentSection,
    Paragraph,
    Part,
    in_words,
    pairs,
)
from outpace.reporting.sections import runs as runs_parts
from outpace.reporting.sections.environment import command, machine_table, topology


def tuning_document(
    tuning: Tuning, folder: Path | None = None, probe: Machine | None = None
) -> Document:
    """Create the report on a search for the fastest plan, with the prediction for each trial.

    The trials' runs are read from `folder`.
    """
    runs, answer = _read_runs(tuning, folder), tuning_answer(tuning)
    return Document(
        "tuning", f"{_model_name(tuning, runs)}: {len(tuning.trials)} trials",
        answer.verdict, answer.facts,
        (
            DocumentSection("Predicted against measured", tuple(_prediction_parts(tuning))),
            DocumentSection("How it was found", tuple(_search_parts(tuning, answer))),
            DocumentSection("Where the time goes", tuple(_time_parts(runs))),
            DocumentSection("Loss", tuple(runs_parts.losses(runs))),
            DocumentSection("Memory", (_memory_chart(tuning),)),
            DocumentSection("Utilisation", tuple(runs_parts.loads(runs))),
            topology(tuning.machine, probe),
            _environment_section(tuning, runs),
        ),
    )  # fmt: skip


def _model_name(tuning: Tuning, runs: Mapping[str, RunFolder]) -> str:
    given = tuning.settings.get("model")
    default = next((run.record.settings.model for run in runs.values()), None)
    return str(given or default or "a model")


def _read_runs(tuning: Tuning, folder: Path | None) -> dict[str, RunFolder]:
    """Read the runs of finished trials, fastest first."""
    done = [one for one in tuning.trials if one.step_time_s is not None]
    done.sort(key=lambda one: one.step_time_s or 0.0)
    return {
        trial_name(tuning, one): read_run(folder / one.run)
        for one in done
        if folder is not None and (folder / one.run / RUN_FILE).is_file()
    }


def _time_parts(runs: Mapping[str, RunFolder]) -> Iterable[Part]:
    known = {name: run.measurement.parts for name, run in runs.items()
             if run.measurement is not None and run.measurement.parts.total_s}  # fmt: skip
    if not known:
        yield Paragraph("The runs of the trials, which have these times, are missing.")
        return
    yield parts_figure("Time of a step by part", known)
    yield from runs_parts.ranks(runs)


def _prediction_parts(tuning: Tuning) -> Iterable[Part]:
    trials = tuning.trials
    if not trials:
        yield Paragraph("Nothing was tried.")
        return
    predicted = [one.predicted_s for one in trials]
    measured = [one.step_time_s for one in trials]
    yield prediction_bars(
        "Time of a step, as predicted when it was chosen",
        [trial_name(tuning, one) for one in trials], predicted, measured,
        seconds([*predicted, *measured]), "time of a step",
    )  # fmt: skip
    if any(value is not None for value in measured):
        yield _prediction_scatter(tuning)


def _prediction_scatter(tuning: Tuning) -> Chart:
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
                "text": [trial_name(tuning, one) for one in done],
                "hovertemplate": "%{text}<extra></extra>"}  # fmt: skip

    series = [
        LineSeries("before any trial", ([one.first_predicted_s for one in done],), seen,
             dots(GREY, "circle-open")),
        LineSeries("when it was chosen", ([one.predicted_s for one in done],), seen,
             dots(MEASURED, "circle")),
        LineSeries("as predicted", (ends,), ends, {"line": {"color": "#777777", "dash": "dash"}}),
    ]  # fmt: skip
    rows = tuple(
        (trial_name(tuning, one), unit.cell(one.first_predicted_s), unit.cell(one.predicted_s),
         unit.cell(one.step_time_s), deviation(one.predicted_s, one.step_time_s))
        for one in done
    )  # fmt: skip
    columns = ("trial", "before any", "when chosen", "measured", "measured to when chosen")
    alt = "Error of each trial's prediction: " + join_items(
        [f"{one.title} {deviation(one.predicted_s, one.step_time_s).text}" for one in done]
    )
    return lines(
        "Predictions before any trial, and when each was chosen", alt, series,
        [AxisChoice("predicted", "predicted", unit)], unit, "measured",
        DataTable("Predictions", columns, rows), hovermode="closest",
    )  # fmt: skip


def _search_parts(tuning: Tuning, answer: Answer) -> Iterable[Part]:
    if any(one.step_time_s is not None for one in tuning.trials):
        yield _progress_chart(tuning)
    yield from answer.parts


def _progress_chart(tuning: Tuning) -> Chart:
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
        (trial_name(tuning, one), time.cell(at), unit.cell(one.step_time_s), unit.cell(known))
        for one, at, known in zip(tuning.trials, x, best, strict=True)
    )
    table = DataTable("The search", ("trial", "after", "its step", "fastest so far"), rows)
    return lines(
        "The fastest step, by time spent on trials",
        f"After {show_seconds(spent_s)} of trials: {show_seconds(best[-1])} a step.",
        series, [AxisChoice("time", "time spent", time)], unit, "time of a step", table,
    )  # fmt: skip


def _memory_chart(tuning: Tuning) -> Part:
    return runs_parts.peak_memory(
        {trial_name(tuning, one): one.peak_memory_bytes for one in tuning.trials}
    )


def _environment_section(tuning: Tuning, runs: Mapping[str, RunFolder]) -> DocumentSection:
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
