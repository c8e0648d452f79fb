"""Peak memory of each plan's fullest rank, in closed form, for many plans at once.

Sizes of states follow Rajbhandari et al., "ZeRO", arXiv 1910.02054, §3, and activations Korthikanti
et al., arXiv 2205.05198, §4. docs/concepts/memory-model.md derives every term from what the model's
operators save and what the strategies' buffers hold. Nothing is fitted.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from outpace.planner.memory.adapter_timeline import adapter_timeline, start_timeline
from outpace.planner.memory.adapters import set_up_adapters
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.memory.step import start_timelines, step_timelines
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import Floats, Ints, PlanBatch
from outpace.records.memory import KINDS, Kind
from outpace.records.plan import Plan

_MIB = 2**20
_AT_ONCE = 4096  # plans estimated at a time
# c10/cuda/CUDACachingAllocator.cpp: segments of 2 MiB for blocks up to 1 MiB, of 20 MiB for those
# below 10 MiB (kSmallBuffer, kLargeBuffer, kMinLargeAlloc); larger ones have their own, rounded up
# to 2 MiB (kRoundLarge).
_SMALL_SEGMENT, _SEGMENT, _LEAST_LARGE, _ROUNDED = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB
# Tensors of a layer: 7 matrices with gradients and two moments, and 16 that the forward saves.
_LARGE_BLOCKS = 7 * 4 + 16
_LARGE_FROZEN_BLOCKS = 7 + 16  # for matrices without gradients
# "The kernels alone take up 1.3GB of GPU memory" (Hugging Face, transformers 4.49, "Model training
# anatomy"); less where CUDA loads them lazily.
_CONTEXT = 1343 * _MIB
# NCCL, src/init.cc: DEFAULT_BUFFSIZE 4 MiB, LL 8 lines × 512 threads × 8 steps × 16 B, LL128
# 120 elements × 640 threads × 8 steps × 8 B, of one peer in a ring; at most 32 channels.
_RING_BYTES = 32 * (4 * _MIB + 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8)


def anatomy(question: MemoryQuestion, columns: PlanBatch) -> dict[Kind, Floats]:
    """Return the peak memory of each plan's fullest rank, by kind.

    Offloaded bytes are a separate kind, outside of the device's peak.
    """
    found: dict[Kind, Floats] = {kind: np.zeros(len(columns)) for kind in KINDS}
    best = np.zeros(len(columns))
    for rows, timeline in _iterate_timelines(question, columns, records_kinds=True):
        fuller = timeline.peak > best[rows]
        chosen = rows[fuller]
        best[chosen] = timeline.peak[fuller]
        for kind, nbytes in timeline.by_kind().items():
            found[kind][chosen] = nbytes[fuller]
    return found


def peak_bytes(
    question: MemoryQuestion, columns: PlanBatch, rank: Literal["fullest", "last"] = "fullest"
) -> Floats:
    """Return the peak tensor bytes of each plan's fullest rank, or of its last rank."""
    peak = np.zeros(len(columns))
    for rows, timeline in _iterate_timelines(question, columns, only_last=rank == "last"):
        peak[rows] = np.maximum(peak[rows], timeline.peak)
    return peak


def offloaded_bytes(question: MemoryQuestion, columns: PlanBatch) -> tuple[Floats, Floats]:
    """Return the peak bytes that a rank stores in host memory and on disk.

    Host memory peaks at the end of the forward, with all activations, or at the end of the
    backward, with gradients of offloaded weights. Its peak need not coincide with the device's.
    """
    host, disk = np.zeros(len(columns)), np.zeros(len(columns))
    for rows, timeline in _iterate_timelines(question, columns):
        host[rows] = np.maximum(host[rows], timeline.host_peak)
        disk[rows] = np.maximum(disk[rows], timeline.disk_peak)
    return host, disk


def _iterate_timelines(
    question: MemoryQuestion,
    columns: PlanBatch,
    records_kinds: bool = False,
    only_last: bool = False,
) -> Iterator[tuple[Ints, MemoryTimeline]]:
    """Yield the indices of some plans and a timeline of their step on one rank.

    Each plan is yielded for every rank that may need the most memory; with `only_last`, only for
    its last rank.
    """
    q, adapters = question, columns.common_adapters
    for rows in _chunk_plans(columns):
        part = columns.select(rows)
        if adapters is None:
            timelines = step_timelines(q, part, records_kinds, only_last)
        else:
            step = set_up_adapters(
                q.outline, q.seq_len, part, q.device, adapters, records_kinds, q.fused_attention
            )
            timelines = iter([(np.arange(len(part)), adapter_timeline(step))])
        for within, timeline in timelines:
            yield rows[within], timeline


