"""Memory of a block's backward, in the order of its operators."""

from dataclasses import dataclass

import numpy as np

from outpace.planner.memory.gradients import GradientBytes, add_gradient
from outpace.planner.memory.rank_setup import BlockMode, RankSetup
from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.setup import MemorySetup
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import Floats, PlanBatch
from outpace.records.outline import AttentionShape

_ATTENTION_ROWS = 512  # rows of scores that ring attention holds at a time


@dataclass(frozen=True)
class _BlockBackward:
    """Values shared by the operators of a block's backward, in bytes unless stated otherwise.

    - `live`: the fraction of saved tensors that are on the device, not offloaded.
    - `copies`: the copies of weights in the matmul dtype, per matrix element.
    - `stream`: the gradient of the residual stream.
    - `read`: the input that the matmuls after a norm read; its gradient has the same size.
    - `cast`: the gradient of a matmul's output in the matmul dtype; 0 if it needs no cast.
    - `gathered`: the matmul input after a second all-gather; 0 if the backward does not gather it.
    """

    setup: MemorySetup
    gradient: GradientBytes
    live: Floats
    copies: Floats
    stream: Floats
    read: Floats
    cast: Floats
    gathered: Floats


def add_block_backward(timeline: MemoryTimeline, rank: RankSetup, mode: BlockMode) -> None:
    """Add a block's recomputation and backward to a timeline: the MLP first, then attention."""
    setup, s, b = rank.setup, rank.setup.sizes, rank.setup.block
    away = mode.offloaded  # offloaded tensors are used in host memory
    copies_away = setup.offloads_activations & ~mode.recomputes
    read = s.whole * s.operand
    block = _BlockBackward(
        setup=setup,
        gradient=rank.gradient,
        live=1 - away / np.maximum(b.saved_bytes, 1),
        copies=np.where(copies_away, 0.0, setup.copies / np.maximum(setup.matrices, 1)),
        stream=s.part * s.stream,
        read=read,
        cast=np.where(s.casts, read, 0.0),
        gathered=np.where(setup.regathers_inputs, read, 0.0),
    )
    timeline.pass_over("activations", b.saved_bytes - mode.saved)
    timeline.allocate("weight copies", np.where(mode.recomputes, setup.copies, 0.0))
    cached = np.where(mode.selective, b.output, 0.0)
    timeline.pass_over("activations", cached)
    _add_mlp_backward(timeline, block)
    _add_attention_backward(timeline, block)
    remains = b.saved_bytes - b.attention - b.inners * b.inner - 2 * b.input
    timeline.free("activations", (remains - 2 * (b.residual + b.norm)) * block.live + cached)
    held = np.where(copies_away, setup.copies, 0.0)
    timeline.offload(-(held + away), setup.activations_on_disk)


def _add_mlp_backward(timeline: MemoryTimeline, block: _BlockBackward) -> None:
    b = block.setup.block
    inner, saved = b.inner, b.inner * block.live
    # The gradient of the MLP's output in the matmuls' dtype, then that of the inner tensor.
    timeline.pass_over("temporary", block.cast)
    timeline.allocate("temporary", inner)
    add_gradient(timeline, block.gradient, b.down, copies=block.copies)
    timeline.free("temporary", block.cast)
    timeline.free("activations", saved)
    if b.gated:
        timeline.allocate("temporary", 2 * inner)
        timeline.free("activations", (b.inners - 2) * saved)
        timeline.free("temporary", inner)
        timeline.pass_over("temporary", block.read + block.gathered)
        add_gradient(timeline, block.gradient, b.up, copies=block.copies)
        timeline.free("temporary", inner)
        timeline.allocate("temporary", inner)
        timeline.free("activations", saved)
        timeline.free("temporary", inner)
        timeline.moment("temporary", block.read)
    else:
        timeline.allocate("temporary", inner)
        timeline.free("activations", saved)
        timeline.free("temporary", inner)
        timeline.allocate("temporary", block.read + block.gathered)
    add_gradient(timeline, block.gradient, b.up, copies=block.copies)
    timeline.free("temporary", inner)
    timeline.free("temporary", block.gathered)
    timeline.free("activations", b.input * block.live)
    _add_norm_backward(timeline, block)


