"""Differences between finished runs in settings, plan, versions and machine, and in step times."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from outpace.experiment.arm_facts import facts_of
from outpace.experiment.past_runs import result_of
from outpace.experiment.results import step_times_of
from outpace.records.comparison import ArmResult
from outpace.records.measurement import PARTS, Measurement
from outpace.records.plan import Plan
from outpace.records.run import RUN_FILE, RunRecord
from outpace.records.settings import OF_A_RUN, TrainSettings
from outpace.records.units import show_seconds
from outpace.records.utilisation import disturbance
from outpace.training.run_dir import RESULT_FILE

# Settings that are reported elsewhere (in the resolved plan or as facts), and paths.
_ELSEWHERE = {*OF_A_RUN, *Plan.model_fields, "plan", "nproc", "threads", "data", "cache_dir",
              "steps", "seed", "global_batch", "seq_len", "offload"}  # fmt: skip
_MAPPINGS = ("versions", "variables")  # facts that are JSON objects, compared key by key
_LONG = 60  # maximum length of a value in a list
_LOST = 0.1  # smallest fraction of a run's time lost in slow steps that is reported


def differences(runs: Mapping[str, Path], results: Sequence[ArmResult]) -> tuple[str, ...]:
    """Return sentences on how runs differ, which may explain their step times.

    They compare settings, the parts of a step, slow steps, and the load from other processes.
    `runs` are folders by arm, in the order of `results`.
    """
    records = [RunRecord.load(run / RUN_FILE) for run in runs.values()]
    found = _find_differing_values(records)
    told = ", ".join(f"{name} {_format_change(values)}" for name, values in found.items())
    first = f"They differ in: {told}." if told else "No recorded difference between the runs."
    rest = (
        *_describe_slowest_part(results),
        *_describe_slow_steps(runs, results),
        *_describe_other_load(runs),
    )
    return first, *_describe_resumes(runs, records), *rest


def _describe_resumes(runs: Mapping[str, Path], records: Sequence[RunRecord]) -> list[str]:
    told = []
    for (name, run), record in zip(runs.items(), records, strict=True):
        if begin := record.last_untimed_step(result_of(run, record)):
            changed = " with another plan, machine or version" * (begin == record.start_step)
            told.append(
                f"{name} was resumed after step {begin:,}{changed}: its times are of the steps "
                "since then."
            )
    return told


def _format_change(values: Sequence[str]) -> str:
    short = [one if len(one) <= _LONG else f"{one[: _LONG - 1]}…" for one in values]
    return " → ".join(short)


def _find_differing_values(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    rows = [_describe_run(record) for record in records]
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [row.get(name, "none") for row in rows] for name in names}
    return {name: values for name, values in found.items() if _differs_clearly(name, values)}


def _differs_clearly(name: str, values: Sequence[str]) -> bool:
    """Return whether the values of a property differ between runs.

    Loads must differ by at least 1, since they vary even on idle machines.
    """
    if name == _LOAD and "unknown" not in values:
        loads = [float(one) for one in values]
        return max(loads) - min(loads) >= 1
    return len(set(values)) > 1


def _describe_run(record: RunRecord) -> dict[str, str]:
    """Return the plan, settings, versions, machine and data of a run as text, by name.

    What is likely to explain a difference in speed comes first.
    """
    plan = {name: _show_value(getattr(record.plan, name)) for name in Plan.model_fields}
    settings = {
        name: _show_value(getattr(record.settings, name))
        for name in TrainSettings.model_fields
        if name not in _ELSEWHERE
    }
    facts = facts_of(record)
    apart = {
        key if name == "versions" else f"{key}=": value
        for name in _MAPPINGS
        for key, value in json.loads(facts.pop(name)).items()
    }
    facts = {_NAMES.get(name, name): value for name, value in facts.items()}
    return plan | settings | facts | apart


_LOAD = "processes that wanted a core before"
_NAMES = {"threads a process": "threads", "load before": _LOAD}


def _show_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else "default" if value is None else str(value)


def _describe_slowest_part(results: Sequence[ArmResult]) -> list[str]:
    known = [one.parts for one in results if one.parts is not None]
    if len(known) < 2 or len(known) < len(results):
        return []
    seconds = {part: [getattr(one, f"{part}_s") for one in known] for part in PARTS}
    totals = [one.total_s for one in known]
    slow, fast = totals.index(max(totals)), totals.index(min(totals))
    part, most = max(seconds.items(), key=lambda pair: pair[1][slow] - pair[1][fast])
    if most[slow] <= most[fast]:
        return []
    return [f"The difference is largest in {part}: {' → '.join(map(show_seconds, most))} a step."]


def _describe_slow_steps(runs: Mapping[str, Path], results: Sequence[ArmResult]) -> list[str]:
    told = []
    for (name, run), result in zip(runs.items(), results, strict=True):
        times_s = step_times_of(run, warm_up=True)
        middle_s = result.step_time_s or median(times_s)
        lost_s = sum(times_s) - middle_s * len(times_s)
        if lost_s > _LOST * sum(times_s):
            told.append(
                f"{name}: its {len(times_s)} steps add up to {show_seconds(sum(times_s))} of "
                f"training time; at the median step of {show_seconds(middle_s)}, they would take "
                f"{show_seconds(middle_s * len(times_s))}. {show_seconds(lost_s)} went to slower "
                "steps."
            )
    return told


def _describe_other_load(runs: Mapping[str, Path]) -> list[str]:
    told = []
    for name, run in runs.items():
        path = run / RESULT_FILE
        loads = Measurement.load(path).utilisation if path.is_file() else ()
        told += [f"{name}: {words}." for words in disturbance(loads)]
    return told
