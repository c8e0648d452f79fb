"""Exact search for the fastest plans that fit, by branch and bound.

With its fastest optimizer, a layout is never slower without an option (recomputation, a chunked
loss, offloading) than with it. Layouts are therefore visited in the order of their time without
options, a few at a time with all of their options. The search ends when the next layout cannot
improve the result, so the result equals that of an exhaustive search.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np

from outpace.planner.plan_columns import (
    MODES,
    OPTIMIZERS,
    STRATEGIES,
    Floats,
    Ints,
    PlanBatch,
    join_batches,
)
from outpace.planner.search.known_bytes import Needs, remember
from outpace.planner.search.search_request import PlanFilter, SearchRequest
from outpace.planner.search.space import expand, expand_timed, layouts, memory_options
from outpace.planner.step_time.estimate import StepTimes, estimate
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.strategies import TRAITS, StrategyFamily

FAMILIES = get_args(StrategyFamily)
_BATCH = 512  # layouts that are expanded together
_FIRST = 16
_FEW = 64
_FULL = MODES.index("full")
_PIECE = 4096  # plans whose memory is estimated together
_NEAR = 1.001  # maximum ratio of step times for which a simpler plan is preferred


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: plans that fit, fastest first, and each strategy family's best.

    All plans are in `columns`; other fields refer to them by index, with −1 for none.

    - `ranked`: the plans that fit, fastest first, one per kind (see `search`).
    - `best`: the fastest plan of each family that fits.
    - `smallest`: the plan of each family that needs the least memory.
    - `simplest`, `leanest`: the simplest plan and the one with the least memory, among those about
      as fast as the fastest (see `plan_choice`). Their step times are at most `simple_s` and
      `lean_s`.
    - `roomier`: no plan that is about as fast leaves memory free, so `leanest` is the fastest plan
      that does.
    - `leaner`: slower plans, each of which needs less memory than all faster ones.
    - `layouts`: all layouts without memory options; a layout takes at least `bound` seconds.
    - `known`: bytes of plans that were estimated, as a cache (see `remember`).
    """

    columns: PlanBatch
    times: StepTimes
    needs: Floats
    ranked: Ints
    best: dict[str, int]
    smallest: dict[str, int]
    considered: int
    simplest: int = -1
    leanest: int = -1
    leaner: tuple[int, ...] = ()
    simple_s: float = np.inf
    lean_s: float = np.inf
    roomier: bool = False
    layouts: PlanBatch | None = None
    bound: Floats = field(default_factory=lambda: np.zeros(0))
    known: dict[bytes, float] = field(default_factory=dict)

    @property
    def fastest(self) -> int:
        """Return the index of the fastest plan that fits; −1 if none does."""
        if not len(self.ranked):
            return -1
        return int(self.ranked[np.argmin(self.times.step_s[self.ranked])])


def family(columns: PlanBatch) -> Ints:
    """Return the index of each plan's family in FAMILIES."""
    places = [FAMILIES.index(TRAITS[name].family) for name in STRATEGIES]
    return np.array(places)[columns.strategy]


def search(
    question: StepTimeQuestion,
    wanted: SearchRequest,
    needs: Needs,
    floors: Needs,
    memory_bytes: float,
    count: int = 10,
) -> SearchResult:
    """Search for the fastest plans that fit; return them with each strategy family's best plan.

    Plans that split the same axes and have the same family and ZeRO stage are of one kind, and the
    fastest plan represents its kind. The result has the `count` fastest kinds, and some without
    pipelines. `needs` returns the bytes that plans need, and `floors` lower bounds on them that are
    faster to compute (`planner.memory.peak.least_bytes`).
    """
    plain = layouts(wanted)
    chosen = list(memory_options(wanted))
    if not chosen:
        return _empty_result(plain, question)
    bound = least_s(question, wanted, plain)
    of_family = family(plain)
    kind = kinds(plain)
    known: dict[bytes, float] = {}
    needs = remember(needs, known)
    taken: list[PlanBatch] = []
    for place in np.unique(of_family):
        mine = np.nonzero(of_family == place)[0]
        order = mine[np.argsort(bound[mine], kind="stable")]
        taken += _search_family(
            question, plain, order, bound, kind, chosen, needs, floors, memory_bytes, count,
            wanted.accepts,
        )  # fmt: skip
    if not taken:
        return _empty_result(plain, question)
    together = join_batches(taken)
    considered = len(plain) * len(chosen)
    found = _make_result(question, together, needs, memory_bytes, count, considered)
    return replace(found, layouts=plain, bound=bound, known=known)


