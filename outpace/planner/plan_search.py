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


def _simulate_finalists(job: PlanningProblem, found: SearchResult) -> SearchResult:
    """Simulate the pipelines of the finalists and rank the finalists again.

    At least two are kept, because the fastest plan is compared with the next.
    """
    times = simulate_pipelines(job.question, found.columns, found.times, found.ranked)
    ranked = order(times, found.ranked)[: max(2, job.count)]
    return replace(found, times=times, ranked=ranked)


def search_plans(job: PlanningProblem) -> SearchResult:
    """Search for plans on all nodes of the problem's cluster."""
    count = _FINALISTS * max(2, job.count)
    return _simulate_finalists(
        job, search(job.question, job.wanted, job.checked_bytes, job.least_bytes, job.limit, count)
    )


def add_alternatives(job: PlanningProblem, found: SearchResult) -> SearchResult:
    """Add the simplest and the leanest of the plans that are about as fast as the fastest.

    Their pipelines are simulated. If one of them is then too slow, the best plan without a pipeline
    replaces it. If one of them is then the fastest plan, it is ranked as such, and alternatives are
    searched again.
    """
    found = _find_simulated_alternatives(job, found)
    faster = _faster_alternatives(found)
    if len(faster):
        ranked = order(found.times, np.concatenate([found.ranked, faster]))
        return add_alternatives(job, replace(found, ranked=ranked))
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


_ROUNDING = 1e-9  # a simulated time's last digits depend on the other plans in the batch


def _faster_alternatives(found: SearchResult) -> Ints:
    """Return the indices of alternatives that are faster than the plan ranked fastest."""
    places = np.array([found.simplest, found.leanest])
    least_s = found.times.step_s[found.fastest] * (1 - _ROUNDING)
    return np.unique(places[found.times.step_s[places] < least_s])


def settle_leanest(job: PlanningProblem, found: SearchResult) -> SearchResult:
    """Drop a plan with headroom that is not needed, or correct which plan is the leanest.

    A plan with headroom is not needed if the recommended plan leaves enough memory free. If
    simulation replaced the leanest plan by one that needs more memory than the recommended plan,
    the recommended plan becomes the leanest, provided that it is fast enough.
    """
    least, simple = found.needs[found.leanest], found.needs[found.simplest]
    if found.roomier:
        needless = simple <= ROOMY * job.limit
        return replace(found, leanest=-1, roomier=False) if needless else found
    fine = found.times.step_s[found.simplest] <= found.lean_s
    return replace(found, leanest=found.simplest) if fine and simple < least else found


def add_leaner(job: PlanningProblem, found: SearchResult) -> SearchResult:
    """Add slower plans that need less memory than the listed ones, if there are few layouts.

    Pipelines are left out, because their times would have to be simulated.
    """
    shown = [place for place, _ in list_places(found)]
    if found.layouts is None or len(found.layouts) > _FEW_LAYOUTS or len(shown) >= job.count:
        return found
    whole = found.layouts.select(found.layouts.pp == 1)
    needs = remember(job.checked_bytes, found.known)
    choice = PlanChoice(
        whole, with_offloads(list(memory_options(job.wanted)), 0), step_seconds(job.question),
        needs, job.least_bytes, job.limit, job.wanted.accepts,
    )  # fmt: skip
    listed = [(float(found.times.step_s[one]), float(found.needs[one])) for one in shown]
    more = leaner(choice, ROOMIER * least_seconds(found), listed, job.count - len(shown))
    if more is None:
        return found
    places = tuple(range(len(found.columns), len(found.columns) + len(more)))
    return replace(add_plans(job.question, found, more, needs), leaner=places)


def _slow_alternatives(found: SearchResult) -> tuple[bool, bool]:
    """Return whether the simplest plan and the leanest plan are too slow after simulation."""
    took = found.times.step_s[[found.simplest, found.leanest]]
    slow = took > np.array([found.simple_s, found.lean_s])
    return bool(slow[0]), bool(slow[1])


def list_places(found: SearchResult) -> list[tuple[int, tuple[Role, ...]]]:
    """Return the indices and roles of the plans to list: those with a role, then others."""
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
    return [*listed.values(), *((place, ()) for place in (*others, *found.leaner))]


def search_nodes(job: PlanningProblem) -> tuple[PlanningProblem, SearchResult]:
    """Search the problem's variants (`by_assumption`) in turn until a plan fits.

    Returns the variant and its result, or the last variant and its result if nothing fits.
    """
    *first, last = job.by_assumption()
    for one in first:
        used, found = _fastest_on_nodes(one)
        if len(found.ranked):
            return used, found
    return _fastest_on_nodes(last)


def _fastest_on_nodes(job: PlanningProblem) -> tuple[PlanningProblem, SearchResult]:
    """Search on all nodes and, if nodes may stay idle, on fewer; return the fastest result."""
    best = job, search_plans(job)
    for nodes in _smaller_clusters(job) if job.idle else ():
        seconds = least_seconds(best[1])
        if _least_s(job, nodes) >= seconds:
            break
        less = job.with_nodes(nodes)
        found = search_plans(less)
        if least_seconds(found) < seconds:
            best = less, found
    return best


def least_seconds(found: SearchResult) -> float:
    """Return the step time of the fastest plan in seconds; infinity if none fits."""
    return float(found.times.step_s[found.fastest]) if len(found.ranked) else math.inf


def _smaller_clusters(job: PlanningProblem) -> list[int]:
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


def _least_s(job: PlanningProblem, nodes: int) -> float:
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
