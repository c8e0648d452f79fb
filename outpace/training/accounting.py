"""Conversion of raw step results into the records and averages that users see."""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.records.errors import DivergedError
from outpace.records.measurement import (
    NEAR_SHARE,
    PARTS,
    WARMUP_STEPS,
    StepRecord,
    StepTimeCheck,
    TimeParts,
)
from outpace.training.step import Figures, RankReports, RawStep
from outpace.training.timing import durations

_KEPT_STEPS = 5000
OPENING_STEPS = 100  # number of steps that are compared with the expected step time


@dataclass(frozen=True)
class Costs:
    """Samples, tokens and FLOPs of a step over all ranks; None if unknown."""

    samples: int
    tokens: int | None
    model_flops: float | None
    hardware_flops: float | None
    peak_flops_per_s: float | None  # dense, in the plan's dtype, over all devices


@dataclass
class Ledger:
    """A run's totals so far, which also turns the raw figures of steps into StepRecords."""

    costs: Costs
    tokens: int | None
    samples: int
    skipped_steps: int = 0
    loss_sum: float = 0.0
    first_loss: float | None = None
    gathered: RankReports | None = None  # the ranks' reports on the last step
    costs_of: Callable[[int], Costs] | None = None  # costs by step, if they differ
    # The latest steps after warm-up, for medians; a limited number, so memory stays bounded.
    steady: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    # Step times of the first steps after warm-up.
    opening_s: list[float] = field(default_factory=list)
    _seen: int = 0

    @property
    def peak_memory_by_rank(self) -> tuple[int, ...]:
        """Peak memory in bytes of each rank so far; empty if unknown."""
        return () if self.gathered is None else self.gathered.peak_memory_by_rank

    def record(self, raw: RawStep) -> StepRecord:
        """Wait until the device has finished a step, add it to the totals, and return its record.

        Raises DivergedError if the loss or the gradient's norm is NaN or infinite.
        """
        figures = raw.figures()
        loss = figures.loss_sum / max(figures.count, 1.0)
        if not abs(loss) < float("inf"):
            raise DivergedError(f"the loss became {loss} at step {raw.step}")
        norm = figures.grad_norm
        if not figures.skipped and not norm < float("inf"):  # the update has spoilt the weights
            raise DivergedError(f"the gradient's norm became {norm} at step {raw.step}")
        costs = self.costs if self.costs_of is None else self.costs_of(raw.step)
        self.samples += costs.samples
        if self.tokens is not None and costs.tokens is not None:
            self.tokens += costs.tokens
        self.skipped_steps += figures.skipped
        self.loss_sum += loss
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.gathered = raw.gathered
        record = self._make_record(raw, figures, loss, costs)
        self._seen += 1
        if self._seen == WARMUP_STEPS + 1:
            self.steady.clear()
        self.steady.append(record)
        if self._seen > WARMUP_STEPS and len(self.opening_s) < OPENING_STEPS:
            self.opening_s.append(record.step_time_s)
        return record

    def _make_record(self, raw: RawStep, figures: Figures, loss: float, costs: Costs) -> StepRecord:
        parts = durations(raw.marks)
        step_time_s = sum(parts.values())
        model_rate = _rate(costs.model_flops, step_time_s)
        hardware_rate = _rate(costs.hardware_flops, step_time_s)
        return StepRecord(
            step=raw.step,
            tokens=self.tokens,
            samples=self.samples,
            loss=loss,
            lr=raw.lr,
            grad_norm=figures.grad_norm,
            step_time_s=step_time_s,
            **{f"{part}_s": parts.get(part, 0.0) for part in PARTS},
            tokens_per_s=_rate(costs.tokens, step_time_s),
            samples_per_s=costs.samples / step_time_s,
            model_flops_per_s=model_rate,
            hardware_flops_per_s=hardware_rate,
            mfu=_rate(model_rate, costs.peak_flops_per_s),
            hfu=_rate(hardware_rate, costs.peak_flops_per_s),
            peak_memory_bytes=raw.gathered.peak_memory_bytes,
            loss_scale=figures.loss_scale,
            skipped_steps=self.skipped_steps,
            cache_freed_bytes=raw.cache_freed_bytes,
        )

    def median_parts(self) -> TimeParts:
        """Return the typical times of a step's parts over the latest steps after warm-up."""
        names = TimeParts.model_fields
        return TimeParts.of_steps({name: [getattr(r, name) for r in self.steady] for name in names})

    def rate(self, name: str) -> float | None:
        """Return `name`, a field of Costs, per second over the latest steps after warm-up.

        If costs differ by step, it is their sum divided by the sum of the step times. Otherwise,
        the median step time is used.
        """
        if self.costs_of is None:
            return _rate(getattr(self.costs, name), self.median_step_time_s())
        rates = [getattr(record, f"{name}_per_s") for record in self.steady]
        if not rates or None in rates:
            return None
        times_s = [record.step_time_s for record in self.steady]
        amount = sum(rate * time_s for rate, time_s in zip(rates, times_s, strict=True))
        return _rate(amount, sum(times_s))

    def median_cache_freed_bytes(self) -> int | None:
        """Return the median bytes of cache freed in a step; None if the run frees no caches."""
        freed = [r.cache_freed_bytes for r in self.steady if r.cache_freed_bytes is not None]
        return int(statistics.median(freed)) if freed else None

    def check_step_time(self, expected_s: float | None) -> StepTimeCheck | None:
        """Compare the first steps after warm-up with the expected step time; None if unknown."""
        if expected_s is None or not self.opening_s:
            return None
        took_s = statistics.median(self.opening_s)
        return StepTimeCheck(
            expected_s=expected_s,
            step_time_s=took_s,
            mean_s=statistics.fmean(self.opening_s),
            steps=len(self.opening_s),
            kept=abs(took_s / expected_s - 1) <= NEAR_SHARE,
        )

    def median_step_time_s(self) -> float | None:
        """Return the median step time of the latest steps after warm-up; None if there are none."""
        return statistics.median(r.step_time_s for r in self.steady) if self.steady else None


def _rate(amount: float | None, per: float | None) -> float | None:
    return None if amount is None or not per else amount / per
