"""Explanations of a plan's rank, of rejected plans, and of problems without any plan."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from outpace.planner.explain.contradictions import contradictions
from outpace.planner.explain.titles import PARTS, choices, title
from outpace.planner.model.adapters import ADAPTER_NAMES
from outpace.planner.plan_columns import MODES, PlanBatch
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.alternatives import trained_by_outpace
from outpace.planner.search.axis_sizes import allowed_sizes, refused_size
from outpace.planner.search.branch_and_bound import FAMILIES, SearchResult, family
from outpace.planner.search.nearest_batch import nearest_batches
from outpace.planner.search.plan_choice import CROWDED, EQUAL, LEAN, ROOMY, count_effort
from outpace.planner.search.plan_masks import untrained_mask
from outpace.planner.search.search_request import SearchRequest
from outpace.planner.search.space import expand, has_plans, layouts, memory_options, to_plan
from outpace.records.errors import join_and, join_or
from outpace.records.estimate import RejectedFamily, Role
from outpace.records.plan import Plan
from outpace.records.units import show_bytes, show_seconds, show_share

_MORE_ROOM = 1.03  # minimum ratio of memory to report
_ALIKE = 5e-4  # smaller relative differences are shown as 0.0 %
_RECOMPUTED = ("products_s", "attention_s", "memory_s")
_LARGE = 0.5  # a second difference is named if it is at least this share of the largest
_MINOR = 0.01  # differences below this share of the largest are not mentioned


def explain_plan(
    job: PlanningProblem,
    result: SearchResult,
    place: int,
    roles: Sequence[Role],
    listed: Sequence[int],
) -> str:
    """Return why a plan is listed, compared with the fastest plan.

    The fastest plan itself is compared with the next one.
    """
    if "fastest" in roles:
        return _explain_fastest(job, result, place, roles, listed)
    mine, least = (float(result.times.step_s[one]) for one in (place, result.fastest))
    slower = f"{show_share(mine / least - 1)} slower than the fastest"
    as_fast = "as fast as the fastest" if mine / least - 1 < _ALIKE else slower
    if "recommended" in roles:
        if mine > EQUAL * least and _is_trained_unlike_fastest(job, result, place):
            return f"{join_and(roles)}: {slower}, which outpace does not train"
        risk = _describe_risk_of_fastest(job, result, place)
        if risk is not None and as_fast == slower:
            simpler = "simpler, " if "offloads" in risk else ""
            return f"{join_and(roles)}: {simpler}{slower}, which {risk}"
        is_noise = as_fast == slower and mine <= EQUAL * least
        within = " (less than the error of estimates)" if is_noise else ""
        return f"{join_and(roles)}: {as_fast}{within}, {_describe_advantage(job, result, place)}"
    room = show_bytes(round(float(result.needs[place])))
    if "with headroom" in roles:
        free = show_share(1 - ROOMY)
        return (
            f"with headroom: {room} of memory, the fastest that leaves {free} of a device free; "
            f"{as_fast}"
        )
    if "leanest" in roles:
        most = show_share(LEAN - 1)
        offloads = _offloaded_kinds(to_plan(result.columns, result.fastest))
        those = "plans" if offloads else "plans without offloading"
        return f"leanest: {room} of memory, the least of {those} at most {most} slower; {as_fast}"
    if as_fast != slower:
        return as_fast
    return f"{slower}: {_describe_largest_gap(result, place, result.fastest)}"


def _is_trained_unlike_fastest(job: PlanningProblem, result: SearchResult, place: int) -> bool:
    """Return whether outpace is the trainer and can train this plan but not the fastest one."""
    cannot = untrained_mask(result.columns.select([place, result.fastest]))
    return trained_by_outpace(job.question) and bool(cannot[1] and not cannot[0])


def _describe_advantage(job: PlanningProblem, result: SearchResult, place: int) -> str:
    """Describe the advantage of a plan that is about as fast as the fastest.

    The plan is simpler, or leaves more memory.
    """
    plainest = next(iter(memory_options(job.wanted)))
    efforts = count_effort(
        result.columns.select([place, result.fastest]), plainest, job.question.other_program
    )
    mine, theirs = (float(result.needs[one]) for one in (place, result.fastest))
    more = "more" if _MORE_ROOM * mine < theirs else "slightly more"
    room = (
        f"with {more} memory left ({show_bytes(round(mine))} used, {show_bytes(round(theirs))} by "
        "the fastest)"
    )
    if efforts[0] >= efforts[1]:
        return room
    return f"simpler, {room}" if _MORE_ROOM * mine < theirs else "and simpler"


def _describe_risk_of_fastest(job: PlanningProblem, result: SearchResult, place: int) -> str | None:
    """Return a risk of the fastest plan that another plan avoids, or None if there is none.

    The risks are offloading and nearly full memory.
    """
    theirs, mine = (
        _offloaded_kinds(to_plan(result.columns, one)) for one in (result.fastest, place)
    )  # fmt: skip
    away = [name for name in theirs if name not in mine]
    if away:
        return f"{'also ' if mine else ''}offloads {join_and(away)}"
    own, least = (float(result.needs[one]) / job.limit for one in (place, result.fastest))
    if any(own <= share < least for share in (ROOMY, CROWDED)):
        free, more = (show_bytes(round((1 - used) * job.limit)) for used in (least, own))
        return f"leaves only {free} of a device's memory free (this one {more})"
    return None


def _offloaded_kinds(plan: Plan) -> list[str]:
    names = ("activations", "parameters", "optimizer")
    return [name for name in names if getattr(plan, f"offload_{name}") != "none"]


def _explain_fastest(
    job: PlanningProblem,
    result: SearchResult,
    place: int,
    roles: Sequence[Role],
    listed: Sequence[int],
) -> str:
    """Say how much faster the fastest plan is than another, after naming its roles.

    The other plan is the next listed one or, if no other is listed, the next of the ranked plans.
    Roles are the reasons why a plan is listed, such as "leanest".
    """
    begin = f"{join_and(roles)}: "
    times = result.times.step_s
    others = sorted({*map(int, listed)} - {place}, key=lambda one: float(times[one]))
    others = others or [int(other) for other in result.ranked if other != place]
    if not others:
        return f"{begin}{_explain_single_plan(job.wanted)}"
    other = others[0]
    against = _name_other_plan(result, other, place, listed)
    gain = float(times[other] / times[place]) - 1
    if gain < _ALIKE:
        return f"{begin}as fast as {against}"
    return (
        f"{begin}{show_share(gain)} faster than {against}, which takes "
        f"{_describe_largest_gap(result, other, place)}"
    )


def _describe_largest_gap(result: SearchResult, slower: int, faster: int) -> str:
    """Describe the one or two parts of a step in which the slower plan loses most time.

    If the other parts matter, the sentence adds their sum, which is negative if the slower plan
    gains time there.
    """
    gaps = {
        name: float(getattr(result.times, name)[slower] - getattr(result.times, name)[faster])
        for name in PARTS
    }
    first, second = sorted(gaps, key=lambda key: -gaps[key])[:2]
    named = [first, second] if gaps[second] > _LARGE * gaps[first] > 0 else [first]
    again = result.columns.modes @ np.arange(len(MODES))  # of blocks, from no recomputation to full
    told = []
    for name in named:
        recomputed = name in _RECOMPUTED and again[slower] > again[faster]
        why = " (it recomputes more)" if recomputed else ""
        told.append(f"{show_seconds(max(0.0, gaps[name]))} more for {PARTS[name]}{why}")
    rest_s = sum(gaps.values()) - sum(max(0.0, gaps[name]) for name in named)
    if abs(rest_s) >= _MINOR * gaps[first]:
        way = "less" if rest_s < 0 else "more"
        told.append(f"{show_seconds(abs(rest_s))} {way} for other parts")
    return join_and(told)


def _name_other_plan(result: SearchResult, other: int, place: int, listed: Sequence[int]) -> str:
    """Name another plan: by its number if it is listed, and by its layout if that differs."""
    theirs, mine = (title(to_plan(result.columns, one)) for one in (other, place))
    layout = theirs.split(", micro-batch")[0]
    differs = layout != mine.split(", micro-batch")[0]
    if other not in listed:
        return f"the next ({layout if differs else theirs}, not listed)"
    return f"plan {listed.index(other) + 1}{f' ({layout})' if differs else ''}"


def _explain_single_plan(wanted: SearchRequest) -> str:
    c = layouts(wanted)
    splits = (c.tp > 1, c.cp > 1, c.pp > 1, c.ep > 1, c.dp_replicate > 1)
    if len(np.unique(np.stack([family(c), c.zero, *splits]), axis=1).T) > 1:
        return "no other kind of plan fits"
    if wanted.keep.keys() - set(ADAPTER_NAMES):  # which have separate options
        return "the only kind that --keep allows"
    return "no other kind of plan was found"


def rejected_families(
    job: PlanningProblem, result: SearchResult, listed: Sequence[int]
) -> list[RejectedFamily]:
    """Return the families of strategies of which no plan is listed, each with the reason.

    Each has its fastest plan, or its smallest plan if none fits.
    """
    shown = {FAMILIES[place] for place in family(result.columns)[list(listed)]}
    laid_out = {FAMILIES[place] for place in np.unique(family(layouts(job.wanted)))}
    rows = []
    for name in FAMILIES:
        if name in result.best and name not in shown:
            rows.append(_explain_rejected_family(job, result, name))
        elif name in laid_out and name not in shown:
            reason = f"cannot be combined with {_format_required_options(job.wanted)}"
            rows.append(RejectedFamily(family=name, reason=reason))
    return rows


def _explain_rejected_family(
    job: PlanningProblem, result: SearchResult, name: str
) -> RejectedFamily:
    """Return why no plan of a family of strategies is listed.

    The reason compares its best plan with the fastest, or says what memory its smallest plan lacks.
    """
    place = result.best[name]
    if place < 0:
        small = result.smallest[name]
        plan = to_plan(result.columns, small)
        unchanged = " (it offloads nothing)" if plan.strategy in _WHOLE else ""
        reason = f"{lacks(job, result.columns, small)} even with {choices(plan)}{unchanged}"
        return RejectedFamily(family=name, reason=reason, plan=plan)
    plan = to_plan(result.columns, place)
    seconds = show_seconds(float(result.times.step_s[place]))
    reason = f"{seconds} at best, with {choices(plan)}; {compare_with_fastest(result, place)}"
    return RejectedFamily(family=name, reason=reason, plan=plan)


def compare_with_fastest(result: SearchResult, place: int) -> str:
    """Return the ratio of a plan's step time to the fastest plan's, and the slower parts."""
    ratio = float(result.times.step_s[place] / result.times.step_s[result.fastest])
    return f"{ratio:.2f} times the fastest: {_describe_largest_gap(result, place, result.fastest)}"


# Baseline strategies, whose plans offload nothing.
_WHOLE = ("dp", "ps", "ring", "horovod", "mp")


def _format_required_options(wanted: SearchRequest) -> str:
    return ", ".join(f"{name}={value}" for name, value in wanted.keep.items())


def lacks(job: PlanningProblem, columns: PlanBatch, place: int) -> str:
    """Describe the device or host memory that a plan needs and the memory that is available."""
    row = columns.select([place])
    need, host = float(job.required_bytes(row)[0]), job.cluster.host_bytes
    if need > job.limit or host is None:
        has = show_bytes(job.cluster.device.memory_bytes)
        return f"needs {show_bytes(round(need))} of a device's {has}"
    away = round(float(job.offloads(row)[0]))
    return f"needs {show_bytes(away)} of a node's {show_bytes(host)} of host memory"


def impossible(wanted: SearchRequest, other_program: bool = False) -> str:
    """Explain why no plan is possible, and suggest other axis sizes or batches.

    `other_program`: the trainer is not outpace.
    """
    obstacle = _explain_trainer_obstacle(wanted)
    if obstacle is not None:
        return obstacle
    wanted = replace(wanted, accepts=None)
    kept = f", with {_format_required_options(wanted)}" if wanted.keep else ""
    devices = "1 device" if wanted.world == 1 else f"{wanted.world} devices"
    begin = f"no plan can be laid out: {devices} and a global batch of {wanted.global_batch}{kept}."
    near: tuple[int, ...] = ()
    wrong = ". ".join(_explain_wrong_sizes(wanted))
    if not wrong:
        near = nearest_batches(wanted)
        wrong = "" if near else ". ".join(contradictions(wanted, other_program))
    if wrong:
        return f"{begin.removesuffix('.')}: {wrong}."
    if near:
        remedy = f"Use a global batch of {join_or(f'{n:,}' for n in near)}, or require less."
    else:
        remedy = "Require less, or use another number of devices."
    return (
        f"{begin} The product of the axes must equal the number of devices, and the data-parallel "
        f"degree must divide the batch. {remedy}"
    )


def _explain_trainer_obstacle(wanted: SearchRequest) -> str | None:
    """Explain why the trainer can express none of the possible plans.

    Returns None if the trainer has no restrictions, or if no plan is possible for any trainer.
    """
    accepts, free = wanted.accepts, replace(wanted, accepts=None)
    if accepts is None or not has_plans(free):
        return None
    plain, chosen = layouts(free), list(memory_options(free))
    simplest = np.argsort(~accepts.accepts_layouts(plain), kind="stable")
    each = (expand(plain.select([place]), chosen) for place in simplest)
    plans = next(one for one in each if len(one))
    kept = f" with {_format_required_options(wanted)}" if wanted.keep else ""
    return (
        f"{accepts.name} can express no plan{kept}. {accepts.describe_obstacle(plans, 0)} Require "
        "less, or plan for another trainer."
    )


def _explain_wrong_sizes(wanted: SearchRequest) -> Iterator[str]:
    keep, world = wanted.keep, wanted.world
    named = False
    for axis in ("tp", "cp", "pp", "ep"):
        reason = refused_size(wanted, axis, int(keep.get(axis, 1)))
        if reason is not None:
            named = True
            yield f"{reason}; {axis} may be {join_or(map(str, allowed_sizes(wanted, axis)))} here"
    kept = {axis: int(keep[axis]) for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp")
            if int(keep.get(axis, 1)) > 1}  # fmt: skip
    product = math.prod(kept.values())
    if world % product and not named:
        terms = " × ".join(f"{axis} {size}" for axis, size in kept.items())
        total = f" = {product}" if len(kept) > 1 else ""
        yield f"{terms}{total} does not divide the {world} devices"
    sizes = {name: int(keep[name]) for name in ("micro_batch", "pp_microbatches") if name in keep}
    whole = math.prod(sizes.values())
    if wanted.global_batch % whole:
        terms = " × ".join(f"{name} {size}" for name, size in sizes.items())
        total = f" = {whole}" if len(sizes) > 1 else ""
        yield f"{terms}{total} does not divide the global batch of {wanted.global_batch}"