def fastest(
    question: StepTimeQuestion, wanted: SearchRequest, needs: Needs, memory_bytes: float, count: int
) -> tuple[PlanBatch, int]:
    """Return the `count` fastest plans that fit, fastest first, and the number of plans considered.

    Layouts are visited in the order of their time without options, until no further layout can be
    among the fastest.
    """
    plain, chosen = layouts(wanted), list(memory_options(wanted))
    bound = least_s(question, wanted, plain)
    order = np.argsort(bound, kind="stable")
    fastest_plans, worst = plain.select(slice(0, 0)), np.inf
    for begin in range(0, len(order) if chosen else 0, _BATCH):
        places = order[begin : begin + _BATCH]
        if bound[places[0]] > worst * _NEAR:
            break
        part = expand(plain.select(places), chosen, wanted.accepts)
        part = part.select(needs(part) <= memory_bytes)
        both = join_batches([fastest_plans, part])
        seconds = estimate(question, both).step_s
        ranking = np.argsort(_ranking_s(both, seconds), kind="stable")[:count]
        fastest_plans = both.select(ranking)
        if len(fastest_plans) == count:
            worst = float(estimate(question, fastest_plans).step_s.max())
    return fastest_plans, len(plain) * len(chosen)


def least_s(question: StepTimeQuestion, wanted: SearchRequest, plain: PlanBatch) -> Floats:
    """Return a lower bound on each layout's step time.

    This is its time without memory options, with the fastest optimizer of those to search. Which
    one is the fastest depends on the layout: if compiled, low-bit states move fewer bytes.
    """
    found: Floats = estimate(question, plain).step_s
    for name in wanted.vary.get("optimizer", ()):
        other = replace(plain, optimizer=np.full(len(plain), OPTIMIZERS.index(name)))
        found = np.minimum(found, estimate(question, other).step_s)
    return found


def step_seconds(question: StepTimeQuestion) -> Callable[[PlanBatch], Floats]:
    """Return a function that returns the step times of plans in seconds."""
    return lambda columns: estimate(question, columns).step_s


def _search_family(
    question: StepTimeQuestion,
    plain: PlanBatch,
    order: Ints,
    bound: Floats,
    kind: Ints,
    chosen: list[dict[str, object]],
    needs: Needs,
    floors: Needs,
    memory_bytes: float,
    count: int,
    accepts: PlanFilter | None,
) -> Iterator[PlanBatch]:
    """Yield one family's plans that may be among the `count` fastest kinds, fastest layouts first.

    For a kind with a known plan, only layouts that may be faster are considered. Times are
    estimated before bytes, which take longer to compute. As long as no plan fits, lower bounds on
    bytes are computed first.
    """
    fastest: dict[int, float] = {}
    least: _Least | None = None
    beyond: list[tuple[PlanBatch, Floats]] = []
    began, size, seconds_of = False, _FIRST, step_seconds(question)
    while True:
        order = order[bound[order] <= _time_limits(fastest, count, kind[order])]
        if not len(order):
            break
        some, order, size = plain.select(order[:size]), order[size:], min(2 * size, _BATCH)
        if fastest or not began:
            part, seconds = expand_timed(some, chosen, seconds_of, accepts=accepts)
        else:
            part = expand(some, chosen, accepts)
            floor = floors(part)
            able = floor <= memory_bytes
            most = part.modes[:, _FULL] == part.modes[:, _FULL].max(initial=0.0)
            lean = ~able & (most | (part.offload_activations > 0))
            beyond.append((part.select(lean), floor[lean]))
            part = part.select(able)
            seconds = seconds_of(part)
        began, own_kinds = True, kinds(part)
        for piece in _chunk_by_time(seconds):
            piece = piece[seconds[piece] <= _time_limits(fastest, count, own_kinds[piece])]
            # As long as nothing fits, also search for the smallest plan.
            piece = _select_fitting(part, piece, floors, memory_bytes if fastest else np.inf)
            if not len(piece):
                continue
            tried = part.select(piece)
            need = needs(tried)
            if not fastest:
                least = _keep_smaller(tried, need, least)
            fits = piece[need <= memory_bytes]
            keep = fits[
                _fastest_by_kind(own_kinds[fits], _ranking_s(part.select(fits), seconds[fits]))
            ]
            for place in keep:
                own, took = int(own_kinds[place]), float(seconds[place])
                fastest[own] = min(fastest.get(own, np.inf), took)
            yield part.select(keep)
    if not fastest and beyond:
        least = _smallest(
            join_batches([one for one, _ in beyond]), np.concatenate([f for _, f in beyond]),
            needs, least,
        )  # fmt: skip
    if not fastest and least is not None:
        yield least[1]


