"""Tokens and FLOPs of a step on a task's samples, whose lengths differ."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from outpace.data.padded_batches import PaddedDataset
from outpace.planner.model.flops import step_flops
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings
from outpace.training.accounting import Costs


def step_costs(
    dataset: PaddedDataset,
    settings: TrainSettings,
    plan: Plan,
    spec: ModelSpec | None,
    labels: Sequence[str] | None,
    peak_flops_per_s: float | None,
    adapters: int | None = None,
) -> Callable[[int], Costs]:
    """Return a function that maps a step to its costs.

    Tokens and model FLOPs exclude padding; hardware FLOPs include it. If only adapters are trained,
    `adapters` is the number of their parameters.
    """

    def costs_of(step: int) -> Costs:
        slots = np.arange(settings.global_batch) + (step - 1) * settings.global_batch
        work = dataset.sample_lengths(settings.seed, slots, plan.samples_read)
        model = hardware = None
        if spec is not None:
            model = _sum_step_flops(spec, work.lengths, labels, adapters)
            hardware = _sum_step_flops(spec, work.padded, labels, adapters, plan)
        return Costs(
            samples=settings.global_batch,
            tokens=int(work.lengths.sum()),
            model_flops=model,
            hardware_flops=hardware,
            peak_flops_per_s=peak_flops_per_s,
        )

    return costs_of


def _sum_step_flops(
    spec: ModelSpec,
    lengths: np.ndarray,
    labels: Sequence[str] | None,
    adapters: int | None,
    plan: Plan | None = None,
) -> float:
    checkpointing = None if plan is None else plan.modes(spec.layers)
    whole = labels is None
    total = sum(
        step_flops(spec, length, count, checkpointing, adapters, whole)
        for length, count in Counter(lengths.tolist()).items()
    )
    if labels is not None:  # pooler and classes, for one token per sample, forward and backward
        pooler = 0 if spec.causal else spec.hidden**2
        total += 6 * len(lengths) * (pooler + spec.hidden * len(labels))
    return float(total)
