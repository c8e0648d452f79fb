"""Offloading of tensors that blocks save for backward, to host memory or a disk.

Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, §5.1.1, offload checkpoints. Here everything
that autograd saves inside a block is offloaded; with checkpointing, that is the block's input. A
block's tensors are offloaded while the next blocks are computed, and return in the backward while
the following block is computed.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from outpace.nn.scratch import Scratch
from outpace.nn.spread import is_spread
from outpace.records.errors import BadInputError
from outpace.records.plan import Offload

# A page; moving smaller tensors saves nothing.
LEAST_BYTES = 4096
# Blocks that a device may be behind the program that feeds it. More would only pile up copies.
_AHEAD = 2


class Parcel(Protocol):
    """A tensor that is stored elsewhere, whose memory there lives as long as this object."""

    def prefetch(self) -> None:
        """Start bringing the tensor back."""

    def open(self) -> Tensor:
        """Return the tensor, for immediate use. It may be called again."""


class Storage(Protocol):
    """Storage that keeps tensors."""

    def store(self, tensor: Tensor) -> Parcel:
        """Start copying a tensor."""

    def pace(self) -> None:
        """Wait for copies that lag behind; called once per block in forward and in backward."""


class _MappedTensor:
    """A tensor in a mapped file; backward reads it from there."""

    def __init__(self, tensor: Tensor, scratch: Scratch) -> None:
        self._tensor, self._region = scratch.copy_temporarily(tensor)
        self._region.release()

    def prefetch(self) -> None:
        self._region.prefetch()

    def open(self) -> Tensor:
        return self._tensor


class DiskStore:
    """Mapped files; the kernel reads ahead and writes back."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def store(self, tensor: Tensor) -> Parcel:
        """Copy a tensor into a file."""
        return _MappedTensor(tensor, self._scratch)

    def pace(self) -> None:
        """Do nothing: the kernel slows down a writer that is faster than the disk."""


class _PinnedTensor:
    """A CUDA tensor in page-locked host memory."""

    def __init__(self, tensor: Tensor, place: "HostStore") -> None:
        place.down.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(place.down):
            memory = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host = memory.copy_(tensor, non_blocking=True)
        tensor.record_stream(place.down)  # keeps its memory until it is copied
        self._sent = place.down.record_event()
        self._place, self._device = place, tensor.device
        self._back: Tensor | None = None

    def prefetch(self) -> None:
        if self._back is not None:
            return
        up = self._place.up
        up.wait_event(self._sent)
        with torch.cuda.stream(up):
            self._back = self._host.to(self._device, non_blocking=True)
        self._arrived = up.record_event()

    def open(self) -> Tensor:
        self.prefetch()  # keep it, since others may have saved the same tensor
        assert self._back is not None
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self._arrived)
        self._back.record_stream(computing)
        return self._back


class HostStore:
    """Page-locked host memory, with a stream for each direction besides the computation's."""

    def __init__(self, device: torch.device) -> None:
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._device = device
        self._marks: deque[Sequence[torch.cuda.Event]] = deque()

    def store(self, tensor: Tensor) -> Parcel:
        """Start copying a tensor to the host."""
        return _PinnedTensor(tensor, self)

    def pace(self) -> None:
        """Limit memory that waits to be copied, or was prefetched too early."""
        computing = torch.cuda.current_stream(self._device)
        self._marks.append([stream.record_event() for stream in (computing, self.down)])
        if len(self._marks) > _AHEAD:
            for event in self._marks.popleft():
                event.synchronize()


