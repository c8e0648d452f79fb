"""FLOPs of a transformer by formula; docs/concepts/flops.md derives them.

Matmuls and attention are counted, with 2·m·n·k FLOPs for an (m, k) by (k, n) matmul. As in
published MFU figures, norms, activations, softmax and the optimizer are ignored, and causal
attention counts in full, not halved. With a sliding window, only the keys in the window count.
Document boundaries do not reduce the count.
"""

import math
from collections.abc import Sequence

from outpace.planner.model.shapes import parameter_shapes
from outpace.records.model import ModelSpec
from outpace.records.plan import Checkpointing

# Matmuls of (S, C) by (C, S) per head: in the forward, scores and mix; in the backward, two
# gradients of each, and in a fused kernel, the scores again.
_FORWARD_MATMULS = 2
_BACKWARD_MATMULS = 4
_FUSED_BACKWARD_MATMULS = 5


def parameter_count(spec: ModelSpec) -> int:
    """Return the number of parameters of a model with its head, counting tied ones once."""
    return sum(math.prod(shape) for shape in parameter_shapes(spec).values())


def block_weights(spec: ModelSpec) -> int:
    """Return the elements of a block's weight matrices; each is one multiply-add per token."""
    attention = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    return attention + (3 if spec.gated else 2) * spec.hidden * spec.ffn


def _recomputed_matmul_weights(spec: ModelSpec) -> int:
    """Return the weight elements of a block whose matmuls full checkpointing repeats.

    torch stops recomputing at the last tensor that the backward reads. The block's last matmul, the
    MLP's down projection, is therefore repeated only if dropout or a norm follows.
    """
    last_is_read = spec.dropout > 0 or not spec.norm_first
    return block_weights(spec) - (0 if last_is_read else spec.hidden * spec.ffn)


def head_weights(spec: ModelSpec) -> int:
    """Return the elements of the matrices after the last block."""
    return spec.vocab * spec.hidden + (0 if spec.norm_first else spec.hidden**2)


def keys_reached(keys: int, window: int | None, causal: bool) -> int:
    """Return the keys that a query attends to: all, or its window (two-sided if not causal)."""
    if window is None:
        return keys
    return min(keys, (1 if causal else 2) * (window - 1) + 1)


def _layer_score_flops(spec: ModelSpec, seq_len: int, layer: int) -> int:
    """Return the FLOPs per sample of one of attention's matmuls, over all heads of a layer.

    It multiplies (S, C) by (C, keys), as the scores do.
    """
    keys = keys_reached(seq_len, spec.layer_window(layer), spec.causal)
    return 2 * spec.heads * spec.head_dim * seq_len * keys


def _model_score_flops(spec: ModelSpec, seq_len: int) -> int:
    return sum(_layer_score_flops(spec, seq_len, layer) for layer in range(spec.layers))


def forward_flops(spec: ModelSpec, seq_len: int, samples: int, head: bool = True) -> int:
    """Return the FLOPs of one forward over `samples` sequences of `seq_len` tokens.

    Without `head`, only one position of each sequence is read, as in a classifier.
    """
    weights = spec.layers * block_weights(spec) + (head_weights(spec) if head else 0)
    attention = _FORWARD_MATMULS * _model_score_flops(spec, seq_len)
    unread = 0 if head else _unread_flops(spec, seq_len, block_weights(spec), _FORWARD_MATMULS)
    return samples * (2 * seq_len * weights + attention - unread)


def _unread_flops(spec: ModelSpec, seq_len: int, weights: int, matmuls: int) -> int:
    """Return the FLOPs per sample that the last block does not need if only one position is read.

    The block then computes only keys and values for all other positions. `weights` is the number of
    elements of a whole block's matmuls, including those for keys and values; `matmuls` is the
    number of matmuls in attention.
    """
    keys_and_values = 2 * spec.hidden * spec.head_dim * spec.kv_heads
    a_place = _layer_score_flops(spec, seq_len, spec.layers - 1) // seq_len
    return (seq_len - 1) * (2 * (weights - keys_and_values) + matmuls * a_place)


def step_flops(
    spec: ModelSpec,
    seq_len: int,
    samples: int,
    checkpointing: Checkpointing | Sequence[Checkpointing] | None = None,
    adapters: int | None = None,
    head: bool = True,
) -> int:
    """Return the FLOPs of forward and backward over `samples` sequences of `seq_len` tokens.

    Without `checkpointing`, these are the FLOPs that the model needs, three times the forward, for
    MFU (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B). With `checkpointing`, given for all
    blocks or per block, these are the FLOPs that the hardware computes, for HFU: they include
    recomputed blocks and the scores that fused attention recomputes.

    Without `head`, only one position of each sequence is read, as in a classifier. If only adapters
    are trained, `adapters` is their number of parameters. Gradients of frozen weights are then not
    computed, and each adapter element is a multiply-add per token, like a weight element.

    Raises ValueError for a classifier with adapters, because a classifier's new layers are fully
    trained.
    """
    if adapters is not None and not head:
        raise ValueError("adapters in addition to a classifier's new layers are not counted")
    forward = forward_flops(spec, seq_len, samples, head)
    matmuls = 3 * forward
    if adapters is not None:
        tokens = samples * seq_len
        matmuls -= 2 * tokens * (spec.layers * block_weights(spec) + head_weights(spec))
        matmuls += 3 * 2 * tokens * adapters
    if checkpointing is None:
        return matmuls
    modes = [checkpointing] * spec.layers if isinstance(checkpointing, str) else checkpointing
    scores = (_FUSED_BACKWARD_MATMULS - _BACKWARD_MATMULS) * _model_score_flops(spec, seq_len)
    again = sum(recomputed_flops(spec, seq_len, mode, at) for at, mode in enumerate(modes))
    share = sum(mode in ("full", "attention") for mode in modes) / spec.layers
    again += round(share * 2 * seq_len * (adapters or 0))
    if not head:
        last = _layer_score_flops(spec, seq_len, spec.layers - 1)
        scores -= (_FUSED_BACKWARD_MATMULS - _BACKWARD_MATMULS) * (last - last // seq_len)
        again -= _unread_recomputed_flops(spec, seq_len, modes[-1])
    return matmuls + samples * (scores + again)


def _unread_recomputed_flops(spec: ModelSpec, seq_len: int, mode: Checkpointing) -> int:
    """Return the part of `recomputed_flops` that is not needed if only one position is read."""
    if mode in ("none", "selective"):
        return 0
    matmuls = 0 if mode == "attention" else _FORWARD_MATMULS
    return _unread_flops(spec, seq_len, _recomputed_matmul_weights(spec), matmuls)


def recomputed_flops(spec: ModelSpec, seq_len: int, mode: Checkpointing, layer: int) -> int:
    """Return the FLOPs per sample that a layer's block recomputes in the backward.

    "full" recomputes the block's forward (Korthikanti et al., arXiv 2205.05198, appendix A),
    "attention" the forward without attention itself, and "selective" no matmuls.
    """
    if mode in ("none", "selective"):
        return 0
    matmuls = 2 * seq_len * _recomputed_matmul_weights(spec)
    if mode == "attention":
        return matmuls
    return matmuls + _FORWARD_MATMULS * _layer_score_flops(spec, seq_len, layer)
