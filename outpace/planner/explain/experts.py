"""Notes on plans for models with experts: assumed load and kernels, and expert parallelism."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from outpace.catalog import efficiency
from outpace.catalog.stacks import Dispatcher, Experts
from outpace.planner.explain.reasons import compare_with_fastest
from outpace.planner.explain.titles import title
from outpace.planner.plan_columns import Floats, PlanBatch
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.alternatives import add_plans
from outpace.planner.search.branch_and_bound import SearchResult
from outpace.planner.search.finalists import simulate_pipelines
from outpace.planner.search.plan_choice import ROOMIER, PlanChoice, quickest
from outpace.planner.search.space import memory_options, to_plan
from outpace.planner.step_time.estimate import estimate
from outpace.records.units import show_seconds

_MATMULS: Mapping[Experts, str] = {
    "grouped": "grouped matmuls",
    "triton": "ScatterMoE's grouped matmuls",
    "loop": "the matmuls of one expert after another",
}
_SENDS: Mapping[Dispatcher, str] = {
    "allgather": "an all-gather of all tokens",
    "alltoall": "an all-to-all",
    "deepep": "DeepEP or HybridEP",
}


def expert_notes(job: PlanningProblem, result: SearchResult, listed: Sequence[int]) -> list[str]:
    """Return notes on a model's experts; empty for a dense model.

    If no listed plan uses expert parallelism, one note gives the time of the fastest plan that
    does.
    """
    if not job.outline.experts:
        return []
    sends = f"; expert parallelism sends tokens by {_SENDS[job.stack.dispatcher]}"
    alone, apart = job.question.device.uneven_experts
    return [
        f"Experts: times assume {job.stack.name}'s kernels: {_MATMULS[job.stack.experts]}"
        f"{sends if job.cluster.devices > 1 else ''}.",
        "Experts: tokens are assumed to be spread evenly, and none dropped. If some "
        "experts get most of them (a power law of 1.2), grouped matmuls were measured to take "
        f"{alone} times as long on one rank, {apart} times on "
        f"the slowest of several ranks with different experts ({efficiency.UNEVEN_SOURCE}).",
        *_expert_parallelism_note(job, result, listed),
    ]


def _expert_parallelism_note(
    job: PlanningProblem, result: SearchResult, listed: Sequence[int]
) -> list[str]:
    """Return a note on the fastest plan with expert parallelism; empty if one is already listed."""
    if result.layouts is None or (result.columns.ep[list(listed)] > 1).any():
        return []
    divided = np.flatnonzero(result.layouts.ep > 1)
    if not len(divided):
        return []

    def seconds(columns: PlanBatch) -> Floats:
        return estimate(job.question, columns).step_s

    choice = PlanChoice(
        result.layouts.select(divided), list(memory_options(job.wanted)), seconds,
        job.checked_bytes, job.least_bytes, job.limit, job.wanted.accepts,
    )  # fmt: skip
    most_s = ROOMIER * float(result.times.step_s[result.fastest])
    plan = quickest(choice, result.bound[divided], most_s)
    if plan is None:
        return ["Expert parallelism: no plan with it fits and takes less than twice as long."]
    result, place = add_plans(job.question, result, plan, job.checked_bytes), len(result.columns)
    times = simulate_pipelines(job.question, result.columns, result.times, np.array([place]))
    result = replace(result, times=times)
    words, took = title(to_plan(result.columns, place)), show_seconds(float(times.step_s[place]))
    against = compare_with_fastest(result, place)
    return [f"Expert parallelism: {words}, takes {took} at best, {against}."]