def _iterate_start_timelines(
    question: MemoryQuestion, columns: PlanBatch
) -> Iterator[tuple[Ints, MemoryTimeline]]:
    """Yield the indices of some plans and a timeline of one rank before its first forward."""
    q, adapters = question, columns.common_adapters
    for rows in _chunk_plans(columns):
        part = columns.select(rows)
        if adapters is None:
            timelines = start_timelines(q, part)
        else:
            step = set_up_adapters(q.outline, q.seq_len, part, q.device, adapters, False)
            timelines = iter([start_timeline(step)])
        for timeline in timelines:
            yield rows, timeline


def _chunk_plans(columns: PlanBatch) -> Iterator[Ints]:
    """Yield plan indices in cache-sized chunks, separated by use of pipelines and sharding."""
    product = columns.strategy_in("3d")
    shards = (columns.zero >= 2) | (product & (columns.data_parallel * columns.cp > 1))
    shards |= columns.offload_parameters > 0
    for piped in (False, True):
        for sharded in (False, True):
            rows = np.flatnonzero(((columns.pp > 1) == piped) & (shards == sharded))
            for begin in range(0, len(rows), _AT_ONCE):
                yield rows[begin : begin + _AT_ONCE]


def reserved_bytes(question: MemoryQuestion, columns: PlanBatch) -> Floats:
    """Return the device memory that plans need.

    This is the sum of tensors, unused parts of the allocator's segments, the CUDA context with its
    kernels, and NCCL's ring buffers of each process group. All but the tensors are upper bounds by
    the rules of docs/concepts/memory-model.md, not measurements. On a CPU, the result is
    `peak_bytes`.
    """
    return _reserved_for_peak(question, columns, peak_bytes(question, columns))


def held_bytes(question: MemoryQuestion, columns: PlanBatch, room: float) -> Floats:
    """Return the bytes that a device of `room` bytes holds after steps, as nvidia-smi shows them.

    These are `reserved_bytes` plus the freed blocks that the allocator keeps while there is room.
    """
    peak, held = np.zeros(len(columns)), np.zeros(len(columns))
    for rows, timeline in _iterate_timelines(question, columns):
        peak[rows] = np.maximum(peak[rows], timeline.peak)
        held[rows] = np.maximum(held[rows], timeline.peak + timeline.kept)
    needed = _reserved_for_peak(question, columns, peak)
    return np.maximum(needed, np.minimum(needed + held - peak, room))


def least_bytes(question: MemoryQuestion, columns: PlanBatch) -> Floats:
    """Return a lower bound on `reserved_bytes`, computed from permanent tensors alone.

    It is the memory before the first forward. The peak of a step is at least as high.
    """
    peak = np.zeros(len(columns))
    for rows, timeline in _iterate_start_timelines(question, columns):
        peak[rows] = np.maximum(peak[rows], timeline.peak)
    return _reserved_for_peak(question, columns, peak)


def _reserved_for_peak(question: MemoryQuestion, columns: PlanBatch, peak: Floats) -> Floats:
    """Return the bytes that are reserved on a device if its tensors peak at `peak` bytes.

    The allocator's segments, the CUDA context and NCCL's buffers are added; on a CPU, nothing is.
    """
    if question.device == "cpu":
        return peak
    blocks = _LARGE_BLOCKS if columns.common_adapters is None else _LARGE_FROZEN_BLOCKS
    large = np.minimum(blocks * question.outline.layers / columns.pp, np.floor(peak / _LEAST_LARGE))
    lost = _SMALL_SEGMENT + _SEGMENT + large * _ROUNDED / 2
    return peak + lost + library_bytes(columns)


def library_bytes(columns: PlanBatch) -> Floats:
    """Return the part of `reserved_bytes` outside of torch: CUDA context and NCCL buffers."""
    groups: Floats = np.zeros(len(columns)) + _count_nccl_groups(columns)
    return _CONTEXT + groups * _RING_BYTES


def plan_library_bytes(plan: Plan) -> int:
    """Return `library_bytes` of one plan."""
    return _CONTEXT + int(_count_nccl_groups(plan)) * _RING_BYTES


def _count_nccl_groups(axes: Plan | PlanBatch) -> Any:
    sizes = (axes.dp_replicate, axes.dp_shard * axes.cp, axes.tp, axes.pp)
    return sum(1 * (size > 1) for size in sizes)
