"""NaN in place of values that a pipeline stage does not have, without memory."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.parallel.tensors import parameter_like


def nan_of(device: torch.device, leaf: Any) -> Any:
    """Return NaN in the form of a tensor, or 0 for integers; other values as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.full(leaf.shape, _absent_value(leaf.dtype), dtype=leaf.dtype, device=device)


def nan_like(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Return NaN in the form of a block's first input."""
    given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), torch.empty(()))
    dtype = given.dtype if _is_inexact(given.dtype) else torch.get_default_dtype()
    return given.new_full(given.shape, math.nan, dtype=dtype)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _absent_value(dtype: torch.dtype) -> Any:
    """Return the value of a tensor that is absent: NaN, or 0 for integers."""
    return math.nan if _is_inexact(dtype) else 0


def forget_all_but(kept: Sequence[Tensor], module: nn.Module) -> None:
    """Replace other parameters with NaN, or with 0 for integers, without memory.

    They stay parameters, so that a loss over all parameters is also NaN.
    """
    ids = {id(tensor) for tensor in kept}
    for part in module.modules():
        for name, tensor in list(part._parameters.items()):
            if tensor is not None and id(tensor) not in ids:
                stub = (
                    tensor.detach().new_full((), _absent_value(tensor.dtype)).expand(tensor.shape)
                )
                setattr(part, name, parameter_like(stub, tensor))


def is_nan(tensor: Tensor) -> bool:
    """Return whether any value of a tensor is NaN."""
    return _is_inexact(tensor.dtype) and bool(tensor.isnan().any())
