"""Calibration: correct the planner's rates with measured steps.

Probes measure matmuls and copies in isolation. In a step, operators run one after the other, with
cold caches, autograd and hooks. Step time is a sum of terms, each proportional to one rate, so
measured steps reveal the error of each rate. Least squares on logarithms finds the correction
factors. A prior centred on 1 keeps a rate where the steps say little about it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outpace.planner.hardware.device import DeviceRates
from outpace.planner.hardware.links import Fabric
from outpace.planner.plan_columns import Floats, PlanBatch, of_plans
from outpace.planner.search.finalists import simulate_pipelines
from outpace.planner.step_time.estimate import estimate
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.outline import Outline
from outpace.records.plan import Plan

# Standard deviations of logarithms: of a rate relative to its datasheet or an isolated
# measurement, and of a step relative to its prediction from correct rates.
UNKNOWN = math.log(3)
_STEP_SPREAD = 0.05
_SOFT = 2.0  # in spreads: larger residuals are outliers
_SLOPE = 0.05  # step of logarithms, for derivatives


@dataclass(frozen=True)
class SeenStep:
    """A measured step: its model, plan, batch and time."""

    outline: Outline
    seq_len: int
    global_batch: int
    plan: Plan
    step_time_s: float


@dataclass(frozen=True)
class RateFit:
    """Device and link rates, for estimating plans."""

    device: DeviceRates
    fabric: Fabric


# Returns the rates with one of them changed, which multiplies its part of the time by a factor.
Adjustment = Callable[[RateFit, float], RateFit]


@dataclass(frozen=True)
class Calibration:
    """Calibrated rates by number of ranks, and their uncertainty.

    `off` is the median error of the predictions for the measured steps. `covariance` is the
    covariance of the logarithms of the adjustments, (adjustments, adjustments).
    """

    rates: dict[int, RateFit]
    off: float
    adjustments: tuple[Adjustment, ...]
    covariance: Floats

    def slopes(self, ranks: int, steps_s: Callable[[RateFit], Floats]) -> Floats:
        """Return derivatives of the logarithms of step times by those of adjustments.

        `steps_s` returns step times for given rates. The result is (adjustments, times).
        """
        rates = self.rates[ranks]
        here = np.log(steps_s(rates))
        changed = [np.log(steps_s(adjust(rates, math.exp(_SLOPE)))) for adjust in self.adjustments]
        return (np.array(changed) - here) / _SLOPE

    def spreads(self, slopes: Floats) -> Floats:
        """Return the standard deviations of the logarithms of times with these slopes.

        For the ratio of two times, pass the difference of their slopes: common errors cancel.
        """
        found: Floats = np.sqrt(np.einsum("ki,kl,li->i", slopes, self.covariance, slopes))
        return found


def calibrate(
    rates: Mapping[int, RateFit], seen: Sequence[SeenStep], spread: float = UNKNOWN
) -> Calibration:
    """Return the rates that best predict the measured steps in `seen`.

    `rates` has one machine's rates by number of ranks; all of them are corrected by the same
    factors. `spread` is the prior uncertainty of a rate, as the standard deviation of its
    logarithm.
    """
    from scipy.optimize import least_squares  # slow to import, and only needed here

    adjustments, groups = _all_adjustments(next(iter(rates.values()))), _group_steps(seen)
    took = np.concatenate([np.empty(0), *(group.step_time_s for group in groups)])

    def adjust_rates(logs: Floats) -> dict[int, RateFit]:
        found = dict(rates)
        for adjust, log in zip(adjustments, logs, strict=True):
            found = {ranks: adjust(one, math.exp(log)) for ranks, one in found.items()}
        return found

    def log_errors(logs: Floats) -> Floats:
        adjusted = adjust_rates(logs)
        predicted_s = np.concatenate(
            [np.empty(0), *(group.steps_s(adjusted[group.ranks]) for group in groups)]
        )
        errors: Floats = np.log(predicted_s / took)
        return errors

    def residuals(logs: Floats) -> Floats:
        return np.concatenate([_limit_outliers(log_errors(logs) / _STEP_SPREAD), logs / spread])

    found = least_squares(residuals, np.zeros(len(adjustments)), xtol=1e-4, ftol=1e-5)
    off = float(np.median(np.abs(log_errors(found.x)))) if seen else 0.0
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return Calibration(adjust_rates(found.x), off, tuple(adjustments), covariance)


def _limit_outliers(errors: Floats) -> Floats:
    """Let squared errors beyond _SOFT grow only linearly, because some steps were disturbed."""
    squares = 2 * _SOFT**2 * (np.sqrt(1 + (errors / _SOFT) ** 2) - 1)
    return np.sign(errors) * np.sqrt(squares)


@dataclass(frozen=True)
class _StepGroup:
    """Measured steps with the same model, batch and number of ranks; `columns` has their plans."""

    ranks: int
    outline: Outline
    seq_len: int
    columns: PlanBatch
    step_time_s: Floats

    def steps_s(self, rates: RateFit) -> Floats:
        return steps_s(
            StepTimeQuestion(self.outline, self.seq_len, rates.device, rates.fabric), self.columns
        )


def steps_s(question: StepTimeQuestion, columns: PlanBatch) -> Floats:
    """Return the step times of plans in seconds, with every pipeline simulated."""
    pipelines = np.nonzero(columns.pp > 1)[0]
    return simulate_pipelines(question, columns, estimate(question, columns), pipelines).step_s


def _group_steps(seen: Sequence[SeenStep]) -> list[_StepGroup]:
    groups: dict[tuple[int, str, int, int], list[SeenStep]] = {}
    for one in seen:
        model = one.outline.model_dump_json()
        key = (one.plan.world_size, model, one.seq_len, one.global_batch)
        groups.setdefault(key, []).append(one)
    return [
        _StepGroup(
            of[0].plan.world_size,
            of[0].outline,
            of[0].seq_len,
            of_plans([one.plan for one in of], of[0].global_batch, of[0].outline.layers),
            np.array([one.step_time_s for one in of]),
        )
        for of in groups.values()
    ]


def _all_adjustments(rates: RateFit) -> list[Adjustment]:
    return [
        *(_dtype_adjustment("best_flops_per_s", dtype) for dtype in rates.device.best_flops_per_s),
        *(_dtype_adjustment("attention_rates", dtype) for dtype in rates.device.attention_rates),
        _adjust_memory, _adjust_operators, _adjust_optimizer, _adjust_units, _adjust_links,
        _adjust_gathers, _adjust_scatters, _adjust_latency,
    ]  # fmt: skip


def _dtype_adjustment(field: str, dtype: str) -> Adjustment:
    def adjust(rates: RateFit, factor: float) -> RateFit:
        before = getattr(rates.device, field)
        return _replace_device_rates(rates, **{field: {**before, dtype: before[dtype] / factor}})

    return adjust


def _replace_device_rates(rates: RateFit, **values: Any) -> RateFit:
    return replace(rates, device=replace(rates.device, **values))


def _adjust_memory(rates: RateFit, factor: float) -> RateFit:
    return _replace_device_rates(rates, memory_bytes_per_s=rates.device.memory_bytes_per_s / factor)


def _adjust_operators(rates: RateFit, factor: float) -> RateFit:
    return _replace_device_rates(rates, operator_s=rates.device.operator_s * factor)


def _adjust_optimizer(rates: RateFit, factor: float) -> RateFit:
    return _replace_device_rates(rates, optimizer_share=rates.device.optimizer_share / factor)


def _adjust_units(rates: RateFit, factor: float) -> RateFit:
    return _replace_device_rates(rates, unit_s=rates.device.unit_s * factor)


def _adjust_links(rates: RateFit, factor: float) -> RateFit:
    fabric = rates.fabric
    return replace(
        rates,
        fabric=replace(
            fabric,
            inside_bytes_per_s=fabric.inside_bytes_per_s / factor,
            across_bytes_per_s=fabric.across_bytes_per_s / factor,
            pair_bytes_per_s=fabric.pair_bytes_per_s / factor,
        ),
    )


def _adjust_gathers(rates: RateFit, factor: float) -> RateFit:
    fabric = rates.fabric
    return replace(rates, fabric=replace(fabric, gather_share=fabric.gather_share / factor))


def _adjust_scatters(rates: RateFit, factor: float) -> RateFit:
    fabric = rates.fabric
    return replace(rates, fabric=replace(fabric, scatter_share=fabric.scatter_share / factor))


def _adjust_latency(rates: RateFit, factor: float) -> RateFit:
    protocols = tuple(
        one._replace(base_s=one.base_s * factor, inside_s=one.inside_s * factor,
                     across_s=one.across_s * factor)
        for one in rates.fabric.protocols
    )  # fmt: skip
    return replace(rates, fabric=replace(rates.fabric, protocols=protocols))
