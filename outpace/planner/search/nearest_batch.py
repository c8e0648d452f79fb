"""Global batches near the requested one that a layout of the ranks can divide."""

from dataclasses import replace

from outpace.planner.search.search_request import SearchRequest
from outpace.planner.search.space import layouts, memory_options

_TRIED = 12  # number of candidates on either side; each requires listing all layouts


def nearest_batches(wanted: SearchRequest) -> tuple[int, ...]:
    """Return the nearest smaller and larger global batches, in samples, that ranks can divide.

    Returns an empty tuple if plans are impossible for a reason other than the batch.
    """
    if len(layouts(wanted)) or not any(True for _ in memory_options(wanted)):
        return ()
    given, candidates = wanted.global_batch, set[int]()
    for unit in _batch_units(wanted):
        below = given // unit * unit
        candidates |= {below, below + unit}
    smaller = sorted((n for n in candidates if 0 < n < given), reverse=True)
    larger = sorted(n for n in candidates if n > given)
    found = (_first_possible_batch(wanted, smaller), _first_possible_batch(wanted, larger))
    return tuple(n for n in found if n is not None)


def _batch_units(wanted: SearchRequest) -> set[int]:
    """Return the samples of a step without gradient accumulation, for each number of replicas.

    Multiples of these numbers are candidates for possible global batches.
    """
    world, keep = wanted.world, wanted.keep
    replicas = {n for n in range(1, world + 1) if world % n == 0} | {max(1, world - 1)}
    each = int(keep.get("micro_batch", 1)) * int(keep.get("pp_microbatches", 1))
    # A pipeline needs at least as many micro-batches as stages.
    stages = {1, int(keep.get("pp", 1))}
    return {n * each * more for n in replicas for more in stages}


def _first_possible_batch(wanted: SearchRequest, batches: list[int]) -> int | None:
    for batch in batches[:_TRIED]:
        if len(layouts(replace(wanted, global_batch=batch))):
            return batch
    return None
