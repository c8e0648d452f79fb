"""Masks of plans with compatible options, and of plans that outpace cannot train."""

from typing import Any

import numpy as np

from outpace.planner.plan_columns import OFFLOADS, OPTIMIZERS, SCHEDULE_NAMES, PlanBatch
from outpace.records.optimizers import LOW, PLAIN_ADAMW
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import IN_BACKWARD
from outpace.records.precisions import MASTERS, PURE, SCALED

GATHERING_LEVELS = (2, 3)  # ZeRO levels that gather parameters before they are used


def untrained_mask(c: PlanBatch) -> Any:
    """Return which plans outpace cannot train (`records.plan.Plan.training_obstacle`)."""
    product, piped = c.strategy_in("3d"), c.pp > 1
    found = (c.async_tp & (c.tp > 1)) | (c.ep > 1)
    found |= product & (c.dp_shard > 1) & (c.zero != 3)
    usual = np.array([
        SCHEDULES[name].stages_per_rank if name in SCHEDULES else 1 for name in SCHEDULE_NAMES
    ])  # fmt: skip
    found |= piped & (c.even_stages | (product & c.splits_backward()))
    return found | (piped & ~c.schedule_in("mp") & (c.stages_per_rank != usual[c.schedule]))


def options_match(c: PlanBatch) -> Any:
    """Return which layouts have compatible precision, optimizer, schedule and compilation."""
    fine = ~(c.precision_in("fp8") & (c.tp > 1))
    low = np.isin(c.optimizer, [OPTIMIZERS.index(name) for name in LOW])
    fine &= low | ~c.precision_in(*PURE)
    fine &= ~c.in_backward | (c.strategy_in(*IN_BACKWARD) & ~c.precision_in(*SCALED))
    return fine & ~(c.splits_backward() & ((c.dp_replicate > 1) | c.compile))


def adapters_match(c: PlanBatch) -> Any:
    """Return which plans train all weights, or train adapters that the planner can estimate."""
    if c.common_adapters is None:
        return np.ones(len(c), bool)
    fine = np.ones(len(c), bool)
    for _, unknown in c.unknown_with_adapters():
        fine &= ~unknown
    return fine


def possible_mask(c: PlanBatch) -> Any:
    """Return which combinations are valid plans, by the rules of `records.plan`."""
    fine = options_match(c) & ~(c.splits_backward() & ((c.modes[:, 0] < 1) | c.chunked_loss))
    gathers = np.isin(c.zero, GATHERING_LEVELS) | c.strategy_in("single")
    fine &= ~((c.offload_parameters == OFFLOADS.index("cpu")) & ~gathers)
    adamw = np.isin(c.optimizer, [OPTIMIZERS.index(name) for name in PLAIN_ADAMW])
    elsewhere = (c.offload_parameters > 0) | (c.offload_optimizer > 0)
    fine &= ~(elsewhere & (~adamw | c.in_backward | c.precision_in(*MASTERS)))
    fine &= ~((c.offload_activations > 0) & (c.compile | (c.pp > 1)))
    fine &= ~((c.offload_parameters == OFFLOADS.index("disk")) & c.compile)
    fine &= ~(elsewhere & (c.pp > 1))
    naive = c.strategy_in("dp", "ps", "ring", "mp")
    fine &= ~(naive & (elsewhere | (c.offload_activations > 0)))
    return fine & adapters_match(c)
