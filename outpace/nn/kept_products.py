"""A block that keeps the outputs of its matrix products and of attention, and computes the rest
again in the backward, without Python for each operator.

torch's selective checkpointing asks a policy about every operator, twice. Here nothing is asked:
what linear layers would save for their backward is replaced, as it is saved, by how to make it
again. That is their input, which a norm or an activation function made, and the cast of their
weight. What is kept are the same bytes: of the residual stream the sum within the block in fp32
rather than the two terms in 16 bits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from outpace.nn.block import MLP, Attention, Block, activate, is_plain, lowered
from outpace.nn.masks import Visibility
from outpace.nn.norms import suits_operator
from outpace.nn.rotary import Tables


class Again:
    """How to make a tensor again. What reads it several times shares it.

    `compute` holds what it is made of, detached, or it would keep the graph alive; a backward has
    no autocast.
    """

    def __init__(self, tensor: Tensor, compute: Callable[[], Tensor]) -> None:
        self.storage = tensor.untyped_storage()._cdata
        self._compute = compute
        self._left = 0
        self._value: Tensor | None = None

    def hold(self) -> "Again":
        """It will be taken once more."""
        self._left += 1
        return self

    def take(self) -> Tensor:
        """The tensor; forgotten when nothing is left to take it."""
        value = self._value
        if value is None:
            with torch.no_grad():
                value = self._compute()
        self._left -= 1
        self._value = value if self._left > 0 else None
        return value


def _replacing(again: Again | None, linear: nn.Linear | None = None) -> saved_tensors_hooks:
    """Within this autograd saves how to make the tensor of `again`, and the cast of a weight."""

    def pack(saved: Tensor) -> Any:
        if again is not None and saved.untyped_storage()._cdata == again.storage:
            return again.hold(), saved.size(), saved.stride(), saved.storage_offset()
        if linear is not None and _is_cast(saved, linear.weight):
            return linear, saved.dtype
        return saved

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed[0], Again):
            again, size, stride, offset = packed
            value: Tensor = again.take().as_strided(size, stride, offset)
            return value
        # Asked for now: a shard has its whole weight in the backward only.
        of, dtype = packed
        cast: Tensor = of.weight.detach().to(dtype).t()
        return cast

    return saved_tensors_hooks(pack, unpack)


def _is_cast(saved: Tensor, weight: Tensor) -> bool:
    """Whether a tensor is the transpose of a cast of a weight; inputs lie in rows."""
    rows, columns = weight.shape
    there = saved.shape == (columns, rows) and saved.stride() == (1, columns) and columns > 1
    return there and saved.dtype != weight.dtype


def _linear(linear: nn.Module, x: Tensor, again: Again | None = None) -> Tensor:
    assert isinstance(linear, nn.Linear)
    with _replacing(again, linear):
        made: Tensor = linear(x)
    return made


def _normed(norm: nn.Module, x: Tensor) -> tuple[Tensor, Again]:
    """The norm in autocast's dtype, and how to make it again of `x`, which the norm saves."""
    low, kept = lowered(norm(x)), x.detach()
    kind, dtype = x.device.type, low.dtype
    autocasts = kind != "meta" and torch.is_autocast_enabled(kind)

    def compute() -> Tensor:
        if not autocasts:
            made: Tensor = norm(kept)
            return made
        with torch.autocast(kind, dtype=dtype, cache_enabled=False):
            return lowered(norm(kept))

    return low, Again(low, compute)


def can_keep_products(
    block: nn.Module,
    x: Tensor,
    sees: Visibility | None = None,
    rotary: Tables | None = None,
    *more: Any,
) -> bool:
    """Whether `keep_products` is for a block, as it is called.

    Norms come first and no other than the two of the residual stream, linear layers are plain ones,
    nothing is drawn, compiled or taken from a cache; and no operators for CPUs are used, which save
    tensors of their own.
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
    return all(is_plain(part) for part in (*attention.children(), *mlp.children()))


def keep_products(
    block: Block, x_BSD: Tensor, sees: Visibility, rotary: Tables | None = None, *_: Any
) -> Tensor:
    """As the block's own forward, (B, S, D) to (B, S, D), without dropout."""
    attention, mlp, spec = block.attention, block.mlp, block.attention.spec
    low, again = _normed(block.attention_norm, x_BSD)
    q, k, v = (_linear(part, low, again) for part in (attention.q, attention.k, attention.v))
    x_BSD = x_BSD + _linear(attention.out, attention.mixed(q, k, v, sees, rotary))
    low, again = _normed(block.mlp_norm, x_BSD)
    up = _linear(mlp.up, low, again)
    kept_up = up.detach()
    if not spec.gated:
        inner = activate(spec, up)
        its = Again(inner, lambda: activate(spec, kept_up))
    else:
        gate = _linear(mlp.gate, low, again)
        kept_gate = gate.detach()
        active = activate(spec, gate)
        with _replacing(Again(active, lambda: activate(spec, kept_gate))):
            inner = active * up
        its = Again(inner, lambda: activate(spec, kept_gate) * kept_up)
    return x_BSD + _linear(mlp.down, inner, its)
