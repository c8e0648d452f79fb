"""Inputs of the memory formula that depend on the pipeline rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outpace.planner.memory.fullest_rank import RankBatch
from outpace.planner.memory.gradients import GradientBytes, gradient_bytes
from outpace.planner.memory.saved_activations import share_of
from outpace.planner.memory.setup import HEAVIEST, MemorySetup
from outpace.planner.plan_columns import Bools, Floats
from outpace.records.plan import Checkpointing


@dataclass(frozen=True)
class BlockMode:
    """Recomputation mode of a block.

    - `recomputes`: which plans recompute tensors of the block.
    - `selective`: which plans recompute only some of them.
    - `saved`: bytes that the block's forward saves.
    - `offloaded`: the part of `saved` that is offloaded. Outputs that a recomputation mode keeps
      stay on the device.
    """

    recomputes: Bools
    selective: Bools
    saved: Floats
    offloaded: Floats


@dataclass(frozen=True)
class Recomputation:
    """Recomputation in a rank's first block, in its last block, and on average.

    `plain` is the fraction of blocks without recomputation; `saved` and `offloaded` are the bytes
    of an average block.
    """

    first: BlockMode
    last: BlockMode
    plain: Floats
    saved: Floats
    offloaded: Floats


@dataclass(frozen=True)
class RankSetup:
    """Memory inputs of one pipeline rank, one entry per plan.

    - `later`: whether the timeline is of a time after the pipeline's first backward.
    - `elements`: the number of all parameter elements that the rank computes with.
    - `outside`: the number of those outside of blocks.
    - `has_gradients`: whether gradients exist before a backward creates new ones.
    - `delays`: whether a pipeline with sharded weights keeps gradients unsharded until its last
      micro-batch.
    """

    setup: MemorySetup
    place: RankBatch
    later: Bools
    outside: Floats
    elements: Floats
    has_gradients: Bools
    delays: Bools

    @property
    def allocates_gradients(self) -> Bools:
        """Return which plans' backwards allocate gradients that stay until the optimizer's step."""
        return ~self.has_gradients & ~self.setup.columns.in_backward

    @property
    def stored_elements(self) -> Floats:
        """Return the number of parameter elements that the rank stores."""
        sharding = self.setup.sharding
        return (sharding.stored * self.place.layers + self.outside) / sharding.shards

    @property
    def root_bytes(self) -> Floats:
        """Return the bytes of gathered parameters outside of blocks; 0 if they are not gathered."""
        sharding = self.setup.sharding
        return np.where(sharding.gathers, sharding.item * self.outside, 0.0)

    @property
    def blocks(self) -> Floats:
        """Return the mean number of blocks per stage."""
        return np.maximum(self.place.chunk_layers, 1e-9)

    @cached_property
    def chunk_bytes(self) -> Floats:
        """Return the bytes that a stage saves per micro-batch, with offloaded ones.

        These are what its blocks save, and its output, which is kept until it is sent and its
        backward begins (except on the last stage). The input of its first block is not counted,
        because it is the received tensor, which exists anyway (except on the first stage). If the
        trainer has a single receive buffer, the input is counted and the output is not.
        """
        setup, place = self.setup, self.place
        stream = np.where(setup.columns.pp > 1, setup.sizes.part * setup.sizes.stream, 0.0)
        sends = np.where(place.last, 1 - 1 / place.stages, 1.0)
        receives = np.where(place.first, 1 - 1 / place.stages, 1.0)
        ends = stream * sends - stream * receives
        blocks = self.blocks * self.recomputation.saved
        return blocks if setup.question.traits.reuses_receive_buffer else blocks + ends

    @property
    def largest(self) -> Floats:
        """Return the elements of the largest parameter: one of a block, or the embedding."""
        setup, place = self.setup, self.place
        ends = np.where(place.first | place.last, setup.ends.embedding, 0.0)
        return np.maximum(setup.block.largest, ends) / setup.sharding.shards

    @cached_property
    def gradient(self) -> GradientBytes:
        """Return the bytes per element of a gradient."""
        return gradient_bytes(
            self.setup, self.allocates_gradients, self.delays & self.has_gradients
        )

    @cached_property
    def recomputation(self) -> Recomputation:
        """Return how the rank's blocks recompute."""
        setup, place = self.setup, self.place
        recomputed = 1 - share_of(setup.columns, "none")
        local = place.again / np.maximum(recomputed, 1e-9)
        shares = {mode: share_of(setup.columns, mode) * local for mode in HEAVIEST}
        shares["none"] = plain = 1 - place.again
        saved = sum(
            (shares[mode] * setup.saved[mode] for mode in HEAVIEST), start=np.zeros_like(plain)
        )
        kept = plain * setup.saved["none"] + (1 - plain) * setup.saved["full"]
        return Recomputation(
            first=_block_mode(setup, place.first_again, HEAVIEST[:3]),
            last=_block_mode(setup, place.last_again, HEAVIEST[2::-1]),
            plain=plain,
            saved=saved,
            offloaded=np.where(setup.offloads_activations, kept, 0.0),
        )


def set_up_rank(setup: MemorySetup, place: RankBatch, later: Bools) -> RankSetup:
    """Return the inputs of the memory estimate for one pipeline rank of every plan."""
    c, g = setup.columns, setup.gradients
    outside = _elements_outside_blocks(setup, place)
    accumulates = (c.passes > 1) & (~setup.dp | g.sums_in_fp32)
    return RankSetup(
        setup=setup,
        place=place,
        later=later,
        outside=outside,
        elements=setup.elements * place.layers + outside,
        has_gradients=g.buckets | accumulates | later,
        delays=setup.sharding.gathers & (c.pp > 1) & (c.microbatches > 1),
    )


def _elements_outside_blocks(setup: MemorySetup, place: RankBatch) -> Floats:
    """Return the elements outside of blocks; a tied head counts once, with the embedding."""
    e = setup.ends
    shared = (e.head == 0) & ~place.first & setup.outline.tied
    head = np.where(shared, e.embedding, e.head)
    first = np.where(place.first, e.embedding + e.positions, 0.0)
    return first + np.where(place.last, e.tail + head, 0.0)


def _block_mode(setup: MemorySetup, recomputes: Bools, modes: Sequence[Checkpointing]) -> BlockMode:
    """Return a block's mode: the first of `modes` that the plan uses, if the block `recomputes`."""
    saved = np.where(recomputes, 0.0, setup.saved["none"])
    selective, free = np.zeros_like(recomputes), recomputes
    for mode in modes:
        chosen = free & (share_of(setup.columns, mode) > 0)
        saved = np.where(chosen, setup.saved[mode], saved)
        selective = chosen if mode == "selective" else selective
        free = free & ~chosen
    kept = np.where(recomputes, setup.saved["full"], setup.saved["none"])
    offloaded = np.where(setup.offloads_activations, kept, 0.0)
    return BlockMode(recomputes=recomputes, selective=selective, saved=saved, offloaded=offloaded)
