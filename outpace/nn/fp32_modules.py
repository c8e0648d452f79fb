"""Norms and embeddings computed in fp32 under autocast, although their weights are 16-bit.

Autocast expects fp32 weights, and casts only those of matmuls. With sharded parameters, ranks
gather 16-bit weights instead (`parallel.fsdp`). With these, torch's norms refuse an fp32 input, and
an embedding would make a transformer's whole residual stream 16-bit.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_LOW = (torch.bfloat16, torch.float16)


def compute_in_fp32(model: nn.Module, runs_on: str) -> None:
    """Make a model's norms and embeddings compute in fp32 under autocast, in place.

    `runs_on` is the device type of the computation. On a CPU, the whole embedding table is cast,
    since the kernel sums gradients in the dtype of the weights; elsewhere, only the output is cast.
    Without autocast, the model computes as before.
    """
    for module in model.modules():
        embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if embeds and runs_on != "cpu":
            module.register_forward_hook(_cast_output_hook)
        elif embeds or isinstance(module, _NORMS):
            kind: Any = type(module)
            module.__class__ = _fp32_subclass(kind)


@cache
def _fp32_subclass(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward casts the module's parameters to fp32.

    Patching `forward` on each instance would not do: torch.compile guards such a forward by
    identity, so layers would not share compiled code, and it would give up after a few
    recompilations.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _forward_with_fp32_parameters(self, kind.forward, *args, **kwargs)

    return type(f"Raised{kind.__name__}", (kind,), {"forward": forward})


def _is_autocast_on(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def in_fp32(x: Tensor) -> Tensor:
    """Cast `x` to fp32 if it has 16 bits and autocast is on."""
    return x.float() if x.dtype in _LOW and _is_autocast_on(x.device) else x


def _cast_output_hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return in_fp32(output)


def _forward_with_fp32_parameters(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    own = module._parameters
    low = {name: p for name, p in own.items() if p is not None and p.dtype in _LOW}
    if not low or not _is_autocast_on(next(iter(low.values())).device):
        return forward(module, *args, **kwargs)
    try:
        for name, parameter in low.items():
            own[name] = parameter.float()  # type: ignore[assignment]
        return forward(module, *args, **kwargs)
    finally:
        own.update(low)
