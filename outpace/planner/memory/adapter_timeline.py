"""Memory timeline of a step that trains adapters.

docs/concepts/memory-model.md derives what autograd saves in `nn.lora` and when that memory is
freed.
"""

import numpy as np

from outpace.planner.memory.adapter_loss import add_frozen_head_loss
from outpace.planner.memory.adapters import QKV, AdapterMemory
from outpace.planner.memory.block_backward import flash_workspace_bytes
from outpace.planner.memory.fullest_rank import recompute_interval
from outpace.planner.memory.optimizer_bytes import MASTER_PIECE_BYTES, optimizer_bytes
from outpace.planner.memory.optimizer_step import add_step_tensors
from outpace.planner.memory.permanent_tensors import WORKSPACES
from outpace.planner.memory.saved_activations import FP32, share_of
from outpace.planner.memory.states import by_plans
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.model.adapters import Matrix, nf4_bytes, nf4_scale_bytes
from outpace.planner.plan_columns import OPTIMIZERS, PRECISIONS, Bools, Floats, Ints
from outpace.records.plan import Checkpointing
from outpace.records.precisions import COMPUTES_IN_BF16, WEIGHTS

_MIB = 2**20
# Bucket size: DDP.broadcast_bucket_size (torch/nn/parallel/distributed.py). Buckets in flight:
# max_in_flight of broadcast_coalesced (torch/csrc/distributed/c10d/comm.cpp).
_BROADCAST_BYTES, _BROADCASTS_IN_FLIGHT = 250 * _MIB, 2
# nn.attention, on a CPU in bf16: queries of a block, and the maximum bytes of its scores.
_SCORE_ROWS, _SCORE_BYTES = 128, 4 * _MIB


def start_timeline(step: AdapterMemory) -> MemoryTimeline:
    """Return a rank's memory timeline before the first forward: its permanent tensors."""
    timeline = MemoryTimeline(len(step.columns), step.records_kinds)
    _add_permanent_tensors(timeline, step)
    return timeline


