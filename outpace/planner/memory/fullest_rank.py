"""Pipeline ranks that may need the most memory, for many plans at once."""

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from outpace.planner.model.outline import head_in_layers
from outpace.planner.pipeline.in_flight import Rank, ranks_of, single_rank
from outpace.planner.pipeline.stages import balance, even
from outpace.planner.plan_columns import MODES, SCHEDULE_NAMES, Bools, Floats, Ints, PlanBatch
from outpace.records.outline import Outline

_FLAGS = {name for name, kind in Rank.__annotations__.items() if kind is bool}


@dataclass(frozen=True)
class RankBatch:
    """The pipeline rank of each plan whose memory is estimated, with one entry per plan.

    The fields are those of `in_flight.Rank`. For a plan without a pipeline, the rank is any rank.
    """

    layers: Floats
    chunk_layers: Floats
    stages: Floats
    first: Bools
    last: Bools
    chunks: Floats
    later_chunks: Floats
    losses: Floats
    later_losses: Floats
    borders: Floats
    inputs_done: Floats
    waiting: Floats
    again: Floats
    first_again: Bools
    last_again: Bools

    def select(self, rows: Ints) -> "RankBatch":
        """Return the pipeline ranks of the plans at the indices `rows`."""
        return RankBatch(*(getattr(self, field.name)[rows] for field in fields(self)))


def fullest_ranks(outline: Outline, columns: PlanBatch) -> list[RankBatch]:
    """Return the pipeline ranks that may need the most memory, each as one entry per plan.

    These are the first rank, the fullest one in between, and the last (`in_flight.ranks_of`). For
    plans with fewer of them than others, the last rank is repeated.
    """
    names = ("schedule", "pp", "stages_per_rank", "microbatches", "even_stages")
    kept = [getattr(columns, name) for name in names]
    rows = np.stack([*kept, recompute_interval(columns, outline.layers)], axis=1)
    unique, place = np.unique(rows, axis=0, return_inverse=True)
    head = head_in_layers(outline)
    found = [_pipeline_ranks(outline.layers, head, *map(int, row)) for row in unique]
    return [
        _make_rank_batch([r[min(n, len(r) - 1)] for r in found], place.reshape(-1))
        for n in range(max(map(len, found)))
    ]


def _make_rank_batch(ranks: list[Rank], rows: Ints) -> RankBatch:
    columns = np.array(ranks, float)[rows].T
    return RankBatch(
        *(
            column.astype(bool) if name in _FLAGS else column
            for name, column in zip(Rank._fields, columns, strict=True)
        )
    )


def recompute_interval(columns: PlanBatch, layers: int) -> Ints:
    """Return n if every n-th block recomputes, starting with the first; 0 if none does.

    Plans specify a fraction: if k of L blocks recompute, n is L/k rounded up.
    """
    recomputed = np.rint((1 - columns.modes[:, MODES.index("none")]) * layers)
    return np.where(recomputed > 0, np.ceil(layers / np.maximum(recomputed, 1)), 0).astype(np.int64)


@lru_cache(maxsize=4096)
def _pipeline_ranks(
    layers: int,
    head: float,
    schedule: int,
    pp: int,
    stages_per_rank: int,
    microbatches: int,
    evenly: int,
    interval: int,
) -> tuple[Rank, ...]:
    if pp == 1:
        return (single_rank(layers, interval),)
    name = SCHEDULE_NAMES[schedule]
    stages = min(layers, pp * stages_per_rank)
    divided = even(layers, stages) if evenly else balance(layers, stages, head)
    counts = divided + (0,) * (pp * stages_per_rank - stages)
    return ranks_of(name, pp, stages_per_rank, microbatches, counts, interval)
