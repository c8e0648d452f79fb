"""Bytes that a layer's forward saves for its backward, and sizes of the layer's weights.

docs/concepts/memory-model.md derives the terms from what autograd saves for each operator of
`nn.block`. Legend: T tokens of a micro-batch on a rank, R of them in the residual stream (fewer
with sequence parallelism), D hidden width; on a rank, Q width of queries, K width of keys or
values, F inner width of the MLP.
"""

from dataclasses import dataclass

import numpy as np

from outpace.planner.memory.framework_traits import OUTPACE, FrameworkTraits
from outpace.planner.model.outline import (
    Weight,
    layer_parameters,
    second_matmuls,
    weights,
)
from outpace.planner.plan_columns import MODES, PRECISIONS, Bools, Floats, PlanBatch
from outpace.records.outline import AttentionShape, Mlp, Outline, Stack
from outpace.records.plan import Checkpointing
from outpace.records.precisions import COMPUTES_IN_BF16, PRECISION_TRAITS

FP32 = 4
_TRAITS = [PRECISION_TRAITS[name] for name in PRECISIONS]
# Bytes of a weight, of a matmul's operand, and of a number in the residual stream, which has the
# weights' dtype.
_TABLE = np.array(
    [(traits.weight_bytes, traits.operand_bytes, traits.weight_bytes) for traits in _TRAITS],
    dtype=float,
)


@dataclass(frozen=True)
class Shapes:
    """Bytes per element of a plan's tensors, and sizes of the tensors passed between layers.

    - `weight`, `operand`, `stream`: bytes per element of a weight, a matmul's operand, and the
      residual stream.
    - `gathered`, `reduced`: bytes per element when sharded parameters are gathered, and when their
      gradients are reduced.
    - `tokens`: the tokens of a micro-batch on a rank.
    - `whole`, `part`: elements of the hidden states of all these tokens, and of the tokens that a
      rank has under sequence parallelism.
    """

    weight: Floats
    gathered: Floats
    reduced: Floats
    operand: Floats
    stream: Floats
    tokens: Floats
    whole: Floats  # T·D
    part: Floats  # R·D
    hidden: int

    @property
    def casts(self) -> Bools:
        """Return which plans cast matmul inputs to a narrower dtype than the residual stream's."""
        return self.operand < self.stream


def shapes(outline: Outline, seq_len: int, columns: PlanBatch) -> Shapes:
    """Return the tensor sizes of every plan."""
    weight, operand, stream = _TABLE[columns.precision].T
    weight = np.where(columns.holds_masters(), FP32, weight)
    tokens = columns.micro_batch * seq_len / columns.cp
    share = np.where(columns.sequence_parallel, columns.tp, 1)
    whole = tokens * outline.hidden
    gathered, reduced = columns.shard_bytes()
    return Shapes(
        weight, gathered, reduced, operand, stream, tokens, whole, whole / share, outline.hidden
    )


@dataclass(frozen=True)
class Layer:
    """Bytes that the forward of one layer saves, by tensor, and the sizes of its weights.

    - `norm`: what each norm saves in addition to its input.
    - `input`: the saved input of the matmuls after a norm.
    - `output`: a matmul's output before it is added to the residual stream.
    - `raw`: queries and keys before rotation.
    """

    norms: int
    composed: Bools  # if norms consist of several operators
    gated: bool
    inners: int  # saved tensors of the MLP's inner width
    residual: Floats
    norm: Floats
    scaled: Floats  # a norm's intermediate result, in the dtype in which it scales
    input: Floats
    output: Floats
    queries: Floats
    keys: Floats  # of keys; values have the same size
    mixed: Floats  # attention's output, with its log-sum-exp
    raw: Floats
    heads_apart: Floats  # normalised queries and keys, and the contiguous copy of the output
    scores: Floats  # if attention is not fused, or has dropout
    dropped: Floats
    matmuls: Floats  # outputs of the matmuls that selective recomputation saves
    inner: Floats  # one tensor of the MLP's inner width
    experts: Floats  # bytes that routing adds
    other: Floats
    matrices: Floats  # elements on this rank
    vectors: Floats
    up: Floats
    down: Floats
    largest: Floats

    @property
    def elements(self) -> Floats:
        """Return the number of parameter elements of a layer on a rank."""
        return self.matrices + self.vectors

    @property
    def _inner_outputs(self) -> Floats:
        """Return the bytes of the inner tensors that matmuls compute: one, or two with a gate."""
        return self.inner * (2 if self.gated else 1)

    @property
    def attention(self) -> Floats:
        """Return the bytes that attention saves in addition to its input."""
        return self.queries + 2 * self.keys + self.mixed + self.heads_apart + self.scores

    @property
    def saved_bytes(self) -> Floats:
        """Return the bytes that a layer without recomputation saves, including its input."""
        return (
            self.norms * (self.residual + self.norm + self.input)
            + self.attention
            + self.dropped
            + self.inners * self.inner
            + self.experts
            + self.other
        )

    def saved_bytes_in(self, mode: Checkpointing) -> Floats:
        """Return the bytes that a layer saves in a recomputation mode, including its input."""
        if mode == "none":
            return self.saved_bytes
        kept = self.residual
        if mode in ("attention", "selective"):
            kept = kept + self.mixed
        if mode == "selective":
            kept = kept + self.matmuls + self.other
        return kept

    @property
    def outputs(self) -> Floats:
        """Return the bytes of output gradients kept for a layer's delayed weight gradients.

        A weight's gradient is computed from them and the saved inputs.
        """
        made = self.raw + self.norms * (self.output + self.scaled)
        return made + self._inner_outputs


