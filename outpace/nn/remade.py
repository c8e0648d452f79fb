"""Saved tensors of a linear matmul, replaced by functions that compute them again.

`torch.autograd.graph.saved_tensors_hooks` would call Python for each tensor saved within it. Here
only one tensor is replaced, after the matmul.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The nodes of a matmul's backward, and what they call its input (rows, (N, in)). The weight, as
# it is multiplied, (in, out), is `mat2` to both.
_INPUTS = {"AddmmBackward0": "_raw_saved_mat1", "MmBackward0": "_raw_saved_self"}


def remake_operands(
    matmul: Tensor,
    make_input: Callable[[], Tensor] | None,
    make_weight: Callable[[], Tensor] | None,
) -> None:
    """Make the backward of `matmul`, `F.linear` of rows, call functions for its operands.

    None leaves an operand unchanged. An operand must have been saved: an input if the weight is
    trained, a weight if the input has a gradient. Nothing changes if torch does not compute the
    matmul as for plain tensors, or if other hooks hold saved tensors (checkpointing, offloading).
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
    """Return whether hooks receive saved tensors; torch accepts no second set of hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def remake(saved: Any, make: Callable[[], Tensor]) -> None:
    """Drop a tensor that a node has saved in one of its `_raw_saved_` attributes."""
    saved.register_hooks(lambda _: make, _make_again)


def _make_again(make: Callable[[], Tensor]) -> Tensor:
    if not torch.is_grad_enabled():
        return make()
    with torch.no_grad():
        return make()
