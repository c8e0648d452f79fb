"""Norms and embeddings over gathered weights of 16 bits, computed in fp32 as autocast has them.

Autocast expects weights in fp32: it casts those of products and leaves the others. Ranks that split
parameters gather them in 16 bits (`parallel.fsdp`), which torch's norms refuse beside an input in
fp32, and which would make a transformer's residual stream one of 16 bits from its embedding on.
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
    """Let a model's norms and embeddings compute in fp32 under autocast, whatever their weights.

    In place; `runs_on` is the kind of device that the model computes on. Without autocast they stay
    as they are. On a CPU, whose kernel adds an embedding's gradients up in the dtype of its
    weights, the table itself is raised; elsewhere what is looked up in it.
    """
    for module in model.modules():
        embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if embeds and runs_on != "cpu":
            module.register_forward_hook(_raise_output)
        elif embeds or isinstance(module, _NORMS):
            kind: Any = type(module)
            module.__class__ = _raised_type(kind)


@cache
def _raised_type(kind: type[nn.Module]) -> type[nn.Module]:
    """A kind of modules whose forward has raised parameters.

    Not a forward of each module's own: a compiler guards those by identity, so that no two layers
    share what it has compiled, and gives up after a few.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _forward_with_raised(self, kind.forward, *args, **kwargs)

    return type(f"Raised{kind.__name__}", (kind,), {"forward": forward})


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def in_fp32(x: Tensor) -> Tensor:
    """`x` in fp32 where it has 16 bits and autocast is on."""
    return x.float() if x.dtype in _LOW and _autocasts(x.device) else x


def _raise_output(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return in_fp32(output)


def _forward_with_raised(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A module's forward with its own parameters of 16 bits raised to fp32."""
    own = module._parameters
    low = {name: p for name, p in own.items() if p is not None and p.dtype in _LOW}
    if not low or not _autocasts(next(iter(low.values())).device):
        return forward(module, *args, **kwargs)
    try:
        for name, parameter in low.items():
            own[name] = parameter.float()  # type: ignore[assignment]
        return forward(module, *args, **kwargs)
    finally:
        own.update(low)
