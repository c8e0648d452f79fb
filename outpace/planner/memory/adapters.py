"""Memory of a step that trains adapters on frozen weights, for many plans at once.

docs/concepts/memory-model.md derives what autograd saves in `nn.lora` and when it frees it: frozen
matrices save no inputs and have no gradients, each adapter saves its input and its low-rank output,
and the first block's input needs no gradient. Nothing is fitted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outpace.planner.memory.adapter_loss import add_frozen_head_loss
from outpace.planner.memory.block_backward import flash_workspace_bytes
from outpace.planner.memory.fullest_rank import recompute_interval
from outpace.planner.memory.optimizer_bytes import MASTER_PIECE_BYTES, optimizer_bytes
from outpace.planner.memory.optimizer_step import add_step_tensors
from outpace.planner.memory.permanent_tensors import WORKSPACES
from outpace.planner.memory.saved_activations import FP32, Layer, Shapes, layer, shapes, share_of
from outpace.planner.memory.states import OutsideElements, by_plans, outside_elements
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.model.adapters import (
    ADAPTER_STRATEGIES,
    AdapterSettings,
    Matrix,
    nf4_bytes,
    nf4_scale_bytes,
    require_adaptable,
)
from outpace.planner.model.outline import layer_parameters, weights
from outpace.planner.plan_columns import OPTIMIZERS, PRECISIONS, Bools, Floats, Ints, PlanBatch
from outpace.records.errors import BadInputError
from outpace.records.outline import Outline
from outpace.records.plan import Checkpointing
from outpace.records.precisions import COMPUTES_IN_BF16, COMPUTES_IN_FP16, WEIGHTS

_MIB = 2**20
# Size of a piece: DDP.broadcast_bucket_size (torch/nn/parallel/distributed.py). Pieces at once:
# max_in_flight of broadcast_coalesced (torch/csrc/distributed/c10d/comm.cpp).
_BROADCAST_BYTES, _BROADCASTS_IN_FLIGHT = 250 * _MIB, 2
# nn.attention, on a CPU in bf16: queries of a block, and the most bytes of its scores.
_SCORE_ROWS, _SCORE_BYTES = 128, 4 * _MIB
_GELU_ELEMENTS = 1 << 18  # elements that nn.gelu handles at a time, on a CPU in bf16
_QKV = ("q", "k", "v")


@dataclass(frozen=True)
class AdapterMemory:
    """A step with adapters: its model, its device, and plans with the same adapters.

    `matrices`: those of a block; `block`: a layer of the stack. `records_kinds`: whether the peak
    by kind will be requested.
    """

    outline: Outline
    seq_len: int
    device: str
    columns: PlanBatch
    settings: AdapterSettings
    matrices: tuple[Matrix, ...]
    sizes: Shapes
    block: Layer
    ends: OutsideElements
    records_kinds: bool

    def timelines(self) -> Iterator[tuple[Ints, MemoryTimeline]]:
        """Yield the timeline of a rank; all ranks are alike."""
        yield np.arange(len(self.columns)), adapter_timeline(self)

    def timelines_at_start(self) -> Iterator[MemoryTimeline]:
        """Yield the timeline of a rank up to the first forward."""
        timeline = MemoryTimeline(len(self.columns), self.records_kinds)
        add_permanent(timeline, self)
        yield timeline

    # Parameters.

    @cached_property
    def gathers(self) -> Bools:
        """Return which plans shard parameters and gather them for use."""
        return self.columns.zero >= 2

    @cached_property
    def shards(self) -> Floats:
        """Return the number of ranks that share the parameters."""
        return np.where(self.gathers, self.columns.dp_shard, 1).astype(float)

    @cached_property
    def vectors(self) -> int:
        """Return the elements of a block's biases and norms."""
        stack = self.outline.stacks[0]
        rest = layer_parameters(stack, self.outline.hidden)
        return rest - sum(w.inputs * w.outputs for w in weights(stack, self.outline.hidden))

    @cached_property
    def adapter_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of a block's adapters."""
        rank = self.settings.rank
        pairs = [((rank, m.inputs), (m.outputs, rank)) for m in self.matrices if m.adapted]
        return [shape for pair in pairs for shape in pair]

    @cached_property
    def trained_elements(self) -> int:
        """Return the elements of a block's adapters."""
        return sum(rows * columns for rows, columns in self.adapter_shapes)

    @cached_property
    def packs(self) -> bool:
        """Return whether the blocks' matrices are stored in 4 bits."""
        return self.settings.base == "nf4"

    @cached_property
    def gathered_item(self) -> Floats:
        """Return the bytes per number of a block's parameters in a forward.

        Byte tensors cannot be cast during a gather, so blocks with byte tensors cast nothing
        (`parallel.fsdp.policy_of`).
        """
        item = self.sizes.weight if self.packs else self.sizes.gathered
        return np.where(self.gathers, item, self.sizes.weight)

    @cached_property
    def root_item(self) -> Floats:
        """Return the bytes per number of a parameter outside of blocks in a forward."""
        return np.where(self.gathers, self.sizes.gathered, self.sizes.weight)

    def block_bytes(self, item: Floats) -> Floats:
        """Return the bytes of a block's parameters, with `item` bytes per number not in 4 bits."""
        if self.packs:
            packed = sum(nf4_bytes(m.elements) for m in self.matrices)
            return packed + item * (self.vectors + self.trained_elements)
        matrices = sum(m.elements for m in self.matrices)
        return item * (matrices + self.vectors + self.trained_elements)

    @cached_property
    def root_elements(self) -> Floats:
        """Return the elements outside of blocks."""
        e = self.ends
        return e.embedding + e.head + e.positions + e.tail

    @cached_property
    def casts_adapters(self) -> Bools:
        """Return which plans cast adapters, and matrices that are not in 4 bits, for matmuls."""
        return self.sizes.operand < self.gathered_item

    def copy_bytes(self, matrix: Matrix, reads_gradient: bool) -> Floats:
        """Return the bytes of casts that a linear layer's backward reads.

        These are the adapters' and, if the input has a gradient (`reads_gradient`), the frozen
        matrix's.
        """
        frozen = matrix.elements if reads_gradient and not self.packs else 0
        own = self.settings.rank * (matrix.inputs + matrix.outputs) if matrix.adapted else 0
        return np.where(self.casts_adapters, self.sizes.operand * (frozen + own), 0.0)

    def block_copies(self, first: bool) -> Floats:
        """Return the bytes of a block's casts that its backward reads."""
        found = [self.copy_bytes(m, not (first and m.name in _QKV)) for m in self.matrices]
        return sum(found, start=np.zeros(len(self.columns)))

    # Activations.

    @cached_property
    def low(self) -> Floats:
        """Return the bytes of a low-rank matmul's output: T·r."""
        return self.sizes.tokens * self.settings.rank * self.sizes.operand

    def input_bytes(self, matrix: Matrix) -> Floats:
        """Return the bytes of a matrix's input, in the dtype of matmuls."""
        return self.sizes.tokens * matrix.inputs * self.sizes.operand

    def output_bytes(self, matrix: Matrix) -> Floats:
        """Return the bytes of a matrix's output, in the dtype of matmuls."""
        return self.sizes.tokens * matrix.outputs * self.sizes.operand

    @cached_property
    def mask(self) -> Floats:
        """Return the bytes that dropout saves per number; on a CPU, it saves a factor."""
        return np.where(self.device == "cpu", self.sizes.operand, 1.0)

    def dropout_bytes(self, matrix: Matrix) -> Floats:
        """Return the bytes that an adapter's dropout saves: its output and its mask."""
        if not self.settings.dropout:
            return np.zeros(len(self.columns))
        return self.sizes.tokens * matrix.inputs * (self.sizes.operand + self.mask)

    def shared_bytes(self, *names: str) -> Floats:
        """Return the bytes of an input that several adapters share, without dropout."""
        readers = [m for m in self.matrices if m.adapted and m.name in names]
        if not readers or self.settings.dropout:
            return np.zeros(len(self.columns))
        return self.input_bytes(readers[0])

    def has(self, *names: str) -> bool:
        """Return whether any of these matrices has an adapter."""
        return any(m.adapted for m in self.matrices if m.name in names)

    def matrix(self, name: str) -> Matrix:
        """Return a block's matrix by its name."""
        return next(m for m in self.matrices if m.name == name)

    @cached_property
    def normed_heads(self) -> Floats:
        """Return bytes saved by norms of queries and keys: inputs, since scales are frozen."""
        one, s = self.outline.stacks[0].attention, self.sizes
        assert one is not None
        if not one.qk_norm:
            return np.zeros(len(self.columns))
        wide, heads = np.maximum(s.operand, FP32), one.heads + one.kv_heads
        found: Floats = s.tokens * heads * (wide * one.head_dim + FP32) + self.block.queries
        return found

    @cached_property
    def attention(self) -> Floats:
        """Return the bytes that attention saves besides its input."""
        b = self.block
        found = b.queries + 2 * b.keys + b.mixed + self.normed_heads + b.scores
        return found + np.where(self.repeats_keys, 2 * (b.queries - b.keys), 0.0)

    @cached_property
    def repeats_keys(self) -> Bools:
        """Return which plans' kernels lack grouped queries (`nn.kernels.choose_kernel`)."""
        kernel = self.columns.precision_in("fp32", *COMPUTES_IN_FP16)
        return kernel & (self.device == "cuda")

    @cached_property
    def saved_bytes(self) -> Floats:
        """Return the bytes saved by a block without recomputation whose input has a gradient."""
        b = self.block
        inner = 3 if b.gated else 1
        own = [self.low + self.dropout_bytes(m) for m in self.matrices if m.adapted]
        return (
            b.norms * (b.residual + b.norm)
            + self.shared_bytes(*_QKV)
            + self.attention
            + self.shared_bytes("gate", "up")
            + inner * b.inner
            + self.shared_bytes("down")
            + b.dropped
            + sum(own, start=np.zeros(len(self.columns)))
        )

    @cached_property
    def first_saves_less(self) -> Floats:
        """Return how many fewer bytes the first block saves, since its input has no gradient.

        Its first norm saves nothing; nor does attention, as long as no adapter precedes it.
        """
        b = self.block
        less = b.residual + b.norm
        if self.has(*_QKV):
            adapted = sum(m.adapted for m in self.matrices if m.name in _QKV)
            masks = adapted * self.sizes.whole * self.mask  # without gradient
            return less + (masks if self.settings.dropout else 0.0)
        if self.has("out"):  # reads the mix, and saves it itself
            return less + self.attention - b.mixed
        gate = b.gated and self.matrix("gate").adapted
        inner = 2 * gate + self.matrix("up").adapted - (3 if b.gated else 1)
        return less + self.attention + b.residual + b.norm - inner * b.inner

    @cached_property
    def forward_bytes(self) -> Floats:
        """Return the bytes that a block's forward needs at its peak in addition to what it saves.

        Outputs of attention, and of norms before their cast, live until its end. The MLP's last
        matmul, or the one before it, adds the outputs of a matrix and its adapter, and their sum.
        """
        s = self.sizes
        throughout = s.whole * s.operand + np.where(s.casts, 2 * s.part * s.stream, 0.0)
        down, up = self.matrix("down"), self.matrix("up")
        later = self.shared_bytes("down")
        if down.adapted:
            later = later + self.low + self.dropout_bytes(down)
        wide = 2 * self.output_bytes(up) - later if up.adapted else -later
        scratch = self.gelu_scratch
        gelu = np.where(scratch > 0, 2 * self.block.inner + scratch - later, 0.0)
        return throughout + np.maximum(np.maximum(wide, gelu), self.output_bytes(down))

    @cached_property
    def gelu_scratch(self) -> Floats:
        """Return bytes of temporaries of GELU on a CPU in bf16 (`nn.gelu`)."""
        own = self.columns.precision_in(*COMPUTES_IN_BF16) & (self.device == "cpu")
        elements = np.minimum(_GELU_ELEMENTS, self.sizes.tokens * self.matrix("up").outputs)
        return np.where(own & (not self.block.gated), 3 * FP32 * elements, 0.0)

    @cached_property
    def recomputed_forward_bytes(self) -> Floats:
        """Return `forward_bytes` of a block that recomputes its tensors in the backward. By then,
        all tensors of the MLP exist, except the outputs of matmuls that are kept.
        """
        s, b = self.sizes, self.block
        throughout = 3 * s.part * s.stream + s.whole * s.operand * np.where(s.casts, 2, 1)
        up, down = self.matrix("up"), self.matrix("down")
        tensors = 3 if b.gated else 2
        gelu = np.where(self.gelu_scratch > 0, b.inner + self.gelu_scratch, 0.0)
        full = b.inner * (tensors + up.adapted)
        full = throughout + np.maximum(full, b.inner * tensors + gelu)
        kept = self.output_bytes(down) * (2 if down.adapted else 1) + self.low
        selective = throughout + b.inner * tensors + gelu - kept
        return np.where(share_of(self.columns, "selective") > 0, selective, full)

    def saved_bytes_in(self, mode: Checkpointing) -> Floats:
        """Return the bytes that a block saves in a mode."""
        b = self.block
        if mode == "none":
            return self.saved_bytes
        kept = b.residual
        if mode in ("attention", "selective"):
            kept = kept + b.mixed
        if mode == "selective":  # every matmul's output: of the matrix and of both factors
            for m in self.matrices:
                kept = kept + self.output_bytes(m)
                kept = kept + (self.output_bytes(m) + self.low if m.adapted else 0.0)
        return kept


