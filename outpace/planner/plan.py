"""The planner's answer: the plan to use, other plans (fastest first), and why others are not."""

import math
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np

from outpace.catalog.accelerators import ACCELERATORS
from outpace.planner.calibration.measured_cases import (
    Likeness,
    extrapolations,
    faster_case,
    nearest_cases,
    spread_beyond,
)
from outpace.planner.calibration.prediction_interval import Interval, QuestionKind, interval
from outpace.planner.explain.axis_links import axis_links
from outpace.planner.explain.experts import expert_notes
from outpace.planner.explain.hints import causal_notes, hint
from outpace.planner.explain.reasons import explain_plan, rejected_families
from outpace.planner.explain.titles import given_title, title, varied_options
from outpace.planner.hardware.device import dtype_of
from outpace.planner.memory import peak as memory
from outpace.planner.model.adapters import ADAPTER_NAMES, ADAPTER_STRATEGIES, can_plan_adapters
from outpace.planner.model.outline import parameters
from outpace.planner.model.outline_flops import forward_flops, recomputed_flops, step_flops
from outpace.planner.plan_columns import MODES, Floats, Ints, PlanBatch, of_plans
from outpace.planner.problem import PlanningProblem
from outpace.planner.remedies import explain_misfit
from outpace.planner.search.alternatives import ROOMY
from outpace.planner.search.branch_and_bound import (
    SearchResult,
    fastest,
    find_alternatives,
    fits,
    kinds,
    search,
)
from outpace.planner.search.simulate_finalists import order, simulate_pipelines
from outpace.planner.search.space import SearchRequest, to_plan
from outpace.planner.step_time.estimate import StepTimes, estimate, offloading
from outpace.planner.step_time.setup import set_up
from outpace.records.errors import BadInputError
from outpace.records.estimate import Estimate, KeptOption, OffloadingPart, Plans, RankedPlan, Role
from outpace.records.optimizers import LOW, OptimizerName
from outpace.records.plan import Plan
from outpace.records.precisions import PRECISION_TRAITS
from outpace.records.units import show_bytes, show_count, show_seconds

_FINALISTS = 2  # times the number of shown plans


def plans(job: PlanningProblem) -> Plans:
    """Consider every plan. Raises BadInputError, naming alternatives, if none fits."""
    began = time.perf_counter()
    wanted = job.wanted
    if wanted.trained and job.outline.untrained is not None:
        raise BadInputError(
            f"{job.outline.name} can be planned, but outpace does not train it: "
            f"{job.outline.untrained}."
        )
    used, found = _fastest(job)
    if not len(found.ranked):
        raise BadInputError(explain_misfit(job, found))
    found = _settle_least(used, _add_alternatives(used, found))
    shown = list_places(found)[: job.count]
    listed = [place for place, _ in shown]
    planned = [_describe_plan(used, found, place, roles, listed) for place, roles in shown]
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
        insistences=tuple(_insistences(job, _seconds(found))),
        considered=found.considered,
        took_s=time.perf_counter() - began,
        source=job.cluster.source,
        notes=(
            *job.outline.notes,
            *job.cluster.notes,
            *_host_memory_note(job, used),
            _interval(job).explanation,
            *_uncertainties(planned),
            *_extrapolated_note(planned[0]),
            *_faster_case_note(used, found, planned[0]),
            *expert_notes(used, found, listed),
            *_small_states_note(used, planned[0]),
            *_adapter_notes(job, planned),
            *_batch_note(planned[0]),
            *causal_notes(job.outline, wanted, planned[0].estimate.mfu),
            *_list_hints(used, found),
        ),
    )


def _interval(job: PlanningProblem) -> Interval:
    """Return the prediction interval for a problem's chips, kind of model, and software."""
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
    """Describe a plan by the features that are compared with measured cases."""
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
    """Return the fields of `RankedPlan` about measured cases; empty for CPUs and guessed rates."""
    if job.cluster.device.kind == "cpu" or not job.outline.vocab:
        return {}
    return {
        "cases": nearest_cases(likeness(job, plan)), "extrapolated": _extrapolations(job, plan)
    }  # fmt: skip


def _extrapolations(job: PlanningProblem, plan: Plan) -> tuple[str, ...]:
    if job.cluster.device.kind == "cpu" or not job.outline.vocab:
        return ()
    return extrapolations(likeness(job, plan))