def layer(
    outline: Outline,
    stack: Stack,
    columns: PlanBatch,
    sizes: Shapes,
    device: str,
    fused: bool,
    traits: FrameworkTraits = OUTPACE,
) -> Layer:
    """Return the saved bytes and weight sizes of one layer of a stack, for every plan."""
    item, tokens, split = sizes.operand, sizes.tokens, columns.tp
    zero = np.zeros_like(tokens)
    fused = fused and not (stack.dropout and device == "cpu")  # the CPU's kernel has no dropout
    mixing = [
        _saved_attention_bytes(one, columns, sizes, device, fused, stack.dropout, traits)
        for one in (stack.attention, stack.cross_attention)
        if one is not None
    ]
    sums = [sum(parts, start=zero) for parts in zip(*mixing, strict=True)] or [zero] * 6
    queries, keys, mixed, raw, apart, scores = sums
    mlp = stack.mlp
    gated = mlp is not None and mlp.gated
    inner, experts = (zero, zero) if mlp is None else _saved_mlp_bytes(mlp, columns, sizes)
    parts = list(weights(stack, outline.hidden))
    cut = [
        w.elements
        / (columns.ep * columns.etp if w.experts else np.where(w.cut == "none", 1, split))
        for w in parts
    ]
    matrices = sum(cut, start=zero)
    up, down = (
        sum((s for s, w in zip(cut, parts, strict=True) if w.name in names), start=zero)
        for names in (("up", "experts up", "shared up"), ("down", "experts down", "shared down"))
    )
    vectors = layer_parameters(stack, outline.hidden) - sum(w.elements for w in parts)
    # Dropout saves a mask: a byte per value on CUDA, a factor in their dtype on a CPU.
    mask = np.where(device == "cpu", item, 1) if stack.dropout else zero
    composed = _composes_norms(stack, columns, traits)
    wide = np.maximum(sizes.stream, FP32)
    output = sizes.whole * item
    parts_saved = (raw, output, inner * (2 if gated else 1), output * (stack.norms - 1))
    return Layer(
        norms=stack.norms,
        composed=composed,
        gated=gated,
        inners=_count_inners(gated, traits),
        residual=sizes.part * sizes.stream,
        norm=_saved_norm_bytes(stack, composed, sizes),
        scaled=sizes.part * np.where(composed, wide, sizes.stream),
        input=(sizes.part if traits.regathers_inputs else sizes.whole) * item,
        output=output,
        queries=queries,
        keys=keys,
        mixed=mixed,
        raw=raw,
        heads_apart=apart,
        scores=scores,
        dropped=2 * mask * sizes.part,
        matmuls=_saved_matmuls(outline, stack, columns, parts_saved, traits),
        inner=inner,
        experts=experts,
        other=sum((item * tokens * p.inputs * p.count for p in stack.other), start=zero),
        matrices=matrices,
        vectors=zero + vectors,
        up=up / (2 if gated else 1),
        down=down,
        largest=_largest_matrix(stack, parts, cut, columns),
    )


def _saved_matmuls(
    outline: Outline,
    stack: Stack,
    columns: PlanBatch,
    outputs: tuple[Floats, ...],
    traits: FrameworkTraits,
) -> Floats:
    """Return the bytes of matmuls' outputs that selective recomputation saves.

    `outputs` are the bytes of four outputs: of attention's projections, of attention's output
    matmul, of the MLP's first matmuls, and of its last. If every second matmul is repeated, the
    outputs of the others are saved; in fp8, all are.
    """
    repeated = second_matmuls(stack, outline.hidden) if traits.repeats_matmuls == "second" else {}
    none = 1.0 if traits.repeats_matmuls == "all" else 0.0
    counted = ~columns.precision_in("fp8") if repeated else np.ones(len(columns), bool)
    shares = [counted * repeated.get(name, none) for name in ("qkv", "out", "up", "down")]
    return sum(
        (nbytes * (1 - share) for nbytes, share in zip(outputs, shares, strict=True)),
        start=np.zeros_like(outputs[0]),
    )


def _composes_norms(stack: Stack, columns: PlanBatch, traits: FrameworkTraits) -> Bools:
    """Return which plans compute norms in several operators: RMSNorm on tensors split over tp."""
    found: Bools = (columns.tp > 1) & (not stack.norm_bias) & (not traits.fuses_norms)
    return found


def _count_inners(gated: bool, traits: FrameworkTraits) -> int:
    """Return how many tensors of the MLP's inner width its forward saves.

    Without a gate, these are the inputs of the activation and of the last matmul. With a gate, they
    also include the tensor that the activation's result is multiplied by, and that result itself,
    unless one kernel computes activation and product.
    """
    if not gated:
        return 2
    return 3 if traits.fuses_gates else 4


