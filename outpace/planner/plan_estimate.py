"""Estimates of single plans: time, memory, cost, and similar measured cases."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

import numpy as np

from outpace.catalog.accelerators import ACCELERATORS
from outpace.planner.calibration.measured_cases import (
    Likeness,
    extrapolations,
    nearest_cases,
    spread_beyond,
)
from outpace.planner.calibration.prediction_interval import Interval, QuestionKind, interval
from outpace.planner.explain.axis_links import axis_links
from outpace.planner.explain.reasons import explain_plan
from outpace.planner.explain.titles import given_title, title, varied_options
from outpace.planner.hardware.device import dtype_of
from outpace.planner.memory import peak as memory
from outpace.planner.model.outline import parameters
from outpace.planner.model.outline_flops import recomputed_flops, step_flops
from outpace.planner.plan_columns import MODES, Floats, PlanBatch, of_plans
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.branch_and_bound import SearchResult
from outpace.planner.search.finalists import simulate_pipelines
from outpace.planner.search.space import to_plan
from outpace.planner.step_time.estimate import StepTimes, estimate, offloading
from outpace.planner.step_time.setup import set_up
from outpace.records.estimate import Estimate, OffloadingPart, RankedPlan, Role
from outpace.records.plan import Plan


def prediction_interval(job: PlanningProblem) -> Interval:
    """Return the prediction interval for a problem's device, type of model and software stack."""
    chip = ACCELERATORS.get(job.cluster.device.name)
    kind = QuestionKind(
        architecture=None if chip is None else chip.architecture,
        experts=bool(job.outline.experts),
        adapters=job.wanted.adapters is not None,
        software=job.stack.name,
        devices=job.cluster.devices,
    )
    return interval(job.cluster.calibrated, job.cluster.guessed, kind, job.cluster.residuals)


def likeness(job: PlanningProblem, plan: Plan) -> Likeness:
    """Return the features by which a plan is compared with measured cases."""
    device = job.cluster.device
    chip = ACCELERATORS.get(device.name)
    return Likeness(
        devices=plan.world_size,
        plan=plan,
        parameters=parameters(job.outline) / 1e9,
        experts=bool(job.outline.experts),
        chip=device.name,
        architecture=None if chip is None else chip.architecture,
        seq_len=job.wanted.seq_len,
        stack=job.stack.name,
    )


def _measured_fields(job: PlanningProblem, plan: Plan) -> dict[str, Any]:
    """Return the fields of `RankedPlan` that compare a plan with measured cases.

    The result is empty on CPUs and for models without a vocabulary, for which nothing was measured.
    """
    if job.cluster.device.kind == "cpu" or not job.outline.vocab:
        return {}
    return {
        "cases": nearest_cases(likeness(job, plan)), "extrapolated": _extrapolations(job, plan)
    }  # fmt: skip


def _extrapolations(job: PlanningProblem, plan: Plan) -> tuple[str, ...]:
    if job.cluster.device.kind == "cpu" or not job.outline.vocab:
        return ()
    return extrapolations(likeness(job, plan))


def estimate_plan(job: PlanningProblem, plan: Plan) -> RankedPlan:
    """Estimate one plan, whether or not it fits.

    Raises BadInputError if the plan does not divide the global batch.
    """
    columns = of_plans([plan], job.wanted.global_batch, job.outline.layers)
    times = estimate(job.question, columns)
    times = simulate_pipelines(job.question, columns, times, np.array([0]))
    return RankedPlan(
        title=given_title(plan, job.wanted.precision, job.wanted.vary),
        plan=plan,
        identity=plan.identity(job.wanted.global_batch),
        estimate=_make_estimate(job, columns, times, job.required_bytes(columns), 0),
        why="as given",
        untrained=job.outline.untrained or plan.training_obstacle,
        placement=axis_links(job.cluster, plan),
        **_measured_fields(job, plan),
    )


def describe_plan(
    job: PlanningProblem,
    found: SearchResult,
    place: int,
    roles: tuple[Role, ...],
    listed: Sequence[int],
) -> RankedPlan:
    """Return the record of a search's plan at index `place`, with explanations for the user.

    `listed` has the indices of all plans that are shown.
    """
    plan = to_plan(found.columns, place)
    return RankedPlan(
        title=", ".join([title(plan), *varied_options(plan, job.wanted.vary)]),
        plan=plan,
        identity=plan.identity(job.wanted.global_batch),
        estimate=_make_estimate(job, found.columns, found.times, found.needs, place),
        why=explain_plan(job, found, place, roles, listed),
        roles=roles,
        untrained=job.outline.untrained or plan.training_obstacle,
        placement=axis_links(job.cluster, plan),
        **_measured_fields(job, plan),
    )