def _uncertainties(planned: Sequence[RankedPlan]) -> list[str]:
    """Return notes on assumptions about plans that the interval does not cover."""
    told = []
    if any(one.plan.precision == "fp8" for one in planned):
        told.append(
            "fp8: the time to compute scales is not counted; MFU is relative to the fp8 peak."
        )
    if any(one.plan.compile for one in planned):
        told.append(
            "compile: its gain is counted in bytes and launches (docs/concepts/planner.md)."
        )
    return told


def _extrapolated_note(planned: RankedPlan) -> list[str]:
    """Return a note on the features of the first plan that no measured case has."""
    if not planned.extrapolated:
        return []
    wider = ", so the interval is wider" if spread_beyond(planned.extrapolated) > 1 else ""
    return [f"Extrapolated: {'; '.join(planned.extrapolated)}{wider}."]


def _faster_case_note(job: PlanningProblem, found: SearchResult, planned: RankedPlan) -> list[str]:
    """Return a note on a listed published step that is faster because it uses fewer bits."""
    plan, least_s = to_plan(found.columns, found.fastest), _seconds(found)
    batch = job.wanted.global_batch
    case = faster_case(likeness(job, plan), planned.cases, batch, least_s)
    if case is None:
        return []
    return [
        f"The published step of {case.stack} ({show_seconds(case.measured_s)}) is faster than the "
        f"fastest plan ({show_seconds(least_s)}) because its matmuls are in "
        f"{case.precision}, the plan's in {PRECISION_TRAITS[plan.precision].matmuls}."
    ]


def _host_memory_note(job: PlanningProblem, used: PlanningProblem) -> list[str]:
    """Return a note on the assumed host memory, if it is unknown and plans may offload to it."""
    if len(job.by_assumption()) == 1:
        return []
    unknown = f"The host memory of {job.cluster.name} is not known"
    state = "Give a node's host memory, as in --host-memory 512GiB"
    if not used.wanted.offloads:
        return [f"{unknown}, so no plan offloads. {state}: plans that offload may be faster."]
    return [
        f"{unknown}, and with these options nothing fits without offloading, so the host is "
        f"assumed to have enough. {state}."
    ]


def _adapter_notes(job: PlanningProblem, planned: Sequence[RankedPlan]) -> list[str]:
    """Return a note on what adapters train, or on what they would save if weights are offloaded."""
    adapters = job.wanted.adapters
    if adapters is not None:
        trained, count = adapters.trained_parameters(job.outline), parameters(job.outline)
        strategies = ", ".join(ADAPTER_STRATEGIES)
        return [
            f"{adapters.title}: {show_count(trained)} parameters are trained, with "
            f"{show_count(count)} frozen ones. Plans use strategy {strategies}, without "
            "offloading. outpace also trains adapters with other strategies: trace their memory "
            "with outpace memory."
        ]
    values = {"precision": job.wanted.precision, **job.wanted.keep}
    known = can_plan_adapters(job.outline, values) and not job.question.other_program
    if planned[0].plan.offload_parameters in (None, "none") or not known:
        return []
    return [
        "Every step fetches the weights from the host. Adapters need far less memory: plan them "
        "with "
        "--lora-rank 16 (and --base nf4)."
    ]


# Options with the smallest states, sorted by how close training is to AdamW in fp32.
_SMALL_STATES: tuple[tuple[OptimizerName, bool], ...] = tuple(
    (name, in_backward) for in_backward in (False, True) for name in LOW
)


def _small_states_note(job: PlanningProblem, planned: RankedPlan) -> list[str]:
    """Return a note on a plan with weights and states in fewer bits, if plan 1 offloads them."""
    wanted, plan = job.wanted, planned.plan
    decided = {*wanted.keep, *wanted.vary} & {
        "precision", "optimizer", "optimizer_in_backward", "offload_parameters",
        "offload_optimizer",
    }  # fmt: skip
    offloads = {plan.offload_parameters, plan.offload_optimizer} != {"none"}
    bf16 = "bf16" in job.cluster.device.peak_flops_per_s
    if not offloads or decided or not bf16 or job.question.other_program:
        return []
    for optimizer, in_backward in _SMALL_STATES:
        options: dict[str, Any] = {"precision": "bf16-pure", "optimizer": optimizer}
        if in_backward:
            options["optimizer_in_backward"] = True
        kept = replace(wanted, keep={**wanted.keep, **options}, offloads=False)
        small = replace(job, wanted=kept, count=1)
        if not fits(kept, small.checked_bytes, small.least_bytes, small.limit):
            continue
        found = _search(small)
        words = ",".join(f"{name}={str(value).lower()}" for name, value in options.items())
        return [
            f"Without offloading, --keep {words} fits: "
            f"{show_bytes(round(float(found.needs[found.fastest])))} and "
            f"{show_seconds(_seconds(found))} a step, against plan 1's "
            f"{show_seconds(planned.estimate.step_time_s)}. Weights and states in fewer bits "
            "change the results of training (docs/concepts/optimizers.md)."
        ]
    return []


