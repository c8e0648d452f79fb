"""Bytes that forward passes keep for backward passes."""

from collections.abc import Iterator

import torch
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes(saved_tensors_hooks):
    """Count of the bytes that forwards save for backwards within the context.

    `live_bytes` is the current count and `peak_bytes` the largest. Each storage counts once,
    however many tensors are views of it; those in `apart` (weights) do not count.
    """

    def __init__(self, apart: Iterator[torch.Tensor]) -> None:
        super().__init__(self._pack, self._unpack)
        self.live_bytes = 0
        self.peak_bytes = 0
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in apart}
        self._holders: dict[int, int] = {}

    def _pack(self, tensor: torch.Tensor) -> "_KeptTensor":
        return _KeptTensor(tensor, self)

    def _unpack(self, kept: "_KeptTensor") -> torch.Tensor:
        return kept.tensor

    def hold(self, tensor: torch.Tensor, change: int) -> None:
        """Count one more (1) or one fewer (-1) holder of the tensor's storage."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._apart:
            return
        before = self._holders.get(place, 0)
        self._holders[place] = before + change
        if before + change == 0:
            del self._holders[place]
        if 0 in (before, before + change):
            self.live_bytes += change * storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class _KeptTensor:
    """A tensor held by the graph, which notifies its account when the graph releases it."""

    def __init__(self, tensor: torch.Tensor, account: SavedBytes) -> None:
        self.tensor = tensor.detach()
        self._account = account
        account.hold(self.tensor, 1)

    def __del__(self) -> None:
        self._account.hold(self.tensor, -1)
