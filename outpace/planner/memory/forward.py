"""Memory of a rank's forwards, for all micro-batches whose backward is still to come."""

import numpy as np

from outpace.planner.memory.loss import add_split_head
from outpace.planner.memory.rank_setup import RankSetup
from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import Floats
from outpace.records.precisions import WEIGHTS


def add_forward(timeline: MemoryTimeline, rank: RankSetup, delayed: Floats) -> None:
    """Add the parameters that forwards gather and the tensors that they save, up to the loss.

    `delayed` is the bytes of output gradients that a pipeline rank keeps for weight gradients of
    earlier micro-batches, if its schedule computes these later.
    """
    setup, place = rank.setup, rank.place
    _add_root_gather(timeline, rank)
    # Under dp the weights are sent in one message.
    whole = setup.sizes.weight * rank.elements
    timeline.moment("communication", np.where(setup.dp, whole, 0.0))
    kept = np.where(rank.later, place.later_chunks, place.chunks)
    chunks = np.maximum(kept, 1)
    away = rank.recomputation.offloaded
    timeline.pass_over("activations", chunks * (rank.chunk_bytes - rank.blocks * away))
    timeline.offload(chunks * rank.blocks * away, setup.activations_on_disk)
    add_copies(timeline, rank, chunks * rank.blocks)
    # If blocks end with norms, the embedding has a norm, too, which saves the sum.
    summed = place.first & bool(setup.outline.head_matmuls)
    stream = setup.sizes.part * setup.sizes.stream
    timeline.pass_over("activations", np.where(summed, stream, 0.0))
    _add_rope_tables(timeline, rank)
    _add_block_gathers(timeline, rank)
    splits = setup.columns.schedule_in("zb") & rank.later & (place.waiting > 0)
    if splits.any():
        add_split_head(timeline.select(splits), rank)
    timeline.allocate("temporary", delayed)


def add_copies(timeline: MemoryTimeline, rank: RankSetup, blocks: Floats) -> None:
    """Add the cast weights that blocks without recomputation save for their backward.

    They are copies in the matmul dtype, which the backward's matmuls read again.
    """
    away = rank.setup.offloads_activations
    nbytes = blocks * rank.setup.copies * rank.recomputation.plain
    timeline.pass_over("weight copies", np.where(away, 0.0, nbytes))
    timeline.offload(np.where(away, nbytes, 0.0), rank.setup.activations_on_disk)


def fp32_embedding_bytes(rank: RankSetup) -> Floats:
    """Return the bytes of the embedding's fp32 copy that the lookup and its gradient use.

    On a CPU under autocast, ranks that shard parameters gather the embedding in 16 bits and copy it
    to fp32. Returns 0 for all other plans.
    """
    setup, sharding = rank.setup, rank.setup.sharding
    autocast = ~setup.columns.precision_in(*WEIGHTS) & (setup.sizes.reduced > sharding.item)
    raised = autocast & sharding.gathers & rank.place.first & (setup.question.device == "cpu")
    return np.where(raised, FP32 * setup.ends.embedding, 0.0)


def _add_root_gather(timeline: MemoryTimeline, rank: RankSetup) -> None:
    timeline.allocate("unsharded", rank.root_bytes)
    timeline.allocate("communication", rank.root_bytes)  # freed once the first block is gathered
    timeline.moment("temporary", fp32_embedding_bytes(rank))


def _add_block_gathers(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Add the all-gathers of all blocks' parameters in a forward.

    A block's parameters are copied out of the communication buffer while those of the previous
    block still exist.
    """
    unit, regathers = rank.setup.unit, rank.setup.sharding.regathers
    others = np.where(regathers, 0.0, unit * (rank.blocks - 1))
    before = np.where(rank.blocks > 1.5, unit, rank.root_bytes)
    timeline.free("communication", rank.root_bytes)
    timeline.pass_over("unsharded", others + unit)
    timeline.moment("communication", before + unit)
    timeline.pass_over("communication", unit)
    timeline.pass_over("unsharded", -np.where(regathers, unit, 0.0))


def _add_rope_tables(timeline: MemoryTimeline, rank: RankSetup) -> None:
    question = rank.setup.question
    first = question.outline.stacks[0].attention
    if question.outline.learned_positions == 0 and first is not None:
        width = first.rope_dim or first.head_dim
        timeline.pass_over(
            "activations", 2 * FP32 * width * question.seq_len / rank.setup.columns.cp
        )
