"""A tuning in a terminal: the plan that won, what it gains, and what was tried."""

from rich.console import Group, RenderableType
from rich.text import Text

from outpace.records.tuning import PlanTrial, Tuning, shown_rate
from outpace.records.units import show_bytes, show_seconds, show_share
from outpace.report.figures import off
from outpace.report.narrow import Narrow

_COLUMNS = ("measured", "{rate}", "predicted", "error", "memory", "compared", "at first")
RATES = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s"}


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
        Text(trial_name(tuning, one), style="bold" if one.number == tuning.best else "")
        for one in tuning.trials
    ]
    rate = shown_rate(tuning.trials)
    cells = [_cells(trial, getattr(trial, rate)) for trial in tuning.trials]
    columns = [name.format(rate=RATES[rate]) for name in _COLUMNS]
    figures = {name: [own[place] for own in cells] for place, name in enumerate(columns)}
    table = Narrow("trial", names, figures)
    notes = [
        f"trials: {len(tuning.trials)}, of {tuning.considered:,} plans in "
        f"{show_seconds(tuning.took_s)}: {tuning.stopped}."
    ]
    notes.append(
        "measured: median step time. error: measured against predicted. memory: tensors of the "
        "fullest process. compared: the time that the fastest quarter of its steps stay below; "
        "plans that took turns are compared turn by turn. at first: predicted before any trial. "
        "Speed was tuned, and nothing that changes what is learnt (learning rate, batch)."
    )
    notes += [f"trial {one.number}{words}." for one in tuning.trials if (words := disturbed(one))]
    notes += [f"{one.title} failed: {one.failure}" for one in tuning.trials if one.failure]
    return Group(Text(), Text(verdict_line(tuning), style="bold"), Text(), table, Text(),
                 *map(Text, notes))  # fmt: skip


def disturbed(trial: PlanTrial) -> str:
    """Words behind a trial that shared its cores with others' processes; "" where it did not."""
    if trial.other_cores is None:
        return ""
    return (
        f": other processes kept {trial.other_cores:.1f} cores busy meanwhile, so it took longer "
        "than it would alone. Tune again when they are done"
    )


def trial_name(tuning: Tuning, trial: PlanTrial) -> str:
    """Its number and plan, and the trial that had the same plan before."""
    before = tuning.same_before(trial)
    again = "" if before is None else f" (again, as trial {before})"
    return f"{trial.number}. {trial.title}{again}"


def rate_cell(per_s: float | None) -> str:
    """Tokens or samples in a second."""
    if per_s is None:
        return "–"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _cells(trial: PlanTrial, per_s: float | None) -> list[str]:
    """Of the columns."""
    predicted = [show_seconds(trial.predicted_s), show_seconds(trial.first_predicted_s)]
    if trial.step_time_s is None:
        return ["failed", "–", predicted[0], "–", "–", "–", predicted[1]]
    above = off(trial.predicted_s, trial.step_time_s).text
    memory, compared = show_bytes(trial.peak_memory_bytes), show_seconds(trial.compared_s)
    measured = show_seconds(trial.step_time_s)
    return [measured, rate_cell(per_s), predicted[0], above, memory, compared, predicted[1]]
