"""Memory from the last hidden state to its gradient, where the head is frozen.

As `planner.memory.loss` has it, without the head's gradient: the same ways to take the logits.
"""

import numpy as np

from outpace.planner.memory.saved_activations import FP32, Shapes
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_batch import Bools, Floats, PlanBatch
from outpace.records.outline import Outline
from outpace.records.precisions import COMPUTES_IN_BF16

_MIB = 2**20
# nn.loss, on a CPU: rows of a chunk, from how many bytes of fp32 logits chunks are taken.
_CHUNK_ROWS = 512
_CHUNKS_FROM = 32 * _MIB
# nn.head_loss, on an accelerator.
_PADDED_TO = 64
_WHOLE_BYTES = 4096 * _MIB
_CHUNK_BYTES = 2048 * _MIB
_CHUNK_ROWS_ACCELERATOR = 4096
_BLOCK_BYTES = 256 * _MIB
_KEPT_OF_TOKEN = 4 + 8 + 1  # log Σ exp, the target's column, whether there is one
# On a CPU in bf16.
_LOW_BYTES = 256 * _MIB
_LOW_BLOCK_BYTES = 2 * _MIB
_LOW_HEAD_ROWS = 2048


def add_frozen_head_loss(
    timeline: MemoryTimeline, outline: Outline, columns: PlanBatch, sizes: Shapes, device: str,
    item: Floats,
) -> None:  # fmt: skip
    """Add the head's products and the loss; `item` are bytes of a number of the head.

    What is left of it is the gradient of the last hidden state, which is not counted here.
    """
    if device == "cuda":
        _on_accelerator(timeline, outline, columns, sizes, item)
        return
    c, s, vocab, hidden = columns, sizes, float(outline.outputs), outline.hidden
    rows = s.tokens
    bf16 = c.precision_in(*COMPUTES_IN_BF16)
    fits = np.maximum(_CHUNK_ROWS, np.floor(_LOW_BYTES / (2 * vocab)))
    large = np.where(bf16, rows > fits, (rows > _CHUNK_ROWS) & (FP32 * rows * vocab > _CHUNKS_FROM))
    chunked = c.chunked_loss | large
    logits, states = rows * vocab, rows * hidden
    output = states * s.stream
    copy = np.where(s.operand < item, vocab * hidden * s.operand, 0.0)

    def select(plans: Bools, nbytes: Floats) -> Floats:
        return np.where(plans, nbytes, 0.0)

    # All logits in 16 bits, over which the gradient is made.
    low = bf16 & ~chunked
    block = np.minimum(np.maximum(1, np.floor(_LOW_BLOCK_BYTES / (FP32 * vocab))), rows)
    part = s.operand * min(vocab, _LOW_HEAD_ROWS) * hidden
    cast = np.where(s.operand < item, part, 0.0)
    read = np.where(s.operand < s.stream, states * s.operand, 0.0)
    within = np.maximum(read + cast, 2 * FP32 * block * vocab)
    timeline.take("activations", select(low, logits * s.operand + output))
    timeline.moment("temporary", select(low, within))
    raised = np.where(s.stream < FP32, FP32 * states, 0.0)
    timeline.moment("temporary", select(low, output + raised + cast + states * s.operand))
    timeline.drop("activations", select(low, logits * s.operand + output))
    # All logits and their logarithms of softmax, in fp32 or what is wider.
    whole = ~bf16 & ~chunked
    wide = np.maximum(s.operand, FP32)
    cast_logits = np.where(s.operand < wide, s.operand, 0.0)
    timeline.take("weight copies", select(whole, copy))
    timeline.moment("temporary", select(whole, output + logits * (cast_logits + 2 * wide)))
    timeline.take("activations", select(whole, logits * wide))
    timeline.moment("temporary", select(whole, logits * 2 * wide))
    timeline.drop("activations", select(whole, logits * wide))
    timeline.moment("temporary", select(whole, logits * (wide + cast_logits)))
    timeline.moment("temporary", select(whole, logits * s.operand + states * s.operand))
    timeline.drop("weight copies", select(whole, copy))
    # In chunks, of which the forward makes the gradient of the hidden states.
    chunk = np.where(bf16 & ~c.chunked_loss, fits, float(_CHUNK_ROWS))
    chunk = np.minimum(chunk, rows)
    grads = states * np.where(bf16, s.stream, wide)
    # bf16's adds up the head's gradient, frozen or not.
    head = np.where(bf16, vocab * hidden * FP32, 0.0)
    own = vocab * hidden * s.operand
    block = np.minimum(np.maximum(1, np.floor(_LOW_BLOCK_BYTES / (FP32 * vocab))), chunk)
    softmax = 2 * FP32 * block * vocab + np.where(rows > chunk, own, 0.0)
    made = own + s.operand * np.maximum(min(vocab, _LOW_HEAD_ROWS), chunk) * hidden
    in_bf16 = s.operand * chunk * vocab + np.maximum(softmax, made) + copy
    raised_head = np.where(item < FP32, vocab * hidden * FP32, 0.0)
    inside = np.where(bf16, in_bf16, FP32 * (chunk + block) * vocab + raised_head)
    timeline.take("activations", select(chunked, grads + head))
    timeline.moment("temporary", select(chunked, inside + output))
    timeline.drop("activations", select(chunked, grads + head))