def _saved_norm_bytes(stack: Stack, composed: Bools, sizes: Shapes) -> Floats:
    """Return the bytes that a norm saves in addition to its input.

    LayerNorm saves a mean and a deviation per token, RMSNorm (nn.norms) one number. RMSNorm in
    several operators also saves the normalised values before scaling, for the gradient of the
    scale; in 16 bits, it saves its input in fp32 instead of the residual stream's dtype.
    """
    numbers = 2 if stack.norm_bias else 1
    wide = np.maximum(sizes.stream, FP32)
    apart = np.where(composed, sizes.part * (wide + wide - sizes.stream), 0.0)
    found: Floats = numbers * FP32 * sizes.part / sizes.hidden + apart
    return found


def _largest_matrix(
    stack: Stack, parts: list[Weight], cut: list[Floats], columns: PlanBatch
) -> Floats:
    """Return the number of elements of a layer's largest matrix.

    Each expert's matrix and each part of a fused matrix are separate matrices.
    """
    gated = stack.mlp is not None and stack.mlp.gated
    most = np.zeros(len(columns))
    for weight, share in zip(parts, cut, strict=True):
        joined = 3 if weight.name.endswith("qkv") else 2 if gated and weight.name == "up" else 1
        matrices = joined * np.maximum(weight.experts / columns.ep, 1)
        most = np.maximum(most, share / matrices)
    return most


def _saved_attention_bytes(
    shape: AttentionShape,
    columns: PlanBatch,
    sizes: Shapes,
    device: str,
    fused: bool,
    dropout: bool,
    traits: FrameworkTraits,
) -> tuple[Floats, ...]:
    """Return the bytes that attention saves, by tensor.

    In order: queries, keys, output, projections before rotation, normalised heads, and scores.
    """
    item, tokens = sizes.operand, sizes.tokens
    heads, kv_heads = shape.heads / columns.tp, shape.kv_heads / columns.tp
    queries = item * tokens * heads * shape.head_dim
    keys = item * tokens * kv_heads * (shape.head_dim + shape.value_dim) / 2
    if shape.kv_rank is not None:
        keys = item * tokens * heads * (shape.head_dim + shape.value_dim) / 2
    # A log-sum-exp of each query and head (Dao et al., arXiv 2205.14135, §3.1); this package's
    # attention on a CPU (nn.attention) keeps none.
    low = columns.precision_in(*COMPUTES_IN_BF16)
    own = low & (columns.cp == 1) & (device == "cpu") & traits.chunks_loss
    sums = np.where(fused & ~own, FP32 * tokens * heads, 0.0)
    mixed = item * tokens * heads * shape.value_dim + sums
    latent = (
        item * tokens * (2 * (shape.query_rank or 0) + 2 * (shape.kv_rank or 0) + shape.rope_dim)
    )
    raw = queries + 2 * keys + latent
    apart = latent
    if shape.qk_norm:
        width = tokens * (heads + kv_heads) * shape.head_dim
        wide = np.maximum(item, FP32)
        apart = apart + 2 * wide * width + FP32 * tokens * (heads + kv_heads) + queries
    # Softmax's output, its dropout mask, and the result: (2 + 1 + 2)·a·s² bytes in 16 bits
    # (Korthikanti et al., arXiv 2205.05198, §4.1).
    scores = np.zeros_like(tokens)
    if not fused:
        factor = np.where(device == "cpu", item, 1) + item if dropout else 0
        length = tokens / columns.micro_batch
        scores = (item + factor) * tokens * heads * length
    return queries, keys, mixed, raw, apart, scores


def _saved_mlp_bytes(mlp: Mlp, columns: PlanBatch, sizes: Shapes) -> tuple[Floats, Floats]:
    """Return the bytes of one inner tensor of an MLP, and the bytes that expert routing adds.

    Each token goes to `active` experts, which are evenly loaded. For routing, the forward saves a
    copy of the token for each of its experts, the experts' results before they are weighted, and
    the router's fp32 probabilities.
    """
    item, tokens = sizes.operand, sizes.tokens
    if not mlp.experts:
        return item * tokens * mlp.width / columns.tp, np.zeros_like(tokens)
    width = mlp.active * mlp.width + mlp.shared
    # If ranks of tp have whole experts, each rank has a part of the tokens.
    own = tokens * columns.etp / columns.tp
    routed = 2 * item * own * mlp.active * sizes.hidden + 2 * FP32 * own * mlp.experts
    return item * tokens * width / columns.tp, routed


def mean(values: list[Floats], stacks: tuple[Stack, ...]) -> Floats:
    """Return the mean over all layers, given one value per stack."""
    total = sum(stack.layers for stack in stacks)
    return sum(
        (value * (stack.layers / total) for value, stack in zip(values, stacks, strict=True)),
        start=np.zeros_like(values[0]),
    )


def share_of(columns: PlanBatch, mode: Checkpointing) -> Floats:
    """Return the fraction of blocks in a recomputation mode."""
    return columns.modes[:, MODES.index(mode)]