def _add_attention_backward(timeline: MemoryTimeline, block: _BlockBackward) -> None:
    s, b = block.setup.sizes, block.setup.block
    timeline.pass_over("temporary", block.cast)
    timeline.pass_over("temporary", b.mixed)
    heads = b.queries + 2 * b.keys
    timeline.allocate("temporary", heads)
    _add_ring_attention(timeline, block.setup)
    _add_attention_workspace(timeline, block.setup)
    timeline.free("temporary", b.mixed + block.cast)
    timeline.free("activations", b.attention * block.live)
    if block.setup.outline.learned_positions == 0:
        wide = FP32 / s.operand
        turned = wide * (2 * b.queries + b.keys) - b.keys
        timeline.moment("temporary", np.maximum(turned, 0))
    rest = b.elements - b.down - b.up * (2 if b.gated else 1)
    timeline.pass_over("temporary", 2 * block.read + block.gathered)
    add_gradient(timeline, block.gradient, rest - b.vectors, copies=block.copies)
    add_gradient(timeline, block.gradient, b.vectors, matmul=False)
    timeline.free("temporary", block.read + block.gathered + heads)
    timeline.free("activations", b.input * block.live)
    _add_norm_backward(timeline, block)


def _add_norm_backward(timeline: MemoryTimeline, block: _BlockBackward) -> None:
    b = block.setup.block
    # Assembled before it is scattered.
    timeline.moment("temporary", np.where(block.setup.splits_stream, block.read, 0.0))
    timeline.pass_over("temporary", block.stream - block.read)
    timeline.allocate("temporary", block.stream * np.where(b.composed, 2, 1))
    timeline.free("activations", (b.residual + b.norm) * block.live)
    timeline.free("temporary", block.stream * np.where(b.composed, 3, 2))


def _add_ring_attention(timeline: MemoryTimeline, setup: MemorySetup) -> None:
    """Add ring attention's temporaries: operands in fp32 and scores.

    Three tensors of scores exist at a time, each with 512 rows.
    """
    c, s, b = setup.columns, setup.sizes, setup.block
    spread = c.cp > 1
    if not spread.any():
        return
    wide = FP32 / s.operand
    one = setup.outline.stacks[0].attention
    heads = (one.heads if one else 0) / c.tp
    length = setup.question.seq_len / c.cp
    rows = np.minimum(_ATTENTION_ROWS, length)
    scores = FP32 * c.micro_batch * heads * rows * length
    operands = wide * (4 * b.queries + 8 * b.keys) + 2 * b.keys
    timeline.select(spread).moment("temporary", 3 * scores + operands)


def _add_attention_workspace(timeline: MemoryTimeline, setup: MemorySetup) -> None:
    one = setup.outline.stacks[0].attention
    if setup.question.device == "cpu" or one is None:
        return
    c = setup.columns
    nbytes = flash_workspace_bytes(one, c, setup.question.seq_len, setup.block.queries)
    timeline.select(c.cp == 1).moment("temporary", nbytes)


def flash_workspace_bytes(
    one: AttentionShape, columns: PlanBatch, seq_len: int, queries: Floats
) -> Floats:
    """Return the bytes of FlashAttention's fp32 query gradients (Dao, arXiv 2307.08691, §3).

    With grouped queries, the result includes gradients of keys and of values for every query head,
    each as large as `queries` bytes.
    """
    unit = 32 if one.head_dim <= 128 else 64
    width = -(-one.head_dim // unit) * unit + 1
    length = np.ceil(seq_len / 128) * 128
    nbytes = FP32 * columns.micro_batch * one.heads / columns.tp * length * width
    found: Floats = nbytes + (2 * queries if one.kv_heads != one.heads else 0)
    return found
