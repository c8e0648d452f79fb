"""Outlines of models that outpace builds, and the weights of an outline's layers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from outpace.planner.model.shapes import parameter_shapes
from outpace.records.model import ModelSpec
from outpace.records.outline import AttentionShape, MatmulShape, Mlp, Outline, Stack

_CLASSES = 2  # the real number depends on the data, but costs next to nothing
# How tensor parallelism splits a weight: by outputs, by inputs, or not at all.
Cut = Literal["outputs", "inputs", "none"]


class Weight(NamedTuple):
    """A weight matrix of a layer, or one matrix in each of `experts` experts."""

    name: str
    inputs: int
    outputs: int
    cut: Cut
    bias: bool = False
    experts: int = 0
    active: int = 1

    @property
    def elements(self) -> int:
        """Return the number of elements, including biases, over all experts."""
        each = self.inputs * self.outputs + (self.outputs if self.bias else 0)
        return each * max(1, self.experts)


def outline(spec: ModelSpec, name: str) -> Outline:
    """Return the outline of a model that outpace builds."""
    attention = AttentionShape(
        heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim, value_dim=spec.head_dim,
        causal=spec.causal, qkv_bias=spec.qkv_bias, out_bias=spec.out_bias, qk_norm=spec.qk_norm,
    )  # fmt: skip
    windowed = sum(spec.layer_window(layer) is not None for layer in range(spec.layers))
    stacks = [
        Stack(
            name="layers" if window is None else "layers with a window",
            layers=count,
            attention=attention.model_copy(update={"window": window}),
            mlp=Mlp(width=spec.ffn, gated=spec.gated, bias=spec.mlp_bias),
            norm_bias=spec.norm == "layernorm",
            dropout=spec.dropout > 0,
            norm_last=not spec.norm_first,
        )
        for count, window in ((spec.layers - windowed, None), (windowed, spec.sliding_window))
        if count
    ]
    shapes = parameter_shapes(spec)
    apart = ("blocks.", "embed.tokens", "embed.positions", "head.weight")
    transform = (
        ()
        if spec.norm_first
        else (MatmulShape(name="head transform", inputs=spec.hidden, outputs=spec.hidden),)
    )
    transformed = sum(matmul.inputs * matmul.outputs for matmul in transform)
    outside = sum(math.prod(shape) for key, shape in shapes.items() if not key.startswith(apart))
    return Outline(
        name=name,
        hidden=spec.hidden,
        stacks=tuple(stacks),
        vocab=spec.vocab,
        outputs=spec.vocab,
        tied=spec.tied,
        learned_positions=spec.max_positions if spec.positions == "learned" else 0,
        outside_parameters=outside - transformed,
        head_matmuls=transform,
        max_positions=spec.max_positions,
        source="the model's spec",
    )


def classifier_outline(found: Outline) -> Outline:
    """Return the outline with a pooler and a classification layer, which reads one token per text.

    The last layer of the outline computes all tokens, although outpace computes only the one that
    is read.
    """
    return found.model_copy(
        update={
            "outputs": _CLASSES,
            "tied": False,
            "predicted": 1,
            "head_matmuls": (),
            "outside_parameters": found.outside_parameters + found.hidden**2,
        }
    )


def weights(stack: Stack, hidden: int) -> Iterator[Weight]:
    """Yield the weight matrices of one layer.

    Matrices named "cross kv" are applied to the input of cross-attention, all others to the layer's
    own tokens.
    """
    if stack.attention is not None:
        yield from _attention_weights(stack.attention, hidden, "")
    if stack.cross_attention is not None:
        yield from _attention_weights(stack.cross_attention, hidden, "cross ")
    if stack.mlp is not None:
        yield from _mlp_weights(stack.mlp, hidden)
    for matmul in stack.other:
        if matmul.weighted:
            for _ in range(matmul.count):
                yield Weight(matmul.name, matmul.inputs, matmul.outputs, "none")


def reads_last_matmul(stack: Stack) -> bool:
    """Return whether the backward reads the result of a layer's last matmul, which is the MLP's.

    The backward of the residual addition does not need it; that of dropout, a norm or expert
    weighting does.
    """
    mlp = stack.mlp
    return stack.dropout or stack.norm_last or mlp is None or mlp.experts > 0


def second_matmuls(stack: Stack, hidden: int) -> Mapping[str, float]:
    """Return, for each weight, the fraction of its outputs that selective recomputation repeats.

    Selective recomputation repeats every second matmul of a layer. Queries, keys and values count
    as separate matmuls, and so do a gate and the projection that it multiplies. Experts' matmuls
    have no such order, so half of their outputs count.
    """
    shares, count = {}, 0
    for weight in weights(stack, hidden):
        if weight.experts:
            shares[weight.name] = 0.5
            continue
        parts, repeated = _unfused_outputs(stack, weight), 0
        for outputs in parts:
            count += 1
            repeated += outputs if count % 2 == 0 else 0
        shares[weight.name] = repeated / sum(parts)
    return shares


def _unfused_outputs(stack: Stack, weight: Weight) -> Sequence[int]:
    """Return the output sizes of a weight's separate matmuls, such as queries, keys and values."""
    attention, mlp = stack.attention, stack.mlp
    if weight.name == "qkv" and attention is not None:
        queries, keys = (n * attention.head_dim for n in (attention.heads, attention.kv_heads))
        return queries, keys, weight.outputs - queries - keys
    if weight.name in ("up", "shared up") and mlp is not None and mlp.gated:
        return weight.outputs // 2, weight.outputs // 2
    return (weight.outputs,)


