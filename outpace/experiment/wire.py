"""What crosses the wire: collectives and their bytes, counted as they are called."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Wire(TorchDispatchMode):
    """Counts the collectives of this thread while it is entered.

    `exchanges` by the operator's name; `bytes` is what this rank gave to them: an all-gather's
    shard, a reduce-scatter's and an all-reduce's whole input, once each.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exchanges: Counter[str] = Counter()
        self.bytes = 0
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is called within counts nothing."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused and func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname.strip("_")
            if not name.startswith(("wait", "wrap", "barrier", "monitored")):
                self.exchanges[name] += 1
                self.bytes += _given_bytes(name, args)
        return func(*args, **(kwargs or {}))


_READ_SECOND = ("allgather", "reduce_scatter", "alltoall", "gather", "scatter")


def _is_root(args: Any) -> bool:
    """Whether a broadcast starts from this rank."""
    _, group, root, *_ = args
    return bool(dist.ProcessGroup.unbox(group).rank() == root)


def _given_bytes(name: str, args: Any) -> int:
    """Of the tensors that a collective reads."""
    given = args
    if name.startswith(_READ_SECOND):
        given = args[1:2]  # after the tensors that it writes
    elif name.startswith("recv") or (name.startswith("broadcast") and not _is_root(args)):
        return 0
    tensors = [leaf for leaf in tree_leaves(list(given)) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)