_MUCH_OF_STEP = 0.25  # of the step time


def _batch_note(planned: RankedPlan) -> list[str]:
    """Return a note on the offloading time that is the same for any batch size, if it is large."""
    one = planned.estimate
    fixed_s = sum(
        part.exposed_s for part in one.offloading if part.what in ("optimizer", "host step", "disk")
    )
    if fixed_s < _MUCH_OF_STEP * one.step_time_s:
        return []
    return [
        f"Of plan 1's offloading, the optimizer takes {show_seconds(fixed_s)} with any batch: its "
        "step outside of the device, and copies of gradients and new weights. A "
        "larger --global-batch (more accumulation) spreads them over more tokens."
    ]


def _list_hints(job: PlanningProblem, found: SearchResult) -> list[str]:
    """Suggest settings that are not searched but would help, if hints are requested."""
    if not job.hints or job.wanted.on_host:
        return []
    best = to_plan(found.columns, found.fastest)
    told = hint(
        job.question, job.wanted, job.checked_bytes, job.least_bytes, job.limit, best,
        _seconds(found),
    )  # fmt: skip
    return [] if told is None else [told]


def _simulate_finalists(job: PlanningProblem, found: SearchResult) -> SearchResult:
    """Simulate the finalists' pipelines, and rank them by the result.

    At least two are simulated, because the fastest is compared with another.
    """
    times = simulate_pipelines(job.question, found.columns, found.times, found.ranked)
    ranked = order(times, found.ranked)[: max(2, job.count)]
    return replace(found, times=times, ranked=ranked)


def _search(job: PlanningProblem) -> SearchResult:
    count = _FINALISTS * max(2, job.count)
    return _simulate_finalists(
        job, search(job.question, job.wanted, job.checked_bytes, job.least_bytes, job.limit, count)
    )


def _add_alternatives(job: PlanningProblem, found: SearchResult) -> SearchResult:
    """Add the simplest and the leanest plans that are about as fast, with simulated pipelines.

    If a simulated pipeline is slower than allowed, the best plan without a pipeline replaces it. If
    one is faster than the fastest, it becomes the fastest, and alternatives are searched again.
    """
    found = _find_simulated_alternatives(job, found)
    faster = _faster_alternatives(found)
    if len(faster):
        ranked = order(found.times, np.concatenate([found.ranked, faster]))
        return _add_alternatives(job, replace(found, ranked=ranked))
    slow = _slow_alternatives(found)
    if not any(slow) or found.layouts is None:
        return found
    whole = np.flatnonzero(found.layouts.pp == 1)
    fewer = replace(found, layouts=found.layouts.select(whole), bound=found.bound[whole])
    again = _find_simulated_alternatives(job, fewer)
    return replace(
        again,
        simplest=again.simplest if slow[0] else found.simplest,
        leanest=again.leanest if slow[1] else found.leanest,
        roomier=again.roomier if slow[1] else found.roomier,
        layouts=found.layouts,
        bound=found.bound,
    )


def _find_simulated_alternatives(job: PlanningProblem, found: SearchResult) -> SearchResult:
    found = find_alternatives(
        job.question, job.wanted, found, job.checked_bytes, job.least_bytes, job.limit
    )
    places = np.array([found.simplest, found.leanest])
    times = simulate_pipelines(job.question, found.columns, found.times, places)
    return replace(found, times=times)


_ROUNDING = 1e-9  # simulated among others, the same plan's time differs in its last digits


def _faster_alternatives(found: SearchResult) -> Ints:
    """Return the simplest and the leanest plans that are faster than the fastest, if any."""
    places = np.array([found.simplest, found.leanest])
    least_s = found.times.step_s[found.fastest] * (1 - _ROUNDING)
    return np.unique(places[found.times.step_s[places] < least_s])