def _attention_weights(attention: AttentionShape, hidden: int, prefix: str) -> Iterator[Weight]:
    if not attention.projected:
        return
    bias = attention.qkv_bias
    queries = attention.heads * attention.head_dim
    keyed = attention.kv_heads * (attention.head_dim + attention.value_dim)
    if attention.kv_rank is not None:
        yield from _latent_attention_weights(attention, attention.kv_rank, hidden)
    elif prefix:
        yield Weight(f"{prefix}q", hidden, queries, "outputs", bias)
        yield Weight(f"{prefix}kv", hidden, keyed, "outputs", bias)
    else:
        yield Weight("qkv", hidden, queries + keyed, "outputs", bias)
    mixed = attention.heads * attention.value_dim
    yield Weight(f"{prefix}out", mixed, hidden, "inputs", attention.out_bias)


def _latent_attention_weights(
    attention: AttentionShape, kv_rank: int, hidden: int
) -> Iterator[Weight]:
    queries = attention.heads * attention.head_dim
    if attention.query_rank is None:
        yield Weight("q", hidden, queries, "outputs")
    else:
        yield Weight("q down", hidden, attention.query_rank, "none", attention.qkv_bias)
        yield Weight("q up", attention.query_rank, queries, "outputs")
    yield Weight("kv down", hidden, kv_rank + attention.rope_dim, "none", attention.qkv_bias)
    keys = attention.head_dim - attention.rope_dim
    yield Weight("kv up", kv_rank, attention.heads * (keys + attention.value_dim), "outputs")


def _mlp_weights(mlp: Mlp, hidden: int) -> Iterator[Weight]:
    times = 2 if mlp.gated else 1
    if not mlp.experts:
        yield Weight("up", hidden, times * mlp.width, "outputs", mlp.bias)
        yield Weight("down", mlp.width, hidden, "inputs", mlp.bias)
        return
    yield Weight("router", hidden, mlp.experts, "none")
    many = (mlp.experts, mlp.active)
    yield Weight("experts up", hidden, times * mlp.width, "outputs", mlp.bias, *many)
    yield Weight("experts down", mlp.width, hidden, "inputs", mlp.bias, *many)
    if mlp.shared:
        yield Weight("shared up", hidden, times * mlp.shared, "outputs", mlp.bias)
        yield Weight("shared down", mlp.shared, hidden, "inputs", mlp.bias)
        if mlp.shared_gate:
            yield Weight("shared gate", hidden, 1, "none")


def seen_length(outline: Outline, stack: Stack, seq_len: int) -> int:
    """Return the number of keys in a stack's cross-attention.

    This is the sequence length of the encoder that precedes the stack.
    """
    seen = seq_len
    for one in outline.stacks:
        if one is stack:
            break
        if one.cross_attention is None:
            seen = one.seq_len or seq_len
    return seen


def layer_parameters(stack: Stack, hidden: int) -> int:
    """Return the number of a layer's parameters: matrices, biases, norms and any others."""
    norms = stack.norms * hidden * (2 if stack.norm_bias else 1)
    for attention in (stack.attention, stack.cross_attention):
        if attention is None:
            continue
        norms += 2 * attention.head_dim if attention.qk_norm else 0
        norms += (attention.query_rank or 0) + (attention.kv_rank or 0)  # latents are normalised
    return sum(w.elements for w in weights(stack, hidden)) + norms + stack.other_parameters


def outside_elements(outline: Outline) -> int:
    """Return the number of parameters outside of layers: embeddings, untied head, and the rest."""
    rows = outline.vocab + (0 if outline.tied else outline.outputs)
    matmuls = sum(p.elements for p in (*outline.embed_matmuls, *outline.head_matmuls))
    embedded = rows * outline.table_width + outline.learned_positions * outline.hidden
    return embedded + matmuls + outline.outside_parameters


def parameters(outline: Outline) -> int:
    """Return the number of a model's parameters."""
    layers = sum(s.layers * layer_parameters(s, outline.hidden) for s in outline.stacks)
    return layers + outside_elements(outline)


def head_in_layers(outline: Outline) -> float:
    """Return the multiply-adds of the head's matmuls, as a multiple of an average layer's."""
    block = sum(
        stack.layers * w.inputs * w.outputs * (w.active if w.experts else 1)
        for stack in outline.stacks
        for w in weights(stack, outline.hidden)
    )
    head = outline.outputs * outline.table_width + sum(p.elements for p in outline.head_matmuls)
    return head * outline.layers / max(block, 1)
