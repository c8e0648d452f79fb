"""Deviations of step times from their predictions, learned from measured plans.

Many causes of prediction errors are common to several plans: a strategy's communication, the cost
of recomputation, how well a micro-batch fits the caches. The logarithm of measured over predicted
time is modelled as a sum of one term per shared feature and one term for the plan itself, all
normally distributed with mean 0. Measurements of some plans therefore improve predictions for
others, more so the more features the plans share. See Rasmussen & Williams, "Gaussian Processes for
Machine Learning" (2006), equations 2.25 and 2.26.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from outpace.planner.plan_columns import Floats
from outpace.records.plan import Plan

# Standard deviations of logarithms, for features that plans may share. Those of the strategy and of
# the plan itself (with a measurement's noise) maximise the likelihood of planner_measured.json's
# rows. Micro-batch: one doubling changes the planner's error by 11 % (477 pairs of vtrain-single),
# 4 % (14 of vtrain-multi) or hardly at all (planner_measured.json). For recomputation and chunked
# losses there are too few rows.
_STRATEGY = 0.08
_SHARED: tuple[tuple[float, Callable[[Plan], Any]], ...] = (
    (0.04, lambda plan: (plan.checkpointing, plan.checkpoint_every)),
    (0.04, lambda plan: plan.loss),
)
_MICRO_BATCH, _DOUBLINGS = 0.1, 1.5  # sizes within this many doublings are similar
_OWN = 0.04
_BEFORE = 2  # weight of these spreads as a prior, in measurements
_TIMES = 2.0 ** np.arange(-1, 4.5, 0.5)  # factors on the spreads to try


@dataclass(frozen=True)
class Deviations:
    """Measured plans, each with its deviation from the prediction.

    A deviation in `missed` is the logarithm of measured over predicted time.
    """

    plans: tuple[Plan, ...]
    missed: Floats

    def predict(self, plans: Sequence[Plan]) -> tuple[Floats, Floats]:
        """Return each plan's expected deviation from its prediction, and the standard deviation.

        A deviation is the logarithm of measured over predicted time.
        """
        strategies, rest = self._fit_spread_factors
        by_strategy = _strategy_covariance(self.plans, plans)
        between = strategies**2 * by_strategy + rest**2 * _feature_covariance(self.plans, plans)
        told = np.linalg.solve(self._measured_covariance(strategies, rest), between)
        means: Floats = told.T @ self.missed
        prior = strategies**2 * _STRATEGY**2 + rest**2 * _SHARED_BY_ONE
        left = np.maximum(prior - np.einsum("ij,ij->j", told, between), 0.0)
        return means, np.sqrt(left + (rest * _OWN) ** 2)

    @cached_property
    def _fit_spread_factors(self) -> tuple[float, float]:
        """Return the most likely factors by which to multiply the prior standard deviations.

        The first is for the deviation that plans of one strategy share, the second for all others.
        """

        def minus_log_posterior(factors: tuple[float, float]) -> float:
            known = self._measured_covariance(*factors)
            seen = float(self.missed @ np.linalg.solve(known, self.missed))
            before = sum(_BEFORE * (2 * math.log(factor) + factor**-2) for factor in factors)
            return seen + float(np.linalg.slogdet(known)[1]) + before

        return min(product(_TIMES.tolist(), repeat=2), key=minus_log_posterior)

    def _measured_covariance(self, strategy: float, other: float) -> Floats:
        own = _feature_covariance(self.plans, self.plans) + _OWN**2 * np.eye(len(self.plans))
        return strategy**2 * _strategy_covariance(self.plans, self.plans) + other**2 * own


def _strategy_covariance(plans: Sequence[Plan], others: Sequence[Plan]) -> Floats:
    """Return the prior covariance of plans' deviations by strategy, (plans, others).

    A deviation is the logarithm of measured over predicted time. The covariance is constant for two
    plans with the same strategy, number of ranks and precision, and 0 for other plans.
    """
    kinds, of_others = ([(p.strategy, p.world_size, p.precision) for p in some]
                        for some in (plans, others))  # fmt: skip
    same = np.array([[one == other for other in of_others] for one in kinds], dtype=float)
    return _STRATEGY**2 * same.reshape(len(plans), len(others))


def _feature_covariance(plans: Sequence[Plan], others: Sequence[Plan]) -> Floats:
    """Return the prior covariance of plans' deviations by other features, (plans, others).

    A deviation is the logarithm of measured over predicted time. The covariance decreases with the
    ratio of the micro-batches. Equal recomputation and equal computation of the loss each add a
    constant.
    """
    sizes, of_others = (np.log2([plan.micro_batch for plan in some]) for some in (plans, others))
    distance = (sizes[:, None] - of_others[None, :]) / _DOUBLINGS
    covariance: Floats = _MICRO_BATCH**2 * np.exp(-(distance**2) / 2)
    for much, what in _SHARED:
        same = np.array([[what(one) == what(other) for other in others] for one in plans])
        covariance = covariance + much**2 * same.reshape(covariance.shape)
    return covariance


_SHARED_BY_ONE = sum(much**2 for much, _ in _SHARED) + _MICRO_BATCH**2