def _on_accelerator(
    timeline: MemoryTimeline, outline: Outline, columns: PlanBatch, sizes: Shapes, item: Floats
) -> None:
    """Add `nn.head_loss`: all logits kept where compiled, else gradients made in the forward."""
    c, s, hidden = columns, sizes, outline.hidden
    rows, padded = s.tokens, float(-(-outline.outputs // _PADDED_TO) * _PADDED_TO)
    states = rows * hidden
    row_bytes = padded * s.operand
    fits = rows * row_bytes <= _WHOLE_BYTES
    whole = c.compile & fits & ~c.chunked_loss
    copied = (s.operand < item) | (padded != outline.outputs)
    copy = np.where(copied, padded * hidden * s.operand, 0.0)
    read = np.where(s.operand < s.stream, states * s.operand, 0.0)
    output = states * s.stream
    most = max(1, _BLOCK_BYTES // (FP32 * padded))

    def block(count: Floats) -> Floats:
        """Return logits in fp32 beside the logits; compiled passes have none."""
        return np.where(c.compile, 0.0, FP32 * np.minimum(count, most) * padded)

    def select(plans: Bools, nbytes: Floats) -> Floats:
        return np.where(plans, nbytes, 0.0)

    kept = rows * row_bytes + read + rows * _KEPT_OF_TOKEN
    timeline.take("weight copies", select(whole, copy))
    timeline.take("activations", select(whole, kept))
    timeline.moment("temporary", select(whole, output))
    made = states * (s.operand + np.where(s.operand < s.stream, s.stream, 0.0))
    timeline.moment("temporary", select(whole, made))
    timeline.drop("weight copies", select(whole, copy))
    timeline.drop("activations", select(whole, kept))
    # In parts, or all at once without a compiler.
    part = np.maximum(_CHUNK_ROWS_ACCELERATOR, _CHUNK_BYTES // row_bytes // _PADDED_TO * _PADDED_TO)
    chunk = np.ceil(rows / np.ceil(rows / part) / _PADDED_TO) * _PADDED_TO
    chunk = np.where(fits, rows, chunk)
    chunk = np.where(c.chunked_loss, _CHUNK_ROWS_ACCELERATOR, chunk)
    chunk = np.minimum(chunk, rows)
    inside = chunk * row_bytes + np.where(s.operand < s.stream, chunk * hidden * s.operand, 0.0)
    softmax = block(chunk) * np.where(s.operand < FP32, 2, 1)
    product = np.where(s.operand < s.stream, chunk * hidden * s.operand, 0.0)
    timeline.take("activations", select(~whole, output))
    timeline.moment(
        "temporary", select(~whole, inside + copy + output + np.maximum(softmax, product))
    )
    timeline.drop("activations", select(~whole, output))
