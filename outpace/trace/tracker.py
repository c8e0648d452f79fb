"""Dispatch mode that counts live bytes as storages are allocated and freed."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):
    """Counter of allocations and frees in its context. Enter it inside the fake tensor mode.

    `events` are pairs of a storage's number and its bytes; bytes are negative for a free.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self._living: dict[int, weakref.ref[Any]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.record(tree_leaves(made))
        return made

    def record(self, values: Iterable[Any]) -> None:
        """Count the tensors among `values` whose storages are new."""
        for value in values:
            if isinstance(value, Tensor):
                self._record_storage(value.untyped_storage())

    def _record_storage(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._living or not size:
            return
        self._count += 1
        number = self._count

        def forget(_: Any) -> None:
            del self._living[key]
            self._add_event(number, -size)

        self._living[key] = weakref.ref(storage, forget)
        self._add_event(number, size)

    def _add_event(self, number: int, size: int) -> None:
        self.events.append((number, size))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
