"""Memory that operators allocate and free internally, invisible to a dispatch mode."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from outpace.nn.attention import attention, attention_backward
from outpace.nn.bf16_loss import (
    backward_temporary_bytes,
    low_loss,
    low_loss_backward,
    temporary_bytes,
)
from outpace.nn.gelu import gelu_tanh
from outpace.nn.norms import rms_norm, rms_norm_backward
from outpace.trace.tracker import Tracker

# Operators implemented in Python, with their code.
_IN_PYTHON: Mapping[Any, Callable[..., Any]] = {
    attention.overload: attention.code,
    attention_backward.overload: attention_backward.code,
    gelu_tanh.overload: gelu_tanh.code,
    rms_norm.overload: rms_norm.code,
    rms_norm_backward.overload: rms_norm_backward.code,
}
# Only for CPUs; accelerators have other kernels.
_ON_CPUS = frozenset({gelu_tanh.overload, rms_norm.overload, rms_norm_backward.overload})


class TemporaryBytes:
    """Callable that returns the bytes that an operator allocates and frees internally.

    An operator implemented in Python (norms, GELU, blocked attention) is run on fake tensors to
    count them. `on_cpu`: whether the traced device is a CPU.
    """

    def __init__(self, on_cpu: bool = True) -> None:
        self._known: dict[Any, int] = {}
        self._on_cpu = on_cpu

    def __call__(self, func: Any, args: Any) -> int:
        """Return the bytes of one call.

        Return 0 for unknown operators, and for operators in Python on real tensors.
        """
        if func is low_loss.overload:
            return temporary_bytes(args[0], args[1])
        if func is low_loss_backward.overload:
            return backward_temporary_bytes(args[2], args[3], args[5])
        if func in _ON_CPUS and not self._on_cpu:
            return 0
        if func not in _IN_PYTHON or not isinstance(args[0], FakeTensor):
            return 0
        key = func, tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype), tuple(args))
        if key not in self._known:
            self._known[key] = _measure_temporary_bytes(_IN_PYTHON[func], args)
        return self._known[key]


def _attention_flops(query: Tensor, key: Tensor) -> int:
    """Return the FLOPs of the matmul of queries and keys, without a mask."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * width


def _head_flops(hidden: Tensor, weight: Tensor) -> int:
    return 2 * hidden.numel() * weight.shape[0]


_ATEN = torch.ops.aten
_ATTENTIONS = (
    attention.overload,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)
_ATTENTION_BACKWARDS = (
    attention_backward.overload,
    _ATEN._scaled_dot_product_flash_attention_backward.default,
    _ATEN._scaled_dot_product_efficient_attention_backward.default,
    _ATEN._scaled_dot_product_cudnn_attention_backward.default,
)
# As torch counts: backwards include the scores that they recompute. (Before 2.13, torch's own
# formulas for attention do not support grouped queries.)
FLOPS: Mapping[Any, Callable[..., int]] = {
    **{one: lambda q, k, *_, **__: 2 * _attention_flops(q, k) for one in _ATTENTIONS},
    **{one: lambda _, q, k, *__, **___: 5 * _attention_flops(q, k) for one in _ATTENTION_BACKWARDS},
    low_loss.overload: lambda hidden, weight, *_: _head_flops(hidden, weight),
    # torch's own formula mistakes the result's dtype for a shape.
    torch.ops.aten.addmm.dtype_out: lambda _, a, b, *__, **___: 2 * a.numel() * b.shape[1],
    low_loss_backward.overload: lambda _, __, hidden, weight, ___, trains: (
        (1 + trains) * _head_flops(hidden, weight)
    ),
}


def _measure_temporary_bytes(run: Callable[..., Any], arguments: Iterable[Any]) -> int:
    tracker = Tracker()
    tracker.record(arguments)
    there = tracker.live_bytes
    with torch.no_grad(), tracker:
        made = run(*arguments)
    made = [made] if isinstance(made, Tensor) else made
    outputs: int = sum(tensor.untyped_storage().nbytes() for tensor in made)
    return tracker.peak_bytes - there - outputs
