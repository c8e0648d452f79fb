"""Alternatives to the fastest plan: the simplest and the leanest of about the same speed."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from outpace.planner.plan_columns import PlanBatch, join_batches
from outpace.planner.search.branch_and_bound import SearchResult, step_seconds
from outpace.planner.search.known_bytes import Needs, remember
from outpace.planner.search.plan_choice import (
    CROWDED,
    EQUAL,
    LEAN,
    ROOMIER,
    ROOMY,
    WIDE,
    PlanChoice,
    is_worth_room,
    leanest,
    quickest,
    simplest,
    with_offloads,
)
from outpace.planner.search.plan_masks import untrained_mask
from outpace.planner.search.search_request import OFFLOADED, SearchRequest
from outpace.planner.search.space import memory_options
from outpace.planner.step_time.estimate import StepTimes, estimate
from outpace.planner.step_time.setup import StepTimeQuestion


def find_alternatives(
    question: StepTimeQuestion,
    wanted: SearchRequest,
    found: SearchResult,
    needs: Needs,
    floors: Needs,
    memory_bytes: float,
) -> SearchResult:
    """Return `found` with two alternatives to the fastest plan that are about as fast.

    The simplest plan is chosen from a group of plans. These groups are considered in turn, until
    one has a plan that takes at most `LEAN` times as long as the fastest plan of all:

    - plans that offload nothing and leave memory free (use at most `ROOMY` of a device's);
    - plans that offload nothing and do not crowd memory (use at most `CROWDED` of it);
    - all plans that offload nothing;
    - the same three groups, with plans that offload at most one kind of tensor, then two, and so
      on.

    Instead of the third group, plans that leave memory free are used if one of them takes at most
    `WIDE` times as long. Within its group, the simplest plan takes at most `EQUAL` times as long as
    the fastest, and stays within the limit by which the group was chosen. The fastest plan of all
    replaces it if that one offloads no more, does not crowd memory, and is so much simpler that
    free memory matters less (`is_worth_room`).

    The leanest plan is the one that needs the least memory. It offloads nothing unless the fastest
    plan does. If it nearly fills a device's memory, the fastest plan that leaves memory free
    replaces it, provided that this plan takes at most `ROOMIER` times as long as the fastest plan
    of all.

    If outpace is the trainer and can train at least one plan that fits, the simplest plan is one
    that outpace can train, and is compared with the fastest plan that outpace can train.

    `needs` returns the bytes that plans need, as in the search, and `floors` lower bounds on them
    (`planner.memory.peak.least_bytes`).
    """
    if found.layouts is None or not len(found.ranked):
        return found

    seconds, needs = step_seconds(question), remember(needs, found.known)
    least_s, options = float(found.times.step_s[found.fastest]), list(memory_options(wanted))
    every = PlanChoice(found.layouts, options, seconds, needs, floors, memory_bytes, wanted.accepts)
    trained = _keep_trained(question, found, every) if trained_by_outpace(question) else found
    simple, simple_s = _find_simplest(every, trained, question.other_program)
    roomy, lean_s = ROOMY * memory_bytes, LEAN * least_s
    offloads = _count_offloaded_kinds(found.columns.select([found.fastest]))
    allowed = every if offloads else replace(every, chosen=with_offloads(options, 0))
    lean = found.layouts.select(found.bound <= lean_s)
    small, roomier = leanest(replace(allowed, plain=lean), lean_s), None
    if small is not None and needs(small)[0] > roomy:
        slow_s = ROOMIER * least_s
        roomier = quickest(replace(allowed, memory_bytes=roomy), found.bound, slow_s)
        small, lean_s = (small, lean_s) if roomier is None else (roomier, slow_s)
    both = join_batches([one for one in (simple, small) if one is not None] or [lean.select([])])
    count = len(trained.columns)
    wider = replace(trained, ranked=found.ranked, layouts=found.layouts, bound=found.bound)
    return replace(
        add_plans(question, wider, both, needs),
        simplest=count if simple is not None else trained.fastest,
        leanest=count + len(both) - 1 if small is not None else found.fastest,
        simple_s=simple_s,
        lean_s=lean_s,
        roomier=roomier is not None,
    )


def trained_by_outpace(question: StepTimeQuestion) -> bool:
    """Return whether outpace is the trainer and can build the model."""
    return not question.other_program and question.outline.untrained is None


def add_plans(
    question: StepTimeQuestion, found: SearchResult, more: PlanBatch, needs: Needs
) -> SearchResult:
    """Return `found` with further plans appended to its rows."""
    theirs = estimate(question, more)
    times = {f.name: np.concatenate([getattr(found.times, f.name), getattr(theirs, f.name)])
             for f in fields(StepTimes)}  # fmt: skip
    return replace(
        found,
        columns=join_batches([found.columns, more]),
        times=StepTimes(**times),
        needs=np.concatenate([found.needs, needs(more)]),
    )


def _keep_trained(
    question: StepTimeQuestion, found: SearchResult, every: PlanChoice
) -> SearchResult:
    """Return `found` with only the layouts that outpace can train, and their fastest plan.

    Returns `found` unchanged if no such plan fits.
    """
    mine = np.flatnonzero(~untrained_mask(every.plain))
    ranked = found.ranked
    if untrained_mask(found.columns.select([found.fastest]))[0]:
        best = quickest(replace(every, plain=every.plain.select(mine)), found.bound[mine], np.inf)
        if best is None:
            return found
        ranked = np.array([len(found.columns)])
        found = add_plans(question, found, best, every.needs)
    else:
        ranked = ranked[~untrained_mask(found.columns.select(ranked))]
    return replace(found, ranked=ranked, layouts=every.plain.select(mine), bound=found.bound[mine])


def _find_simplest(
    every: PlanChoice, found: SearchResult, trains_all: bool
) -> tuple[PlanBatch | None, float]:
    """Return the simplest plan about as fast as the fastest, and the limit on its step time.

    The plan is None if the fastest is worth more than free memory. The limit is in seconds.
    """
    assert found.layouts is not None
    least_s, own = float(found.times.step_s[found.fastest]), found.columns.select([found.fastest])
    offloads, options = _count_offloaded_kinds(own), every.chosen
    plain = replace(every, plain=found.layouts)
    by_offloads = [replace(plain, chosen=with_offloads(options, n)) for n in range(offloads + 1)]
    choice, simple_s = _group_of_simplest(by_offloads, found, least_s)
    near = found.layouts.select(found.bound <= simple_s)
    simple = simplest(replace(choice, plain=near), simple_s, every.memory_bytes, trains_all)
    worth_room = (
        simple is not None
        and found.needs[found.fastest] <= CROWDED * every.memory_bytes
        and offloads <= _count_offloaded_kinds(simple)
        and is_worth_room(own, simple, options[0], trains_all)
    )
    return (None if worth_room else simple), simple_s


def _group_of_simplest(
    by_offloads: Sequence[PlanChoice], found: SearchResult, least_s: float
) -> tuple[PlanChoice, float]:
    """Return the plans from which to choose the simplest, and the limit on its seconds per step.

    `by_offloads` has one entry for each limit on the kinds of tensors that a plan offloads: none,
    at most one kind, and so on, up to as many kinds as the fastest plan offloads.
    """
    need = float(found.needs[found.fastest])
    for choice in by_offloads:
        has_fastest = len(choice.chosen) == len(by_offloads[-1].chosen)
        for share in (ROOMY, CROWDED, 1.0):
            part, most_s = replace(choice, memory_bytes=share * choice.memory_bytes), LEAN * least_s
            if has_fastest and need <= part.memory_bytes:
                equal_s = least_s
            else:
                equal_s = _quickest_s(part, found, most_s)
            if share == 1 and equal_s < np.inf:
                roomy = replace(choice, memory_bytes=ROOMY * choice.memory_bytes)
                roomy_s = _quickest_s(roomy, found, WIDE * least_s)
                if roomy_s < np.inf:
                    part, equal_s, most_s = roomy, roomy_s, WIDE * least_s
            if equal_s < np.inf:
                return part, min(EQUAL * equal_s, most_s)
    raise AssertionError("unreachable: the fastest plan should always fit")


def _quickest_s(choice: PlanChoice, found: SearchResult, most_s: float) -> float:
    plan = quickest(choice, found.bound, most_s)
    return np.inf if plan is None else float(choice.seconds(plan)[0])


def _count_offloaded_kinds(columns: PlanBatch) -> int:
    return sum(bool((getattr(columns, name) > 0).any()) for name in OFFLOADED)
