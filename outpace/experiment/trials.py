"""Trials of the tuner: short training runs with a plan, alone or taking turns."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from outpace.experiment.arms import RunFailure, file_name, train_once
from outpace.experiment.interleaved_runs import TurnResult, TurnTraining, train_in_turn
from outpace.experiment.results import steps_of
from outpace.experiment.tune import NextTrial
from outpace.records.machine import Machine
from outpace.records.measurement import WARMUP_STEPS, Measurement
from outpace.records.plan import Plan
from outpace.records.tuning import PlanTrial

_STEPS_S = 10.0  # predicted duration of a trial, longer than typical disturbances
_FEWEST, _MOST = 8, 60  # minimum and maximum number of steps after warm-up
_START_S = 300.0  # allowed time to start and end
_PATIENCE = 20  # allowed multiple of the predicted duration
TURN_S, _TURNS = 2.0, 6  # length and number of turns when several plans take turns
_OF_DEVICE = 0.8  # fraction of device memory for the tensors of all plans that take turns
_PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class Trials:
    """Runner of tuning's trials, each of which trains with one plan for a few steps.

    `folder` is the folder of the trials, and `given` their common settings. `host_bytes` is the
    memory limit for all processes of a trial on the CPU; None on GPUs.
    """

    given: Mapping[str, Any]
    folder: Path
    host_bytes: int | None = None

    def run(self, number: int, chosen: NextTrial) -> PlanTrial:
        """Train with a plan for a few steps, within time and memory limits."""
        expected_s = chosen.proposal.step_time_s
        steps = min(max(round(_STEPS_S / expected_s), _FEWEST), _MOST) + WARMUP_STEPS
        one, began_s = self._prepare(number, chosen), time.monotonic()
        limit_s = _START_S + _PATIENCE * steps * expected_s
        ended = train_once({**one.given, "steps": steps}, one.run, one.config, limit_s=limit_s)
        took_s, found = time.monotonic() - began_s, {}
        if isinstance(ended, Measurement):
            steps_s = [float(step["step_time_s"]) for step in steps_of(one.run)[WARMUP_STEPS:]]
            found = {"step_time_s": ended.step_time_s, "undisturbed_s": first_quartile(steps_s)}
        return self._make_trial(number, chosen, ended, took_s=took_s, **found)

    def run_in_turn(self, number: int, several: Sequence[NextTrial]) -> list[PlanTrial]:
        """Train with several plans that take turns, and return the measured trials.

        The processes of all plans must fit in memory together.
        """
        entrants = [self._prepare(at, chosen) for at, chosen in enumerate(several, number)]
        expected_s = sum(
            entrant.steps(_TURNS) * chosen.proposal.step_time_s
            for entrant, chosen in zip(entrants, several, strict=True)
        )
        began_s = time.monotonic()
        turned = train_in_turn(entrants, _TURNS, _START_S + _PATIENCE * expected_s)
        share_s = (time.monotonic() - began_s) / len(several)
        found = [
            _step_times(one, own_s) for one, own_s in zip(turned, paired_s(turned), strict=True)
        ]
        return [
            self._make_trial(number + at, chosen, turned[at].result, took_s=share_s, raced=True,
                        **found[at])
            for at, chosen in enumerate(several)
        ]  # fmt: skip

    def _prepare(self, number: int, chosen: NextTrial) -> TurnTraining:
        """Write the plan to the trial's folder, and return the training run to start there."""
        where, plan = self.folder / _trial_folder(number, chosen), chosen.proposal.plan
        where.mkdir(parents=True, exist_ok=True)
        plan.save(where / _PLAN_FILE)
        given = {**self.given, "plan": str(where / _PLAN_FILE)}
        if self.host_bytes is not None:
            given.setdefault("memory_limit", self.host_bytes // plan.world_size)
        steps = max(round(TURN_S / chosen.proposal.step_time_s), 2)
        behind = int(self.host_bytes is None)
        return TurnTraining(given, where / "run", where / "config.toml", steps, behind)

    def _make_trial(
        self, number: int, chosen: NextTrial, ended: Measurement | RunFailure, **found: Any
    ) -> PlanTrial:
        proposal = chosen.proposal
        if isinstance(ended, RunFailure):
            found.update(failure=ended.reason, exit_code=ended.exit_code)
        else:
            found.update(
                peak_memory_bytes=ended.peak_memory_bytes,
                tokens_per_s=ended.tokens_per_s,
                samples_per_s=ended.samples_per_s,
            )
            if not found.get("raced"):  # no other trials took turns with it
                used = [load.host.disturbing_cores for load in ended.utilisation]
                found["other_cores"] = max((one for one in used if one is not None), default=None)
        return PlanTrial(
            number=number,
            why=chosen.why,
            title=proposal.title,
            plan=proposal.plan,
            first_predicted_s=chosen.first_s,
            predicted_s=proposal.step_time_s,
            run=str(_trial_folder(number, chosen) / "run"),
            **found,
        )


def fit_together(
    plans: Sequence[Plan], trials: Sequence[PlanTrial], host_bytes: int | None, machine: Machine
) -> bool:
    """Return whether all ranks of these plans fit in memory at the same time.

    A plan's need is the peak memory that its earlier trial measured. `host_bytes` is the memory for
    all ranks on the CPU; None if each rank has a GPU.
    """
    peaks = {one.plan.model_dump_json(): one.peak_memory_bytes for one in trials}
    known = [(plan, peak) for plan in plans if (peak := peaks.get(plan.model_dump_json()))]
    if len(known) < len(plans):
        return False
    if host_bytes is not None:
        return sum(peak * plan.world_size for plan, peak in known) <= host_bytes
    least = min((device.memory_bytes or 0 for device in machine.devices), default=0)
    return sum(peak for _, peak in known) <= _OF_DEVICE * least


def _trial_folder(number: int, chosen: NextTrial) -> Path:
    return Path("trials") / f"{number:02d}-{file_name(chosen.proposal.title)}"


def _step_times(one: TurnResult, solo_s: float | None) -> dict[str, float | None]:
    if isinstance(one.result, RunFailure):
        return {}
    steps_s = [seconds for turn in one.turns for seconds in turn]
    return {
        "step_time_s": median(steps_s) if steps_s else one.result.step_time_s,
        "undisturbed_s": solo_s,
    }


def paired_s(several: Sequence[TurnResult]) -> list[float | None]:
    """Return the seconds per step of runs that took turns, without the drift that they share.

    In each turn, the first quartile of a run's step times is divided by the geometric mean of all
    runs' first quartiles, so a drift that affects all runs cancels. The result is the median of
    these ratios times the median of the means. It is None for a run without step times in some
    turn.
    """
    count = max((len(one.turns) for one in several), default=0)
    whole = [one for one in several if len(one.turns) == count and all(one.turns)]
    if not count or not whole:
        return [None] * len(several)
    logs = np.log([[first_quartile(turn) for turn in one.turns] for one in whole])
    common = logs.mean(axis=0)
    own = np.median(logs - common, axis=1) + np.median(common)
    seconds = dict(zip(map(id, whole), map(math.exp, own), strict=True))
    return [seconds.get(id(one)) for one in several]


def first_quartile(took_s: Sequence[float]) -> float:
    """Return the first quartile of step times."""
    return sorted(took_s)[len(took_s) // 4]