def _make_estimate(
    job: PlanningProblem, columns: PlanBatch, times: StepTimes, needs: Floats, place: int
) -> Estimate:
    wanted, device = job.wanted, job.cluster.device
    seconds = float(times.step_s[place])
    samples = wanted.global_batch
    tokens = samples * wanted.seq_len
    row = columns.select([place])
    ranks = int(row.ranks[0] + row.servers[0])
    adapters = row.common_adapters
    trained = None if adapters is None else adapters.trained_parameters(job.outline)
    flops = step_flops(job.outline, wanted.seq_len, samples, trained)
    shares: dict[str, float] = dict(zip(MODES, map(float, row.modes[0]), strict=True))
    eight = to_plan(row, 0).precision == "fp8"
    shares["selective"] *= job.stack.repeats_matmuls == "second" and not eight
    stops = bool(set_up(job.question, row).stops_early[0])
    again = recomputed_flops(job.outline, wanted.seq_len, samples, shares, stops_early=stops)
    again /= flops
    peak = device.peak_flops_per_s.get(dtype_of(to_plan(row, 0).precision))
    mfu = None if peak is None else flops / seconds / peak / ranks
    low, high, _, level = prediction_interval(job)
    wider = spread_beyond(_extrapolations(job, to_plan(row, 0)))
    low, high = low**wider, high**wider
    by_kind = memory.anatomy(job.memory_question, row)
    kinds: dict[str, int] = {
        str(name): round(float(values[0])) for name, values in by_kind.items() if values[0] >= 0.5
    }
    kinds.pop("offloaded", 0)  # at the device's peak; the host's own peak follows
    host, disk = (round(float(amount[0])) for amount in job.offloaded_bytes(row))
    inside = sum(kinds.values())
    kinds["allocator and libraries"] = max(0, round(float(needs[place])) - inside)
    budget = None if job.tokens is None else job.tokens / tokens * seconds
    return Estimate(
        depth="estimate",
        step_time_s=seconds,
        low_s=seconds * low,
        high_s=seconds * high,
        level=level,
        tokens_per_s=tokens / seconds,
        samples_per_s=None if job.outline.vocab else job.wanted.global_batch / seconds,
        mfu=mfu,
        hfu=None if mfu is None else mfu * (1 + again),
        peak_memory_bytes=inside + kinds["allocator and libraries"],
        memory_bytes=device.memory_bytes,
        memory=kinds,
        host_offloaded_bytes=host,
        host_memory_bytes=job.cluster.host_bytes,
        disk_offloaded_bytes=disk,
        parts_s={f.name: float(getattr(times, f.name)[place]) for f in fields(times)},
        offloading=_offloading_parts(job, row) if host or disk else (),
        ranks=ranks,
        tokens=job.tokens,
        time_s=budget,
        cost=None if budget is None or job.price is None else budget / 3600 * ranks * job.price,
    )


def _offloading_parts(job: PlanningProblem, row: PlanBatch) -> tuple[OffloadingPart, ...]:
    costs = offloading(job.question, row)
    plan = to_plan(row, 0)
    sent: list[tuple[Literal["weights", "activations", "optimizer"], str]] = [
        ("weights", plan.offload_parameters),
        ("activations", plan.offload_activations),
        ("optimizer", plan.offload_optimizer),
    ]
    parts = [
        OffloadingPart(
            what=what,
            nbytes=round(float(getattr(costs, f"{what}_bytes")[0])),
            exposed_s=float(getattr(costs, f"{what}_s")[0]),
        )
        for what, place in sent
        if place != "none"
    ]
    if costs.host_step_s[0]:
        parts.append(OffloadingPart(what="host step", exposed_s=float(costs.host_step_s[0])))
    if costs.disk_bytes[0]:
        nbytes = round(float(costs.disk_bytes[0]))
        parts.append(OffloadingPart(what="disk", nbytes=nbytes, exposed_s=float(costs.disk_s[0])))
    return tuple(parts)
