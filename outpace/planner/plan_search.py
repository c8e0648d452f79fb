"""Search for a problem's fastest plans and alternatives, with simulated pipelines."""

import math
from dataclasses import replace

import numpy as np

from outpace.planner.hardware.device import dtype_of
from outpace.planner.model.outline_flops import forward_flops
from outpace.planner.plan_columns import Ints
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.alternatives import add_plans, find_alternatives
from outpace.planner.search.branch_and_bound import (
    SearchResult,
    fastest,
    kinds,
    search,
    step_seconds,
)
from outpace.planner.search.finalists import order, simulate_pipelines
from outpace.planner.search.known_bytes import remember
from outpace.planner.search.plan_choice import ROOMIER, ROOMY, PlanChoice, leaner, with_offloads
from outpace.planner.search.space import memory_options, to_plan
from outpace.planner.step_time.estimate import estimate
from outpace.records.estimate import Role
from outpace.records.plan import Plan

_FINALISTS = 2  # simulated plans per shown plan
_FEW_LAYOUTS = 64  # up to this, plans that need less memory are added to a short list


def _simulate_finalists(job: PlanningProblem, result: SearchResult) -> SearchResult:
    """Simulate the pipelines among the fastest plans, and sort these plans by simulated time.

    Keeps at least two plans, because the fastest plan is compared with the next.
    """
    times = simulate_pipelines(job.question, result.columns, result.times, result.ranked)
    ranked = order(times, result.ranked)[: max(2, job.count)]
    return replace(result, times=times, ranked=ranked)


def search_plans(job: PlanningProblem) -> SearchResult:
    """Search for plans on all nodes of the problem's cluster."""
    count = _FINALISTS * max(2, job.count)
    return _simulate_finalists(
        job, search(job.question, job.wanted, job.checked_bytes, job.least_bytes, job.limit, count)
    )


def add_alternatives(job: PlanningProblem, result: SearchResult) -> SearchResult:
    """Add the simplest plan and the plan with the least memory, if about as fast as the fastest.

    Pipelines among these two are simulated. If one turns out too slow, the best plan without a
    pipeline replaces it. If one turns out to be the fastest plan of all, it is added to the
    ranking, and both alternatives are searched again.
    """
    result = _find_simulated_alternatives(job, result)
    faster = _faster_alternatives(result)
    if len(faster):
        ranked = order(result.times, np.concatenate([result.ranked, faster]))
        return add_alternatives(job, replace(result, ranked=ranked))
    slow = _slow_alternatives(result)
    if not any(slow) or result.layouts is None:
        return result
    whole = np.flatnonzero(result.layouts.pp == 1)
    fewer = replace(result, layouts=result.layouts.select(whole), bound=result.bound[whole])
    again = _find_simulated_alternatives(job, fewer)
    return replace(
        again,
        simplest=again.simplest if slow[0] else result.simplest,
        leanest=again.leanest if slow[1] else result.leanest,
        roomier=again.roomier if slow[1] else result.roomier,
        layouts=result.layouts,
        bound=result.bound,
    )


def _find_simulated_alternatives(job: PlanningProblem, result: SearchResult) -> SearchResult:
    result = find_alternatives(
        job.question, job.wanted, result, job.checked_bytes, job.least_bytes, job.limit
    )
    places = np.array([result.simplest, result.leanest])
    times = simulate_pipelines(job.question, result.columns, result.times, places)
    return replace(result, times=times)


_ROUNDING = 1e-9  # a simulated time's last digits depend on the other plans in the batch


def _faster_alternatives(result: SearchResult) -> Ints:
    places = np.array([result.simplest, result.leanest])
    least_s = result.times.step_s[result.fastest] * (1 - _ROUNDING)
    return np.unique(places[result.times.step_s[places] < least_s])


def settle_leanest(job: PlanningProblem, result: SearchResult) -> SearchResult:
    """Correct the choice of the plan with the least memory after pipelines have been simulated.

    If the search found a slower plan that leaves memory free, it is dropped if the recommended plan
    leaves enough memory free. Otherwise, if the recommended plan needs less memory than the leanest
    plan and is fast enough, it becomes the leanest plan, too.
    """
    least, simple = result.needs[result.leanest], result.needs[result.simplest]
    if result.roomier:
        needless = simple <= ROOMY * job.limit
        return replace(result, leanest=-1, roomier=False) if needless else result
    fine = result.times.step_s[result.simplest] <= result.lean_s
    return replace(result, leanest=result.simplest) if fine and simple < least else result


