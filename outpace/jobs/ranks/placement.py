"""Check that ranks are numbered host by host, as groups of neighbouring ranks expect."""

from collections.abc import Sequence
from itertools import pairwise

from outpace.jobs.ranks.process_groups import Groups
from outpace.parallel.rank_objects import gather_objects
from outpace.records.ranks import Ranks


def placement_hints(groups: Groups) -> list[str]:
    """Return a hint if neighbouring ranks are on different hosts. Collective on several hosts."""
    ranks = groups.ranks
    if ranks.world_size == ranks.local_world_size:
        return []
    places = gather_objects(ranks, groups.patient)
    stray = first_stray_rank(places)
    if stray is None:
        return []
    return [
        f"ranks are not numbered host by host: rank {stray} is on a different host from rank "
        f"{stray - 1}, though more ranks of that host follow. Results stay the same, but groups "
        "of neighbouring ranks, as for --tp, span hosts and wait for the network. Start with "
        "srun --distribution=block, mpirun --map-by slot, or torchrun"
    ]


def first_stray_rank(places: Sequence[Ranks]) -> int | None:
    """Return the first rank that is not numbered host by host; None if all are."""
    for before, after in pairwise(places):
        ended = before.local_rank + 1 == before.local_world_size
        if after.local_rank != (0 if ended else before.local_rank + 1):
            return after.rank
    return None
