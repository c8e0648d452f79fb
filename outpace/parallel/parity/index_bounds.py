"""Bounds checks for indices before a GPU uses them.

On a GPU, an index that is too large ends the whole process (a device-side assertion), whereas a CPU
raises an error. Forwards that run with the counters of much later steps may use such indices.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that take a list of index tensors, indices along a dimension, or numbers of rows.
_LISTS = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"})
_ALONG = frozenset({
    "index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill",
    "index_fill_", "index_reduce", "index_reduce_", "gather", "scatter", "scatter_", "scatter_add",
    "scatter_add_", "scatter_reduce", "scatter_reduce_",
})  # fmt: skip
_ROWS = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only"})


def require_bounds(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which an index out of bounds raises IndexError, on a GPU too."""
    return nullcontext() if device.type == "cpu" else IndexBounds()  # type: ignore[no-untyped-call]


class IndexBounds(TorchDispatchMode):
    """A dispatch mode that checks the bounds of indices; each check waits for the GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "namespace", None) == "aten":
            for indices, least, size in _list_indices(func.overloadpacket.__name__, args):
                if indices.numel() and (int(indices.min()) < least or int(indices.max()) >= size):
                    raise IndexError(f"an index is outside of a dimension of size {size}")
        return func(*args, **(kwargs or {}))


def _list_indices(name: str, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, int, int]]:
    """Yield each index tensor of an operator, with the lowest index allowed and the size."""
    if name in _LISTS:
        dim = 0
        for one in args[1]:
            is_mask = one is not None and one.dtype in (torch.bool, torch.uint8)
            if one is not None and not is_mask:
                yield one, -args[0].shape[dim], args[0].shape[dim]
            dim += one.ndim if is_mask else 1
    elif name in _ALONG and args[0].ndim:
        yield args[2], 0, args[0].shape[args[1]]
    elif name in _ROWS:
        yield args[1], 0, args[0].shape[0]
