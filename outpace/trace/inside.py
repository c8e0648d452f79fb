"""What operators take and give back within themselves, which a mode around them does not see."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import linear_cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_CHUNKED_LOSS = torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default
_ALLOW_RETAIN_GRAPH = 11  # the operator's argument that its code does not take


class Inside:
    """Bytes that operators need beside what they are given and what they make.

    The chunked loss is written in Python: its code is run on tensors without memory.
    """

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def __call__(self, func: Any, args: Any) -> int:
        """For one call. 0 for operators that are not known, and with memory of their own."""
        if func is not _CHUNKED_LOSS or not isinstance(args[0], FakeTensor):
            return 0
        key = tree_map_only(Tensor, lambda tensor: (tensor.shape, tensor.dtype), tuple(args))
        if key not in self._known:
            given = (*args[:_ALLOW_RETAIN_GRAPH], *args[_ALLOW_RETAIN_GRAPH + 1 :])
            run = linear_cross_entropy._linear_cross_entropy_batch_chunked_accumulator
            self._known[key] = _taken(partial(run, *given))
        return self._known[key]


def _taken(run: Callable[[], Any]) -> int:
    peak = _Peak()
    with torch.no_grad(), peak:
        made = run()
    return peak.peak_bytes - sum(storage.nbytes() for storage in _storages(made))


class _Peak(TorchDispatchMode):
    """The most bytes of storages that are made while it is entered, and live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._seen.setdefault(storage._cdata, None)
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage._cdata not in self._seen:
                nbytes = storage.nbytes()
                freed = partial(self._freed, storage._cdata, nbytes)
                self._seen[storage._cdata] = weakref.ref(storage, freed)
                self.live_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return made

    def _freed(self, key: int, nbytes: int, _: Any) -> None:
        self._seen.pop(key, None)
        self.live_bytes -= nbytes


def _storages(tree: Any) -> Iterable[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