def _add_permanent_tensors(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    c, s, layers = step.columns, step.sizes, step.outline.layers
    if step.packs and step.device == "cpu":
        # On a CPU, all weights are loaded before they are quantized one by one.
        first = step.matrices[0].elements
        whole = sum(m.elements for m in step.matrices) + step.vectors
        raised = np.where(s.weight < FP32, FP32 * first, 0.0)
        built = s.weight * (layers * whole + step.root_elements) + nf4_bytes(first) + raised
        timeline.moment("weights", built)
    held = step.block_bytes(s.weight) * layers + s.weight * step.root_elements
    timeline.pass_over("weights", held / step.shards)
    # DDP sends all weights from rank 0 before the first step. If all weights are trained, this
    # stays below a step's peak, which includes gradients of the same size.
    sent = np.minimum(held, _BROADCASTS_IN_FLIGHT * _BROADCAST_BYTES)
    timeline.moment("communication", np.where(c.strategy_in("ddp"), sent, 0.0))
    timeline.pass_over("optimizer state", layers * _block_state_bytes(step) / step.shards)
    trained = s.weight * layers * step.trained_elements
    buckets = np.where(c.strategy_in("ddp"), trained, 0.0)
    apart = np.where(c.strategy_in("ddp") | ~step.gathers, trained, trained / step.shards)
    timeline.pass_over("gradients", buckets + np.where(c.passes > 1, apart, 0.0))
    timeline.pass_over("workspaces", WORKSPACES[step.device])
    samples = (c.micro_batch * c.passes).astype(float)
    timeline.pass_over("inputs", 16.0 * step.seq_len * samples)
    timeline.record_peak()


def _block_state_bytes(step: AdapterMemory) -> Floats:
    def value(optimizer: int, precision: int) -> float:
        name = OPTIMIZERS[optimizer]
        return sum(optimizer_bytes(one, name, PRECISIONS[precision]) for one in step.adapter_shapes)

    return by_plans(step.columns.with_kept_states(), ("optimizer", "precision"), value)


def adapter_timeline(step: AdapterMemory) -> MemoryTimeline:
    """Return the memory timeline of a step on a rank, which is the same for all ranks."""
    timeline = start_timeline(step)
    _add_root_gather(timeline, step)
    _add_forward(timeline, step)
    s, stream = step.sizes, step.sizes.part * step.sizes.stream
    normed = stream + step.block.norm
    timeline.pass_over("activations", normed)
    add_frozen_head_loss(timeline, step.outline, step.columns, s, step.device, step.root_item)
    timeline.allocate("temporary", 2 * stream)
    timeline.free("activations", normed)
    timeline.free("temporary", stream)
    unit = _gathered_block_bytes(step)
    timeline.free("communication", unit)
    _add_blocks_backward(timeline, step, unit)
    _add_optimizer_step(timeline, step)
    return timeline


def _gathered_block_bytes(step: AdapterMemory) -> Floats:
    return np.where(step.gathers, step.block_bytes(step.gathered_item), 0.0)


def _add_root_gather(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    root = np.where(step.gathers, step.root_item * step.root_elements, 0.0)
    timeline.allocate("unsharded", root)
    timeline.allocate("communication", root)
    autocast = ~step.columns.precision_in(*WEIGHTS) & (step.sizes.reduced > step.root_item)
    raised = step.gathers & autocast & (step.device == "cpu")
    timeline.moment("temporary", np.where(raised, FP32 * step.ends.embedding, 0.0))
    timeline.free("communication", root)


def _add_forward(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    """Add the tensors that blocks save for the backward.

    With sharded parameters, each block is gathered while the buffer of the previous gather still
    exists.
    """
    c, layers = step.columns, step.outline.layers
    plain = share_of(c, "none")
    kept = plain * step.saved_bytes
    for mode in ("full", "attention", "selective"):
        kept = kept + share_of(c, mode) * step.saved_bytes_in(mode)
    first = recompute_interval(c, layers) == 0
    less = np.where(first, step.first_saves_less, 0.0)
    timeline.pass_over("activations", layers * kept - less)
    copies = layers * plain * step.block_copies(first=False)
    spared = step.block_copies(first=False) - step.block_copies(first=True)
    timeline.pass_over("weight copies", copies - np.where(first, spared, 0.0))
    attention = step.outline.stacks[0].attention
    if step.outline.learned_positions == 0 and attention is not None:
        timeline.pass_over("activations", 2 * FP32 * attention.head_dim * step.seq_len)
    last = _recomputes(recompute_interval(c, layers), layers - 1)
    passing = np.where(last, step.recomputed_forward_bytes, step.forward_bytes)
    unit = _gathered_block_bytes(step)
    timeline.pass_over("unsharded", unit)
    timeline.moment("communication", 2 * unit)
    timeline.pass_over("communication", unit)
    timeline.moment("temporary", passing)
    timeline.free("unsharded", unit)


def _add_blocks_backward(timeline: MemoryTimeline, step: AdapterMemory, unit: Floats) -> None:
    """Add the memory changes of the backward through all blocks.

    The last two and the first two blocks are added one by one, and those between them at once.
    """
    layers = step.outline.layers
    every = recompute_interval(step.columns, layers)
    shown = sorted({layers - 1, layers - 2, 1, 0} & set(range(layers)), reverse=True)
    reduced = np.zeros(len(step.columns))
    saved = sum((_saved_bytes(step, every, place) for place in shown), start=np.zeros(len(unit)))
    casts = sum((_cast_bytes(step, every, place) for place in shown), start=np.zeros(len(unit)))
    for place in shown:
        if place == 1 and layers > len(shown):
            _add_middle_blocks(timeline, step, layers - len(shown), saved, casts)
        timeline.allocate("communication", unit)
        timeline.allocate("unsharded", unit)
        timeline.free("communication", unit)
        coming = unit if place else np.zeros_like(unit)
        timeline.allocate("communication", coming)
        _add_block_backward(timeline, step, _recomputes(every, place), first=place == 0)
        timeline.free("communication", coming)
        timeline.free("unsharded", unit)
        reduced = _start_reduction(timeline, step, reduced)
    timeline.free("communication", reduced)
    timeline.free("temporary", step.sizes.part * step.sizes.stream)


def _recomputes(every: Ints, place: int) -> Bools:
    """Return which plans recompute block `place`.

    `every`: a plan recomputes each block whose index is a multiple of this number; 0 for no block.
    """
    found: Bools = (every > 0) & (place % np.maximum(every, 1) == 0)
    return found


def _saved_bytes(step: AdapterMemory, every: Ints, place: int) -> Floats:
    less = step.first_saves_less if place == 0 else 0.0
    return np.where(_recomputes(every, place), _checkpointed_bytes(step), step.saved_bytes - less)


def _checkpointed_bytes(step: AdapterMemory) -> Floats:
    """Return the bytes that the forward of a recomputed block saves.

    All recomputed blocks of a plan have the same mode.
    """
    modes: tuple[Checkpointing, ...] = ("selective", "attention", "full")
    found = step.saved_bytes
    for mode in modes:
        found = np.where(share_of(step.columns, mode) > 0, step.saved_bytes_in(mode), found)
    return found


def _cast_bytes(step: AdapterMemory, every: Ints, place: int) -> Floats:
    return np.where(_recomputes(every, place), 0.0, step.block_copies(first=place == 0))


def _add_middle_blocks(
    timeline: MemoryTimeline, step: AdapterMemory, count: int, saved: Floats, casts: Floats
) -> None:
    """Add the memory changes of the `count` middle blocks.

    All blocks together save certain bytes of activations and of weights in the matmul dtype. The
    first and last blocks account for `saved` and `casts` of these, and the middle blocks for the
    rest.
    """
    c, layers = step.columns, step.outline.layers
    every = recompute_interval(c, layers)
    plain = share_of(c, "none") * layers
    less = np.where(every == 0, step.first_saves_less, 0.0)
    kept = plain * step.saved_bytes + (layers - plain) * _checkpointed_bytes(step) - less
    spared = step.block_copies(first=False) - step.block_copies(first=True)
    copies = plain * step.block_copies(first=False) - np.where(every == 0, spared, 0.0)
    timeline.free("activations", kept - saved)
    timeline.free("weight copies", copies - casts)
    grads = count * step.sizes.weight * step.trained_elements / step.shards
    timeline.pass_over("gradients", np.where(_starts_with_gradients(step), 0.0, grads))


def _starts_with_gradients(step: AdapterMemory) -> Bools:
    return step.columns.strategy_in("ddp") | (step.columns.passes > 1)


def _start_reduction(timeline: MemoryTimeline, step: AdapterMemory, reduced: Floats) -> Floats:
    """Start the reduction of a block's gradients and return the bytes being reduced.

    Frees `reduced`, the bytes of the previous block's reduction.
    """
    sent = np.where(step.gathers, step.sizes.reduced * step.trained_elements, 0.0)
    if step.packs:
        sent = np.where(step.gathers, step.sizes.weight * step.trained_elements, 0.0)
    timeline.free("communication", reduced)
    timeline.allocate("communication", sent)
    made = np.where(step.gathers, step.gathered_item * step.trained_elements, 0.0)
    timeline.free("communication", made)
    kept = np.where(step.gathers, step.sizes.weight * step.trained_elements / step.shards, 0.0)
    timeline.allocate("gradients", np.where(_starts_with_gradients(step), 0.0, kept))
    return sent


def _add_adapter_gradient(timeline: MemoryTimeline, step: AdapterMemory, elements: int) -> None:
    whole = step.gathered_item * elements
    timeline.allocate("communication", np.where(step.gathers, whole, 0.0))
    own = np.where(step.gathers, 0.0, whole)
    there = _starts_with_gradients(step)
    timeline.moment("temporary", np.where(there, own, 0.0))
    timeline.allocate("gradients", np.where(there, 0.0, own))


def _add_block_backward(
    timeline: MemoryTimeline, step: AdapterMemory, recomputes: Bools, *, first: bool
) -> None:
    """Add a block's recomputation and backward, first of the MLP, then of attention.

    The gradient of the residual stream is live throughout.
    """
    b, s = step.block, step.sizes
    less = step.first_saves_less if first else 0.0
    stream, read = s.part * s.stream, s.whole * s.operand
    cast = np.where(s.casts, read, 0.0)
    timeline.allocate("temporary", cast)
    remade = np.where(recomputes, step.saved_bytes - less - _checkpointed_bytes(step), 0.0)
    timeline.pass_over("activations", remade)
    timeline.allocate("weight copies", np.where(recomputes, step.block_copies(first=first), 0.0))
    timeline.moment("temporary", np.where(recomputes, step.forward_bytes, 0.0))
    # The last matmul's output was saved, and is not recomputed.
    cached = np.where(recomputes & (share_of(step.columns, "selective") > 0), b.output, 0.0)
    timeline.pass_over("activations", cached)
    starts = first and not step.has(*QKV, "out")
    if starts and not step.has("gate", "up"):
        down = step.matrix("down")
        read = step.shared_bytes("down")
        _add_linear_backward(timeline, step, down, made=cast, read=read, has_gradient=False)
    else:
        _add_mlp_backward(timeline, step, cast)
    if not starts:
        _add_norm_backward(timeline, step, stream, read)
        timeline.allocate("temporary", cast)
        _add_attention_backward(timeline, step, cast, first=first)
        if not first:
            _add_norm_backward(timeline, step, stream, read)
    timeline.free("activations", b.dropped + cached)


def _add_mlp_backward(timeline: MemoryTimeline, step: AdapterMemory, cast: Floats) -> None:
    """Add the memory changes of the MLP's backward.

    `cast`: the bytes of the gradient of the MLP's output, cast to the matmul dtype; 0 for plans
    that do not cast it.
    """
    b, inner = step.block, step.block.inner
    down, up = step.matrix("down"), step.matrix("up")
    _add_linear_backward(timeline, step, down, made=cast, read=step.shared_bytes("down"))
    if b.gated:
        timeline.allocate("temporary", 2 * inner)
        timeline.free("activations", 2 * inner)
        timeline.free("temporary", inner)
        _add_linear_backward(timeline, step, up, made=inner)
        timeline.allocate("temporary", inner)
        timeline.free("activations", inner)
        timeline.free("temporary", inner)
        up, joins = step.matrix("gate"), True
    else:
        timeline.allocate("temporary", inner)
        timeline.free("activations", inner)
        timeline.free("temporary", inner)
        joins = False
    read = step.shared_bytes("gate", "up")
    _add_linear_backward(timeline, step, up, made=inner, read=read, joins=joins)


def _add_attention_backward(
    timeline: MemoryTimeline, step: AdapterMemory, cast: Floats, *, first: bool
) -> None:
    """Add the memory changes of attention's backward.

    `cast`: the bytes of the gradient of attention's output, cast to the matmul dtype; 0 for plans
    that do not cast it. In the `first` block, attention's input needs no gradient.
    """
    b, s = step.block, step.sizes
    out = step.matrix("out")
    begins = first and not step.has(*QKV)  # the attention output has no gradient
    _add_linear_backward(timeline, step, out, made=cast, has_gradient=not begins)
    if begins:
        timeline.free("activations", b.mixed)
        return
    mixed = step.input_bytes(out)
    heads = b.queries + 2 * b.keys
    timeline.allocate("temporary", heads)
    _add_attention_workspace(timeline, step)
    timeline.free("activations", step.attention)
    timeline.free("temporary", mixed)
    if step.outline.learned_positions == 0:
        wide = FP32 / s.operand
        turned = wide * (2 * b.queries + b.keys) - b.keys
        timeline.moment("temporary", np.maximum(turned, 0))
    joins = False
    for name in ("v", "k", "q"):
        matrix = step.matrix(name)
        read = step.shared_bytes(*QKV) if name == "q" else np.zeros_like(cast)
        _add_linear_backward(
            timeline, step, matrix, made=step.output_bytes(matrix), read=read, joins=joins,
            has_gradient=not first,
        )  # fmt: skip
        joins = not first


def _add_linear_backward(
    timeline: MemoryTimeline,
    step: AdapterMemory,
    matrix: Matrix,
    *,
    made: Floats,
    read: Floats | float = 0.0,
    joins: bool = False,
    has_gradient: bool = True,
) -> None:
    """Add the memory changes of a linear layer's backward.

    The backward computes gradients for the adapter's factor B, the frozen matrix and then the
    adapter's factor A. It frees `made` bytes of the output's gradient and `read` bytes of the input
    that adapters saved. `has_gradient`: the gradient of the input is computed and stays. `joins`:
    this gradient is added to an existing one.
    """
    into = step.input_bytes(matrix) if has_gradient else np.zeros(len(step.columns))
    rank = step.settings.rank
    if matrix.adapted:
        _add_adapter_gradient(timeline, step, rank * matrix.outputs)
        timeline.free("activations", step.low)
        timeline.allocate("temporary", step.low)
    unpacked: Floats | float = 0.0
    if step.packs and has_gradient:
        unpacked = matrix.elements * step.sizes.operand
        scales = nf4_scale_bytes(matrix.elements)
        timeline.moment("temporary", unpacked + 2 * scales)
    timeline.allocate("temporary", unpacked + into)
    timeline.free("temporary", unpacked + made)
    timeline.free("weight copies", step.copy_bytes(matrix, has_gradient))
    if joins:
        timeline.moment("temporary", into)
        timeline.free("temporary", into)
    if matrix.adapted:
        _add_adapter_gradient(timeline, step, rank * matrix.inputs)
        timeline.allocate("temporary", into)
        timeline.free("activations", read)
        timeline.free("temporary", step.low)
        if step.settings.dropout:
            timeline.moment("temporary", into)
            timeline.free("activations", step.dropout_bytes(matrix))
        timeline.moment("temporary", into)
        timeline.free("temporary", into)
    else:
        timeline.free("activations", read)


def _add_norm_backward(
    timeline: MemoryTimeline, step: AdapterMemory, stream: Floats, read: Floats
) -> None:
    timeline.pass_over("temporary", stream - read)
    timeline.allocate("temporary", stream)
    timeline.free("activations", step.block.residual + step.block.norm)
    timeline.free("temporary", stream)
    timeline.moment("temporary", stream)
    timeline.free("temporary", stream)


def _add_attention_workspace(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    """Add the workspace of attention's backward.

    FlashAttention sums the gradients of queries in fp32 (Dao, arXiv 2307.08691, §3). On a CPU in
    bf16, outpace's kernel (`nn.attention`) sums the gradients of keys and values, and holds three
    copies of the inputs and probabilities of a block of queries.
    """
    one, c, b = step.outline.stacks[0].attention, step.columns, step.block
    assert one is not None
    if step.device == "cuda":
        nbytes = flash_workspace_bytes(one, c, step.seq_len, b.queries)
        timeline.moment("temporary", nbytes)
        return
    item = step.sizes.operand
    rows = min(_SCORE_ROWS, step.seq_len)
    head = one.heads // one.kv_heads * rows * step.seq_len * item
    heads = np.clip(_SCORE_BYTES // head, 1, one.kv_heads)
    entries = np.clip(_SCORE_BYTES // (head * one.kv_heads), 1, c.micro_batch)
    wide = FP32 / item if step.seq_len > _SCORE_ROWS else 1.0
    sums = 2 * b.keys * (wide - 1)
    share = heads * entries / (one.kv_heads * c.micro_batch)
    parts = share * (3 * b.queries * rows / step.seq_len + 4 * b.keys)
    nbytes = 3 * head * heads * entries + parts + sums
    own = c.precision_in(*COMPUTES_IN_BF16)
    timeline.moment("temporary", np.where(own, nbytes, 0.0))


def _add_optimizer_step(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    timeline.clear("activations", "temporary", "weight copies", "unsharded", "communication")
    c, s = step.columns, step.sizes
    elements = step.outline.layers * step.trained_elements / step.shards
    largest = max(rows * columns for rows, columns in step.adapter_shapes) / step.shards
    masters = c.precision_in("bf16-master") & ~c.holds_masters()
    piece = np.minimum(np.maximum(MASTER_PIECE_BYTES, FP32 * largest), FP32 * elements)
    timeline.moment("temporary", np.where(masters, piece, 0.0))
    widened = c.precision_in("fp16-master") & ~step.gathers
    timeline.allocate("gradients", np.where(widened, FP32 * elements, 0.0))
    item = np.maximum(s.weight, FP32)
    add_step_tensors(timeline, c, largest * item, elements * item)
