"""Finished runs as arms of a comparison, with segments of their steps as rounds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from outpace.experiment.results import step_times_of
from outpace.records.comparison import Arm, Experiment, Outcome
from outpace.records.errors import BadInputError
from outpace.records.measurement import WARMUP_STEPS
from outpace.records.run import RUN_FILE, RunRecord, require_run
from outpace.records.settings import OF_A_RUN

_MOST_BLOCKS = 30
NOT_IN_TURN = (
    "These runs were not interleaved, so differences include other load on the machine and "
    "variation between starts."
)


def arms_of(runs: Sequence[Path], price: float | None = None) -> Experiment:
    """Return an experiment with one arm per run, each with the settings in which runs differ.

    Raises BadInputError if a folder holds no run.
    """
    for run in runs:
        require_run(run)
    given = [_settings_to_repeat(RunRecord.load(run / RUN_FILE)) for run in runs]
    alike = {name for name in given[0] if all(one[name] == given[0][name] for one in given)}
    names = _distinct_names(runs)
    return Experiment.parse(
        {
            "common": {name: given[0][name] for name in sorted(alike)},
            "arms": [
                Arm(name=name, settings={k: v for k, v in one.items() if k not in alike})
                for name, one in zip(names, given, strict=True)
            ],
            "price": price,
            "in_turn": False,
        },
        "--runs",
    )


def _settings_to_repeat(record: RunRecord) -> dict[str, Any]:
    """Return the settings that repeat a run, with `nproc` even if a launcher started its ranks."""
    given = record.settings.model_dump(mode="json", exclude=set(OF_A_RUN))
    world = record.plan.world_size
    return given | ({"nproc": world} if world > 1 else {})


def _distinct_names(runs: Sequence[Path]) -> list[str]:
    """Return the runs' folder names if they differ, otherwise their paths."""
    last = [run.resolve().name for run in runs]
    return last if len(set(last)) == len(last) else [str(run) for run in runs]


def outcomes_of(runs: Sequence[Path], experiment: Experiment) -> list[Outcome]:
    """Split the steps of each run into segments, and return the median step time of each.

    All runs have as many segments as the shortest one. Raises BadInputError for a run that has only
    warm-up steps.
    """
    times = [step_times_of(run) for run in runs]
    least = min(map(len, times))
    if least == 0:
        short = runs[times.index(min(times, key=len))]
        begun = RunRecord.load(short / RUN_FILE).start_step
        since = (
            f" since it was resumed after step {begun:,} with another plan, machine or version"
            if begun else ""
        )  # fmt: skip
        raise BadInputError(
            f"{short} has at most {WARMUP_STEPS} steps{since}, all of them warm-up, so there is "
            "nothing to compare. Train it for more steps."
        )
    size = -(-least // _MOST_BLOCKS)
    found = []
    for number in range(least // size):
        for run, arm, own in zip(runs, experiment.arms, times, strict=True):
            value = median(own[number * size : (number + 1) * size])
            where = str(run.resolve())  # absolute, so the stored result is valid in any folder
            found.append(Outcome(arm=arm.name, round=number, value=value, run=where))
    return found