def _select_fitting(part: PlanBatch, piece: Ints, floors: Needs, memory_bytes: float) -> Ints:
    """Return the indices in `piece` of plans whose lower bounds fit; all if memory is infinite."""
    if np.isinf(memory_bytes):
        return piece
    return piece[floors(part.select(piece)) <= memory_bytes]


_Least = tuple[float, PlanBatch]  # bytes, and the plan


def _keep_smaller(plans: PlanBatch, need: Floats, smallest: _Least | None) -> _Least | None:
    small = int(np.argmin(need))
    if smallest is None or need[small] < smallest[0]:
        return float(need[small]), plans.select([small])
    return smallest


def _smallest(plans: PlanBatch, floor: Floats, needs: Needs, least: _Least | None) -> _Least | None:
    """Return the plan that needs the least memory, with its bytes.

    `least` is the best plan so far, which is returned if none needs less.

    The caller passes `plans` that recompute as much as possible or offload activations. Others
    cannot need the least memory: only with offloading can less recomputation reduce memory.
    """
    order, size = np.lexsort((plans.micro_batch, floor)), _FEW
    while len(order):
        places, order, size = order[:size], order[size:], min(2 * size, _PIECE)
        if least is not None and floor[places[0]] >= least[0]:
            break
        some = plans.select(places)
        least = _keep_smaller(some, needs(some), least)
    return least


def _time_limits(fastest: dict[int, float], count: int, kinds: Ints) -> Floats:
    """Return, for each of `kinds`, the longest step time at which plans are still considered."""
    whole = {own: took for own, took in fastest.items() if not _has_pipeline(own)}
    worst_s = _nth_fastest_s(fastest, count)
    whole_s = _nth_fastest_s(whole, _least_without_pipelines(count))
    each, place = np.unique(kinds, return_inverse=True)
    limits = [
        min(worst_s if _has_pipeline(own) else max(worst_s, whole_s), fastest.get(own, np.inf))
        for own in map(int, each)
    ]
    return np.array(limits, float)[place] * _NEAR


def _nth_fastest_s(fastest: dict[int, float], count: int) -> float:
    return sorted(fastest.values())[count - 1] if len(fastest) >= count else np.inf


