"""Number of micro-batches whose activations a pipeline rank keeps, from its schedule.

A rank keeps what a stage's forward saved for a micro-batch until its backward is done. Before any
gradients exist, a rank keeps the most at the end of the warm-up. Later, with all gradients
allocated, it keeps at most as much. Both numbers are returned, because memory may peak at either
time.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from outpace.planner.pipeline.schedules import order
from outpace.records.pipelines import SCHEDULES

Operation = tuple[Literal["F", "B", "W"], int]  # kind of operation, and its local stage


class Rank(NamedTuple):
    """A rank of a pipeline and the activations that it keeps.

    A chunk is one micro-batch on one stage.

    - `layers`, `chunk_layers`: the number of layers on this rank, and their mean per stage.
    - `stages`: the number of stages on this rank; `first` and `last` tell whether the model's first
      and last stages are among them.
    - `chunks`: the number of chunks kept before all of the rank's stages have gradients.
    - `later_chunks`: the number kept afterwards.
    - `losses`, `later_losses`: how many of these chunks are on the model's last stage, so that they
      have a loss.
    - `borders`: the number of neighbouring stages on other ranks, from which this rank receives
      hidden states or gradients.
    - `inputs_done`: with a split backward, torch keeps the gradients of received tensors until the
      end of the step. This is how many exist when the most chunks are kept.
    - `waiting`: with a split backward, the number of chunks whose weight gradients are not computed
      yet at that time.
    - `again`: the fraction of blocks that recompute; `first_again` and `last_again` tell whether
      the first and the last block do.
    """

    layers: int
    chunk_layers: float
    stages: int
    first: bool
    last: bool
    chunks: int
    later_chunks: int
    losses: int
    later_losses: int
    borders: int
    inputs_done: int
    waiting: int
    again: float
    first_again: bool
    last_again: bool


@lru_cache(maxsize=4096)
def ranks_of(
    name: str,
    pp: int,
    stages_per_rank: int,
    microbatches: int,
    layers: tuple[int, ...],
    every: int = 0,
) -> tuple[Rank, ...]:
    """Return the first rank, the last rank, and the fullest one in between.

    Every `every`-th block recomputes, starting with the first; 0 means none.
    """
    tried = {0, 1, pp // 2, pp - 2, pp - 1} & set(range(pp))
    ranks = {
        rank: _make_rank(name, pp, rank, stages_per_rank, microbatches, layers, every)
        for rank in tried
    }
    between = [rank for rank in sorted(ranks) if 0 < rank < pp - 1]
    fullest = max(between, key=lambda r: _memory_sort_key(ranks[r]), default=0)
    return tuple(ranks[rank] for rank in sorted({0, fullest, pp - 1}))


def _memory_sort_key(rank: Rank) -> tuple[float, int]:
    """Return a key that sorts ranks by memory.

    The key is the number of blocks whose activations the rank keeps, with less weight for blocks
    that recompute, and then its number of layers.
    """
    return rank.chunks * rank.chunk_layers * (1.5 - rank.again), rank.layers


def single_rank(layers: int, every: int = 0) -> Rank:
    """Return the only rank of a plan without a pipeline, which has all layers."""
    blocks = range(layers)
    return Rank(
        layers, float(layers), 1, True, True, 1, 0, 1, 0, 0, 0, 0, *_recompute_share(blocks, every)
    )


def _recompute_share(blocks: Sequence[int], every: int) -> tuple[float, bool, bool]:
    """Return the fraction of blocks that recompute, and whether the first and the last block do."""
    found = [every > 0 and block % every == 0 for block in blocks]
    return (sum(found) / len(found), found[0], found[-1]) if found else (0.0, False, False)


def _make_rank(
    name: str,
    pp: int,
    rank: int,
    per_rank: int,
    microbatches: int,
    layers: tuple[int, ...],
    every: int,
) -> Rank:
    schedule = SCHEDULES[name]
    ranks = [schedule.rank_of(stage, pp) for stage in range(pp * per_rank)]
    mine = [stage for stage in range(pp * per_rank) if ranks[stage] == rank]
    held = [layers[stage] for stage in mine]
    blocks = [sum(layers[:stage]) + n for stage in mine for n in range(layers[stage])]
    last = mine.index(pp * per_rank - 1) if pp * per_rank - 1 in mine else -1
    chunks, losses, later_chunks, later_losses, done = _max_kept_chunks(
        _iterate_operations(name, pp, rank, per_rank, microbatches, mine),
        held,
        last,
        schedule.splits_backward,
        mine.index(0) if 0 in mine else -1,
    )
    if schedule.placement == "v":  # a backward follows immediately at the V's turn
        losses, later_losses = min(losses, 1), min(later_losses, 1)
    borders = sum(
        0 <= other < len(ranks) and ranks[other] != rank
        for stage in mine
        for other in (stage - 1, stage + 1)
    )
    return Rank(
        sum(held), sum(held) / per_rank, per_rank, 0 in mine, last >= 0,
        chunks, later_chunks, losses, later_losses, borders,
        done if schedule.splits_backward else 0,
        {"zb": rank, "zbv": 1}.get(name, 0),
        *_recompute_share(blocks, every),
    )  # fmt: skip


def _max_kept_chunks(
    order: Iterator[Operation], layers: list[int], last: int, splits: bool, first: int
) -> tuple[int, int, int, int, int]:
    """Return how many chunks a rank keeps at most during its operations.

    In order, the result has: the chunks, and how many of them are on the model's last stage, at the
    time of most kept layers before all of the rank's stages have gradients; both numbers for the
    time afterwards; and the number of input gradients that exist at the latter time. `layers` has
    the number of layers of each of the rank's stages. `last` and `first` are the positions of the
    model's last and first stage among the rank's stages, or -1 if they are on another rank.
    """
    begun: set[int] = set()
    early, later = (0, 0, 0), (0, 0, 0)
    blocks = chunks = done = at_most = losses = 0
    for kind, stage in order:
        if kind == "F":
            blocks, chunks = blocks + layers[stage], chunks + 1
            losses += stage == last
        done += kind == "B" and stage != first
        found = blocks, chunks, losses
        if len(begun) == len(layers):
            at_most = done if found[0] >= later[0] else at_most
            later = max(later, found)
        else:
            early = max(early, found)
        losses -= kind == "B" and stage == last
        if kind == ("W" if splits else "B"):
            blocks, chunks = blocks - layers[stage], chunks - 1
            begun.add(stage)
    return early[1], early[2], later[1], later[2], at_most


def _iterate_operations(
    name: str, pp: int, rank: int, per_rank: int, microbatches: int, stages: list[int]
) -> Iterator[Operation]:
    """Yield each of a rank's operations: its kind, and the index of its stage on the rank.

    If the schedule splits backwards, a backward that is not split yields "B" and "W".
    """
    splits = SCHEDULES[name].splits_backward
    for action in order(name, rank, pp, microbatches, per_rank):
        stage = stages.index(action.stage)
        if action.kind == "F" or action.kind == "W":
            yield action.kind, stage
            continue
        yield "B", stage
        if splits and action.kind == "B":
            yield "W", stage
