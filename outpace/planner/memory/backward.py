"""Memory of a rank's backward: its blocks, from last to first, then the embedding."""

from dataclasses import dataclass

import numpy as np

from outpace.planner.memory.block_backward import add_block_backward
from outpace.planner.memory.forward import add_copies, fp32_embedding_bytes
from outpace.planner.memory.gradients import add_gradient, added_bytes, offload_gradients
from outpace.planner.memory.loss import tied_head_bytes
from outpace.planner.memory.rank_setup import BlockMode, RankSetup
from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import Bools, Floats, Ints


@dataclass(frozen=True)
class _BlockPosition:
    """One block of a rank, in the order in which backwards are added to a timeline.

    `present` tells which plans have this block, `mode` how it recomputes, and `prefetches` which
    plans gather the parameters of the next block to run during its backward.
    """

    present: Bools
    mode: BlockMode
    prefetches: Bools


def add_backward(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Add the memory of all blocks' backward passes, and of the embedding's, to a timeline.

    The first and last blocks are added one by one, the blocks between them as a single change.
    """
    setup, blocks = rank.setup, rank.blocks
    first, last = rank.recomputation.first, rank.recomputation.last
    timeline.free("communication", np.where(setup.sharding.regathers, setup.unit, 0.0))
    # A split backward keeps the inputs of weight gradients until their turn. DualPipeV splits only
    # to fill bubbles, when fewer micro-batches are in flight.
    splits = setup.columns.schedule_in("zb", "zbv")
    kept = np.where(splits, blocks * setup.block.outputs, 0.0)
    timeline.allocate("temporary", kept)
    # If weights are gathered, the second and the second to last block are added separately, too.
    sharded = setup.sharding.gathers
    ends = [
        _BlockPosition(blocks > 0, last, blocks > 1.5),
        _BlockPosition(sharded & (blocks > 2.5), last, blocks > 2.5),
    ]
    beginnings = [
        _BlockPosition(sharded & (blocks > 3.5), first, blocks > 3.5),
        _BlockPosition(blocks > 1.5, first, np.zeros_like(sharded)),
    ]
    reduced = np.zeros_like(setup.unit)
    for position in ends:
        reduced = _add_block(timeline, rank, position, reduced)
    _add_middle_blocks(timeline, rank, ends, beginnings)
    for position in beginnings:
        reduced = _add_block(timeline, rank, position, reduced)
    timeline.free("temporary", kept)
    _add_embedding_gradient(timeline, rank)
    timeline.free("communication", reduced)
    timeline.free("temporary", setup.sizes.part * setup.sizes.stream)
    _add_root_reduction(timeline, rank)


def _add_middle_blocks(
    timeline: MemoryTimeline,
    rank: RankSetup,
    ends: list[_BlockPosition],
    beginnings: list[_BlockPosition],
) -> None:
    setup, s, sharding = rank.setup, rank.setup.sizes, rank.setup.sharding
    delays, modes = rank.delays, rank.recomputation
    at_end, at_beginning = _count_present(ends), _count_present(beginnings)
    left = np.maximum(rank.blocks - (at_end + at_beginning), 0)
    item = np.where(delays, s.reduced, setup.gradients.sum_item)
    shards = np.where(delays, 1, sharding.shards)
    grads = left * item * setup.elements * sharding.expert_factor / shards
    grads = np.where(rank.allocates_gradients, grads, 0.0)
    timeline.pass_over("gradients", np.where(setup.gradients_on_host, 0.0, grads))
    remains = np.where(delays, 1, np.where(sharding.regathers, 0, -1))
    timeline.pass_over("unsharded", left * setup.unit * remains)
    between = rank.chunk_bytes - modes.last.saved * at_end - modes.first.saved * at_beginning
    between = np.where(left > 0, np.maximum(between, 0), 0.0)
    away = np.minimum(between, left * modes.offloaded)
    timeline.free("activations", between - away)
    timeline.offload(-away, setup.activations_on_disk)
    add_copies(timeline, rank, -left)
    offload_gradients(timeline, setup, np.where(delays, 0.0, grads))


def _count_present(positions: list[_BlockPosition]) -> Ints:
    count: Ints = np.sum([one.present for one in positions], axis=0)
    return count


def _add_block(
    timeline: MemoryTimeline, rank: RankSetup, position: _BlockPosition, reduced: Floats
) -> Floats:
    """Add the memory of one block's backward to a timeline.

    Returns the bytes of this block's gradients that are being reduced when its backward ends.
    `reduced` is the value that this function returned for the previous block, whose reduction ends
    during this block's backward.
    """
    if not position.present.any():
        return reduced
    setup, s, sharding, delays = rank.setup, rank.setup.sizes, rank.setup.sharding, rank.delays
    unit = setup.unit
    sent = np.where(sharding.gathers, s.reduced * setup.elements, 0.0)
    gathered = np.where(sharding.regathers, unit, 0.0)
    coming = np.where(position.prefetches, gathered, 0.0)
    here = timeline.select(position.present)
    # Gathered: this block's parameters, copied out of the buffer, and the next block's, in transit.
    here.allocate("communication", gathered)
    here.allocate("unsharded", gathered)
    here.free("communication", gathered)
    here.allocate("communication", coming)
    add_block_backward(here, rank, position.mode)
    here.free("communication", coming)
    # Reduced and scattered, immediately or after a pipeline's last micro-batch.
    made, sent_now = np.where(delays, 0.0, unit), np.where(delays, 0.0, sent)
    here.free("unsharded", made)
    here.free("communication", reduced)
    here.allocate("communication", sent_now)
    here.free("communication", made)  # the block's gradients
    kept = np.where(sharding.gathers, s.weight * setup.elements, 0.0)
    kept = kept * sharding.expert_factor / sharding.shards
    # Until they are on the host, reduced gradients exist in addition to the unreduced ones.
    here.moment("temporary", np.where(setup.gradients_on_host, kept, 0.0))
    _delay_reduction(here, rank, sent)
    kept = np.where(rank.allocates_gradients & ~delays, kept, 0.0)
    here.allocate("gradients", np.where(setup.gradients_on_host, 0.0, kept))
    offload_gradients(here, setup, kept)
    return np.where(position.present, sent_now, reduced)


def _delay_reduction(timeline: MemoryTimeline, rank: RankSetup, sent: Floats) -> None:
    """Add the unsharded gradients that a pipeline keeps until its last micro-batch.

    The block's first gradients are kept in the reduction dtype, in which they take `sent` bytes.
    Those of later micro-batches are added to them one by one, after the block's backward.
    """
    setup, item = rank.setup, rank.setup.sharding.item
    casts = setup.sizes.reduced != item
    first, later = rank.delays & ~rank.has_gradients, rank.delays & rank.has_gradients
    timeline.allocate("communication", np.where(first, sent - setup.unit, 0.0))
    largest = item * setup.block.largest
    timeline.moment("communication", np.where(first & casts, largest, 0.0))
    timeline.free("communication", np.where(later & casts, setup.unit, 0.0))


def _add_embedding_gradient(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Add the gradient of the embedding, with a row for each token of the vocabulary.

    If the head is tied to the embedding, also add the tensor in which both gradients are summed.
    """
    setup, place, e = rank.setup, rank.place, rank.setup.ends
    both = place.first & place.last & setup.outline.tied
    add_gradient(timeline.select(place.first), rank.gradient, e.positions, matmul=False)
    # Tied: the head's gradient exists, too, and a third tensor for the sum.
    alone = setup.dp | (setup.columns.pp > 1)  # each in a separate backward
    raised = fp32_embedding_bytes(rank)
    cast = raised / FP32 * setup.sharding.item
    # Sums in fp32: each is cast before it is added.
    rows, added = e.embedding * setup.sharding.item, e.embedding * added_bytes(setup)
    casts = np.where(setup.gradients.casts_sums, rows + added, 0.0)
    sums = np.maximum(added * np.where(alone, 1, 2), casts)
    timeline.moment("temporary", np.maximum(np.where(both, sums, 0.0), raised + cast))
    timeline.free("temporary", tied_head_bytes(rank))
    single = place.first & ~both
    add_gradient(timeline.select(single), rank.gradient, e.embedding, matmul=False)


def _add_root_reduction(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Add the reduction of gradients that no block has reduced in its own backward.

    These are the gradients of parameters outside of blocks and, if a pipeline delays reductions,
    those of its blocks. The head's gradients are already on the timeline, added with the loss; they
    are reduced here.
    """
    setup, place, s, sharding = rank.setup, rank.place, rank.setup.sizes, rank.setup.sharding
    item, delays = sharding.item, rank.delays
    elements = np.where(sharding.gathers, rank.outside, 0.0)
    timeline.moment("communication", np.where(delays, s.reduced * setup.elements, 0.0))
    blocks = np.where(delays, setup.elements * place.chunk_layers, 0.0)
    timeline.free("unsharded", item * (elements + blocks))
    timeline.moment("communication", s.reduced * elements)
    joined = delays & rank.has_gradients & (s.reduced == item)
    tail = np.where(sharding.gathers & place.last, setup.ends.tail, 0.0)
    timeline.free("communication", np.where(joined, 0.0, item * (elements - tail)))
    leaving = np.where(setup.gradients_on_host, elements, 0.0)
    timeline.allocate("communication", s.reduced * leaving)
    timeline.moment("temporary", s.weight * leaving / sharding.shards)
    timeline.free("communication", s.reduced * leaving)
    made = s.weight * elements / sharding.shards
    made = np.where(rank.allocates_gradients, made, 0.0)
    timeline.allocate("gradients", np.where(setup.gradients_on_host, 0.0, made))
    # Gradients that were kept until the pipeline's last micro-batch are reduced by now, too.
    ends_now = delays & (setup.columns.passes == 1) & ~setup.columns.in_backward
    waited = s.weight * sharding.stored * place.layers / sharding.shards
    offload_gradients(timeline, setup, made + np.where(ends_now, waited, 0.0))
    # A tied embedding's gradient, which the first and the last stage all-reduce.
    ends = (place.first ^ place.last) & setup.outline.tied
    timeline.moment("communication", np.where(ends, item * setup.ends.embedding, 0.0))
