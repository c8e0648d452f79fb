"""A tuning in a terminal: the plan that won, what it gains, and what was tried."""

from rich.console import Group, RenderableType
from rich.text import Text

from outpace.records.tuning import Trial, Tuning
from outpace.records.units import show_bytes, show_seconds, show_share
from outpace.report.figures import off
from outpace.report.narrow import Narrow

_COLUMNS = ("measured", "compared", "predicted", "off by", "memory", "before any")


def verdict_line(tuning: Tuning) -> str:
    """What was found, in a sentence."""
    best = tuning.fastest
    if best is None or tuning.step_time_s is None:
        return "Every trial failed; nothing was found."
    found = f"{best.title}: {show_seconds(tuning.step_time_s)} a step{by_one_trial(tuning)}"
    if tuning.gain is None:
        return f"{found}. The default could not be measured."
    if best.number == tuning.default:
        return f"{found}. That is what outpace train does by itself: nothing tried is faster."
    return f"{found}, {show_share(tuning.gain)} less than what outpace train does by itself."


def by_one_trial(tuning: Tuning) -> str:
    """Said where nothing else speaks for the fastest: the least of several is too low by chance."""
    best = tuning.fastest
    same = [one for one in tuning.trials if best is not None and one.plan == best.plan]
    several = len({one.plan.model_dump_json() for one in tuning.trials}) > 1
    return " (by one trial)" if several and len(same) == 1 else ""


def shown(tuning: Tuning) -> RenderableType:
    """For a terminal."""
    names = [
        Text(f"{one.number}. {one.title}", style="bold" if one.number == tuning.best else "")
        for one in tuning.trials
    ]
    cells = [_cells(trial) for trial in tuning.trials]
    figures = {name: [own[place] for own in cells] for place, name in enumerate(_COLUMNS)}
    table = Narrow("trial", names, figures)
    notes = [
        f"trials: {len(tuning.trials)}, of {tuning.considered:,} plans in "
        f"{show_seconds(tuning.took_s)}: {tuning.stopped}."
    ]
    notes.append(
        "compared: by what a quarter of its steps stay below, of those that ran in turn by their "
        "turns. off by: measured, above what was predicted. before any: predicted before any trial."
    )
    notes += [f"{one.title} failed: {one.failure}" for one in tuning.trials if one.failure]
    return Group(Text(), Text(verdict_line(tuning), style="bold"), Text(), table, Text(),
                 *map(Text, notes))  # fmt: skip


def _cells(trial: Trial) -> list[str]:
    """Of the columns."""
    predicted = [show_seconds(trial.predicted_s), show_seconds(trial.first_predicted_s)]
    if trial.step_time_s is None:
        return ["failed", "–", predicted[0], "–", "–", predicted[1]]
    above = off(trial.predicted_s, trial.step_time_s).text
    return [show_seconds(trial.step_time_s), show_seconds(trial.compared_s), predicted[0], above,
            show_bytes(trial.peak_memory_bytes), predicted[1]]  # fmt: skip
