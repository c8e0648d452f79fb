"""Comparison: the arms, the outcome of each round, and the conclusions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from outpace.records.base import Record, entry
from outpace.records.evidence import fewest_rounds
from outpace.records.machine import Machine
from outpace.records.measurement import TimeParts
from outpace.records.units import show_share

_FAILS = 2  # failures after which an arm is dropped


class Arm(Record):
    """One of the options that a comparison runs: settings of outpace train, or a command."""

    name: str = Field(min_length=1)
    settings: dict[str, Any] = entry(
        "settings of outpace train, in addition to the common ones", {}
    )
    environment: dict[str, str] = entry("environment variables to set", {})
    command: str | None = entry("command to run, instead of settings")


class Experiment(Record):
    """The options (arms) that a comparison runs, and its limits.

    A round runs every arm once, in random order.
    """

    has_checksum: ClassVar[bool] = True

    arms: tuple[Arm, ...]
    common: dict[str, Any] = entry("settings of every arm", {})
    metric: str | None = entry("regular expression whose group matches the figure in the output")
    rounds: PositiveInt = entry("maximum number of rounds", 40)
    budget_s: PositiveFloat = entry("no round starts after this time", 600.0)
    within: PositiveFloat = entry("relative differences below this are ignored", 0.015)
    seed: NonNegativeInt = entry("random seed of the order of the arms", 0)
    price: PositiveFloat | None = entry("price per device-hour; on CPUs, per host-hour")
    in_turn: bool = entry("whether arms run in turn; False: finished runs are compared", True)

    @model_validator(mode="after")
    def _check_arms(self) -> Self:
        names = [arm.name for arm in self.arms]
        if len(names) < 2:
            alone = f"{names[0]} with" if names else ""
            raise ValueError(
                f"there is nothing to compare {alone}".rstrip() + ": name at least two arms, as in "
                "outpace compare ddp zero3 --nproc 2, or give --command twice"
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"two arms are called {twice[0]}. Give each its own name, as in NAME:SETTINGS, or "
                "name two different runs"
            )
        commands = sum(arm.command is not None for arm in self.arms)
        if commands not in (0, len(names)):
            raise ValueError(
                "some arms are commands and others are settings. Use either commands or settings "
                "for all arms"
            )
        if commands and self.metric is None:
            raise ValueError(
                "commands need a metric: a regular expression with one group around the number, "
                "such as 'step time: ([0-9.]+)'"
            )
        self._check_effect(commands > 0)
        return self

    def _check_effect(self, commands: bool) -> None:
        if not commands and self.metric is not None:
            raise ValueError(
                f"metric {self.metric!r} applies to the output of commands, but no arm is a "
                "command. Leave out metric"
            )
        settings = {*self.common, *(name for arm in self.arms for name in arm.settings)}
        if commands and settings:
            raise ValueError(
                f"commands run unchanged, so {', '.join(sorted(settings))} would have no effect. "
                "Put the settings into the commands, or vary them through environment variables in "
                "a grid"
            )


class Verdict(Record):
    """Slowdown of an arm relative to the first arm (0.08: 8 % slower), with its interval."""

    rounds: NonNegativeInt
    slowdown: float | None = Field(description="median over the rounds; None: no rounds")
    low: float | None = Field(description="lower end of the interval; None: too few rounds")
    high: float | None
    level: float
    claimed: bool = Field(
        description="whether there is a difference at level `alpha` (an anytime-valid test)"
    )
    slower: bool | None = entry("whether most rounds were slower; None: no claim")
    alpha: float
    in_turn: bool = entry("False: rounds are blocks of two finished runs, so no claim", True)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return both ends of the interval; None if there were too few rounds."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def claimed_faster(self) -> bool:
        """Return whether a statistical test finds the arm faster than the first.

        The median slowdown must agree.
        """
        return self.claimed and not self._most_were_slower and (self.slowdown or 0.0) < 0

    @property
    def claimed_slower(self) -> bool:
        """Return whether a statistical test finds the arm slower than the first.

        The median slowdown must agree.
        """
        return self.claimed and self._most_were_slower and (self.slowdown or 0.0) > 0

    @property
    def _most_were_slower(self) -> bool:
        """Whether most rounds were slower than the first arm's.

        Older records do not say so; for them, the median decides.
        """
        return (self.slowdown or 0.0) > 0 if self.slower is None else self.slower

    def words(
        self, arm: str, against: str, quantity: tuple[str, str] = ("slower", "faster")
    ) -> str:
        """Return the verdict as a sentence.

        `quantity` has the words for a larger and a smaller value.
        """
        if self.slowdown is None:
            return f"{arm} and {against}: nothing was measured"
        if not self.in_turn:
            return self._two_runs_words(self.slowdown, arm, against)
        if self.low is None or self.high is None:
            return self._undecided_words(self.slowdown, arm, against, quantity)
        if self.claimed:
            slower = self._most_were_slower
            size = self.slowdown if slower else -self.slowdown
            if size < 0:  # claimed early, but the median has changed its sign since
                return (
                    f"{arm} was {quantity[not slower]} than {against} in most rounds at the time "
                    f"of the claim, but the median is now {_percent(self.slowdown)} "
                    f"({100 * self.level:.0f} %: {_format_interval(self.low, self.high)})"
                )
            if self.low > 1 and quantity[0] == "slower":
                return (
                    f"{arm} takes {1 + self.slowdown:.1f} times as long as {against} "
                    f"({100 * self.level:.0f} %: {1 + self.low:.1f} to {1 + self.high:.1f})"
                )
            return (
                f"{arm} is {show_share(size or 0.0)} {quantity[not slower]} than {against} "
                f"({100 * self.level:.0f} %: {_format_interval(self.low, self.high)})"
            )
        if self.low > 0 or self.high < 0:
            if self.rounds < fewest_rounds(self.alpha):
                return self._undecided_words(self.slowdown, arm, against, quantity)
            return (
                f"{arm} and {against}: no significant difference at {100 * self.alpha:.2g} %: "
                f"{_percent(self.low)} to {_percent(self.high)} ({100 * self.level:.0f} %)"
            )
        largest = max(abs(self.low), abs(self.high))
        return (
            f"{arm} and {against} are within the noise: no difference larger than "
            f"{show_share(largest)} either way. Run more rounds to detect smaller ones"
        )

    def _undecided_words(
        self, slowdown: float, arm: str, against: str, quantity: tuple[str, str]
    ) -> str:
        """Return a sentence that asks for more rounds, and states the median so far."""
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        size = f"is {show_share(abs(slowdown))} {quantity[slowdown < 0]} than"
        if slowdown > 1 and quantity[0] == "slower":  # easier to read than hundreds of per cent
            size = f"takes {1 + slowdown:.1f} times as long as"
        elif slowdown == 0:
            size = "equals"
        return (
            f"{rounds} cannot decide between {arm} and {against}: at least "
            f"{fewest_rounds(self.alpha)} are needed. In the median so far, {arm} {size} {against}"
        )

    def _two_runs_words(self, slowdown: float, arm: str, against: str) -> str:
        """Return a sentence that compares two finished runs.

        It claims no difference, since speed also varies from start to start.
        """
        parts = "with too few steps to measure how much they vary"
        if self.low is not None and self.high is not None:
            parts = f"{_percent(self.low)} to {_percent(self.high)} over parts of the runs"
        if slowdown > 1:  # as factors, which are easier to read than hundreds of per cent
            if self.low is not None and self.high is not None:
                parts = f"{1 + self.low:.1f} to {1 + self.high:.1f} times over parts of the runs"
            took = f"{1 + slowdown:.1f} times as long as"
        else:
            took = f"{show_share(abs(slowdown))} {'longer' if slowdown > 0 else 'less time'} than"
        return (
            f"a step of {arm} took {took} one of {against} in these two runs ({parts}). Two "
            "identical runs may differ by as much. To claim a difference, let outpace compare "
            "train the arms in turn: give it arms instead of runs"
        )


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _format_interval(low: float, high: float) -> str:
    if low < 0 < high:
        return f"{_percent(low)} to {_percent(high)}"
    ends = sorted((abs(low), abs(high)))
    return " to ".join(map(show_share, ends))


# A compared value, which is positive because ratios are taken.
_Figure = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Outcome(Record):
    """One run of an arm."""

    arm: str
    round: NonNegativeInt
    value: _Figure | None = Field(description="step time in seconds, or the metric; None: failed")
    failure: str | None = None
    run: str | None = entry("the run's directory, relative to the experiment's")
    took_s: NonNegativeFloat = entry("duration, including startup and shutdown", 0.0)


def remaining_arms(experiment: Experiment, outcomes: Sequence[Outcome]) -> list[Arm]:
    """Return the arms that have not failed repeatedly."""
    return [
        arm
        for arm in experiment.arms
        if sum(one.arm == arm.name and one.value is None for one in outcomes) < _FAILS
    ]


class ArmResult(Record):
    """Medians over an arm's runs."""

    summary_fields: ClassVar[tuple[str, ...]] = (
        "arm", "step_time_s", "tokens_per_s", "peak_memory_bytes", "final_loss",
    )  # fmt: skip

    arm: str
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    model_flops_per_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_by_rank: tuple[int, ...] = ()
    parts: TimeParts | None = None
    sent_bytes: int | None = entry("bytes that all ranks send in a step")
    idle_share: float | None = entry(
        "share of time in which the ranks' devices, or on CPUs their main threads, were idle"
    )
    device_utilisation: float | None = entry(
        "mean share of time in which the run's devices computed"
    )
    core_utilisation: float | None = entry("mean share of time in which the hosts' cores were busy")
    other_cores: float | None = entry("cores that other processes kept busy; None: few, or unknown")
    final_loss: float | None = None
    price_per_million_tokens: float | None = None
    metric: float | None = None
    verdict: Verdict | None = entry("against the first arm; None for the first arm")
    facts: dict[str, str] = entry(
        "facts that determined the arm's runs, joined by → if they changed between runs", {}
    )


class Comparison(Record):
    """Result of a comparison, saved as comparison.json."""

    has_checksum: ClassVar[bool] = True

    experiment: Experiment
    command: tuple[str, ...] = Field(description="command that repeats the comparison")
    arms: tuple[ArmResult, ...]
    outcomes: tuple[Outcome, ...]
    differing: tuple[str, ...] = entry("unintended differences between the arms", ())
    differences: tuple[str, ...] = entry(
        "how finished runs differ, and in which parts of a step", ()
    )
    losses: str | None = entry("whether the loss curves agree, as a sentence")
    stopped: str = Field(description="why no further round was run")
    took_s: float
    machine: Machine
    started: str
    beside: tuple[str, ...] = entry(
        "for a repeated comparison: whether the result is the same, and what changed", ()
    )

    def verdicts(self) -> Mapping[str, Verdict]:
        """Return the verdicts by arm, for all arms but the first."""
        return {one.arm: one.verdict for one in self.arms if one.verdict is not None}
