"""FLOPs of matmuls and attention of an outline (docs/concepts/flops.md)."""

from collections.abc import Mapping, Sequence

from outpace.planner.model.flops import keys_reached
from outpace.planner.model.outline import Weight, reads_last_matmul, second_matmuls, weights
from outpace.records.outline import AttentionShape, MatmulShape, Outline, Stack


def forward_flops(outline: Outline, seq_len: int, samples: int, *, attention: bool = True) -> int:
    """Return the FLOPs of one forward, with the head, over `samples` sequences of `seq_len` tokens.

    A matmul takes 2·m·n·k FLOPs. Attention counts all keys, or all keys of its window, masked or
    not. Experts count only for the tokens routed to them, and the router counts too. A stack with a
    fixed sequence length, such as an image encoder, uses that length instead of `seq_len`. A
    decoder's cross-attention reads the encoder's output.
    """
    total, seen, length = _matmul_flops(outline.embed_matmuls, seq_len), seq_len, seq_len
    for stack in outline.stacks:
        length = stack.seq_len or seq_len
        total += stack.layers * layer_flops(
            stack, outline.hidden, length, seen, attention=attention
        )
        if stack.cross_attention is None:
            seen = length
    predicted = outline.predicted or length
    total += _matmul_flops(outline.head_matmuls, predicted)
    total += 2 * predicted * outline.table_width * outline.outputs
    return samples * total


def step_flops(outline: Outline, seq_len: int, samples: int, adapters: int | None = None) -> int:
    """Return the FLOPs of a model's forward and backward, three times those of its forward.

    If only adapters are trained, `adapters` is their number of parameters. Frozen weights then have
    no gradients, and each adapter element is a multiply-add per token, like a weight element.
    """
    matmuls = 3 * forward_flops(outline, seq_len, samples)
    if adapters is None:
        return matmuls
    frozen = forward_flops(outline, seq_len, samples, attention=False)
    return matmuls - frozen + 3 * 2 * samples * seq_len * adapters


def masked_flops(outline: Outline, seq_len: int, samples: int) -> int:
    """Return the part of `step_flops` that causal masks make unnecessary.

    This is half of causal attention. Windows shorter than the sequence are excluded, because only
    the keys in the window are counted.
    """
    total = 0
    for stack in outline.stacks:
        length, attention = stack.seq_len or seq_len, stack.attention
        if attention is None or not attention.causal:
            continue
        if keys_reached(length, attention.window, causal=True) == length:
            total += stack.layers * _attention_flops(attention, length, length) // 2
    return 3 * samples * total


def recomputed_flops(
    outline: Outline,
    seq_len: int,
    samples: int,
    shares: Mapping[str, float],
    *,
    stops_early: bool = False,
) -> float:
    """Return the FLOPs that checkpointed layers recompute in one backward.

    `shares` is the fraction of layers in each mode: "full" layers repeat the whole forward,
    "attention" layers all of it except attention itself, and "selective" layers every second
    matmul. With `stops_early`, the last matmul is left out if nothing reads its result.
    """
    total, seen = 0.0, seq_len
    for stack in outline.stacks:
        length = stack.seq_len or seq_len
        whole, matmuls = (
            layer_flops(stack, outline.hidden, length, seen, attention=attention)
            for attention in (True, False)
        )
        if stops_early and stack.mlp is not None and not reads_last_matmul(stack):
            last = 2 * length * outline.hidden * stack.mlp.width
            whole, matmuls = whole - last, matmuls - last
        again = shares.get("full", 0.0) * whole + shares.get("attention", 0.0) * matmuls
        again += shares.get("selective", 0.0) * _second_flops(stack, outline.hidden, length, seen)
        total += stack.layers * again
        if stack.cross_attention is None:
            seen = length
    return samples * total


def _second_flops(stack: Stack, hidden: int, length: int, seen: int) -> float:
    """Return the FLOPs of every second weight matmul of a layer."""
    shares, total = second_matmuls(stack, hidden), 0.0
    for weight in weights(stack, hidden):
        rows = seen if weight.name == "cross kv" else length
        total += shares[weight.name] * 2 * rows * _weight_elements_per_token(weight)
    return total


def layer_flops(
    stack: Stack, hidden: int, length: int, seen: int, *, attention: bool = True
) -> int:
    """Return a layer's FLOPs per sample of `length` tokens; cross-attention has `seen` keys."""
    total = _matmul_flops(stack.other, length)
    bare = stack.model_copy(update={"other": ()})
    for weight in weights(bare, hidden):
        rows = seen if weight.name == "cross kv" else length
        total += 2 * rows * _weight_elements_per_token(weight)
    if not attention:
        return total
    if stack.attention is not None:
        total += _attention_flops(stack.attention, length, length)
    if stack.cross_attention is not None:
        total += _attention_flops(stack.cross_attention, length, seen)
    return total


def _weight_elements_per_token(weight: Weight) -> int:
    return weight.inputs * weight.outputs * (weight.active if weight.experts else 1)


def _attention_flops(attention: AttentionShape, queries: int, keys: int) -> int:
    seen = keys_reached(keys, attention.window, attention.causal)
    return 2 * attention.heads * (attention.head_dim + attention.value_dim) * queries * seen


def _matmul_flops(matmuls: Sequence[MatmulShape], rows: int) -> int:
    return sum(2 * (p.positions or rows) * p.inputs * p.outputs * p.count * p.uses for p in matmuls)
