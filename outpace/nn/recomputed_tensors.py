"""Replacement of a linear layer's saved tensors by functions that recompute them.

`torch.autograd.graph.saved_tensors_hooks` would call Python for each tensor saved in its context.
Here, single saved tensors are replaced after the matmul.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Autograd nodes of a matmul, and their attribute for its input, rows (N, in). Both nodes call the
# weight, as (in, out), `mat2`.
_INPUTS = {"AddmmBackward0": "_raw_saved_mat1", "MmBackward0": "_raw_saved_self"}


def remake_operands(
    matmul: Tensor,
    make_input: Callable[[], Tensor] | None,
    make_weight: Callable[[], Tensor] | None,
) -> None:
    """Make the backward of a linear layer call functions that recompute the layer's operands.

    `matmul`: the layer's output for rows (N, in), from `F.linear`. `make_input`, `make_weight`:
    functions that return the operand; None: the saved one is used. An operand with a function must
    have been saved: the input if the weight is trained, the weight if the input needs a gradient.
    Nothing changes if the autograd node is not that of plain tensors, or if other saved-tensor
    hooks are active (checkpointing, offloading).
    """
    node = matmul.grad_fn
    name = _INPUTS.get(type(node).__name__)
    if name is None or has_hooks():
        return
    if make_input is not None:
        remake(getattr(node, name), make_input)
    if make_weight is not None:
        remake(node._raw_saved_mat2, make_weight)  # type: ignore[union-attr]


def has_hooks() -> bool:
    """Return whether saved-tensor hooks are active; torch does not combine them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def remake(saved: Any, make: Callable[[], Tensor]) -> None:
    """Make autograd call `make` in the backward, instead of keeping a saved tensor.

    `saved`: an attribute of an autograd node whose name begins with `_raw_saved_`.
    """
    saved.register_hooks(lambda _: make, _make_without_grad)


def _make_without_grad(make: Callable[[], Tensor]) -> Tensor:
    if not torch.is_grad_enabled():
        return make()
    with torch.no_grad():
        return make()
