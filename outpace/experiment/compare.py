"""Runs of arms in rounds, until the verdict is clear or the budget is spent.

Every round runs each arm once, in separate processes and random order, so that differences between
starts (memory addresses, cores) count as noise and cause no verdict.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outpace.experiment.sequential import verdict
from outpace.records.comparison import Arm, Experiment, Outcome, Verdict, remaining_arms

ALPHA = 0.01  # probability of any false claim, over all pairs
LEVEL = 0.95
# An interval is narrow enough if its width is this fraction of the difference.
_NARROW = 0.5


class Run(Protocol):
    """A function that runs an arm once, in round `number`, with its files in `folder`."""

    def __call__(self, experiment: Experiment, arm: Arm, number: int, folder: Path) -> Outcome: ...


@dataclass(frozen=True)
class ComparisonEnd:
    """All outcomes of a comparison, and why it stopped."""

    outcomes: tuple[Outcome, ...]
    stopped: str


def compare(
    experiment: Experiment,
    folder: Path,
    run: Run,
    before: Sequence[Outcome] = (),
    told: Callable[[Outcome, Mapping[str, Verdict]], None] = lambda outcome, verdicts: None,
    clock: Callable[[], float] = time.monotonic,
) -> ComparisonEnd:
    """Run rounds, in which each arm runs once, until the verdicts are clear or a limit is reached.

    `before` are the outcomes of earlier rounds, which are not repeated. `told` is called after each
    run with its outcome and the verdicts so far.
    """
    outcomes, began_s = list(before), clock() - sum(one.took_s for one in before)
    begin = 1 + max((one.round for one in before), default=-1)
    for number in range(begin, experiment.rounds):
        arms = remaining_arms(experiment, outcomes)
        if experiment.arms[0] not in arms:
            return ComparisonEnd(
                tuple(outcomes),
                f"{experiment.arms[0].name} fails: {_last_failure(experiment.arms[0], outcomes)}",
            )
        if len(arms) < 2:
            return ComparisonEnd(tuple(outcomes), "all arms but the first fail")
        if outcomes and clock() - began_s >= experiment.budget_s:
            return ComparisonEnd(
                tuple(outcomes), f"the budget of {experiment.budget_s:.0f} s is spent"
            )
        found = verdicts(experiment, outcomes)
        if all(is_clear(found[arm.name], experiment.within) for arm in arms[1:]):
            return ComparisonEnd(tuple(outcomes), "the verdict is clear")
        for arm in _shuffle_arms(experiment, arms, number):
            outcome = run(experiment, arm, number, folder)
            outcomes.append(outcome)
            told(outcome, verdicts(experiment, outcomes))
    return ComparisonEnd(tuple(outcomes), _format_end(experiment.rounds))


def _format_end(rounds: int) -> str:
    return "the one round is done" if rounds == 1 else f"all {rounds} rounds are done"


def verdicts(experiment: Experiment, outcomes: Sequence[Outcome]) -> dict[str, Verdict]:
    """Judge for each arm but the first whether it is slower or faster than the first one.

    Only rounds in which both succeeded count. The probability that any claimed difference is false,
    over all arms, is at most ALPHA.
    """
    of: dict[str, dict[int, float]] = {arm.name: {} for arm in experiment.arms}
    for one in outcomes:
        if one.value is not None:
            of[one.arm][one.round] = one.value
    base, *others = experiment.arms
    found = {}
    for arm in others:
        rounds = sorted(of[base.name].keys() & of[arm.name].keys())
        times = [of[arm.name][number] for number in rounds]
        against = [of[base.name][number] for number in rounds]
        found[arm.name] = verdict(times, against, ALPHA / len(others), LEVEL, experiment.in_turn)
    return found


def is_clear(one: Verdict, within: float) -> bool:
    """Return whether a verdict is clear enough to stop measuring.

    It is if there is a statistically significant difference whose size is known precisely, or if
    the difference is too small to matter: at most `within`, relative to the step time.
    """
    if one.low is None or one.high is None or one.slowdown is None:
        return False
    if max(abs(one.low), abs(one.high)) <= within:
        return True
    return one.claimed and one.high - one.low <= max(within, _NARROW * abs(one.slowdown))


def whole_rounds(experiment: Experiment, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes without those of an incomplete last round."""
    last = max((one.round for one in outcomes), default=-1)
    before = [one for one in outcomes if one.round < last]
    ran = {one.arm for one in outcomes if one.round == last}
    whole = ran.issuperset(arm.name for arm in remaining_arms(experiment, before))
    return list(outcomes) if whole else before


def _last_failure(arm: Arm, outcomes: Sequence[Outcome]) -> str:
    return next(
        (one.failure for one in reversed(outcomes) if one.arm == arm.name and one.failure), "?"
    )


def _shuffle_arms(experiment: Experiment, arms: Sequence[Arm], number: int) -> list[Arm]:
    """Return a round's arms in random order, which is the same when the experiment is repeated."""
    return random.Random(f"{experiment.seed} {number}").sample(list(arms), len(arms))
