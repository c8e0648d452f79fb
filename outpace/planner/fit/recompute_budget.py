"""Choice of blocks to recompute, so that a step fits a memory budget at the lowest cost in time.

All blocks are equal, so a choice is a number of blocks per mode, and all choices can be tried. Feng
and Huang ("Optimal Gradient Checkpoint Search", arXiv 1808.00079) and Jain et al. ("Checkmate",
arXiv 1910.02653) solve the problem for unequal layers.
"""

from collections.abc import Mapping
from typing import get_args

from outpace.planner.fit.cost import Cost, Predict
from outpace.planner.pipeline.stages import layers_per_stage
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Checkpointing, Plan
from outpace.records.units import show_bytes

MODES: tuple[Checkpointing, ...] = get_args(Checkpointing)
Counts = dict[Checkpointing, int]
# The first choice assumes that recomputing any block saves the same memory. The peak is convex in
# the numbers of blocks, so this gives an upper bound, and one prediction (slow if modes differ) is
# usually enough. If the prediction exceeds the budget, the next choice must save that much more.
_TRIES = 3


def plan_within(plan: Plan, spec: ModelSpec, budget_bytes: int, predict: Predict) -> Plan:
    """Return `plan` with the fastest choice of recomputed blocks that fits into the budget.

    Pipeline stages with fewer blocks use the beginning of the largest stage's choice. Raises
    BadInputError if the plan does not fit even with full recomputation.
    """
    stages = layers_per_stage(spec, plan.stages)
    plain = predict(plan)
    if plain.peak_memory_bytes <= budget_bytes:
        return plan
    uniform = {mode: predict(_use_mode_for_all_blocks(plan, mode)) for mode in MODES[1:]}
    length = max(stages)
    saved = {
        m: (plain.peak_memory_bytes - c.peak_memory_bytes) / length for m, c in uniform.items()
    }
    plain_s = plain.step_s
    costs = {
        mode: (cost.step_s - plain_s) / length
        for mode, cost in uniform.items()
        if cost.step_s is not None and plain_s is not None
    }
    if len(costs) < len(uniform):  # times are needed to compare mixtures
        return _use_first_fitting_mode(plan, uniform, budget_bytes)
    need = plain.peak_memory_bytes - budget_bytes
    for _ in range(_TRIES):
        counts = cheapest(length, saved, costs, need)
        if counts is None:
            break
        found = with_modes(plan, stages, counts)
        over = predict(found).peak_memory_bytes - budget_bytes
        if over <= 0:
            return found
        need += over
    return _use_first_fitting_mode(plan, uniform, budget_bytes)


def _use_first_fitting_mode(
    plan: Plan, uniform: Mapping[Checkpointing, Cost], budget_bytes: int
) -> Plan:
    """Return the plan with the same recomputation mode for all blocks: the first that fits.

    Raises BadInputError if none fits.
    """
    for mode, cost in uniform.items():
        if cost.peak_memory_bytes <= budget_bytes:
            return _use_mode_for_all_blocks(plan, mode)
    least = min(cost.peak_memory_bytes for cost in uniform.values())
    raise BadInputError(
        f"memory budget {show_bytes(budget_bytes)}: with every block recomputed, a step still "
        f"needs {show_bytes(least)} on its fullest rank. Use a smaller micro-batch, a strategy "
        "that shards parameters, gradients and optimizer states (zero3), or a larger budget."
    )


def cheapest(
    blocks: int,
    saved: Mapping[Checkpointing, float],
    costs: Mapping[Checkpointing, float],
    need: float,
) -> Counts | None:
    """Return the cheapest numbers of blocks per recomputation mode that save `need` bytes.

    Returns None if no numbers do. `saved` and `costs` are the bytes and the seconds per block. The
    search is exact: it tries all numbers of blocks for two modes, and adds the smallest number for
    the third mode that is sufficient.
    """
    *outer, inner = MODES[1:]
    best: tuple[float, Counts] | None = None
    for first in range(blocks + 1):
        for second in range(blocks - first + 1):
            left = need - first * saved[outer[0]] - second * saved[outer[1]]
            third = max(0, _count_needed(left, saved[inner]))
            if first + second + third > blocks:
                continue
            counts = {outer[0]: first, outer[1]: second, inner: third}
            cost = sum(costs[mode] * number for mode, number in counts.items())
            if best is None or cost < best[0]:
                best = (cost, counts)
    return None if best is None else best[1]


def _count_needed(need: float, each: float) -> int:
    """Return how many times `each` is needed to reach `need`; a huge number if `each` is 0."""
    if need <= 0:
        return 0
    return int(-(-need // each)) if each > 0 else 2**62


def with_modes(plan: Plan, stages: tuple[int, ...], counts: Counts) -> Plan:
    """Return the plan with these numbers of blocks per mode in its largest stage.

    Blocks that recompute most come first. When the backward reaches them, it has freed the memory
    of later blocks, which the recomputed activations can then use.
    """
    pattern = [mode for mode in reversed(MODES) for _ in range(counts.get(mode, 0))]
    pattern += ["none"] * (max(stages) - len(pattern))
    layers = tuple(mode for stage in stages for mode in pattern[:stage])
    return Plan.parse(
        {**_without_recomputation(plan), "checkpoint_layers": layers}, "memory budget"
    )


def _use_mode_for_all_blocks(plan: Plan, mode: Checkpointing) -> Plan:
    return Plan.parse({**_without_recomputation(plan), "checkpointing": mode}, "memory budget")


def _without_recomputation(plan: Plan) -> dict[str, object]:
    return {
        **plan.model_dump(),
        "checkpointing": "none",
        "checkpoint_every": 1,
        "checkpoint_layers": (),
    }
