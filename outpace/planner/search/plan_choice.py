"""Choice among plans that are about as fast: the simplest with free memory, and the leanest.

Estimates of two plans on one machine share most of their error, but each may have an additional
error of 2 %. If plans differ by less, the plan that an expert would run comes first: one without an
unnecessary axis or schedule, and with free memory.

A plan that offloads more than another, or that fills a device's memory, must be more than 10 %
faster to be preferred. Offloading loads a host that all devices of a node share, and no published
step uses it. The median error of estimated memory is 2 to 5 %, but some errors are larger: a
quarter or more of the plans that are estimated to need more than `CROWDED` of a device's memory do
not run. A plan that leaves memory free is therefore preferred even if it takes more than 10 %
longer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outpace.planner.plan_columns import (
    OFFLOADS,
    Bools,
    Floats,
    Ints,
    PlanBatch,
    join_batches,
)
from outpace.planner.search.plan_masks import untrained_mask
from outpace.planner.search.search_request import OFFLOADED, PlanFilter
from outpace.planner.search.space import Options, expand_timed

EQUAL = 1.02  # times the fastest step: up to this, the fastest plan is not preferred
LEAN = 1.10  # times the fastest step: limit for the leanest and the simplest plan
ROOMIER = 2.0  # times the fastest step: limit if no faster plan leaves memory free
ROOMY = 0.9  # of a device's memory: above this, fragmentation or longer samples may exceed it
# Of a device's memory. With a normal error whose median is 3 %, one in four plans estimated to need
# this much exceeds the memory, and one in two of those estimated to need all of it.
CROWDED = 0.97
# Limit, in fastest steps, for a plan that leaves memory free if all faster ones fill it.
WIDE = 4 / 3
_ENOUGH = 0.5  # of a device's memory: using even less is no advantage
_CLEARLY = 0.95  # times another plan's memory: the error of its estimate is about as large
_TIGHT = 2  # added cost of a plan that uses more than ROOMY
# Costs of offloading. They exceed those of tensor and pipeline parallelism and of little free
# memory, since a step then also waits for the host's memory, links and other programs.
_OFFLOAD, _OFFLOAD_TO_DISK = 5, 6
_LAYOUTS = 2048  # expanded together; with fewer, calls take most of the time
_FEW_LAYOUTS = 512
_PIECE = 256  # number of plans whose memory is estimated first; each later piece is twice as large

Estimates = Callable[[PlanBatch], Floats]
_Least = tuple[float, float, PlanBatch]  # bytes, seconds, and the plan


@dataclass(frozen=True)
class PlanChoice:
    """Plans to choose from, with their costs.

    `plain` are layouts without options, and `chosen` the options to combine with each layout. A
    plan takes `seconds` per step and `needs` bytes of a device's `memory_bytes`; `floors` are lower
    bounds on `needs` that are faster to compute. `accepts`: see `SearchRequest`.
    """

    plain: PlanBatch
    chosen: Sequence[Options]
    seconds: Estimates
    needs: Estimates
    floors: Estimates
    memory_bytes: float
    accepts: PlanFilter | None = None


def simplest(
    choice: PlanChoice, most_s: float, device_bytes: float, trains_all: bool
) -> PlanBatch | None:
    """Return the simplest plan that fits and takes at most `most_s`; ties go to the least memory.

    Free memory is relative to `device_bytes`, even if the plans of `choice` may not use all of a
    device's memory. `trains_all`: the trainer is not outpace, so plans that outpace cannot train
    are not penalised.
    """
    parts = []
    for part, took in _plans_within_time(choice, most_s):
        parts.append((part, took, count_effort(part, choice.chosen[0], trains_all)))
    best: tuple[float, float, float, PlanBatch] | None = None
    for cost in sorted({int(cost) for _, _, costs in parts for cost in np.unique(costs)}):
        if best is not None and best[0] < cost:
            break
        found: _Least | None = None
        for part, took, costs in parts:
            rows = np.flatnonzero(costs == cost)
            found = _least_of(choice, part.select(rows), took[rows], _ENOUGH * device_bytes, found)
        if found is None:
            continue
        total = cost + _TIGHT * (found[0] > ROOMY * device_bytes)
        if best is None or (total, *found[:2]) < best[:3]:
            best = total, *found
    return None if best is None else best[3]


def leanest(choice: PlanChoice, most_s: float) -> PlanBatch | None:
    """Return the plan with the least device memory that fits and takes at most `most_s`."""
    best: _Least | None = None
    for part, took in _plans_within_time(choice, most_s):
        best = _least_of(choice, part, took, 0.0, best)
    return None if best is None else best[2]


def leaner(
    choice: PlanChoice, most_s: float, listed: Sequence[tuple[float, float]], count: int
) -> PlanBatch | None:
    """Return up to `count` plans, fastest first, that need clearly less memory than faster ones.

    `listed` has the seconds and bytes of plans that are already listed. Returns None if there are
    no further plans.
    """
    parts = list(_plans_within_time(choice, most_s))
    if not parts:
        return None
    plans, took = join_batches([part for part, _ in parts]), np.concatenate([s for _, s in parts])
    nbytes, known = choice.needs(plans), list(listed)
    taken: list[int] = []
    for place in np.lexsort((nbytes, took)):
        own = float(took[place]), float(nbytes[place])
        least = min((b for s, b in known if s <= own[0]), default=choice.memory_bytes)
        enough = _ENOUGH * choice.memory_bytes
        if len(taken) < count and own[1] <= _CLEARLY * least and least > enough:
            taken.append(int(place))
            known.append(own)
    return plans.select(np.array(taken)) if taken else None


def with_offloads(chosen: Sequence[Options], most: int) -> list[Options]:
    """Return the options that offload at most `most` of activations, parameters and optimizer."""
    return [one for one in chosen if sum(one[name] > 0 for name in OFFLOADED) <= most]


def quickest(choice: PlanChoice, bound: Floats, most_s: float) -> PlanBatch | None:
    """Return the fastest plan that fits and takes at most `most_s`, or None if there is none.

    With any options, a layout takes at least its `bound`. Lower bounds on bytes are checked before
    seconds, and bytes are estimated for the fastest plans first.
    """

    def able(columns: PlanBatch) -> Bools:
        fine: Bools = choice.floors(columns) <= choice.memory_bytes
        return fine

    best, order = None, np.argsort(bound, kind="stable")
    for begin in range(0, len(order) if choice.chosen else 0, _FEW_LAYOUTS):
        places = order[begin : begin + _FEW_LAYOUTS]
        if bound[places[0]] > most_s:
            break
        some = choice.plain.select(places)
        part, took = expand_timed(some, choice.chosen, choice.seconds, able, choice.accepts)
        rest = np.flatnonzero(took <= most_s)
        rest = rest[np.argsort(took[rest], kind="stable")]
        for first in range(0, len(rest), _LAYOUTS):
            rows = rest[first : first + _LAYOUTS]
            fits = rows[choice.needs(part.select(rows)) <= choice.memory_bytes]
            if len(fits):
                best, most_s = part.select(fits[:1]), float(took[fits[0]])
                break
    return best


def _least_of(
    choice: PlanChoice, part: PlanBatch, took: Floats, enough: float, best: _Least | None
) -> _Least | None:
    """Return the plan with the least memory, with its bytes and seconds, from `part` or `best`.

    `took` has the seconds of the plans in `part`, and `best` is the best plan so far. Plans that
    need at most `enough` bytes count as equal, and the fastest of them is chosen. Plans are checked
    in the order of lower bounds on their bytes, until no further plan can need less.
    """
    least = np.maximum(choice.floors(part), enough)
    order = np.argsort(least, kind="stable")
    size = _PIECE
    while len(order):
        rows, order, size = order[:size], order[size:], 2 * size
        if least[rows[0]] > (choice.memory_bytes if best is None else best[0]):
            break
        nbytes = np.maximum(choice.needs(part.select(rows)), enough)
        place = int(np.lexsort((took[rows], nbytes))[0])
        own = float(nbytes[place]), float(took[rows[place]])
        if own[0] <= choice.memory_bytes and (best is None or own < best[:2]):
            best = *own, part.select(rows[[place]])
    return best


def _plans_within_time(choice: PlanChoice, most_s: float) -> Iterator[tuple[PlanBatch, Floats]]:
    for begin in range(0, len(choice.plain) if choice.chosen else 0, _LAYOUTS):
        some = choice.plain.select(slice(begin, begin + _LAYOUTS))
        part, took = expand_timed(some, choice.chosen, choice.seconds, accepts=choice.accepts)
        within = np.flatnonzero(took <= most_s)
        if len(within):
            yield part.select(within), took[within]


def is_worth_room(one: PlanBatch, other: PlanBatch, plainest: Options, trains_all: bool) -> bool:
    """Return whether `one` plan is so much simpler than the `other` that free memory matters less.

    The simpler plan is then preferred even if only the other one leaves memory free: a tensor or
    pipeline axis is too high a price for the last tenth of memory. For the other arguments, see
    `count_effort`.
    """
    mine, theirs = (count_effort(plan, plainest, trains_all)[0] for plan in (one, other))
    return bool(mine + _TIGHT <= theirs)


def count_effort(c: PlanBatch, plainest: Options, trains_all: bool) -> Ints:
    """Return the effort of running each plan, from its layout and options; less is simpler.

    `plainest` are options with the default optimizer. `trains_all`: see `simplest`.
    """
    return _layout_effort(c, trains_all) + _options_effort(c, plainest)


def _layout_effort(c: PlanBatch, trains_all: bool) -> Ints:
    """Return the effort of each layout relative to DDP: 1 for sharding, 2 for most other axes.

    Plans that outpace cannot train count 3 more, unless another program trains them.
    """
    exotic = (c.pp > 1) & ~c.schedule_in("gpipe", "1f1b")
    found: Ints = (
        (c.zero > 0).astype(np.int64)
        + c.strategy_in("hsdp")
        + 2 * ((c.tp > 1).astype(np.int64) + (c.cp > 1) + (c.pp > 1) + exotic)
        + (c.ep > 1)
        + ((c.even_stages & (c.pp > 1)) | ((c.async_tp | ~c.sequence_parallel) & (c.tp > 1)))
        + 3 * c.strategy_in("dp", "ps", "ring", "mp", "horovod")
        + 2 * c.precision_in("fp8")
    )
    return found if trains_all else found + 3 * untrained_mask(c)


def _options_effort(c: PlanBatch, plainest: Options) -> Ints:
    disk = OFFLOADS.index("disk")
    found = np.zeros(len(c), np.int64)
    for name in OFFLOADED:
        place = getattr(c, name)
        found += np.select([place == disk, place > 0], [_OFFLOAD_TO_DISK, _OFFLOAD], 0)
    found += (c.modes[:, 0] < 1) + (c.optimizer != plainest["optimizer"]).astype(np.int64)
    return found + c.chunked_loss + c.in_backward
