"""The planner's answer: recommended plans, alternatives, and reasons for rejecting others."""

import time
from dataclasses import replace

from outpace.planner.explain.experts import expert_notes
from outpace.planner.explain.hints import causal_notes
from outpace.planner.explain.reasons import rejected_families
from outpace.planner.model.adapters import ADAPTER_NAMES
from outpace.planner.model.outline import parameters
from outpace.planner.plan_estimate import describe_plan, prediction_interval
from outpace.planner.plan_notes import (
    adapter_notes,
    batch_note,
    extrapolated_note,
    faster_case_note,
    host_memory_note,
    list_hints,
    small_states_note,
    uncertainties,
    uneven_batch_note,
)
from outpace.planner.plan_search import (
    add_alternatives,
    add_leaner,
    least_seconds,
    list_places,
    search_nodes,
    settle_leanest,
)
from outpace.planner.problem import PlanningProblem
from outpace.planner.remedies import explain_misfit
from outpace.planner.search.search_request import SearchRequest
from outpace.records.errors import BadInputError
from outpace.records.estimate import KeptOption, Plans, RankedPlan


def plans(job: PlanningProblem) -> Plans:
    """Return the ranked plans for a problem, and why other families of plans were rejected.

    Raises BadInputError if no plan fits, with changes that would help, or if outpace is to train
    the model but cannot.
    """
    began = time.perf_counter()
    wanted = job.wanted
    if wanted.trained and job.outline.untrained is not None:
        raise BadInputError(
            f"{job.outline.name} can be planned, but outpace does not train it: "
            f"{job.outline.untrained}."
        )
    used, found = search_nodes(job)
    if not len(found.ranked):
        raise BadInputError(explain_misfit(job, found))
    found = add_leaner(used, settle_leanest(used, add_alternatives(used, found)))
    shown = list_places(found)[: job.count]
    listed = [place for place, _ in shown]
    planned = [describe_plan(used, found, place, roles, listed) for place, roles in shown]
    return Plans(
        model=job.outline.name,
        parameters=parameters(job.outline),
        machine=job.cluster.name,
        nodes=job.cluster.nodes,
        idle_nodes=job.cluster.nodes - used.cluster.nodes,
        devices_per_node=job.cluster.fabric.per_node,
        nominal_memory_bytes=job.cluster.device.nominal_bytes,
        seq_len=wanted.seq_len,
        global_batch=wanted.global_batch,
        plans=tuple(planned),
        rejected=tuple(rejected_families(used, found, listed)),
        insistences=tuple(_slowdowns_of_required_options(job, least_seconds(found))),
        considered=found.considered,
        took_s=time.perf_counter() - began,
        source=job.cluster.source,
        notes=(
            *job.outline.notes,
            *job.cluster.notes,
            *uneven_batch_note(job),
            *host_memory_note(job, used),
            prediction_interval(job).explanation,
            *uncertainties(planned),
            *extrapolated_note(planned[0]),
            *faster_case_note(used, found, planned[0]),
            *expert_notes(used, found, listed),
            *small_states_note(used, planned[0]),
            *adapter_notes(job, used, planned),
            *batch_note(planned[0]),
            *causal_notes(job.outline, wanted, planned[0].estimate.mfu),
            *list_hints(used, found),
        ),
    )


def _slowdowns_of_required_options(job: PlanningProblem, fastest_s: float) -> list[KeptOption]:
    rows = []
    wanted = job.wanted
    asked: list[tuple[str, SearchRequest]] = [
        (f"{name}={value}", replace(wanted, keep={k: v for k, v in wanted.keep.items()
                                                  if k != name}))
        for name, value in wanted.keep.items()
        if name not in ADAPTER_NAMES  # these options change what is trained
    ]  # fmt: skip
    if wanted.most_tp is not None:
        asked.append((f"max-tp {wanted.most_tp}", replace(wanted, most_tp=None)))
    for setting, freer in asked:
        _, found = search_nodes(replace(job, wanted=freer, count=1))
        if len(found.ranked):
            free_s = least_seconds(found)
            rows.append(KeptOption(setting=setting, slowdown=max(0.0, fastest_s / free_s - 1)))
    return rows


def throughput(job: PlanningProblem, nodes: int) -> RankedPlan | None:
    """Return the fastest plan on `nodes` nodes, or None if none fits."""
    used, found = search_nodes(replace(job.with_nodes(nodes), count=2))
    if not len(found.ranked):
        return None
    return describe_plan(used, found, found.fastest, ("fastest",), [found.fastest])
