"""NaN placeholders for values that a pipeline stage does not have."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.parallel.custom.absent_parameters import AbsentParameters
from outpace.parallel.tensors import parameter_like


def nan_of(device: torch.device, leaf: Any) -> Any:
    """Return a tensor of NaN (0 for integers) with the shape and dtype of `leaf`, on `device`.

    A `leaf` that is no tensor is returned unchanged.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.full(leaf.shape, _placeholder_for(leaf.dtype), dtype=leaf.dtype, device=device)


def nan_like(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Return NaN in the shape of a block's first tensor argument."""
    given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), torch.empty(()))
    dtype = given.dtype if _supports_nan(given.dtype) else torch.get_default_dtype()
    return given.new_full(given.shape, math.nan, dtype=dtype)


def _supports_nan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _placeholder_for(dtype: torch.dtype) -> Any:
    return math.nan if _supports_nan(dtype) else 0


def forget_all_but(
    kept: Sequence[Tensor], module: nn.Module, absent: AbsentParameters | None = None
) -> None:
    """Replace the values of all parameters except `kept` with NaN (0 for integers).

    The replaced parameters take no memory. They remain parameters, so a loss over all parameters is
    also NaN. `absent`, if given, can later refuse uses of them.
    """
    ids = {id(tensor) for tensor in kept}
    for part in module.modules():
        for name, tensor in list(part._parameters.items()):
            if tensor is not None and id(tensor) not in ids:
                stub = (
                    tensor.detach()
                    .new_full((), _placeholder_for(tensor.dtype))
                    .expand(tensor.shape)
                )
                made = parameter_like(stub, tensor)
                setattr(part, name, absent.replace(made, tensor) if absent else made)


def is_nan(tensor: Tensor) -> bool:
    """Return whether any value of a tensor is NaN."""
    return _supports_nan(tensor.dtype) and bool(tensor.isnan().any())