def _least_without_pipelines(count: int) -> int:
    """Return how many kinds without pipelines a search keeps at least.

    The fastest of these kinds are kept even if they are not among the `count` fastest of all.
    Simulation may show that pipelines are slower than estimated.
    """
    return max(1, count // 2)


def _chunk_by_time(seconds: Floats) -> Iterator[Ints]:
    order = np.argsort(seconds, kind="stable")
    for begin in range(0, len(order), _PIECE):
        yield order[begin : begin + _PIECE]


def _fastest_by_kind(kinds: Ints, seconds: Floats) -> Ints:
    """Return each kind's fastest plan; among equals, the first, which has the fewest options."""
    order = np.argsort(seconds, kind="stable")
    _, first = np.unique(kinds[order], return_index=True)
    return order[first]


def kinds(c: PlanBatch) -> Ints:
    """Return an index for each combination of family, split axes and ZeRO level."""
    found = family(c)
    for split in (c.tp > 1, c.cp > 1, c.ep > 1, c.dp_replicate > 1, c.pp > 1):
        found = found * 2 + split
    return found * 4 + c.zero


def _has_pipeline(kind: int) -> bool:
    return bool(kind // 4 % 2)


def _ranking_s(c: PlanBatch, seconds: Floats) -> Floats:
    """Return step times for ranking, which place the simplest of equally fast plans first.

    Each split axis and each enabled option adds a ten-thousandth of the step time.
    """
    pulled = sum(
        values.astype(float)
        for values in (
            c.tp > 1, c.cp > 1, c.pp > 1, c.dp_replicate > 1, c.stages_per_rank > 1,
            c.chunked_loss, c.offload_activations > 0, c.offload_parameters > 0,
            c.offload_optimizer > 0, c.modes[:, 0] < 1, c.even_stages, c.in_backward,
        )
    )  # fmt: skip
    return seconds * (1 + 1e-4 * pulled)


def _make_result(
    question: StepTimeQuestion, columns: PlanBatch, needs: Needs, memory_bytes: float, count: int,
    considered: int,
) -> SearchResult:  # fmt: skip
    times, need = estimate(question, columns), needs(columns)
    seconds, of_family = times.step_s, family(columns)
    fits = need <= memory_bytes
    inside = np.nonzero(fits)[0]
    order_s = _ranking_s(columns, seconds)
    ranked = inside[_fastest_by_kind(kinds(columns)[inside], order_s[inside])]
    ranked = ranked[np.argsort(order_s[ranked], kind="stable")]
    finalists = np.zeros(len(ranked), bool)
    finalists[:count] = True
    whole = np.flatnonzero(columns.pp[ranked] == 1)
    finalists[whole[: _least_without_pipelines(count)]] = True
    ranked = ranked[finalists]
    best, smallest = {}, {}
    for place in np.unique(of_family):
        mine = np.nonzero(of_family == place)[0]
        able = mine[fits[mine]]
        name = FAMILIES[place]
        best[name] = int(able[np.argmin(seconds[able])]) if len(able) else -1
        smallest[name] = int(mine[np.argmin(need[mine])])
    return SearchResult(columns, times, need, ranked, best, smallest, considered)


def fits(wanted: SearchRequest, needs: Needs, floors: Needs, memory_bytes: float) -> bool:
    """Return whether any plan fits, trying the smallest micro-batch with the most recomputation.

    Plans that offload activations are also tried with less recomputation, which may need less
    memory. If the optimizer runs in the backward, all micro-batches are tried: several small ones
    accumulate gradients, whereas a single large one keeps none.
    """
    in_backward = bool(wanted.keep.get("optimizer_in_backward"))
    if not (in_backward or {"micro_batch", "pp_microbatches"} & wanted.keep.keys()):
        wanted = replace(wanted, keep={**wanted.keep, "micro_batch": 1})  # 1 is always possible
    plain, chosen = layouts(wanted), list(memory_options(wanted))
    if not chosen or not len(plain):
        return False
    most = chosen[-1]["modes"]
    chosen = [one for one in chosen if one["modes"] == most or one["offload_activations"]]
    if not in_backward:
        plain = plain.select(plain.micro_batch == plain.micro_batch.min())
    # Layouts that shard the most come first.
    order = np.argsort(-plain.zero * plain.dp_shard * plain.tp * plain.pp, kind="stable")
    for begin in range(0, len(order), _BATCH):
        part = expand(plain.select(order[begin : begin + _BATCH]), chosen, wanted.accepts)
        part = part.select(floors(part) <= memory_bytes)
        if len(part) and (needs(part) <= memory_bytes).any():
            return True
    return False


def _empty_result(plain: PlanBatch, question: StepTimeQuestion) -> SearchResult:
    none = plain.select(slice(0, 0))
    empty = np.zeros(0)
    return SearchResult(
        none, estimate(question, none), empty, np.zeros(0, np.int64), {}, {}, len(plain)
    )