def set_up_adapters(
    outline: Outline, seq_len: int, columns: PlanBatch, device: str, settings: AdapterSettings,
    records_kinds: bool, fused_attention: bool = True,
) -> AdapterMemory:  # fmt: skip
    """Return a step with these adapters.

    Raises BadInputError for targets that the model lacks, and for plans whose memory is unknown.
    """
    require_adaptable(outline)
    _require_known(columns)
    sizes = shapes(outline, seq_len, columns)
    return AdapterMemory(
        outline=outline, seq_len=seq_len, device=device, columns=columns, settings=settings,
        matrices=tuple(settings.matrices(outline)), sizes=sizes,
        block=layer(outline, outline.stacks[0], columns, sizes, device, fused_attention),
        ends=outside_elements(outline, columns), records_kinds=records_kinds,
    )  # fmt: skip


def _require_known(columns: PlanBatch) -> None:
    """Raise BadInputError for a plan that has no formula."""
    for what, unknown in columns.unknown_with_adapters():
        if unknown.any():
            raise BadInputError(
                f"the planner cannot estimate the memory of adapters with {what}. Use strategy "
                f"{', '.join(ADAPTER_STRATEGIES)} without offloading, or outpace memory, which "
                "traces any plan."
            )


def add_permanent(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    """Add the quantization of weights, then the tensors that exist before a forward."""
    c, s, layers = step.columns, step.sizes, step.outline.layers
    if step.packs and step.device == "cpu":
        # On a CPU, weights stay unquantized until their turn.
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
    timeline.pass_over("optimizer state", layers * _state_bytes(step) / step.shards)
    trained = s.weight * layers * step.trained_elements
    buckets = np.where(c.strategy_in("ddp"), trained, 0.0)
    apart = np.where(c.strategy_in("ddp") | ~step.gathers, trained, trained / step.shards)
    timeline.pass_over("gradients", buckets + np.where(c.passes > 1, apart, 0.0))
    timeline.pass_over("workspaces", WORKSPACES[step.device])
    samples = (c.micro_batch * c.passes).astype(float)
    timeline.pass_over("inputs", 16.0 * step.seq_len * samples)
    timeline.record_peak()


def _state_bytes(step: AdapterMemory) -> Floats:
    """Return bytes of the optimizer's state for a block's adapters."""

    def value(optimizer: int, low: int) -> float:
        name = OPTIMIZERS[optimizer]
        return sum(optimizer_bytes(one, name, PRECISIONS[low]) for one in step.adapter_shapes)

    return by_plans(step.columns.with_kept_states(), ("optimizer", "precision"), value)


def adapter_timeline(step: AdapterMemory) -> MemoryTimeline:
    """Return the timeline of a step on a rank; all ranks are alike."""
    timeline = MemoryTimeline(len(step.columns), step.records_kinds)
    add_permanent(timeline, step)
    _add_root(timeline, step)
    _add_forward(timeline, step)
    s, stream = step.sizes, step.sizes.part * step.sizes.stream
    normed = stream + step.block.norm
    timeline.pass_over("activations", normed)
    add_frozen_head_loss(timeline, step.outline, step.columns, s, step.device, step.root_item)
    timeline.allocate("temporary", 2 * stream)
    timeline.free("activations", normed)
    timeline.free("temporary", stream)
    unit = _unit(step)
    timeline.free("communication", unit)
    _add_blocks(timeline, step, unit)
    _add_optimizer(timeline, step)
    return timeline


def _unit(step: AdapterMemory) -> Floats:
    """Return bytes of a block if it is gathered."""
    return np.where(step.gathers, step.block_bytes(step.gathered_item), 0.0)


def _add_root(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    """Add gathered parameters outside of blocks, and the fp32 table (`nn.fp32_modules`)."""
    root = np.where(step.gathers, step.root_item * step.root_elements, 0.0)
    timeline.allocate("unsharded", root)
    timeline.allocate("communication", root)
    autocast = ~step.columns.precision_in(*WEIGHTS) & (step.sizes.reduced > step.root_item)
    raised = step.gathers & autocast & (step.device == "cpu")
    timeline.moment("temporary", np.where(raised, FP32 * step.ends.embedding, 0.0))
    timeline.free("communication", root)


def _add_forward(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    """Add the tensors that blocks save; a gathered block overlaps with the previous buffer."""
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
    unit = _unit(step)
    timeline.pass_over("unsharded", unit)
    timeline.moment("communication", 2 * unit)
    timeline.pass_over("communication", unit)
    timeline.moment("temporary", passing)
    timeline.free("unsharded", unit)


def _add_blocks(timeline: MemoryTimeline, step: AdapterMemory, unit: Floats) -> None:
    """Add the backward: the last two blocks, those in between as one, the first two."""
    layers = step.outline.layers
    every = recompute_interval(step.columns, layers)
    shown = sorted({layers - 1, layers - 2, 1, 0} & set(range(layers)), reverse=True)
    reduced = np.zeros(len(step.columns))
    given = sum((_kept_bytes(step, every, place) for place in shown), start=np.zeros(len(unit)))
    copied = sum((_copy_bytes(step, every, place) for place in shown), start=np.zeros(len(unit)))
    for place in shown:
        if place == 1 and layers > len(shown):
            _pass_over_others(timeline, step, layers - len(shown), given, copied)
        timeline.allocate("communication", unit)
        timeline.allocate("unsharded", unit)
        timeline.free("communication", unit)
        coming = unit if place else np.zeros_like(unit)
        timeline.allocate("communication", coming)
        _add_block(timeline, step, _recomputes(every, place), first=place == 0)
        timeline.free("communication", coming)
        timeline.free("unsharded", unit)
        reduced = _reduce(timeline, step, reduced)
    timeline.free("communication", reduced)
    timeline.free("temporary", step.sizes.part * step.sizes.stream)


def _recomputes(every: Ints, place: int) -> Bools:
    """Return which plans recompute a block: every n-th block, from the first."""
    found: Bools = (every > 0) & (place % np.maximum(every, 1) == 0)
    return found


def _kept_bytes(step: AdapterMemory, every: Ints, place: int) -> Floats:
    """Return bytes that a block saves in its forward."""
    less = step.first_saves_less if place == 0 else 0.0
    return np.where(_recomputes(every, place), _checkpoint_bytes(step), step.saved_bytes - less)


def _checkpoint_bytes(step: AdapterMemory) -> Floats:
    """Return bytes that recomputed blocks save, all in one mode."""
    modes: tuple[Checkpointing, ...] = ("selective", "attention", "full")
    found = step.saved_bytes
    for mode in modes:
        found = np.where(share_of(step.columns, mode) > 0, step.saved_bytes_in(mode), found)
    return found


def _copy_bytes(step: AdapterMemory, every: Ints, place: int) -> Floats:
    """Return bytes of casts that a block saves in its forward."""
    return np.where(_recomputes(every, place), 0.0, step.block_copies(first=place == 0))


def _pass_over_others(
    timeline: MemoryTimeline, step: AdapterMemory, count: int, given: Floats, copied: Floats
) -> None:
    """Add what `count` blocks leave and release; `given` and `copied` describe other blocks."""
    c, layers = step.columns, step.outline.layers
    every = recompute_interval(c, layers)
    plain = share_of(c, "none") * layers
    less = np.where(every == 0, step.first_saves_less, 0.0)
    kept = plain * step.saved_bytes + (layers - plain) * _checkpoint_bytes(step) - less
    spared = step.block_copies(first=False) - step.block_copies(first=True)
    copies = plain * step.block_copies(first=False) - np.where(every == 0, spared, 0.0)
    timeline.free("activations", kept - given)
    timeline.free("weight copies", copies - copied)
    grads = count * step.sizes.weight * step.trained_elements / step.shards
    timeline.pass_over("gradients", np.where(_has_gradients(step), 0.0, grads))


def _has_gradients(step: AdapterMemory) -> Bools:
    """Return which plans have gradients before a backward creates more."""
    return step.columns.strategy_in("ddp") | (step.columns.passes > 1)


def _reduce(timeline: MemoryTimeline, step: AdapterMemory, reduced: Floats) -> Floats:
    """Start the reduction of a block's gradients, and end that of `reduced`; return its bytes."""
    sent = np.where(step.gathers, step.sizes.reduced * step.trained_elements, 0.0)
    if step.packs:
        sent = np.where(step.gathers, step.sizes.weight * step.trained_elements, 0.0)
    timeline.free("communication", reduced)
    timeline.allocate("communication", sent)
    made = np.where(step.gathers, step.gathered_item * step.trained_elements, 0.0)
    timeline.free("communication", made)
    kept = np.where(step.gathers, step.sizes.weight * step.trained_elements / step.shards, 0.0)
    timeline.allocate("gradients", np.where(_has_gradients(step), 0.0, kept))
    return sent


def _add_gradient(timeline: MemoryTimeline, step: AdapterMemory, elements: int) -> None:
    """Add the gradient of an adapter's factor: stored, accumulated, or reduced."""
    whole = step.gathered_item * elements
    timeline.allocate("communication", np.where(step.gathers, whole, 0.0))
    own = np.where(step.gathers, 0.0, whole)
    there = _has_gradients(step)
    timeline.moment("temporary", np.where(there, own, 0.0))
    timeline.allocate("gradients", np.where(there, 0.0, own))


def _add_block(timeline: MemoryTimeline, step: AdapterMemory, again: Bools, *, first: bool) -> None:
    """Add a block's backward, after its recomputation: the MLP, then attention.

    The gradient of the residual stream is live throughout.
    """
    b, s = step.block, step.sizes
    less = step.first_saves_less if first else 0.0
    stream, read = s.part * s.stream, s.whole * s.operand
    cast = np.where(s.casts, read, 0.0)
    timeline.allocate("temporary", cast)
    remade = np.where(again, step.saved_bytes - less - _checkpoint_bytes(step), 0.0)
    timeline.pass_over("activations", remade)
    timeline.allocate("weight copies", np.where(again, step.block_copies(first=first), 0.0))
    timeline.moment("temporary", np.where(again, step.forward_bytes, 0.0))
    # The last matmul's output was saved, and is not recomputed.
    cached = np.where(again & (share_of(step.columns, "selective") > 0), b.output, 0.0)
    timeline.pass_over("activations", cached)
    starts = first and not step.has(*_QKV, "out")
    if starts and not step.has("gate", "up"):
        down = step.matrix("down")
        read = step.shared_bytes("down")
        _add_linear(timeline, step, down, made=cast, read=read, has_gradient=False)
    else:
        _add_mlp(timeline, step, cast)
    if not starts:
        _add_norm(timeline, step, stream, read)
        timeline.allocate("temporary", cast)
        _add_attention(timeline, step, cast, first=first)
        if not first:
            _add_norm(timeline, step, stream, read)
    timeline.free("activations", b.dropped + cached)


def _add_mlp(timeline: MemoryTimeline, step: AdapterMemory, cast: Floats) -> None:
    """Add the MLP; its output's gradient takes `cast` bytes unless it has the stream's dtype."""
    b, inner = step.block, step.block.inner
    down, up = step.matrix("down"), step.matrix("up")
    _add_linear(timeline, step, down, made=cast, read=step.shared_bytes("down"))
    if b.gated:
        timeline.allocate("temporary", 2 * inner)
        timeline.free("activations", 2 * inner)
        timeline.free("temporary", inner)
        _add_linear(timeline, step, up, made=inner)
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
    _add_linear(timeline, step, up, made=inner, read=read, joins=joins)


def _add_attention(
    timeline: MemoryTimeline, step: AdapterMemory, cast: Floats, *, first: bool
) -> None:
    """Add attention; the inputs of the first block's queries, keys and values need no gradient."""
    b, s = step.block, step.sizes
    out = step.matrix("out")
    begins = first and not step.has(*_QKV)  # the mix has no gradient
    _add_linear(timeline, step, out, made=cast, has_gradient=not begins)
    if begins:
        timeline.free("activations", b.mixed)
        return
    mixed = step.input_bytes(out)
    heads = b.queries + 2 * b.keys
    timeline.allocate("temporary", heads)
    _add_workspace(timeline, step)
    timeline.free("activations", step.attention)
    timeline.free("temporary", mixed)
    if step.outline.learned_positions == 0:
        wide = FP32 / s.operand
        turned = wide * (2 * b.queries + b.keys) + b.queries - b.queries - b.keys
        timeline.moment("temporary", np.maximum(turned, 0))
    joins = False
    for name in ("v", "k", "q"):
        matrix = step.matrix(name)
        read = step.shared_bytes(*_QKV) if name == "q" else np.zeros_like(cast)
        _add_linear(
            timeline, step, matrix, made=step.output_bytes(matrix), read=read, joins=joins,
            has_gradient=not first,
        )  # fmt: skip
        joins = not first


def _add_linear(
    timeline: MemoryTimeline,
    step: AdapterMemory,
    matrix: Matrix,
    *,
    made: Floats,
    read: Floats | float = 0.0,
    joins: bool = False,
    has_gradient: bool = True,
) -> None:
    """Add a linear layer's backward: B, the frozen matrix, then A.

    It frees `made` bytes of its output's gradient and `read` bytes of the input that adapters
    saved. The gradient of its input stays if it `has_gradient`; `joins`: it is added to an existing
    gradient.
    """
    into = step.input_bytes(matrix) if has_gradient else np.zeros(len(step.columns))
    rank = step.settings.rank
    if matrix.adapted:
        _add_gradient(timeline, step, rank * matrix.outputs)
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
        _add_gradient(timeline, step, rank * matrix.inputs)
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


def _add_norm(timeline: MemoryTimeline, step: AdapterMemory, stream: Floats, read: Floats) -> None:
    """Add the gradient of a norm's input, which is then added to the residual stream's gradient."""
    timeline.pass_over("temporary", stream - read)
    timeline.allocate("temporary", stream)
    timeline.free("activations", step.block.residual + step.block.norm)
    timeline.free("temporary", stream)
    timeline.moment("temporary", stream)
    timeline.free("temporary", stream)


def _add_workspace(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    """Add the workspace of attention's backward.

    FlashAttention sums the gradients of queries in fp32 (Dao, arXiv 2307.08691, §3). outpace's
    kernel on a CPU in bf16 (`nn.attention`) sums the gradients of keys and values, and holds three
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


def _add_optimizer(timeline: MemoryTimeline, step: AdapterMemory) -> None:
    """Add temporaries of the optimizer's step."""
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
