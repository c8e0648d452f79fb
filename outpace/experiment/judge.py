"""Evaluation of an experiment: medians, verdicts, differences, agreement of losses."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from outpace.catalog.accelerators import find_accelerator
from outpace.experiment.arm_facts import describe_clocks, describe_differences, read_facts
from outpace.experiment.compare import ComparisonEnd
from outpace.experiment.differences import differences
from outpace.experiment.finished_runs import NOT_IN_TURN, arms_of, outcomes_of
from outpace.experiment.results import curves, describe_losses, results
from outpace.probing.hardware.machine import identify
from outpace.records.comparison import Comparison, Experiment


def judge(
    experiment: Experiment, folder: Path, ended: ComparisonEnd, took_s: float, started: str,
    command: tuple[str, ...],
) -> Comparison:  # fmt: skip
    """Return the comparison of an experiment's alternatives (arms), from their run folders.

    `ended` has the outcome of each run, and `command` is the command that started the experiment.
    """
    facts = read_facts(experiment, folder, ended.outcomes)
    return Comparison(
        experiment=experiment,
        command=command,
        arms=tuple(results(experiment, folder, ended.outcomes, facts)),
        outcomes=ended.outcomes,
        differing=(
            *describe_differences(experiment, facts),
            *describe_clocks(folder, ended.outcomes),
        ),
        losses=describe_losses(curves(experiment, folder, ended.outcomes)),
        stopped=ended.stopped,
        took_s=took_s,
        machine=identify(find_accelerator),
        started=started,
    )


def compare_runs(runs: Sequence[Path], price: float | None = None) -> Comparison:
    """Compare finished runs. Raises BadInputError if a folder holds no run."""
    experiment = arms_of(runs, price)
    ended = ComparisonEnd(tuple(outcomes_of(runs, experiment)), "the runs are over")
    words = ["outpace", "compare", "--runs", *map(str, runs)]
    words += [] if price is None else ["--price", f"{price:g}"]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = judge(experiment, Path(), ended, 0.0, now, tuple(words))
    folders = {arm.name: run for arm, run in zip(experiment.arms, runs, strict=True)}
    return found.model_copy(
        update={
            "differing": (NOT_IN_TURN, *describe_clocks(Path(), ended.outcomes)),
            "differences": differences(folders, found.arms),
        }
    )
