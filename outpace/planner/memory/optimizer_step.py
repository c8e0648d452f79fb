"""Memory of the optimizer's step."""

import numpy as np

from outpace.planner.memory.optimizer_bytes import MASTER_PIECE_BYTES
from outpace.planner.memory.rank_setup import RankSetup
from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.states import whole_share
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import OFFLOADS, OPTIMIZERS, Floats, PlanBatch
from outpace.records.optimizers import OPTIMIZER_TRAITS
from outpace.records.precisions import PURE

_UNIT_BYTES = 4 * 2**20  # minimum bytes of parameters that an offloaded optimizer updates together
_TRAITS = [OPTIMIZER_TRAITS[name] for name in OPTIMIZERS]
_STEP_TENSORS = np.array([traits.tensors for traits in _TRAITS])
_COPIES = np.array([traits.copies for traits in _TRAITS])


def add_optimizer_step(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Add the temporaries of the optimizer's step."""
    setup, sharding = rank.setup, rank.setup.sharding
    timeline.clear("activations", "temporary", "weight copies", "unsharded")
    _free_copied_gradients(timeline, rank)
    elements = (sharding.stepped * rank.place.layers + rank.outside) / sharding.shards
    _add_unscaled_gradients(timeline, rank, elements)
    _add_gradient_copies(timeline, rank, elements)
    # Offloaded states are updated unit by unit.
    unit = np.minimum(np.maximum(_UNIT_BYTES / FP32, rank.largest), elements)
    stepped = _elements_updated_at_once(rank, elements, unit)
    # With bf16-master, gradients are cast to fp32 in chunks, unless summed in fp32.
    c, g = setup.columns, setup.gradients
    piece = np.minimum(np.maximum(MASTER_PIECE_BYTES, FP32 * rank.largest), FP32 * stepped)
    masters = c.precision_in("bf16-master") & ~c.holds_masters()
    narrow = g.replicas | ~g.sums_in_fp32
    timeline.moment("temporary", np.where(masters & narrow, piece, 0.0))
    # Copies of two units' gradients on their way to the host.
    copied = (c.offload_optimizer == OFFLOADS.index("cpu")) & (c.offload_parameters == 0)
    copies = np.where(copied, np.minimum(2 * unit, elements) * setup.sizes.weight, 0.0)
    on_cpu = setup.question.device == "cpu"
    if on_cpu:
        timeline.pass_over("temporary", copies)
    else:
        timeline.offload(copies, False)
        timeline.offload(-copies, False)
    item = np.maximum(setup.sizes.weight, FP32)
    add_step_tensors(timeline, c, rank.largest * item, stepped * item)
    if on_cpu:
        timeline.free("temporary", copies)


def _free_copied_gradients(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Free gradients whose sums are in buffers when the optimizer's step begins.

    These are gradients that were copied into one buffer to communicate them, and gradients that
    were accumulated outside of buckets.
    """
    g = rank.setup.gradients
    copied = g.fuses & ~g.sums_in_fp32
    if copied.any():
        timeline.select(copied).clear("gradients")
    gone = np.where(g.replicas | ~g.sums_in_fp32, g.apart, 0.0)
    timeline.free("gradients", gone * rank.elements)


def _add_unscaled_gradients(timeline: MemoryTimeline, rank: RankSetup, elements: Floats) -> None:
    """Add the fp32 gradients that the optimizer's step computes with the precision fp16-master.

    Unscaling the loss makes an fp32 copy of each gradient, on ranks with master weights. The copies
    replace the 16-bit gradients one by one, except 16-bit gradients that are views of buffers.
    """
    setup, sharding, g = rank.setup, rank.setup.sharding, rank.setup.gradients
    master = setup.columns.precision_in("fp16-master") & (g.bucket_item < FP32)
    replaced = np.where(g.buckets | g.fuses, 0.0, setup.sizes.weight)
    made = sharding.shards / sharding.owners * (FP32 - replaced) * elements
    timeline.allocate("gradients", np.where(master, made, 0.0))


def _add_gradient_copies(timeline: MemoryTimeline, rank: RankSetup, elements: Floats) -> None:
    """Add the copies that some trainers' optimizer steps make of all gradients at once.

    If the plan has a pipeline, also add the blocks that the allocator keeps for the copies, the
    fp32 gradients and the reduction buffer. They are larger than any freed block, except the one
    that held the zero gradients of the optimizer's initial step. That block is free again after a
    backward unless receive buffers of a pipeline occupy it.
    """
    setup, sharding = rank.setup, rank.setup.sharding
    traits = setup.question.traits
    if not traits.gradient_copies:
        return
    owned = sharding.shards / sharding.owners * elements
    timeline.moment("temporary", traits.gradient_copies * owned)
    added = (FP32 + traits.gradient_copies) * owned + traits.reduce_buffer
    timeline.kept += np.where(setup.columns.pp > 1, added, 0.0)


def _elements_updated_at_once(rank: RankSetup, elements: Floats, unit: Floats) -> Floats:
    c, sharding = rank.setup.columns, rank.setup.sharding
    stepped = elements
    if sharding.shares_states.any():
        share = whole_share(rank.setup.outline, c)
        stepped = np.where(sharding.shares_states, elements * share, elements)
    by_unit = (c.offload_optimizer > 0) | (c.offload_parameters == OFFLOADS.index("disk"))
    return np.where(by_unit, np.minimum(unit, stepped), stepped)


def add_step_tensors(
    timeline: MemoryTimeline, columns: PlanBatch, largest: Floats, stepped: Floats
) -> None:
    """Add the temporaries of an optimizer's step.

    They are tensors as large as the largest parameter, of `largest` bytes, and copies of all
    parameters that are updated at once, of `stepped` bytes.
    """
    pure, rounds = columns.precision_in(*PURE), columns.precision_in("bf16-pure")
    in_fp32, in_fp16, in_bf16 = _STEP_TENSORS[columns.optimizer].T
    chosen = np.where(pure, np.where(rounds, in_bf16, in_fp16), in_fp32)
    timeline.moment("temporary", chosen * largest)
    timeline.moment("temporary", _COPIES[columns.optimizer] * stepped)
