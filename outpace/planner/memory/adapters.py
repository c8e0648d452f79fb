"""Memory of a step that trains adapters on frozen weights, for many plans at once.

docs/concepts/memory-model.md derives what autograd saves in `nn.lora` and when that memory is
freed. Frozen matrices save no inputs and have no gradients, each adapter saves its input and its
low-rank output, and the first block's input needs no gradient. Nothing is fitted.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outpace.planner.memory.saved_activations import FP32, Layer, Shapes, layer, shapes, share_of
from outpace.planner.memory.states import OutsideElements, outside_elements
from outpace.planner.model.adapters import (
    ADAPTER_STRATEGIES,
    AdapterSettings,
    Matrix,
    nf4_bytes,
    require_adaptable,
)
from outpace.planner.model.outline import layer_parameters, weights
from outpace.planner.plan_columns import Bools, Floats, PlanBatch
from outpace.records.errors import BadInputError
from outpace.records.outline import Outline
from outpace.records.plan import Checkpointing
from outpace.records.precisions import COMPUTES_IN_BF16, COMPUTES_IN_FP16

_GELU_ELEMENTS = 1 << 18  # elements that nn.gelu processes at a time, on a CPU in bf16
QKV = ("q", "k", "v")


@dataclass(frozen=True)
class AdapterMemory:
    """Inputs of the memory formula for a step that trains adapters.

    All plans in `columns` have the same adapters. `matrices` are the matrices of a block, and
    `block` has its memory. `records_kinds`: also record memory by kind, for the breakdown of the
    peak.
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

    # Parameters.

    @cached_property
    def gathers(self) -> Bools:
        """Return which plans shard parameters and gather them before use."""
        return self.columns.zero >= 2

    @cached_property
    def shards(self) -> Floats:
        """Return the number of shards of each parameter."""
        return np.where(self.gathers, self.columns.dp_shard, 1).astype(float)

    @cached_property
    def vectors(self) -> int:
        """Return the number of elements in a block's biases and norms."""
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
        """Return the number of elements of a block's adapters."""
        return sum(rows * columns for rows, columns in self.adapter_shapes)

    @cached_property
    def packs(self) -> bool:
        """Return whether the blocks' matrices are stored in 4 bits."""
        return self.settings.base == "nf4"

    @cached_property
    def gathered_item(self) -> Floats:
        """Return the bytes per element of a block's parameters in the forward.

        Gathers cannot cast byte tensors, so quantized blocks are gathered without a cast
        (`parallel.fsdp.policy_of`).
        """
        item = self.sizes.weight if self.packs else self.sizes.gathered
        return np.where(self.gathers, item, self.sizes.weight)

    @cached_property
    def root_item(self) -> Floats:
        """Return the bytes per element, in the forward, of parameters outside of blocks."""
        return np.where(self.gathers, self.sizes.gathered, self.sizes.weight)

    def block_bytes(self, item: Floats) -> Floats:
        """Return the bytes of a block's parameters, with `item` bytes per unquantized element."""
        if self.packs:
            packed = sum(nf4_bytes(m.elements) for m in self.matrices)
            return packed + item * (self.vectors + self.trained_elements)
        matrices = sum(m.elements for m in self.matrices)
        return item * (matrices + self.vectors + self.trained_elements)

    @cached_property
    def root_elements(self) -> Floats:
        """Return the number of parameter elements outside of blocks."""
        e = self.ends
        return e.embedding + e.head + e.positions + e.tail

    @cached_property
    def casts_adapters(self) -> Bools:
        """Return which plans cast adapters and unquantized matrices for matmuls."""
        return self.sizes.operand < self.gathered_item

    def copy_bytes(self, matrix: Matrix, reads_gradient: bool) -> Floats:
        """Return the bytes of weight casts that a linear layer's backward reads.

        They are casts of the adapter and, with `reads_gradient`, of the frozen matrix, which the
        gradient of the input needs.
        """
        frozen = matrix.elements if reads_gradient and not self.packs else 0
        own = self.settings.rank * (matrix.inputs + matrix.outputs) if matrix.adapted else 0
        return np.where(self.casts_adapters, self.sizes.operand * (frozen + own), 0.0)

    def block_copies(self, first: bool) -> Floats:
        """Return the bytes of weight casts that a block's backward reads."""
        found = [self.copy_bytes(m, not (first and m.name in QKV)) for m in self.matrices]
        return sum(found, start=np.zeros(len(self.columns)))

    # Activations.

    @cached_property
    def low(self) -> Floats:
        """Return the bytes of an adapter's low-rank output, tokens × rank elements."""
        return self.sizes.tokens * self.settings.rank * self.sizes.operand

    def input_bytes(self, matrix: Matrix) -> Floats:
        """Return the bytes of a matrix's input in the matmul dtype."""
        return self.sizes.tokens * matrix.inputs * self.sizes.operand

    def output_bytes(self, matrix: Matrix) -> Floats:
        """Return the bytes of a matrix's output in the matmul dtype."""
        return self.sizes.tokens * matrix.outputs * self.sizes.operand

    @cached_property
    def mask(self) -> Floats:
        """Return the bytes per element of a dropout mask.

        On a CPU, the mask has the dtype of the operands; elsewhere, it takes a byte.
        """
        return np.where(self.device == "cpu", self.sizes.operand, 1.0)

    def dropout_bytes(self, matrix: Matrix) -> Floats:
        """Return the bytes that an adapter's dropout saves: its output and its mask."""
        if not self.settings.dropout:
            return np.zeros(len(self.columns))
        return self.sizes.tokens * matrix.inputs * (self.sizes.operand + self.mask)

    def shared_bytes(self, *names: str) -> Floats:
        """Return the bytes of the input that adapters of these matrices share.

        Returns 0 with dropout, because each adapter then saves the output of its own dropout.
        """
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
        """Return the bytes that the norms of queries and keys save for the backward.

        The norms' weights are frozen.
        """
        one, s = self.outline.stacks[0].attention, self.sizes
        assert one is not None
        if not one.qk_norm:
            return np.zeros(len(self.columns))
        wide, heads = np.maximum(s.operand, FP32), one.heads + one.kv_heads
        found: Floats = s.tokens * heads * (wide * one.head_dim + FP32) + self.block.queries
        return found

    @cached_property
    def attention(self) -> Floats:
        """Return the bytes that attention saves in addition to its input."""
        b = self.block
        found = b.queries + 2 * b.keys + b.mixed + self.normed_heads + b.scores
        return found + np.where(self.repeats_keys, 2 * (b.queries - b.keys), 0.0)

    @cached_property
    def repeats_keys(self) -> Bools:
        """Return which plans repeat keys and values, for a kernel without grouped queries."""
        kernel = self.columns.precision_in("fp32", *COMPUTES_IN_FP16)
        return kernel & (self.device == "cuda")

    @cached_property
    def saved_bytes(self) -> Floats:
        """Return the bytes that a block saves without recomputation if its input has a gradient."""
        b = self.block
        inner = 3 if b.gated else 1
        own = [self.low + self.dropout_bytes(m) for m in self.matrices if m.adapted]
        return (
            b.norms * (b.residual + b.norm)
            + self.shared_bytes(*QKV)
            + self.attention
            + self.shared_bytes("gate", "up")
            + inner * b.inner
            + self.shared_bytes("down")
            + b.dropped
            + sum(own, start=np.zeros(len(self.columns)))
        )

    @cached_property
    def first_saves_less(self) -> Floats:
        """Return how many bytes less the first block saves because its input has no gradient.

        Its first norm saves nothing. Neither does attention, unless an adapter precedes it.
        """
        b = self.block
        less = b.residual + b.norm
        if self.has(*QKV):
            adapted = sum(m.adapted for m in self.matrices if m.name in QKV)
            masks = adapted * self.sizes.whole * self.mask  # has no gradient
            return less + (masks if self.settings.dropout else 0.0)
        if self.has("out"):  # reads attention's output, and saves it itself
            return less + self.attention - b.mixed
        gate = b.gated and self.matrix("gate").adapted
        inner = 2 * gate + self.matrix("up").adapted - (3 if b.gated else 1)
        return less + self.attention + b.residual + b.norm - inner * b.inner

    @cached_property
    def forward_bytes(self) -> Floats:
        """Return the bytes that a block's forward needs at its peak beyond those that it saves.

        The outputs of attention, and of norms before their cast, live until the block ends. The
        peak is in one of the MLP's last two matmuls, where a matrix's output, its adapter's output
        and their sum exist, or in GELU.
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
        """Return the bytes of GELU's temporaries on a CPU in bf16 (`nn.gelu`)."""
        own = self.columns.precision_in(*COMPUTES_IN_BF16) & (self.device == "cpu")
        elements = np.minimum(_GELU_ELEMENTS, self.sizes.tokens * self.matrix("up").outputs)
        return np.where(own & (not self.block.gated), 3 * FP32 * elements, 0.0)

    @cached_property
    def recomputed_forward_bytes(self) -> Floats:
        """Return `forward_bytes` for a forward that is repeated in the backward.

        At its end, all tensors of the MLP exist, except matmul outputs that were saved.
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
        """Return the bytes that a block saves in a recomputation mode."""
        b = self.block
        if mode == "none":
            return self.saved_bytes
        kept = b.residual
        if mode in ("attention", "selective"):
            kept = kept + b.mixed
        if mode == "selective":  # the outputs of all matmuls: of the matrix and of both factors
            for m in self.matrices:
                kept = kept + self.output_bytes(m)
                kept = kept + (self.output_bytes(m) + self.low if m.adapted else 0.0)
        return kept


def set_up_adapters(
    outline: Outline, seq_len: int, columns: PlanBatch, device: str, settings: AdapterSettings,
    records_kinds: bool, fused_attention: bool = True,
) -> AdapterMemory:  # fmt: skip
    """Return the inputs of the memory formula for plans with these adapters.

    Raises BadInputError if the model lacks a target of the adapters, or if there is no formula for
    a plan.
    """
    require_adaptable(outline)
    _refuse_plans_without_formula(columns)
    sizes = shapes(outline, seq_len, columns)
    return AdapterMemory(
        outline=outline, seq_len=seq_len, device=device, columns=columns, settings=settings,
        matrices=tuple(settings.matrices(outline)), sizes=sizes,
        block=layer(outline, outline.stacks[0], columns, sizes, device, fused_attention),
        ends=outside_elements(outline, columns), records_kinds=records_kinds,
    )  # fmt: skip


def _refuse_plans_without_formula(columns: PlanBatch) -> None:
    for what, unknown in columns.unknown_with_adapters():
        if unknown.any():
            raise BadInputError(
                f"the planner cannot estimate the memory of adapters with {what}. Use strategy "
                f"{', '.join(ADAPTER_STRATEGIES)} without offloading, or estimate the plan's "
                "memory with `outpace memory`."
            )