def _settle_least(job: PlanningProblem, found: SearchResult) -> SearchResult:
    """Drop a plan with headroom that is not needed, and correct which plan is the leanest.

    A plan with headroom is not needed if the recommended one leaves enough memory free. The leanest
    may have been replaced by a plan that needs more memory than the recommended one. Since the
    latter is fast enough to be the leanest, it then has both roles.
    """
    least, simple = found.needs[found.leanest], found.needs[found.simplest]
    if found.roomier:
        needless = simple <= ROOMY * job.limit
        return replace(found, leanest=-1, roomier=False) if needless else found
    fine = found.times.step_s[found.simplest] <= found.lean_s
    return replace(found, leanest=found.simplest) if fine and simple < least else found


def _slow_alternatives(found: SearchResult) -> tuple[bool, bool]:
    """Return whether the simplest and the leanest plans are slower than allowed if simulated."""
    took = found.times.step_s[[found.simplest, found.leanest]]
    slow = took > np.array([found.simple_s, found.lean_s])
    return bool(slow[0]), bool(slow[1])


def list_places(found: SearchResult) -> list[tuple[int, tuple[Role, ...]]]:
    """Return the plans to list: first those with a role, then plans of other kinds."""
    roles: list[tuple[int, Role]] = [
        (found.simplest, "recommended"), (found.fastest, "fastest"),
        (found.leanest, "with headroom" if found.roomier else "leanest"),
    ]  # fmt: skip
    fastest = to_plan(found.columns, found.fastest)
    listed: dict[str, tuple[int, tuple[Role, ...]]] = {}
    for place, role in roles:
        if place < 0:
            continue
        plan = to_plan(found.columns, place)
        key = plan.model_dump_json()
        first, own = listed.get(key, (found.fastest if plan == fastest else place, ()))
        listed[key] = first, (*own, role)
    shown = kinds(found.columns)[[place for place, _ in listed.values()]]
    others = [int(place) for place in found.ranked if kinds(found.columns)[place] not in shown]
    return [*listed.values(), *((place, ()) for place in others)]


def _fastest(job: PlanningProblem) -> tuple[PlanningProblem, SearchResult]:
    """Search; return the result, and the version of the problem with plans (`by_assumption`)."""
    *first, last = job.by_assumption()
    for one in first:
        used, found = _fastest_on_nodes(one)
        if len(found.ranked):
            return used, found
    return _fastest_on_nodes(last)


def _fastest_on_nodes(job: PlanningProblem) -> tuple[PlanningProblem, SearchResult]:
    """Search on all nodes or, if nodes may stay idle, on the number of nodes that is fastest."""
    best = job, _search(job)
    for nodes in _smaller_clusters(job) if job.idle else ():
        seconds = _seconds(best[1])
        if _least_s(job, nodes) >= seconds:
            break
        less = job.with_nodes(nodes)
        found = _search(less)
        if _seconds(found) < seconds:
            best = less, found
    return best


def _seconds(found: SearchResult) -> float:
    """Return the step time of the fastest plan, s; infinity if none fits."""
    return float(found.times.step_s[found.fastest]) if len(found.ranked) else math.inf


