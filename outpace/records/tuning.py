"""Tuning: the plans that were tried, their step times, and the fastest."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from outpace.records.base import Record, entry
from outpace.records.machine import Machine
from outpace.records.plan import Plan

TUNING_FILE = "tuning.json"


class PlanTrial(Record):
    """A trial: a few steps of one plan in separate processes."""

    summary_fields: ClassVar[tuple[str, ...]] = (
        "number", "title", "step_time_s", "tokens_per_s", "predicted_s", "peak_memory_bytes", "why",
    )  # fmt: skip

    number: PositiveInt
    why: str = Field(description="why the plan was tried")
    title: str
    plan: Plan
    first_predicted_s: PositiveFloat = Field(description="step time predicted before any trial")
    predicted_s: PositiveFloat = Field(description="step time predicted when the plan was chosen")
    step_time_s: PositiveFloat | None = entry("measured median; None: the trial failed")
    undisturbed_s: PositiveFloat | None = entry("first quartile of step times; None: unknown")
    raced: bool = entry("whether the trial is in the final round, where plans run in turn", False)
    tokens_per_s: PositiveFloat | None = entry(
        "median over all processes; None: failed, or no tokens"
    )
    samples_per_s: PositiveFloat | None = entry(
        "median over all processes; None: failed, or an older file"
    )
    peak_memory_bytes: NonNegativeInt | None = entry("bytes of tensors, maximum over processes")
    other_cores: PositiveFloat | None = entry(
        "cores that other processes kept busy during the trial; None: few, or unknown"
    )
    failure: str | None = None
    exit_code: int | None = entry("exit code of a failed trial; None: stopped, or not failed")
    took_s: NonNegativeFloat = Field(description="duration, including startup and shutdown")
    run: str = Field(description="the trial's directory, relative to the tuning's")

    @property
    def compared_s(self) -> float | None:
        """Return the step time by which plans are compared.

        The first quartile is preferred to the median, since other load only lengthens steps.
        """
        return self.undisturbed_s or self.step_time_s


def shown_rate(trials: Sequence[PlanTrial]) -> Literal["tokens_per_s", "samples_per_s"]:
    """Return the field with the throughput of trials: samples_per_s if the data has no tokens."""
    done = [trial for trial in trials if trial.step_time_s is not None]
    by_samples = any(one.samples_per_s for one in done)
    tokens = any(one.tokens_per_s for one in done) or not by_samples
    return "tokens_per_s" if tokens else "samples_per_s"


class Tuning(Record):
    """All trials of a tuning (tuning.json, next to the fastest plan's plan.json)."""

    has_checksum: ClassVar[bool] = True

    settings: dict[str, Any] = Field(description="settings of outpace train, as the user gave them")
    trials: tuple[PlanTrial, ...]
    best: PositiveInt | None = Field(description="number of the fastest trial; None: all failed")
    default: PositiveInt | None = Field(
        description="number of the trial with outpace train's default plan"
    )
    step_time_s: PositiveFloat | None = Field(
        description="of the fastest plan: the median of its last trial"
    )
    gain: float | None = Field(description="0.2: the fastest takes 20 % less time than the default")
    stopped: str = Field(description="why no further trial was run")
    considered: NonNegativeInt = Field(description="number of plans considered")
    took_s: NonNegativeFloat
    machine: Machine
    started: str
    command: tuple[str, ...] = Field(description="command that repeats the tuning")

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        numbers = [trial.number for trial in self.trials]
        if numbers != list(range(1, len(numbers) + 1)):
            raise ValueError(f"trials are numbered 1, 2, …, not {numbers}")
        for name, number in (("best", self.best), ("default", self.default)):
            if number is not None and number > len(numbers):
                raise ValueError(f"{name} is trial {number}, of {len(numbers)}")
        if self.best is not None and self.trial(self.best).step_time_s is None:
            raise ValueError(f"trial {self.best} failed: it cannot be the fastest")
        return self

    def trial(self, number: int) -> PlanTrial:
        """Return a trial by its number."""
        return self.trials[number - 1]

    def same_before(self, trial: PlanTrial) -> int | None:
        """Return the number of the first earlier trial of the same plan, or None."""
        first = next(one.number for one in self.trials if one.plan == trial.plan)
        return first if first < trial.number else None

    @property
    def compares(self) -> bool:
        """Return whether several plans were measured."""
        return len({one.plan.model_dump_json() for one in self.trials if one.step_time_s}) > 1

    @property
    def fastest(self) -> PlanTrial | None:
        """Return the trial of the fastest plan; None if all trials failed."""
        return None if self.best is None else self.trial(self.best)
