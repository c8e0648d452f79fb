"""The planner proposes, short trainings decide, and each of them makes the planner know better."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median_low
from typing import Any, Protocol

from outpace.experiment.arms import Failed, safe, train_once
from outpace.experiment.results import steps_of
from outpace.launch.tuning import Proposal
from outpace.records.measurement import WARMUP_STEPS
from outpace.records.plan import Plan
from outpace.records.tuning import Trial
from outpace.records.units import show_seconds

_STEPS_S = 10.0  # of a trial, as predicted: what disturbs lasts for some seconds
_FEWEST, _MOST = 8, 60  # steps, beside those of warm-up
_START_S = 300.0  # to begin and to end, at most
_PATIENCE = 20  # times as long as predicted
_CLOSE = 0.05  # plans nearer to the fastest than this are run again, to tell them apart
_RUNS = 2  # of such a plan
_TOLD_APART = 2  # trials that are kept for that
_SURE = 1.645  # deviations to either end of what holds 90 %
_NORMAL = NormalDist()
DEFAULT_WHY = "what outpace train does by itself"


@dataclass(frozen=True)
class Limits:
    """Trials at most, seconds after which none begins, and what it must be able to win by."""

    trials: int = 8
    budget_s: float = 600.0
    within: float = 0.02


class Planner(Protocol):
    """Predicts with what trials have told; see `launch.tuning.Proposer`."""

    @property
    def default(self) -> Plan: ...
    def proposals(self, trials: Sequence[Trial]) -> list[Proposal]: ...
    def proposal(self, plan: Plan, trials: Sequence[Trial] = ()) -> Proposal: ...


# Runs a proposal under a number, for a reason; `first_s` was predicted of it before any trial.
Run = Callable[[int, str, Proposal, float], Trial]


@dataclass(frozen=True)
class Ended:
    """All trials, and why there are no more."""

    trials: tuple[Trial, ...]
    stopped: str


def tune(
    planner: Planner,
    run: Run,
    limits: Limits,
    before: Sequence[Trial] = (),
    told: Callable[[Trial], None] = lambda trial: None,
    clock: Callable[[], float] = time.monotonic,
) -> Ended:
    """Trials after those of `before`: the default first, then what the planner thinks fastest."""
    trials, began_s = list(before), clock() - sum(trial.took_s for trial in before)
    while True:
        if len(trials) >= limits.trials:
            return Ended(tuple(trials), f"all {limits.trials} trials are made")
        if trials and clock() - began_s >= limits.budget_s:
            return Ended(tuple(trials), f"the budget of {limits.budget_s:.0f} s is spent")
        chosen = _next(planner, trials, limits)
        if chosen is None:
            return Ended(
                tuple(trials), f"no plan that is left can win by more than {limits.within:.0%}"
            )
        why, proposal = chosen
        first_s = planner.proposal(proposal.plan).step_time_s
        trials.append(run(len(trials) + 1, why, proposal, first_s))
        told(trials[-1])


def _next(planner: Planner, trials: Sequence[Trial], limits: Limits) -> tuple[str, Proposal] | None:
    """What to try, and why. None: nothing is worth it."""
    if not trials:
        return DEFAULT_WHY, planner.proposal(planner.default)
    again = _again(planner.default, trials)
    if again is None or limits.trials - len(trials) > _TOLD_APART:
        one = _untried(planner, trials, limits.within)
        if one is not None:
            return f"it may take {show_seconds(_least_s(one))}", one
    if again is None:
        return None
    why, plan = again
    return why, planner.proposal(plan, trials)


def _untried(planner: Planner, trials: Sequence[Trial], within: float) -> Proposal | None:
    """Of the plans left that may win by so much the one that shortens the best time most."""
    tried = {_key(trial.plan) for trial in trials}
    best_s = min(step_times_s(trials).values(), default=math.inf)
    left = [
        one
        for one in planner.proposals(trials)
        if _key(one.plan) not in tried and _least_s(one) < best_s * (1 - within)
    ]
    return max(left, key=lambda one: _expected_gain(one, best_s), default=None)


def _least_s(one: Proposal) -> float:
    """The lower end of what holds 90 %."""
    return one.step_time_s * math.exp(-_SURE * one.spread)


def _expected_gain(one: Proposal, best_s: float) -> float:
    """By how much a plan shortens the best time in the mean, where it may also do nothing for it.

    As a logarithm: "expected improvement" of Jones, Schonlau & Welch, "Efficient Global
    Optimization of Expensive Black-Box Functions" (1998), equation 15.
    """
    if best_s == math.inf:  # whatever runs is a gain: what is fastest in the mean
        return -math.log(one.step_time_s)
    ahead = math.log(best_s / one.step_time_s)
    if one.spread == 0:
        return max(ahead, 0.0)
    deviations = ahead / one.spread
    return ahead * _NORMAL.cdf(deviations) + one.spread * _NORMAL.pdf(deviations)


def _again(default: Plan, trials: Sequence[Trial]) -> tuple[str, Plan] | None:
    """Of what the result rests on, the fastest, what is close and the default, what ran least.

    Other work on the machine may have slowed a single trial; of two that disagree, a third decides.
    """
    taken = _taken_s(trials)
    times = {key: median_low(seconds) for key, seconds in taken.items()}
    most_s = min(times.values(), default=0.0) * (1 + _CLOSE)
    rest = [key for key, seconds in times.items() if seconds <= most_s or key == _key(default)]
    runs = Counter(_key(trial.plan) for trial in trials)  # those that failed, too
    few = [key for key in rest if runs[key] < _RUNS + _disagree(taken[key])]
    if len(rest) < 2 or not few:
        return None
    key = min(few, key=lambda one: (runs[one], times[one]))
    plan = next(trial.plan for trial in trials if _key(trial.plan) == key)
    why = "close to the fastest" if times[key] <= most_s else "the gain rests on it"
    return f"{why}: once more", plan


def _disagree(seconds: Sequence[float]) -> bool:
    return max(seconds) > min(seconds) * (1 + 2 * _CLOSE)


def _key(plan: Plan) -> str:
    return plan.model_dump_json()


def step_times_s(trials: Sequence[Trial]) -> dict[str, float]:
    """By plan, as JSON: of three trials the median, of two the faster: what disturbs is no help."""
    return {key: median_low(seconds) for key, seconds in _taken_s(trials).items()}


def time_of(plan: Plan, trials: Sequence[Trial]) -> float | None:
    """What a step by this plan takes, by all of its trials; None: none came to its end."""
    return step_times_s(trials).get(_key(plan))


def _taken_s(trials: Sequence[Trial]) -> dict[str, list[float]]:
    """By plan: the step times of its trials, but for those that failed."""
    found: dict[str, list[float]] = {}
    for trial in trials:
        if trial.compared_s is not None:
            found.setdefault(_key(trial.plan), []).append(trial.compared_s)
    return found


def tuned(trials: Sequence[Trial]) -> dict[str, Any]:
    """What trials come to, by the names of `Tuning`: the fastest, the default, the gain."""
    times = step_times_s(trials)
    first = {_key(trial.plan): trial.number for trial in reversed(trials)}
    best = min(times, key=lambda key: times[key], default=None)
    default = next((trial for trial in trials if trial.why == DEFAULT_WHY), None)
    default_s = None if default is None else times.get(_key(default.plan))
    best_s = None if best is None else times[best]
    medians = [one.step_time_s for one in trials if one.step_time_s and _key(one.plan) == best]
    return {
        "best": None if best is None else first[best],
        "default": None if default is None else default.number,
        "step_time_s": median_low(medians) if medians else None,
        "gain": None if best_s is None or default_s is None else 1 - best_s / default_s,
    }


def run_trial(
    given: Mapping[str, Any],
    folder: Path,
    number: int,
    why: str,
    proposal: Proposal,
    first_s: float,
    host_bytes: int | None = None,
) -> Trial:
    """Train by a plan for a few steps, in processes of its own with limits of time and memory.

    `host_bytes`: what they may have together where no limit is given; None: all that there is.
    """
    name = f"{number:02d}-{safe(proposal.title)}"
    where = folder / "trials" / name
    where.mkdir(parents=True, exist_ok=True)
    proposal.plan.save(where / "plan.json")
    steps = min(max(round(_STEPS_S / proposal.step_time_s), _FEWEST), _MOST) + WARMUP_STEPS
    began_s = time.monotonic()
    if host_bytes is not None:
        given = {"memory_limit": host_bytes // proposal.plan.world_size, **given}
    measured = train_once(
        {**given, "plan": str(where / "plan.json"), "steps": steps},
        where / "run",
        where / "config.toml",
        limit_s=_START_S + _PATIENCE * steps * proposal.step_time_s,
    )
    found: dict[str, Any]
    if isinstance(measured, Failed):
        found = {"step_time_s": None, "failure": measured.words, "exit_code": measured.exit_code}
    else:
        found = {
            "step_time_s": measured.step_time_s,
            "undisturbed_s": _undisturbed_s(where / "run"),
            "peak_memory_bytes": measured.peak_memory_bytes,
        }
    return Trial(
        number=number,
        why=why,
        title=proposal.title,
        plan=proposal.plan,
        first_predicted_s=first_s,
        predicted_s=proposal.step_time_s,
        took_s=time.monotonic() - began_s,
        run=str(Path("trials") / name / "run"),
        **found,
    )


def _undisturbed_s(run: Path) -> float:
    """Of the steps after warm-up: so that a quarter of them took no longer."""
    took_s = sorted(float(step["step_time_s"]) for step in steps_of(run)[WARMUP_STEPS:])
    return took_s[len(took_s) // 4]
