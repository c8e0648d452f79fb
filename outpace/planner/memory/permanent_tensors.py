"""Tensors on a rank at the start of a step: weights, states, buffers and earlier gradients."""

import numpy as np

from outpace.planner.memory.gradients import offload_gradients
from outpace.planner.memory.rank_setup import RankSetup
from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.states import whole_states
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import OFFLOADS, Floats

_MIB = 2**20
# Two threads run matmuls, each with a workspace of cuBLAS: 32 MiB on Hopper and later (torch,
# CUDABlas handle pool, 4096 KiB × 8).
WORKSPACES = {"cpu": 0, "cuda": 2 * 32 * _MIB}
_CPU, _DISK = OFFLOADS.index("cpu"), OFFLOADS.index("disk")


def add_permanent_tensors(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Add the tensors that exist before a forward, including gradients of earlier micro-batches."""
    states = _optimizer_state_bytes(rank)
    _add_weights_and_states(timeline, rank, states)
    _add_buffers(timeline, rank, states)
    _add_pipeline_buffers(timeline, rank)
    _add_sums_outside_buckets(timeline, rank)
    _add_accumulated_gradients(timeline, rank)
    timeline.record_peak()


def _add_weights_and_states(timeline: MemoryTimeline, rank: RankSetup, states: Floats) -> None:
    setup, c = rank.setup, rank.setup.columns
    on_gpu = setup.question.device == "cuda"
    held = setup.sizes.weight * rank.stored_elements
    on_disk = c.offload_parameters == _DISK
    weights_away = (on_gpu & (c.offload_parameters == _CPU)) | on_disk
    states_on_disk = c.offload_optimizer == _DISK
    states_on_host = on_gpu & ((c.offload_optimizer == _CPU) | (c.offload_parameters == _CPU))
    states_away = states_on_disk | states_on_host
    # Weights are on the device, with a copy where the optimizer updates them.
    apart = (c.offload_optimizer == _CPU) | (on_gpu & (c.offload_optimizer > 0))
    twin = np.where(apart & (c.offload_parameters == 0), held, 0.0)
    timeline.pass_over("weights", np.where(weights_away, 0.0, held))
    timeline.pass_over("optimizer state", np.where(states_away, 0.0, states + twin))
    timeline.offload(np.where(weights_away, held, 0.0), on_disk)
    timeline.offload(np.where(states_away, states + twin, 0.0), states_on_disk)


def _optimizer_state_bytes(rank: RankSetup) -> Floats:
    setup, place, sharding = rank.setup, rank.place, rank.setup.sharding
    t = sharding.states
    tied_again = np.where(place.first | (not setup.outline.tied), 0.0, t.embedding)
    first = np.where(place.first, t.embedding + t.positions, 0.0)
    last = np.where(place.last, t.head + t.rest + tied_again, 0.0)
    all_of = place.layers * t.layer + first + last
    share = 1 / sharding.owners
    if sharding.shares_states.any() and not setup.question.traits.shards_by_element:
        kept = setup.columns.with_kept_states()
        whole = whole_states(setup.outline, kept) * place.layers / setup.outline.layers
        return np.where(sharding.shares_states, whole, all_of * share)
    # Under dp, the rank estimated is rank 0, which updates all parameters.
    return all_of * share


def _add_buffers(timeline: MemoryTimeline, rank: RankSetup, states: Floats) -> None:
    setup, c, g = rank.setup, rank.setup.columns, rank.setup.gradients
    device = setup.question.device
    timeline.pass_over("gradients", np.where(g.buckets, g.bucket_item * rank.elements, 0.0))
    # States are created before they are moved to disk, unit by unit.
    made = states / np.maximum(rank.stored_elements, 1) * rank.largest
    moved = (c.offload_optimizer == _DISK) & (device == "cpu")
    timeline.moment("temporary", np.where(moved, made, 0.0))
    timeline.pass_over("workspaces", WORKSPACES[device])
    # Token ids and targets, 8 bytes each; under dp, rank 0 reads those of all ranks.
    readers = np.where(setup.dp, c.data_parallel, 1).astype(float)
    samples: Floats = readers * (c.micro_batch * c.microbatches * c.passes).astype(float)
    timeline.pass_over("inputs", 16.0 * setup.question.seq_len * samples)
    whole = setup.sizes.weight * rank.elements
    timeline.pass_over("communication", np.where(g.fuses, whole, 0.0))


def _add_pipeline_buffers(timeline: MemoryTimeline, rank: RankSetup) -> None:
    setup, place, c = rank.setup, rank.place, rank.setup.columns
    stream = setup.sizes.part * setup.sizes.stream
    piped = c.pp > 1
    each = 1 if setup.question.traits.reuses_receive_buffer else c.microbatches
    timeline.pass_over("communication", np.where(piped, place.borders * each * stream, 0.0))
    done = np.where(piped & rank.later, place.inputs_done * stream, 0.0)
    timeline.pass_over("communication", done)


def _add_sums_outside_buckets(timeline: MemoryTimeline, rank: RankSetup) -> None:
    setup, g = rank.setup, rank.setup.gradients
    timeline.pass_over("gradients", g.apart * rank.elements)
    # Sums in fp32 are rounded to the buckets' dtype before the last micro-batch.
    beside = np.where(g.casts_sums, setup.sizes.weight, FP32) * rank.elements
    timeline.moment("gradients", np.where(g.replicas & g.sums_in_fp32, beside, 0.0))


def _add_accumulated_gradients(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Add the accumulated gradients that exist before a forward, for plans without buckets.

    If weights are in host memory, their reduced gradients are, too. In a pipeline, gradients of
    sharded weights stay unsharded until the last micro-batch.
    """
    setup, c, s = rank.setup, rank.setup.columns, rank.setup.sizes
    sharding, g, delays = setup.sharding, setup.gradients, rank.delays
    whole = delays | setup.question.traits.accumulates_unsharded
    item = np.where(delays, s.reduced, g.sum_item)
    grown = item * rank.elements / np.where(whole, 1, sharding.shards)
    grown = np.where(rank.has_gradients & ~g.buckets, grown, 0.0)
    offload_gradients(timeline, setup, np.where(delays, 0.0, grown))
    on_device = np.where(setup.gradients_on_host, 0.0, grown)
    timeline.pass_over("gradients", np.where(delays, 0.0, on_device))
    timeline.pass_over("communication", np.where(delays, on_device, 0.0))
    # Gradients of earlier passes are already sharded.
    left = np.where(delays & (c.passes > 1), s.weight * rank.elements / sharding.shards, 0.0)
    timeline.pass_over("gradients", np.where(setup.gradients_on_host, 0.0, left))
    offload_gradients(timeline, setup, left)