def add_leaner(job: PlanningProblem, result: SearchResult) -> SearchResult:
    """Add slower plans that need less memory than the listed ones, if the list is short.

    Nothing is added if there are many possible layouts. Plans with pipelines are left out, because
    their times would have to be simulated.
    """
    shown = [place for place, _ in list_places(result)]
    if result.layouts is None or len(result.layouts) > _FEW_LAYOUTS or len(shown) >= job.count:
        return result
    whole = result.layouts.select(result.layouts.pp == 1)
    needs = remember(job.checked_bytes, result.known)
    choice = PlanChoice(
        whole, with_offloads(list(memory_options(job.wanted)), 0), step_seconds(job.question),
        needs, job.least_bytes, job.limit, job.wanted.accepts,
    )  # fmt: skip
    listed = [(float(result.times.step_s[one]), float(result.needs[one])) for one in shown]
    more = leaner(choice, ROOMIER * least_seconds(result), listed, job.count - len(shown))
    if more is None:
        return result
    places = tuple(range(len(result.columns), len(result.columns) + len(more)))
    return replace(add_plans(job.question, result, more, needs), leaner=places)


def _slow_alternatives(result: SearchResult) -> tuple[bool, bool]:
    """Return whether the simplest plan and the leanest plan are too slow after simulation."""
    took = result.times.step_s[[result.simplest, result.leanest]]
    slow = took > np.array([result.simple_s, result.lean_s])
    return bool(slow[0]), bool(slow[1])


def list_places(result: SearchResult) -> list[tuple[int, tuple[Role, ...]]]:
    """Return the indices and roles of the plans to list: those with a role, then others."""
    roles: list[tuple[int, Role]] = [
        (result.simplest, "recommended"), (result.fastest, "fastest"),
        (result.leanest, "with headroom" if result.roomier else "leanest"),
    ]  # fmt: skip
    fastest = to_plan(result.columns, result.fastest)
    listed: dict[str, tuple[int, tuple[Role, ...]]] = {}
    for place, role in roles:
        if place < 0:
            continue
        plan = to_plan(result.columns, place)
        key = plan.model_dump_json()
        first, own = listed.get(key, (result.fastest if plan == fastest else place, ()))
        listed[key] = first, (*own, role)
    shown = kinds(result.columns)[[place for place, _ in listed.values()]]
    others = [int(place) for place in result.ranked if kinds(result.columns)[place] not in shown]
    return [*listed.values(), *((place, ()) for place in (*others, *result.leaner))]


def search_nodes(job: PlanningProblem) -> tuple[PlanningProblem, SearchResult]:
    """Search the problem's variants (`by_assumption`) in turn until a plan fits.

    Returns the variant and its result, or the last variant and its result if nothing fits.
    """
    *first, last = job.by_assumption()
    for one in first:
        used, result = _search_numbers_of_nodes(one)
        if len(result.ranked):
            return used, result
    return _search_numbers_of_nodes(last)


def _search_numbers_of_nodes(job: PlanningProblem) -> tuple[PlanningProblem, SearchResult]:
    """Search on all nodes and, if nodes may stay idle, on fewer; return the fastest result."""
    best = job, search_plans(job)
    for nodes in _smaller_node_counts(job) if job.idle else ():
        seconds = least_seconds(best[1])
        if _least_step_s(job, nodes) >= seconds:
            break
        less = job.with_nodes(nodes)
        result = search_plans(less)
        if least_seconds(result) < seconds:
            best = less, result
    return best


def least_seconds(result: SearchResult) -> float:
    """Return the step time of the fastest plan in seconds; infinity if none fits."""
    return float(result.times.step_s[result.fastest]) if len(result.ranked) else math.inf


def _smaller_node_counts(job: PlanningProblem) -> list[int]:
    """Return the smaller numbers of nodes to search, largest first.

    These are `nodes` halved repeatedly, powers of two, and numbers whose devices divide the global
    batch. The numbers for n nodes include all numbers for n / 2.
    """
    nodes, each = job.cluster.nodes, job.cluster.fabric.per_node
    batch = job.wanted.global_batch
    halves = {nodes >> shift for shift in range(nodes.bit_length())}
    powers = {1 << shift for shift in range(nodes.bit_length())}
    even = {n for n in range(1, min(nodes, batch // each) + 1) if batch % (n * each) == 0}
    return sorted((n for n in halves | powers | even if 0 < n < nodes), reverse=True)


def _least_step_s(job: PlanningProblem, nodes: int) -> float:
    """Return a lower bound on the step time on `nodes` nodes: matmuls alone, at the best rate."""
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
    """Return the `count` fastest plans with step times, and the number of plans considered."""
    columns, considered = fastest(job.question, job.wanted, job.checked_bytes, job.limit, count)
    places = np.arange(len(columns))
    times = simulate_pipelines(job.question, columns, estimate(job.question, columns), places)
    ranked = sorted(places, key=lambda place: times.step_s[place])
    return [(to_plan(columns, int(p)), float(times.step_s[p])) for p in ranked], considered