def _smaller_clusters(job: PlanningProblem) -> list[int]:
    """Yield smaller numbers of nodes that are worth considering, largest first.

    They are repeated halves, powers of two, and numbers whose devices divide the global batch. All
    numbers considered for a machine are also considered for one twice as large.
    """
    nodes, each = job.cluster.nodes, job.cluster.fabric.per_node
    batch = job.wanted.global_batch
    halves = {nodes >> shift for shift in range(nodes.bit_length())}
    powers = {1 << shift for shift in range(nodes.bit_length())}
    even = {n for n in range(1, min(nodes, batch // each) + 1) if batch % (n * each) == 0}
    return sorted((n for n in halves | powers | even if 0 < n < nodes), reverse=True)


def _least_s(job: PlanningProblem, nodes: int) -> float:
    """Return a lower bound of the step time on `nodes` nodes: all matmuls at the best rate."""
    wanted = job.wanted
    passes = 3 if wanted.adapters is None else 2  # frozen weights have no gradients
    flops = passes * forward_flops(
        job.outline, wanted.seq_len, wanted.global_batch, attention=False
    )
    own = (wanted.keep.get("precision", wanted.precision),)
    names = wanted.vary.get("precision", own)
    rate = max(job.cluster.device.rate(dtype_of(name)) for name in names)
    return flops / (rate * nodes * job.cluster.fabric.per_node)


def fastest_plans(job: PlanningProblem, count: int) -> tuple[list[tuple[Plan, float]], int]:
    """Return the `count` fastest plans of any kind, their step times, and the number considered."""
    columns, considered = fastest(job.question, job.wanted, job.checked_bytes, job.limit, count)
    places = np.arange(len(columns))
    times = simulate_pipelines(job.question, columns, estimate(job.question, columns), places)
    ranked = sorted(places, key=lambda place: times.step_s[place])
    return [(to_plan(columns, int(p)), float(times.step_s[p])) for p in ranked], considered


def estimate_plan(job: PlanningProblem, plan: Plan) -> RankedPlan:
    """Estimate one plan, whether it fits or not. Raises BadInputError if it does not divide the
    batch.
    """
    columns = of_plans([plan], job.wanted.global_batch, job.outline.layers)
    times = estimate(job.question, columns)
    times = simulate_pipelines(job.question, columns, times, np.array([0]))
    return RankedPlan(
        title=given_title(plan, job.wanted.precision, job.wanted.vary),
        plan=plan,
        identity=plan.identity(job.wanted.global_batch),
        estimate=_estimate(job, columns, times, job.required_bytes(columns), 0),
        why="as given",
        untrained=job.outline.untrained or plan.training_obstacle,
        placement=axis_links(job.cluster, plan),
        **_measured_fields(job, plan),
    )


def _describe_plan(
    job: PlanningProblem,
    found: SearchResult,
    place: int,
    roles: tuple[Role, ...],
    listed: Sequence[int],
) -> RankedPlan:
    plan = to_plan(found.columns, place)
    return RankedPlan(
        title=", ".join([title(plan), *varied_options(plan, job.wanted.vary)]),
        plan=plan,
        identity=plan.identity(job.wanted.global_batch),
        estimate=_estimate(job, found.columns, found.times, found.needs, place),
        why=explain_plan(job, found, place, roles, listed),
        roles=roles,
        untrained=job.outline.untrained or plan.training_obstacle,
        placement=axis_links(job.cluster, plan),
        **_measured_fields(job, plan),
    )


def _estimate(
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
    low, high, _, level = _interval(job)
    wider = spread_beyond(_extrapolations(job, to_plan(row, 0)))
    low, high = low**wider, high**wider
    by_kind = memory.anatomy(job.memory_question, row)
    kinds: dict[str, int] = {
        str(name): round(float(values[0])) for name, values in by_kind.items() if values[0] >= 0.5
    }
    kinds.pop("offloaded", 0)  # at the device's peak, not at the host's
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
        offloading=_offloading(job, row) if host or disk else (),
        ranks=ranks,
        tokens=job.tokens,
        time_s=budget,
        cost=None if budget is None or job.price is None else budget / 3600 * ranks * job.price,
    )


def _offloading(job: PlanningProblem, row: PlanBatch) -> tuple[OffloadingPart, ...]:
    """Return the copies and optimizer steps of a plan that offloads."""
    found = offloading(job.question, row)
    plan = to_plan(row, 0)
    sent: list[tuple[Literal["weights", "activations", "optimizer"], str]] = [
        ("weights", plan.offload_parameters),
        ("activations", plan.offload_activations),
        ("optimizer", plan.offload_optimizer),
    ]
    parts = [
        OffloadingPart(
            what=what,
            nbytes=round(float(getattr(found, f"{what}_bytes")[0])),
            exposed_s=float(getattr(found, f"{what}_s")[0]),
        )
        for what, place in sent
        if place != "none"
    ]
    if found.host_step_s[0]:
        parts.append(OffloadingPart(what="host step", exposed_s=float(found.host_step_s[0])))
    if found.disk_bytes[0]:
        nbytes = round(float(found.disk_bytes[0]))
        parts.append(OffloadingPart(what="disk", nbytes=nbytes, exposed_s=float(found.disk_s[0])))
    return tuple(parts)


def _insistences(job: PlanningProblem, fastest_s: float) -> list[KeptOption]:
    """Return the cost of each option that the user requires, compared with the time without it."""
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
        _, found = _fastest(replace(job, wanted=freer, count=1))
        if len(found.ranked):
            free_s = _seconds(found)
            rows.append(KeptOption(setting=setting, slowdown=max(0.0, fastest_s / free_s - 1)))
    return rows


def throughput(job: PlanningProblem, nodes: int) -> RankedPlan | None:
    """Return the fastest plan on `nodes` nodes; None if none fits."""
    used, found = _fastest(replace(job.with_nodes(nodes), count=2))
    if not len(found.ranked):
        return None
    return _describe_plan(used, found, found.fastest, ("fastest",), [found.fastest])
