"""Selective checkpointing of a block that keeps the outputs of matmuls and attention.

torch's selective checkpointing calls a policy twice for every operator. Here, each tensor that a
linear layer saves for its backward is replaced by a recipe to recompute it: inputs by the norm or
activation function, and copies of weights by casting or joining. The same number of bytes is kept,
but the residual sum within the block is kept in fp32 instead of its two terms in 16 bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.nn.block import (
    MLP,
    Attention,
    Block,
    activate,
    is_plain,
    joined_matmul,
    joined_weight,
    split_matmul,
    to_autocast_dtype,
)
from outpace.nn.masks import Visibility
from outpace.nn.norms import suits_operator
from outpace.nn.recomputed_tensors import has_hooks, remake, remake_operands
from outpace.nn.rotary import Tables


class Recipe:
    """Recomputation of a tensor that the backwards of several operators read.

    The first of these readers computes the tensor, and the last one frees it. `compute` must use
    detached inputs, which do not keep the graph alive, and runs without autocast, like the
    backward.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._readers_left = 0
        self._value: Tensor | None = None

    def add_reader(self) -> Callable[[], Tensor]:
        """Register one more reader, and return the function that gives it the tensor."""
        self._readers_left += 1
        return self._read_once

    def _read_once(self) -> Tensor:
        value = self._compute() if self._value is None else self._value
        self._readers_left -= 1
        self._value = value if self._readers_left > 0 else None  # free it after the last reader
        return value


def _apply_linear(
    layers: Sequence[nn.Linear], rows: Tensor, recipe: Recipe | None = None
) -> Tensor:
    """Apply linear layers to `rows` (N, in) by one matmul; return the outputs joined.

    In the backward, `recipe` recomputes `rows` (None: autograd keeps them), and the weights are
    cast and joined again, instead of keeping copies of them.
    """
    output = joined_matmul(rows, layers)
    dtype = output.dtype

    def make_weight() -> Tensor:
        # The weights are read only in the backward, where a sharded weight is gathered.
        return joined_weight(layers).to(dtype).t()

    copied = len(layers) > 1 or layers[0].weight.dtype != dtype
    trains = any(layer.weight.requires_grad for layer in layers)
    remake_operands(
        output,
        recipe.add_reader() if recipe is not None and trains else None,
        make_weight if copied and rows.requires_grad else None,
    )
    return output


def _apply_norm(norm: nn.Module, x: Tensor) -> tuple[Tensor, Recipe]:
    """Return the norm's output in autocast's dtype, and a recipe to recompute it from `x`."""
    low, saved = to_autocast_dtype(norm(x)), x.detach()
    kind, dtype = x.device.type, low.dtype
    autocasts = kind != "meta" and torch.is_autocast_enabled(kind) and not _stays_fp32(norm, saved)

    def compute() -> Tensor:
        if not autocasts:
            made: Tensor = norm(saved).to(dtype)
            return made
        with torch.autocast(kind, dtype=dtype, cache_enabled=False):
            return to_autocast_dtype(norm(saved))

    return low, Recipe(compute)


def _stays_fp32(norm: nn.Module, x: Tensor) -> bool:
    return x.dtype == getattr(norm.weight, "dtype", None) == torch.float32


def can_keep_matmuls(
    block: nn.Module,
    x: Tensor,
    sees: Visibility | None = None,
    rotary: Tables | None = None,
    *more: Any,
) -> bool:
    """Return whether `keep_matmuls` supports a block with these arguments.

    The block must be pre-norm, without other norms than those of the residual stream, and its
    linear layers must be plain. Nothing may be compiled or read from a cache. outpace's operators
    for the CPU must not be in use, since they save tensors of their own.
    """
    if not isinstance(block, Block) or torch.compiler.is_compiling():
        return False
    attention, mlp = block.attention, block.mlp
    cached = any(one is not None for one in more)
    if type(attention) is not Attention or type(mlp) is not MLP or cached:
        return False
    kind = x.device.type
    low = x.element_size() == 2 or (kind != "meta" and torch.is_autocast_enabled(kind))
    if not block.norm_first or attention.spec.qk_norm or (low and suits_operator(x)):
        return False
    return all(map(is_plain, attention.children())) and all(map(is_plain, mlp.children()))


def keep_matmuls(
    block: Block, x_BSD: Tensor, sees: Visibility, rotary: Tables | None = None, *_: Any
) -> Tensor:
    """Run a block's forward without dropout, (B, S, D) to (B, S, D), saving only matmul outputs."""
    attention, mlp, spec = block.attention, block.mlp, block.attention.spec
    x_ND = x_BSD.flatten(0, -2)  # rows, as matmuls need them, in one view for all layers
    low, again = _apply_norm(block.attention_norm, x_ND)
    parts = [attention.q, attention.k, attention.v]
    if attention.can_join(low):
        joined = _apply_linear(parts, low, again)
        q, k, v = split_matmul(joined.view(*x_BSD.shape[:-1], -1), parts)
    else:
        q, k, v = (_apply_linear([part], low, again).view(*x_BSD.shape[:-1], -1) for part in parts)
    mixed_BSD = attention.mix_values(q, k, v, sees, rotary)
    x_ND = x_ND + _apply_linear([attention.out], mixed_BSD.flatten(0, -2))
    low, again = _apply_norm(block.mlp_norm, x_ND)
    up = _apply_linear([mlp.up], low, again)
    kept_up = up.detach()
    if not spec.gated:
        inner = activate(spec, up)
        its = Recipe(lambda: activate(spec, kept_up))
    else:
        gate = _apply_linear([mlp.gate], low, again)
        kept_gate = gate.detach()
        active = activate(spec, gate)
        inner = active * up
        node: Any = inner.grad_fn
        if node is not None and up.requires_grad and not has_hooks():
            remake(node._raw_saved_self, lambda: activate(spec, kept_gate))
        its = Recipe(lambda: activate(spec, kept_gate) * kept_up)
    return (x_ND + _apply_linear([mlp.down], inner, its)).view(x_BSD.shape)
