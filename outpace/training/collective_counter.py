"""Dispatch mode that counts this process's collectives and their bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.nn.dtensor import has_spread
from outpace.planner.communication.volume import Tally

# Operator-name prefixes by kind of collective; the longest match counts.
_KINDS = {
    "all_reduce": "all_reduce", "allreduce": "all_reduce",
    "all_gather": "all_gather", "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all", "alltoall": "all_to_all",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
    "send": "send",
}  # fmt: skip
# "outpace" is for collectives through peer memory (parallel.peer_memory).
_NAMESPACES = ("c10d", "_c10d_functional", "outpace")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


class CollectiveCounter(TorchDispatchMode):
    """Counter of this thread's collectives in the context.

    `tally` has their number and bytes: what this rank sends under the algorithm that sends least
    (`planner.communication.volume`).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since True would import the compiler, and no compiled code runs here."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = Tally()
        self._paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause counting in this context."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_spread(types):
            # DTensor then calls the operators on local tensors, including communication
            return NotImplemented
        if not self._paused and func.namespace in _NAMESPACES:
            kind = _collective_kind(func._opname.strip("_"))
            if kind is not None:
                self._count_collective(kind, args)
        return func(*args, **(kwargs or {}))

    def _count_collective(self, kind: str, args: Any) -> None:
        group = _collective_group(args)
        # The first number is the root, if any.
        root = kind in _ROOTED and next(a for a in args if isinstance(a, int)) == group.rank()
        # Output tensors come first, then inputs, unless one list is both. A scatter's chunks are
        # equal, so the output gives their size.
        given = args[0] if kind == "scatter" else (_tensor_leaves(args[1]) or args[0])
        self.tally.add(kind, group.size(), sum(t.nbytes for t in _tensor_leaves(given)), root=root)


def _collective_kind(operator: str) -> str | None:
    """Return the kind of a collective; None if the operator sends nothing (a receive, a wait)."""
    fitting = [name for name in _KINDS if operator.startswith(name)]
    return _KINDS[max(fitting, key=len)] if fitting else None


def _collective_group(args: Any) -> dist.ProcessGroup:
    """Return a collective's group: a boxed argument, or by name in functional collectives."""
    boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
    if boxed is None:
        return _resolve_process_group(args[-1])
    return dist.ProcessGroup.unbox(boxed)


def _tensor_leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
