"""Answer of a tuning: the fastest plan, its gain, and the trials."""

from collections.abc import Iterator

from outpace.records.tuning import PlanTrial, Tuning, shown_rate
from outpace.records.units import show_bytes, show_seconds, show_share
from outpace.reporting.charts.figures import deviation
from outpace.reporting.render.document import Answer, Cell, DataTable, Number, Paragraph, StyledText

_NOTHING_COMPARED = (
    "Nothing was compared, because no other plan was measured: use a longer --budget."
)
_ALIKE, _LESS = 1.02, 1.03  # maximum ratio of step times; minimum ratio of memory
_RATES = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s"}


def tuning_answer(tuning: Tuning) -> Answer:
    """Show the fastest plan, and all trials."""
    failed = [one for one in tuning.trials if one.failure is not None]
    facts = (
        ("trials", str(len(tuning.trials))), ("failed", str(len(failed))),
        ("plans considered", f"{tuning.considered:,}"), ("took", show_seconds(tuning.took_s)),
        ("why it ended", tuning.stopped),
    )  # fmt: skip
    notes = (
        "measured: median step time. error: measured relative to predicted. memory: tensors of "
        "the fullest process. compared: the first quartile of its step times; plans measured in "
        "turn are compared turn by turn. at first: predicted before any trial. Only speed was "
        "tuned, not settings that affect learning (learning rate, batch).",
        *_uncompiled_notes(tuning), *_leaner_notes(tuning), *_shared_cores_notes(tuning),
        *(f"{one.title} failed: {one.failure}" for one in failed),
    )  # fmt: skip
    return Answer(tuple(_verdict(tuning)), facts, (_trials_table(tuning), *map(Paragraph, notes)))


def _verdict(tuning: Tuning) -> Iterator[str]:
    best = tuning.fastest
    if best is None:
        count = len(tuning.trials)
        none = "The only trial did not finish" if count == 1 else f"None of {count} trials finished"
        yield f"{none}: {tuning.stopped}."
        return
    default = None if tuning.default is None else tuning.trial(tuning.default)
    took = f"{show_seconds(tuning.step_time_s)} a step{_one_trial_words(tuning)}"
    yield f"Fastest: {best.title}, {took}."
    if tuning.gain is None:
        yield "The default could not be measured."
    elif default is best:
        yield "It is the default." if tuning.compares else _NOTHING_COMPARED
    elif default is not None:
        trials = [one.compared_s for one in tuning.trials if one.plan == default.plan]
        took_s = [one for one in trials if one is not None]
        how = "in turn" if any(one.raced for one in tuning.trials) else "undisturbed"
        yield (
            f"Compared {how}, the fastest takes {show_share(tuning.gain)} less time than the "
            f"default, {default.title}, which takes {show_seconds(took_s[-1])}."
        )
    if tuning.step_time_s is not None:
        first, last = (show_seconds(one) for one in (best.first_predicted_s, best.predicted_s))
        share = deviation(best.predicted_s, tuning.step_time_s).text
        yield (
            f"Its step time was predicted as {first} before any trial, and as {last} when it was "
            f"chosen; the measurement is {share} off the latter."
        )


def _one_trial_words(tuning: Tuning) -> str:
    """Return a warning, in parentheses, if the fastest of several plans was measured only once.

    The minimum of several noisy measurements is likely to be too small.
    """
    best = tuning.fastest
    same = [one for one in tuning.trials if best is not None and one.plan == best.plan]
    several = len({one.plan.model_dump_json() for one in tuning.trials}) > 1
    if not several or len(same) > 1:
        return ""
    return " (it ran in one trial only, and may have looked faster by chance)"


def _trials_table(tuning: Tuning) -> DataTable:
    rate = shown_rate(tuning.trials)
    shown = ("measured", _RATES[rate], "predicted", "error", "memory", "compared", "at first")
    rows = tuple(
        (
            _name_cell(tuning, one), *_measured_cells(one, getattr(one, rate)),
            _time(one.first_predicted_s), _time(one.took_s), one.why, one.run,
        )
        for one in tuning.trials
    )  # fmt: skip
    heads = {name: name for name in ("trial", *shown)}
    return DataTable(
        "The trials", ("trial", *shown, "took", "why it was tried", "run"), rows, heads
    )


def _name_cell(tuning: Tuning, trial: PlanTrial) -> Cell:
    name = trial_name(tuning, trial)
    return StyledText(name, "bold") if trial.number == tuning.best else name


def _measured_cells(trial: PlanTrial, per_s: float | None) -> tuple[Number, ...]:
    if trial.step_time_s is None:
        unknown = Number(None, "–")
        return (
            Number(None, "failed"),
            unknown,
            _time(trial.predicted_s),
            unknown,
            unknown,
            unknown,
        )
    return (
        _time(trial.step_time_s), Number(per_s, _format_rate(per_s)), _time(trial.predicted_s),
        deviation(trial.predicted_s, trial.step_time_s),
        Number(trial.peak_memory_bytes, show_bytes(trial.peak_memory_bytes)),
        _time(trial.compared_s),
    )  # fmt: skip


def _time(seconds: float | None) -> Number:
    return Number(seconds, show_seconds(seconds))


def _format_rate(per_s: float | None) -> str:
    if per_s is None:
        return "–"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _uncompiled_notes(tuning: Tuning) -> list[str]:
    asked = tuning.settings.get("compile") is not None
    if asked or tuning.machine.devices or any(one.plan.compile for one in tuning.trials):
        return []
    return [
        "torch.compile was not tried: on a CPU, outpace compiles only with --compile, which tune "
        "accepts, too."
    ]


def _leaner_notes(tuning: Tuning) -> list[str]:
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


def _shared_cores_notes(tuning: Tuning) -> list[str]:
    shared = [one for one in tuning.trials if one.other_cores is not None]
    if not shared:
        return []
    used = [one.other_cores or 0.0 for one in shared]
    least, most = f"{min(used):.1f}", f"{max(used):.1f}"
    cores = least if least == most else f"{least} to {most}"
    numbers = [str(one.number) for one in shared]
    which = f"trial {numbers[0]}" if len(numbers) == 1 else f"trials {', '.join(numbers)}"
    return [
        f"{which}: other processes kept {cores} cores busy meanwhile, so steps took longer. Tune "
        "again when they are done."
    ]


def disturbance_words(trial: PlanTrial) -> str:
    """Return a suffix if other processes used a trial's cores, else ''."""
    if trial.other_cores is None:
        return ""
    return f", while other processes kept {trial.other_cores:.1f} cores busy"


def trial_name(tuning: Tuning, trial: PlanTrial) -> str:
    """Return a trial's number and plan, and whether it is a repeat, the fastest or the default."""
    before = tuning.same_before(trial)
    again = "" if before is None else f" (again, as trial {before})"
    marks = {tuning.best: " (fastest)", tuning.default: " (default)"}
    return f"{trial.number}. {trial.title}{again}{marks.get(trial.number, '')}"
