"""A tuning in a terminal: the fastest plan, its gain, and the trials."""

from rich.console import Group, RenderableType
from rich.text import Text

from outpace.records.tuning import PlanTrial, Tuning, shown_rate
from outpace.records.units import show_bytes, show_seconds, show_share
from outpace.reporting.charts.figures import deviation
from outpace.reporting.terminal.table import NarrowTable

_COLUMNS = ("measured", "{rate}", "predicted", "error", "memory", "compared", "at first")
COMPARED = (
    "compared: the first quartile of its step times; plans measured in turn are compared turn "
    "by turn."
)
NOTHING_COMPARED = (
    "Nothing was compared, for no other plan was measured: give it more time (--budget)."
)
_ALIKE, _LESS = 1.02, 1.03  # times as long, at most; times as much memory, at least
RATES = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s"}


def verdict_line(tuning: Tuning) -> str:
    """Return a sentence about the result."""
    best = tuning.fastest
    if best is None or tuning.step_time_s is None:
        return "Every trial failed, so there is no result."
    found = f"{best.title}: {show_seconds(tuning.step_time_s)} a step{one_trial_words(tuning)}"
    if tuning.gain is None:
        return f"{found}. The default could not be measured."
    if not tuning.compares:
        return f"{found}. {NOTHING_COMPARED}"
    if best.number == tuning.default:
        return f"{found}. That is the default of outpace train: no other trial was faster."
    return (
        f"{found}. By the column compared it takes {show_share(tuning.gain)} less time than the "
        "default of outpace train."
    )


def one_trial_words(tuning: Tuning) -> str:
    """Return a warning if the fastest plan ran once: the minimum of several is biased."""
    best = tuning.fastest
    same = [one for one in tuning.trials if best is not None and one.plan == best.plan]
    several = len({one.plan.model_dump_json() for one in tuning.trials}) > 1
    if not several or len(same) > 1:
        return ""
    return " (it ran in one trial only, and may have looked faster by chance)"


def tuning_text(tuning: Tuning) -> RenderableType:
    """Format a tuning for a terminal."""
    names = [
        Text(trial_name(tuning, one), style="bold" if one.number == tuning.best else "")
        for one in tuning.trials
    ]
    rate = shown_rate(tuning.trials)
    cells = [_cells(trial, getattr(trial, rate)) for trial in tuning.trials]
    columns = [name.format(rate=RATES[rate]) for name in _COLUMNS]
    figures = {name: [own[place] for own in cells] for place, name in enumerate(columns)}
    table = NarrowTable("trial", names, figures)
    notes = [
        f"trials: {len(tuning.trials)}, of {tuning.considered:,} plans in "
        f"{show_seconds(tuning.took_s)}: {tuning.stopped}."
    ]
    notes.append(
        "measured: median step time. error: measured relative to predicted. memory: tensors "
        f"of the fullest process. {COMPARED} at first: predicted before any trial. Only speed "
        "was tuned, not what affects learning (learning rate, batch)."
    )
    notes += leaner_notes(tuning) + shared_cores_notes(tuning)
    notes += [f"{one.title} failed: {one.failure}" for one in tuning.trials if one.failure]
    return Group(Text(), Text(verdict_line(tuning), style="bold"), Text(), table, Text(),
                 *map(Text, notes))  # fmt: skip


def leaner_notes(tuning: Tuning) -> list[str]:
    """Return a note on a trial about as fast as the fastest that used less memory, if any."""
    best = tuning.fastest
    if best is None or best.compared_s is None or best.peak_memory_bytes is None:
        return []
    near = [
        (one.peak_memory_bytes, one.compared_s, one) for one in tuning.trials
        if one.compared_s is not None and one.compared_s <= _ALIKE * best.compared_s
        and one.peak_memory_bytes is not None
        and _LESS * one.peak_memory_bytes < best.peak_memory_bytes
    ]  # fmt: skip
    if not near:
        return []
    nbytes, took_s, leanest = min(near, key=lambda one: one[:2])
    slower = show_share(max(0.0, took_s / best.compared_s - 1))
    return [
        f"trial {leanest.number} ({leanest.title}) took {slower} longer and used "
        f"{show_bytes(nbytes)} rather than {show_bytes(best.peak_memory_bytes)}: choose it if "
        "memory is short."
    ]


def shared_cores_notes(tuning: Tuning) -> list[str]:
    """Return a note on trials that shared their cores with other processes, if any."""
    shared = [one for one in tuning.trials if one.other_cores is not None]
    if not shared:
        return []
    used = [one.other_cores or 0.0 for one in shared]
    least, most = f"{min(used):.1f}", f"{max(used):.1f}"
    cores = least if least == most else f"{least} to {most}"
    numbers = [str(one.number) for one in shared]
    which = f"trial {numbers[0]}" if len(numbers) == 1 else f"trials {', '.join(numbers)}"
    return [
        f"{which}: other processes kept {cores} cores busy meanwhile, so steps took longer than "
        "they would alone. Tune again when they are done."
    ]


def disturbance_words(trial: PlanTrial) -> str:
    """Return a suffix for a trial that shared its cores with other processes; '' for others."""
    if trial.other_cores is None:
        return ""
    return f", while other processes kept {trial.other_cores:.1f} cores busy"


def trial_name(tuning: Tuning, trial: PlanTrial) -> str:
    """Return a trial's number and plan, and the earlier trial with the same plan."""
    before = tuning.same_before(trial)
    again = "" if before is None else f" (again, as trial {before})"
    return f"{trial.number}. {trial.title}{again}"


def rate_cell(per_s: float | None) -> str:
    """Format tokens or samples per second."""
    if per_s is None:
        return "–"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _cells(trial: PlanTrial, per_s: float | None) -> list[str]:
    """Return a trial's cells, in the order of the columns."""
    predicted = [show_seconds(trial.predicted_s), show_seconds(trial.first_predicted_s)]
    if trial.step_time_s is None:
        return ["failed", "–", predicted[0], "–", "–", "–", predicted[1]]
    above = deviation(trial.predicted_s, trial.step_time_s).text
    memory, compared = show_bytes(trial.peak_memory_bytes), show_seconds(trial.compared_s)
    measured = show_seconds(trial.step_time_s)
    return [measured, rate_cell(per_s), predicted[0], above, memory, compared, predicted[1]]
