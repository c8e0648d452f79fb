"""Memory of a frozen head and of the loss, from the last hidden state to its gradient.

Logits are handled as in `planner.memory.loss`, but the head has no gradient.
"""

import numpy as np

from outpace.planner.memory.logit_chunks import (
    CHUNK_ROWS,
    KEPT_OF_TOKEN,
    LOW_HEAD_ROWS,
    accelerator_rows,
    block_bytes,
    computes_whole_logits,
    exceeds_cpu,
    padded_columns,
    softmax_rows,
    whole_bf16_rows,
)
from outpace.planner.memory.saved_activations import FP32, Shapes
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import Bools, Floats, PlanBatch
from outpace.records.outline import Outline
from outpace.records.precisions import COMPUTES_IN_BF16


def add_frozen_head_loss(
    timeline: MemoryTimeline, outline: Outline, columns: PlanBatch, sizes: Shapes, device: str,
    item: Floats,
) -> None:  # fmt: skip
    """Add the head's matmuls and the loss; `item` is the bytes per element of the head's weight.

    The gradient of the last hidden state, which this produces, is not counted here.
    """
    if device == "cuda":
        _add_accelerator_loss(timeline, outline, columns, sizes, item)
        return
    c, s, hidden = columns, sizes, outline.hidden
    vocab = np.full(len(c), float(outline.outputs))
    rows = s.tokens
    bf16 = c.precision_in(*COMPUTES_IN_BF16)
    chunked = c.chunked_loss | exceeds_cpu(rows, vocab, bf16)
    logits, states = rows * vocab, rows * hidden
    output = states * s.stream
    copy = np.where(s.operand < item, vocab * hidden * s.operand, 0.0)

    def select(plans: Bools, nbytes: Floats) -> Floats:
        return np.where(plans, nbytes, 0.0)

    # All logits in 16 bits, overwritten by their gradient.
    low = bf16 & ~chunked
    block = softmax_rows(vocab, rows)
    part = s.operand * np.minimum(vocab, LOW_HEAD_ROWS) * hidden
    cast = np.where(s.operand < item, part, 0.0)
    read = np.where(s.operand < s.stream, states * s.operand, 0.0)
    within = np.maximum(read + cast, 2 * FP32 * block * vocab)
    timeline.allocate("activations", select(low, logits * s.operand + output))
    timeline.moment("temporary", select(low, within))
    raised = np.where(s.stream < FP32, FP32 * states, 0.0)
    timeline.moment("temporary", select(low, output + raised + cast + states * s.operand))
    timeline.free("activations", select(low, logits * s.operand + output))
    # All logits and their log-softmax, in fp32 or wider.
    whole = ~bf16 & ~chunked
    wide = np.maximum(s.operand, FP32)
    cast_logits = np.where(s.operand < wide, s.operand, 0.0)
    timeline.allocate("weight copies", select(whole, copy))
    timeline.moment("temporary", select(whole, output + logits * (cast_logits + 2 * wide)))
    timeline.allocate("activations", select(whole, logits * wide))
    timeline.moment("temporary", select(whole, logits * 2 * wide))
    timeline.free("activations", select(whole, logits * wide))
    timeline.moment("temporary", select(whole, logits * (wide + cast_logits)))
    timeline.moment("temporary", select(whole, logits * s.operand + states * s.operand))
    timeline.free("weight copies", select(whole, copy))
    # In chunks, whose forward computes the gradient of the hidden states.
    chunk = np.where(bf16 & ~c.chunked_loss, whole_bf16_rows(vocab), float(CHUNK_ROWS))
    chunk = np.minimum(chunk, rows)
    grads = states * np.where(bf16, s.stream, wide)
    # In bf16, the kernel sums the head's gradient even if the head is frozen.
    head = np.where(bf16, vocab * hidden * FP32, 0.0)
    own = vocab * hidden * s.operand
    block = softmax_rows(vocab, chunk)
    softmax = 2 * FP32 * block * vocab + np.where(rows > chunk, own, 0.0)
    made = own + s.operand * np.maximum(np.minimum(vocab, LOW_HEAD_ROWS), chunk) * hidden
    in_bf16 = s.operand * chunk * vocab + np.maximum(softmax, made) + copy
    raised_head = np.where(item < FP32, vocab * hidden * FP32, 0.0)
    inside = np.where(bf16, in_bf16, FP32 * (chunk + block) * vocab + raised_head)
    timeline.allocate("activations", select(chunked, grads + head))
    timeline.moment("temporary", select(chunked, inside + output))
    timeline.free("activations", select(chunked, grads + head))


def _add_accelerator_loss(
    timeline: MemoryTimeline, outline: Outline, columns: PlanBatch, sizes: Shapes, item: Floats
) -> None:
    """Add the memory of `nn.head_loss`, the loss on accelerators.

    If it is compiled and the logits fit, all logits are kept for the backward. Otherwise, the
    forward computes the gradients chunk by chunk.
    """
    c, s, hidden = columns, sizes, outline.hidden
    rows, wide = s.tokens, padded_columns(np.full(len(c), float(outline.outputs)))
    states = rows * hidden
    row_bytes = wide * s.operand
    whole = c.compile & computes_whole_logits(rows, wide, s.operand) & ~c.chunked_loss
    copied = (s.operand < item) | (wide != outline.outputs)
    copy = np.where(copied, wide * hidden * s.operand, 0.0)
    read = np.where(s.operand < s.stream, states * s.operand, 0.0)
    output = states * s.stream

    def select(plans: Bools, nbytes: Floats) -> Floats:
        return np.where(plans, nbytes, 0.0)

    kept = rows * row_bytes + read + rows * KEPT_OF_TOKEN
    timeline.allocate("weight copies", select(whole, copy))
    timeline.allocate("activations", select(whole, kept))
    timeline.moment("temporary", select(whole, output))
    made = states * (s.operand + np.where(s.operand < s.stream, s.stream, 0.0))
    timeline.moment("temporary", select(whole, made))
    timeline.free("weight copies", select(whole, copy))
    timeline.free("activations", select(whole, kept))
    # In chunks, or all at once without a compiler.
    chunk = accelerator_rows(rows, wide, s.operand, c.chunked_loss)
    inside = chunk * row_bytes + np.where(s.operand < s.stream, chunk * hidden * s.operand, 0.0)
    softmax = block_bytes(chunk, wide, c.compile) * np.where(s.operand < FP32, 2, 1)
    matmul = np.where(s.operand < s.stream, chunk * hidden * s.operand, 0.0)
    timeline.allocate("activations", select(~whole, output))
    timeline.moment(
        "temporary", select(~whole, inside + copy + output + np.maximum(softmax, matmul))
    )
    timeline.free("activations", select(~whole, output))
