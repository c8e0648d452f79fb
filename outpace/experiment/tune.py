"""Tuning: the planner proposes plans, and each trial improves its predictions."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import NormalDist
from typing import Any, Protocol

from outpace.jobs.planning.proposer import TuningProposal
from outpace.records.plan import Plan
from outpace.records.tuning import PlanTrial
from outpace.records.units import show_seconds

_CLOSE = 0.1  # plans within this fraction of the fastest are finalists, which run in turn
_FINALISTS = 3  # maximum number of finalists, apart from the default
_FEWEST_FINALISTS = 2
_OF_TRIALS = 0.4  # largest fraction of the trials for finalists
_SURE = 1.645  # standard deviations to either end of a 90 % interval
_NORMAL = NormalDist()
DEFAULT_WHY = "what outpace train does by default"


@dataclass(frozen=True)
class Limits:
    """Limits of tuning: `trials` is the largest number of trials.

    No trial starts after `budget_s` seconds. A plan is tried only if it may be faster than the
    fastest by at least the fraction `within`.
    """

    trials: int = 8
    budget_s: float = 600.0
    within: float = 0.02


class StepPredictor(Protocol):
    """Predictor of plans' step times that learns from the trials so far."""

    @property
    def default(self) -> Plan: ...
    def proposals(self, trials: Sequence[PlanTrial]) -> list[TuningProposal]: ...
    def proposal(self, plan: Plan, trials: Sequence[PlanTrial] = ()) -> TuningProposal: ...


@dataclass(frozen=True)
class NextTrial:
    """A plan to try next, and why; `first_s` is its predicted step time before any trial."""

    why: str
    proposal: TuningProposal
    first_s: float


# Run trials, one or several that take turns, with the number of the first one.
Run = Callable[[int, NextTrial], PlanTrial]
RunFinal = Callable[[int, Sequence[NextTrial]], Sequence[PlanTrial]]


@dataclass(frozen=True)
class TuningEnd:
    """All trials, and why tuning stopped."""

    trials: tuple[PlanTrial, ...]
    stopped: str


def tune(
    planner: StepPredictor,
    run: Run,
    run_final: RunFinal,
    limits: Limits,
    before: Sequence[PlanTrial] = (),
    told: Callable[[PlanTrial], None] = lambda trial: None,
    clock: Callable[[], float] = time.monotonic,
) -> TuningEnd:
    """Run trials until no remaining plan can be faster, or a limit is reached.

    The default plan is tried first, then the most promising plans. At the end, the fastest plans
    run once more, taking turns. `before` has earlier trials, which count toward the limits and are
    part of the result. `told` is called with each new trial.
    """
    trials, began_s = list(before), clock() - sum(trial.took_s for trial in before)
    while True:
        left = limits.trials - len(trials)
        if left <= 0:
            return TuningEnd(tuple(trials), f"all {limits.trials} trials are done")
        if trials and clock() - began_s >= limits.budget_s:
            return TuningEnd(tuple(trials), f"the budget of {limits.budget_s:.0f} s is spent")
        finalists = _choose_finalists(planner, trials, min(left, int(_OF_TRIALS * limits.trials)))
        chosen = _choose_next(planner, trials, limits.within) if left > len(finalists) else None
        if chosen is None and not finalists:
            return TuningEnd(
                tuple(trials), f"no remaining plan can be faster by more than {limits.within:.0%}"
            )
        if trials and trials[-1].raced and left <= _FEWEST_FINALISTS:
            return TuningEnd(
                tuple(trials), "too few trials are left to try and compare another plan"
            )
        number = len(trials) + 1
        for trial in [run(number, chosen)] if chosen is not None else run_final(number, finalists):
            trials.append(trial)
            told(trial)


def _choose_next(
    planner: StepPredictor, trials: Sequence[PlanTrial], within: float
) -> NextTrial | None:
    """Return the next trial; None if no other plan can be faster by the fraction `within`."""
    if not trials:
        return _make_trial(planner, DEFAULT_WHY, planner.proposal(planner.default))
    one = _find_best_untried(planner, trials, within)
    if one is None:
        return None
    return _make_trial(planner, f"it may take {show_seconds(_lower_end_s(one))}", one)


def _make_trial(planner: StepPredictor, why: str, proposal: TuningProposal) -> NextTrial:
    return NextTrial(why, proposal, planner.proposal(proposal.plan).step_time_s)


