"""Collectives in a user's forward or loss that not all ranks run at the same time."""

from functools import cache
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.records.errors import BadInputError

COLLECTIVE = "the forward or the loss calls a collective of torch.distributed"
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


@cache
def is_collective(operator: Any) -> bool:
    """Return whether an operator belongs to torch.distributed."""
    return getattr(operator, "namespace", None) in _NAMESPACES


class CollectiveError(BadInputError):
    """A collective in the user's code that other ranks would never join."""


class NoCollectives(TorchDispatchMode):
    """A mode that refuses collectives over all ranks, for code that only some ranks run."""

    supports_higher_order_operators = True

    def __init__(self, strategy: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._strategy = strategy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_collective(func) and _uses_world_group((args, kwargs)):
            name = func.__name__.partition(".")[0].strip("_")
            raise CollectiveError(
                f"{COLLECTIVE} ({name}) over all ranks, but under strategy {self._strategy} not "
                "all of them run it, or they have the same samples, so it would hang or count "
                "samples twice. Use ddp, zero1, zero2 or zero3, or give the collective a process "
                "group of ranks with different samples."
            )
        return func(*args, **(kwargs or {}))


def _uses_world_group(arguments: Any) -> bool:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, str) and leaf == name:
            return True
        if type(leaf).__name__ == "ScriptObject" and "ProcessGroup" in str(leaf._type()):
            return bool(dist.ProcessGroup.unbox(leaf).group_name == name)
    return False