class _SavedTensors:
    """Tensors saved by one forward of a block: each once, however many operations save it.

    Blocks do not share copies: a pipeline receives into the same memory repeatedly, which
    autograd's version counters do not see.
    """

    def __init__(self, keeper: "Keeper", weights: set[int], before: "_SavedTensors | None") -> None:
        self._keeper, self._weights = keeper, weights
        self._before = None if before is None else weakref.ref(before)
        self._saved: dict[Any, weakref.ref[_SavedTensor]] = {}
        self._opened = False

    def pack(self, tensor: Tensor) -> "Tensor | _SavedTensor":
        """Return a function that brings a saved tensor back; or the tensor itself, if it stays."""
        held = tensor._local_tensor if is_spread(tensor) else tensor
        if not _moves(held) or held.untyped_storage()._cdata in self._weights:
            return tensor
        # A weak reference to a storage keeps its identity from being given to another.
        key = (
            StorageWeakRef(held.untyped_storage()), held._version, held.storage_offset(),
            held.shape, held.stride(), held.dtype, type(tensor),
        )  # fmt: skip
        known = self._saved.get(key)
        found = None if known is None else known()
        if found is None:
            spec = tensor._spec if is_spread(tensor) else None
            found = _SavedTensor(self._keeper.place.store(held.detach()), spec, self)
            self._saved[key] = weakref.ref(found)
        return found

    def open(self) -> None:
        """Prefetch the tensors of the previous block, since the backward has reached this one."""
        if self._opened:
            return
        self._opened = True
        self._keeper.place.pace()
        before = None if self._before is None else self._before()
        if before is not None:
            before.prefetch()

    def prefetch(self) -> None:
        """Start to bring back all tensors that are still needed."""
        for known in self._saved.values():
            saved = known()
            if saved is not None:
                saved.parcel.prefetch()


class _SavedTensor:
    """A saved tensor, plain or part of a DTensor; it keeps its `_SavedTensors` alive."""

    def __init__(self, parcel: Parcel, spec: Any, shelf: _SavedTensors) -> None:
        self.parcel, self._spec, self._shelf = parcel, spec, shelf

    def open(self) -> Tensor:
        self._shelf.open()
        tensor = self.parcel.open()
        if self._spec is None:
            return tensor
        from torch.distributed.tensor import DTensor

        return DTensor(tensor, self._spec, requires_grad=False)


def _moves(tensor: Tensor) -> bool:
    """Return whether a tensor has separate memory that is worth moving."""
    plain = type(tensor) in (Tensor, nn.Parameter, FakeTensor)
    return plain and LEAST_BYTES <= tensor.nbytes <= tensor.untyped_storage().nbytes()


class Keeper:
    """Storage in `place` for tensors that blocks save."""

    def __init__(self, place: Storage) -> None:
        self.place = place
        self._last: weakref.ref[_SavedTensors] | None = None

    def forward(self, run: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call `run`, the block's forward, with saved tensors stored in the place."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        self.place.pace()
        weights = {_memory(parameter) for parameter in block.parameters()}
        shelf = _SavedTensors(self, weights, None if self._last is None else self._last())
        self._last = weakref.ref(shelf)
        with saved_tensors_hooks(shelf.pack, _open):
            return run(*args, **kwargs)


class KeptForward:
    """A wrapper of a block's forward, `inner`, whose saved tensors a Keeper stores."""

    def __init__(self, keeper: Keeper, inner: Callable[..., Any], block: nn.Module) -> None:
        self.inner, self._keeper, self._block = inner, keeper, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._keeper.forward(self.inner, self._block, *args, **kwargs)


def _open(saved: "Tensor | _SavedTensor") -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.open()


def _memory(parameter: Tensor) -> int:
    held = parameter._local_tensor if is_spread(parameter) else parameter
    storage: int = held.untyped_storage()._cdata
    return storage


def require_place(where: Offload, device: torch.device) -> None:
    """Refuse a place that does not suit activations of a device. Raises BadInputError."""
    if where == "cpu" and device.type != "cuda":
        raise BadInputError(
            f"offload_activations cpu: the activations of a {device.type} device are in host "
            "memory anyway. Use offload_activations disk, or checkpointing full."
        )
    if where == "disk" and device.type != "cpu":
        raise BadInputError(
            f"offload_activations disk is for training on the CPU; the device is {device.type}. "
            "Use offload_activations cpu."
        )


def offload_activations(blocks: Sequence[nn.Module], place: Storage) -> None:
    """Make each block keep its saved tensors in `place`. Exact: the values are copied."""
    keeper = Keeper(place)
    for block in blocks:
        block.forward = KeptForward(keeper, block.forward, block)