def _choose_finalists(
    planner: StepPredictor, trials: Sequence[PlanTrial], most: int
) -> list[NextTrial]:
    """Return the plans for the final, in which the best plans are timed again while taking turns.

    These are the fastest plan, those that are almost as fast, and the default plan if its trial
    succeeded; at most `most`. Returns an empty list if they have just run in turn, or if there are
    too few.
    """
    if not trials or trials[-1].raced:
        return []
    times, default = step_times_s(trials), _plan_key(planner.default)
    nearest = sorted(times, key=lambda key: times[key])[:_FINALISTS]
    whys = {key: "close to the fastest: timed again, in turn" for key in nearest
            if times[key] <= times[nearest[0]] * (1 + _CLOSE)}  # fmt: skip
    if default in times:
        whys.setdefault(default, "the baseline of the gain: timed again, in turn")
    plans = {_plan_key(trial.plan): trial.plan for trial in trials}
    found = [
        _make_trial(planner, why, planner.proposal(plans[key], trials)) for key, why in whys.items()
    ]
    return found[:most] if len(found[:most]) >= _FEWEST_FINALISTS else []


def _find_best_untried(
    planner: StepPredictor, trials: Sequence[PlanTrial], within: float
) -> TuningProposal | None:
    """Return the untried plan with the largest expected gain.

    Returns None if no plan can be faster than the fastest by the fraction `within`.
    """
    tried = {_plan_key(trial.plan) for trial in trials}
    best_s = min(step_times_s(trials).values(), default=math.inf)
    left = [
        one
        for one in planner.proposals(trials)
        if _plan_key(one.plan) not in tried and _lower_end_s(one) < best_s * (1 - within)
    ]
    return max(left, key=lambda one: _expected_gain(one, best_s), default=None)


def _lower_end_s(proposal: TuningProposal) -> float:
    """Return the lower end of the 90 % interval of a plan's step time."""
    return proposal.step_time_s * math.exp(-_SURE * proposal.spread)


def _expected_gain(proposal: TuningProposal, best_s: float) -> float:
    """Return the expected decrease of the log of the best step time, if this plan is tried.

    Source: Jones, Schonlau & Welch, "Efficient Global Optimization of Expensive Black-Box
    Functions" (1998), equation 15.
    """
    if best_s == math.inf:  # anything that runs is a gain, so prefer the fastest
        return -math.log(proposal.step_time_s)
    ahead = math.log(best_s / proposal.step_time_s)
    if proposal.spread == 0:
        return max(ahead, 0.0)
    deviations = ahead / proposal.spread
    return ahead * _NORMAL.cdf(deviations) + proposal.spread * _NORMAL.pdf(deviations)


def _plan_key(plan: Plan) -> str:
    return plan.model_dump_json()


def step_times_s(trials: Sequence[PlanTrial]) -> dict[str, float]:
    """Return step times by plan (as JSON) from each plan's last successful trial."""
    return {_plan_key(one.plan): one.compared_s for one in trials if one.compared_s is not None}


def _successful_finals(trials: Sequence[PlanTrial]) -> list[PlanTrial]:
    """Return the successful trials of the final, in which the fastest plans ran in turn.

    Returns an empty list if fewer than two succeeded, since there is nothing to compare.
    """
    last = [*takewhile(lambda trial: trial.raced, reversed(trials))]
    done = [trial for trial in last if trial.compared_s is not None]
    return done if len(done) > 1 else []


def summarise(trials: Sequence[PlanTrial]) -> dict[str, Any]:
    """Return the results of tuning as fields of `Tuning`, by name.

    These are the numbers of the fastest and of the default trial, the fastest plan's step time, and
    its gain over the default. The fastest is chosen among the plans of the final, which ran in turn
    under the same machine load, or among all trials if there was no final.
    """
    finals = _successful_finals(trials)
    times = step_times_s(finals or trials)
    number = {_plan_key(trial.plan): trial.number for trial in reversed(trials)}
    best = min(times, key=lambda key: times[key], default=None)
    default = next((trial for trial in trials if trial.why == DEFAULT_WHY), None)
    gain = None
    if best is not None and default is not None:
        alike = times if _plan_key(default.plan) in times else step_times_s(trials[: -len(finals)])
        best_s, default_s = alike.get(best), alike.get(_plan_key(default.plan))
        gain = None if best_s is None or default_s is None else 1 - best_s / default_s
    medians = [one.step_time_s for one in trials if one.step_time_s and _plan_key(one.plan) == best]
    return {
        "best": None if best is None else number[best],
        "default": None if default is None else default.number,
        "step_time_s": medians[-1] if medians else None,
        "gain": gain,
    }
