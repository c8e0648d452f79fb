"""Estimated time and memory of one plan, or its traced memory."""

import math
from dataclasses import replace

from outpace.jobs.planning.request import PlanQuestion, job
from outpace.planner.plan_estimate import estimate_plan
from outpace.planner.problem import PlanningProblem
from outpace.records.errors import BadInputError
from outpace.records.estimate import RankedPlan
from outpace.records.plan import Plan


def estimate(
    asked: PlanQuestion, plan: Plan, name: str = "the plan", *, trace: bool = False
) -> tuple[RankedPlan, PlanningProblem]:
    """Estimate the time and memory of a plan; also return the planning problem.

    `name`: the plan's name in error messages. With `trace`, the real model runs under fake tensors,
    which gives its exact peak memory. Raises BadInputError if the plan is for another number of
    devices, or cannot be estimated.
    """
    question = job(asked)
    if plan.world_size != question.wanted.world:
        raise BadInputError(
            f"{name} is for {plan.world_size} devices, but {question.cluster.nodes} × "
            f"{question.cluster.fabric.per_node} = {question.wanted.world} are requested. Change "
            "the plan's axes, or --nodes and --devices-per-node."
        )
    if asked.global_batch is None:
        # The default, rounded up to a multiple of the samples that all ranks process in one pass.
        least = plan.samples_per_pass * plan.data_parallel
        batch = least * math.ceil(question.wanted.global_batch / least)
        question = replace(question, wanted=replace(question.wanted, global_batch=batch))
    try:
        planned = estimate_plan(question, plan)
    except BadInputError as error:
        raise BadInputError(f"{name}: {error}") from None
    if trace:
        from outpace.jobs.memory.traced_plan import use_traced_memory

        planned = use_traced_memory(planned, asked.model, question)
    return planned, question
