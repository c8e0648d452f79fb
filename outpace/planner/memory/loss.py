"""Memory of the last norm, the head and the loss, forward and backward."""

from dataclasses import dataclass

import numpy as np

from outpace.planner.memory.gradients import add_gradient, added_bytes
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
from outpace.planner.memory.rank_setup import RankSetup
from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.setup import MemorySetup
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import Bools, Floats
from outpace.records.precisions import COMPUTES_IN_BF16


@dataclass(frozen=True)
class _Head:
    """The language-model head of a rank that has one, with the values that its memory depends on.

    - `rows`: the number of tokens for which logits are computed.
    - `elements`: the number of elements of the head's weight.
    - `more`: the number of other micro-batches whose backward is still to come.
    - `last`: the bytes of a buffer that is freed when the head's backward begins.
    - `copied`: which plans multiply by a cast or padded copy of the weight.
    """

    setup: MemorySetup
    rows: Floats
    vocab: Floats
    elements: Floats
    more: Floats
    last: Floats
    copied: Bools


def add_loss(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Add the last norm, the head and the loss of all micro-batches that await their backward.

    The gradient of the last hidden state remains allocated.
    """
    setup, c, s = rank.setup, rank.setup.columns, rank.setup.sizes
    place, hidden = rank.place, rank.setup.outline.hidden
    with_head = timeline.select(place.last)
    losses = np.where(rank.later, place.later_losses, place.losses)
    many = np.where(setup.dp, c.dp_replicate, 1)
    rows = s.tokens * many
    # Saved by the norm before the head, and by its transform if there is one.
    stream = s.part * s.stream
    norm = np.where(setup.block.composed, setup.block.norm, 0.0)
    before = stream + norm + _head_transform_bytes(setup)
    kept = np.maximum(losses, 1) * before
    outputs = np.where(many > 1, rows * hidden * s.stream, 0.0)
    # If weights stay gathered, the last block's buffer is freed when the backward begins.
    last = np.where(setup.sharding.regathers, 0.0, setup.unit)
    with_head.pass_over("activations", kept)
    timeline.pass_over("activations", outputs)
    if place.last.any():
        _add_head_and_loss(with_head, setup, rows, np.maximum(losses - 1, 0), last)
    timeline.select(~place.last).free("communication", last)
    timeline.free("activations", outputs)
    add_gradient(with_head, rank.gradient, _logit_columns(setup) * hidden)
    timeline.pass_over("temporary", tied_head_bytes(rank))
    with_head.free("activations", kept - (np.maximum(losses, 1) - 1) * before)
    # From here on, the gradient of the residual stream exists.
    timeline.allocate("temporary", stream)


def add_split_head(timeline: MemoryTimeline, rank: RankSetup) -> None:
    """Add the inputs of the head's delayed weight gradient.

    These are the logits' gradient and the copy of the weight.
    """
    setup, s, vocab = rank.setup, rank.setup.sizes, _logit_columns(rank.setup)
    here = timeline.select(rank.place.last & ~_uses_chunks(setup, s.tokens, vocab))
    here.pass_over("temporary", s.tokens * vocab * s.operand)
    if not _uses_head_loss(setup):
        copy = vocab * setup.outline.hidden * s.operand
        here.pass_over("weight copies", np.where(s.operand < setup.sharding.item, copy, 0.0))


def tied_head_bytes(rank: RankSetup) -> Floats:
    """Return the bytes of a tied head's gradient, which waits for the embedding's gradient.

    Returns 0 if the head's gradient is stored until the optimizer's step anyway.
    """
    setup, place, c = rank.setup, rank.place, rank.setup.columns
    both = place.first & place.last & setup.outline.tied & ~setup.dp & (c.pp == 1)
    waits = both & ~setup.sharding.gathers & ~rank.allocates_gradients
    return np.where(waits, setup.ends.embedding * added_bytes(setup), 0.0)


def _add_head_and_loss(
    timeline: MemoryTimeline, setup: MemorySetup, rows: Floats, more: Floats, last: Floats
) -> None:
    """Add the memory of the head and the loss to a timeline, as each plan computes them.

    `rows` is the number of tokens, `more` the number of other micro-batches whose backward is still
    to come, and `last` the bytes of a buffer that is freed when the head's backward begins.
    """
    item, hidden, vocab = setup.sharding.item, setup.outline.hidden, _logit_columns(setup)
    cast = setup.sizes.operand < item
    chunked = _uses_chunks(setup, rows, vocab)
    if _uses_head_loss(setup):
        wide = padded_columns(vocab)
        copied = cast | (wide != vocab)
        head = _Head(setup, rows, wide, wide * hidden, more, last, copied)
        whole = ~chunked & _keeps_logits(setup, rows, wide)
        ways = [(whole, _add_logits_in_place), (~whole, _add_chunks_in_place)]
    else:
        head = _Head(setup, rows, vocab, vocab * hidden, more, last, cast)
        low = _overwrites_bf16_logits(setup)
        ways = [
            (low & ~chunked, _add_bf16_logits),
            (~chunked & ~low, _add_fp32_logits),
            (chunked, _add_cpu_chunks),
        ]
    for plans, add in ways:
        if plans.any():
            add(timeline.select(plans), head)


def _logit_columns(setup: MemorySetup) -> Floats:
    return np.ceil(setup.outline.outputs / setup.columns.tp)


def _head_transform_bytes(setup: MemorySetup) -> Floats | float:
    """Return the bytes that BERT's matmul, activation and norm before the head save."""
    if not setup.outline.head_matmuls:
        return 0.0
    read = setup.sizes.whole * setup.sizes.operand
    return 2 * read + np.where(setup.sizes.casts, read, 0.0)


def _uses_chunks(setup: MemorySetup, rows: Floats, vocab: Floats) -> Bools:
    c = setup.columns
    if _uses_head_loss(setup):
        large = ~computes_whole_logits(rows, padded_columns(vocab), setup.sizes.operand)
    else:
        large = exceeds_cpu(rows, vocab, _overwrites_bf16_logits(setup))
    chunks: Bools = ((large & ~c.splits_backward()) | c.chunked_loss) & (c.tp == 1)
    return chunks & setup.question.traits.chunks_loss


def _uses_head_loss(setup: MemorySetup) -> bool:
    """Return whether the loss is `nn.head_loss`, which outpace uses on accelerators."""
    return setup.question.traits.chunks_loss and setup.question.device == "cuda"


def _keeps_logits(setup: MemorySetup, rows: Floats, columns: Floats) -> Bools:
    c = setup.columns
    whole = c.compile & computes_whole_logits(rows, columns, setup.sizes.operand)
    return c.splits_backward() | (c.tp > 1) | whole


def _add_logits_in_place(timeline: MemoryTimeline, head: _Head) -> None:
    """Add the logits of all tokens at once, which the backward overwrites with their gradient."""
    s, rows = head.setup.sizes, head.rows
    states = rows * head.setup.outline.hidden
    cast = np.where(s.operand < s.stream, states * s.operand, 0.0)
    kept = rows * head.vocab * s.operand + cast + rows * KEPT_OF_TOKEN
    copy = np.where(head.copied, head.elements * s.operand, 0.0)
    block = block_bytes(rows, head.vocab, head.setup.columns.compile)
    output = np.where(s.casts, states * s.stream, 0.0)
    timeline.pass_over("activations", head.more * kept)
    timeline.pass_over("weight copies", (1 + head.more) * copy)
    timeline.moment("temporary", kept + block + output)
    timeline.allocate("activations", kept)
    timeline.free("communication", head.last)
    within = states * (s.operand + np.where(s.casts, s.stream, 0.0))
    timeline.moment("temporary", np.maximum(block, within))
    timeline.free("weight copies", copy)
    timeline.moment("temporary", states * s.stream + head.elements * head.setup.sharding.item)
    timeline.free("activations", kept)


def _add_chunks_in_place(timeline: MemoryTimeline, head: _Head) -> None:
    """Add logits, all at once or in chunks, whose gradients the forward computes in place."""
    s, rows, item = head.setup.sizes, head.rows, head.setup.sharding.item
    hidden = head.setup.outline.hidden
    c, row_bytes = head.setup.columns, np.maximum(head.vocab, 1) * s.operand
    chunk = accelerator_rows(rows, head.vocab, s.operand, c.chunked_loss)
    states_grad = rows * hidden * s.stream
    weights_grad = head.elements * FP32
    cast = np.where(s.operand < s.stream, chunk * hidden * s.operand, 0.0)
    logits = chunk * row_bytes + cast
    copy = np.where(head.copied, head.elements * s.operand, 0.0)
    # Cast for the softmax, and the softmax.
    block = block_bytes(chunk, head.vocab, c.compile) * np.where(s.operand < FP32, 2, 1)
    block = block + np.where(rows > chunk, weights_grad, 0.0)
    timeline.pass_over("activations", (1 + head.more) * states_grad + head.more * weights_grad)
    output = rows * hidden * s.stream
    within = np.maximum(block, weights_grad + cast)
    timeline.moment("temporary", logits + copy + output + within)
    timeline.pass_over("activations", weights_grad)
    timeline.free("communication", head.last)
    timeline.moment("temporary", np.where(item < FP32, head.elements * item, 0.0))
    timeline.free("activations", states_grad + weights_grad)


def _overwrites_bf16_logits(setup: MemorySetup) -> Bools:
    """Return which plans compute logits in bf16 on a CPU and overwrite them with their gradient."""
    c = setup.columns
    own = c.precision_in(*COMPUTES_IN_BF16) & ~c.splits_backward() & (c.tp == 1)
    takes: Bools = own & setup.question.traits.chunks_loss & (setup.question.device == "cpu")
    return takes


def _add_bf16_logits(timeline: MemoryTimeline, head: _Head) -> None:
    """Add all logits in 16 bits; their gradient is computed in place."""
    s, rows, vocab = head.setup.sizes, head.rows, head.vocab
    states = rows * head.setup.outline.hidden
    logits = rows * vocab * s.operand
    output = np.where(s.casts, states * s.stream, 0.0)
    read = np.where(s.operand < s.stream, states * s.operand, 0.0)
    part = s.operand * np.minimum(vocab, LOW_HEAD_ROWS) * head.setup.outline.hidden
    cast = np.where(head.copied, part, 0.0)
    timeline.pass_over("activations", head.more * logits)
    within = np.maximum(read + cast, 2 * FP32 * softmax_rows(vocab, rows) * vocab)
    timeline.moment("temporary", logits + within + output)
    timeline.allocate("activations", logits)
    timeline.free("communication", head.last)
    wide = np.where(s.stream < FP32, FP32 + s.stream, FP32)
    made = head.elements * head.setup.sharding.item + states * wide
    timeline.moment("temporary", made + read + cast + np.maximum(part, states * s.operand))
    timeline.free("activations", logits)


def _add_fp32_logits(timeline: MemoryTimeline, head: _Head) -> None:
    setup, s, c = head.setup, head.setup.sizes, head.setup.columns
    in_place = setup.question.traits.softmax_in_place
    states = head.rows * setup.outline.hidden
    logits, wide = head.rows * head.vocab, np.maximum(s.operand, FP32)
    narrow = np.where(s.operand < FP32, s.operand, 0.0)
    read = states * s.operand
    # The head's input is gathered for its matmul and again for its gradient, or kept.
    gathered = np.where(setup.regathers_inputs, read * (1 - 1 / c.tp), 0.0)
    copy = np.where(head.copied, head.elements * s.operand, 0.0)
    timeline.pass_over("activations", head.more * (logits * wide + read - gathered))
    timeline.pass_over("weight copies", head.more * copy)
    timeline.pass_over("activations", read - gathered)
    timeline.pass_over("weight copies", copy)
    # Logits in fp32, and the logarithms of their softmax (split over ranks: exponentials).
    output = np.where(s.casts, states * s.stream, 0.0)  # the tensor that was cast
    again = 0 if in_place else wide
    timeline.moment("temporary", output + logits * (narrow + wide + again))
    timeline.allocate("activations", logits * wide)
    timeline.free("communication", head.last)
    # Its gradient and that of the logits. If split or in place, the latter is computed directly,
    # and cast.
    made = np.where((c.tp > 1) | in_place, again + narrow, 2 * wide)
    timeline.moment("temporary", logits * made)
    timeline.free("activations", logits * wide)
    grads = logits * s.operand + head.elements * s.operand + read + gathered
    timeline.moment("temporary", grads)
    timeline.free("weight copies", copy)
    timeline.free("activations", read - gathered)


def _add_cpu_chunks(timeline: MemoryTimeline, head: _Head) -> None:
    """Add the CPU's chunked loss, whose forward computes gradients of hidden states and head."""
    s, hidden, item = head.setup.sizes, head.setup.outline.hidden, head.setup.sharding.item
    rows, vocab, low = head.rows, head.vocab, _overwrites_bf16_logits(head.setup)
    asked = head.setup.columns.chunked_loss
    chunk = np.where(low & ~asked, whole_bf16_rows(vocab), float(CHUNK_ROWS))
    chunk = np.minimum(chunk, rows)
    states_grad = rows * hidden * np.where(low, s.stream, np.maximum(s.operand, FP32))
    weights_grad = head.elements * np.maximum(FP32, item)
    raised = np.where((item < FP32) & ~low, head.elements * FP32, 0.0)
    timeline.pass_over("activations", (1 + head.more) * (states_grad + weights_grad))
    output = rows * hidden * s.stream
    cast = np.where(low & head.copied, head.elements * s.operand, 0.0)
    # In bf16, a chunk's gradient of the head lives while the next one is computed.
    grad = head.elements * s.operand
    block = softmax_rows(vocab, chunk)
    softmax = 2 * FP32 * block * vocab + np.where(rows > chunk, grad, 0.0)
    part = s.operand * np.maximum(np.minimum(vocab, LOW_HEAD_ROWS), chunk) * hidden
    in_place = s.operand * chunk * vocab + np.maximum(softmax, grad + part)
    inside = np.where(low, in_place, FP32 * (chunk + block) * vocab)
    timeline.moment("temporary", inside + output + cast + raised)
    timeline.free("communication", head.last)
    timeline.free("activations", states_grad + weights_grad)
