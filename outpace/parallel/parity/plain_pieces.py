"""Micro-batches of a global batch that each rank runs in the plain module's pass."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from outpace.parallel.batches import concatenate, cut, pack, samples_in, unpack
from outpace.parallel.layout import Batch
from outpace.parallel.rank_objects import gather_objects
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks


class Pieces:
    """This rank's micro-batches of a global batch; ranks with the same samples divide them."""

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self._plan, self._ranks = plan, ranks

    @property
    def ranks_per_share(self) -> int:
        """The number of ranks that have the same samples."""
        return (self._plan.world_size - self._plan.servers) // self._plan.data_parallel

    @property
    def share(self) -> int | None:
        """Return the index of this rank's share of the global batch; None if there is none."""
        return self._plan.data_rank(self._ranks.rank)

    @property
    def place(self) -> int:
        """Return this rank's index among the ranks that get the same samples."""
        if self.ranks_per_share == 1:
            return 0
        rank, plan = self._ranks.rank, self._plan
        return rank % plan.tp if plan.tp > 1 else rank // (plan.world_size // plan.pp)

    def is_cut(self, passes: Sequence[Batch]) -> bool:
        """Return whether ranks or micro-batches split the batch."""
        return self._plan.data_parallel * self._plan.pp_microbatches * len(passes) > 1

    def find_first(self, passes: Sequence[Batch]) -> Batch | None:
        """Return the first micro-batch; None if another rank with the same samples runs it."""
        if not passes or self.place:
            return None
        return cut(passes[0], self._plan.pp_microbatches)[0]

    def choose(self, passes: Sequence[Batch]) -> tuple[Batch | None, int]:
        """Return the micro-batch whose samples this rank compares with other ranks, and its order.

        The order is the rank's index among the ranks that compare samples. The micro-batch is None
        if the plan does not split batches, or if another rank has the same samples and runs them.
        If all ranks have the same samples, they choose different micro-batches.
        """
        share = self.share
        if share is None or not passes or not self.is_cut(passes):
            return None, 0
        if self._plan.data_parallel > 1:
            return self.find_first(passes), share
        parts = self._plan.pp_microbatches
        number = self.place * len(passes) * parts // self.ranks_per_share
        return cut(passes[number // parts], parts)[number % parts], self.place

    def select(self, passes: Sequence[Batch], in_order: bool) -> Iterator[tuple[int, Batch, bool]]:
        """Yield (number, micro-batch, True) for each micro-batch that this rank runs, in order.

        `in_order`: also yield (number, micro-batch, False) for those that other ranks with the same
        samples run.
        """
        plan, number = self._plan, 0
        for batch in passes:
            parts = cut(batch, plan.pp_microbatches) if plan.pp_microbatches > 1 else [batch]
            for part in parts:
                mine = number % self.ranks_per_share == self.place
                if mine or in_order:
                    yield number, part, mine
                number += 1

    def find_other(
        self, piece: Batch | None, passes: Sequence[Batch], device: torch.device
    ) -> Batch | None:
        """Return this rank's second micro-batch or, if it has only one, another rank's. Collective.

        A micro-batch is sent only if it is a single sample and belongs to one of the first two
        shares of the global batch. Returns None if there is no other micro-batch.
        """
        mine = self.share
        sends = piece is not None and samples_in(piece) == 1 and mine in (0, 1)
        sent = pack(piece) if sends else None
        said = gather_objects((mine, sent))
        if self._plan.pp_microbatches > 1 and passes:
            return cut(passes[0], self._plan.pp_microbatches)[1]
        if len(passes) > 1:
            return passes[1]
        theirs = next((data for rank, data in said if rank != mine and data is not None), None)
        return None if theirs is None else unpack(theirs, device)

    def gather_whole(self, passes: Sequence[Batch]) -> Batch | None:
        """Return the global batch on the CPU; None if it cannot be concatenated. Collective."""
        sent = [pack(batch) for batch in passes]
        said: list[Any] = gather_objects((self.share, sent))
        shares = {rank: data for rank, data in said if rank is not None}
        packed = [one for rank in sorted(shares) for one in shares[rank]]
        if None in packed:
            return None
        parts = [unpack(one, torch.device("cpu")) for one in packed]
        whole = parts[0]
        for part in parts[1:]:
            whole = None if whole is None else concatenate(whole, part)
        return whole
