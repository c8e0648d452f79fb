"""Offloading of the tensors that blocks save for the backward, to host memory or disk.

Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, §5.1.1, offload checkpoints. Here everything
that autograd saves inside a block is offloaded; with full checkpointing, only the block's input. A
block's tensors are copied out while later blocks compute. In the backward, they are prefetched
while the block after it computes.
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

from outpace.nn.dtensor import is_spread
from outpace.nn.scratch_files import Scratch
from outpace.records.errors import BadInputError
from outpace.records.plan import Offload

LEAST_BYTES = 4096  # one page: offloading smaller tensors saves nothing
# Number of blocks by which the device may lag behind the host. More would only accumulate copies.
_AHEAD = 2


class Parcel(Protocol):
    """An offloaded tensor, stored as long as this object lives."""

    def prefetch(self) -> None:
        """Start to copy the tensor back."""

    def open(self) -> Tensor:
        """Return the tensor, ready for use. May be called repeatedly."""


class Storage(Protocol):
    """Storage for offloaded tensors."""

    def store(self, tensor: Tensor) -> Parcel:
        """Start to copy a tensor out."""

    def pace(self) -> None:
        """Wait while too many copies are pending. Blocks call this once in forward and backward."""


class _MappedTensor:
    def __init__(self, tensor: Tensor, scratch: Scratch) -> None:
        self._tensor, self._region = scratch.copy_temporarily(tensor)
        self._region.release()

    def prefetch(self) -> None:
        self._region.prefetch()

    def open(self) -> Tensor:
        return self._tensor


class DiskStore:
    """Storage in memory-mapped files; the kernel reads ahead and writes back."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def store(self, tensor: Tensor) -> Parcel:
        """Copy a tensor into a file."""
        return _MappedTensor(tensor, self._scratch)

    def pace(self) -> None:
        """Do nothing: the kernel slows down writers that outpace the disk."""


class _PinnedTensor:
    def __init__(self, tensor: Tensor, place: "HostStore") -> None:
        place.down.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(place.down):
            memory = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host = memory.copy_(tensor, non_blocking=True)
        tensor.record_stream(place.down)  # keeps its memory until the copy is done
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
        self.prefetch()  # and keep the copy, since other operators may have saved the same tensor
        assert self._back is not None
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self._arrived)
        self._back.record_stream(computing)
        return self._back


class HostStore:
    """Storage in pinned host memory, with a stream per direction beside the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._device = device
        self._marks: deque[Sequence[torch.cuda.Event]] = deque()

    def store(self, tensor: Tensor) -> Parcel:
        """Start to copy a tensor to the host."""
        return _PinnedTensor(tensor, self)

    def pace(self) -> None:
        """Limit the device memory of tensors that wait to be copied out or are prefetched."""
        computing = torch.cuda.current_stream(self._device)
        self._marks.append([stream.record_event() for stream in (computing, self.down)])
        if len(self._marks) > _AHEAD:
            for event in self._marks.popleft():
                event.synchronize()


class _SavedTensors:
    """Handles of the tensors that one forward of a block saves for its backward.

    A tensor that several operators save is stored once. Blocks do not share stored tensors: a
    pipeline receives each micro-batch into the same memory, and this does not change the version
    counter by which a changed tensor is recognised.
    """

    def __init__(
        self, keeper: "Keeper", weights: set[int], previous: "_SavedTensors | None"
    ) -> None:
        self._keeper, self._weights = keeper, weights
        self._previous = None if previous is None else weakref.ref(previous)
        self._saved: dict[Any, weakref.ref[_SavedTensor]] = {}
        self._opened = False

    def pack(self, tensor: Tensor) -> "Tensor | _SavedTensor":
        """Store a tensor and return its handle; return weights and small tensors unchanged."""
        held = tensor._local_tensor if is_spread(tensor) else tensor
        if not _is_worth_offloading(held) or held.untyped_storage()._cdata in self._weights:
            return tensor
        # The identity of a storage is not reused while a weak reference to it exists.
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
        """Prefetch the previous block's tensors, once the backward has reached this block."""
        if self._opened:
            return
        self._opened = True
        self._keeper.place.pace()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.prefetch()

    def prefetch(self) -> None:
        for known in self._saved.values():
            saved = known()
            if saved is not None:
                saved.parcel.prefetch()


class _SavedTensor:
    """A saved tensor, plain or the shard of a DTensor; it keeps its `_SavedTensors` alive."""

    def __init__(self, parcel: Parcel, spec: Any, block_tensors: _SavedTensors) -> None:
        self.parcel, self._spec, self._block_tensors = parcel, spec, block_tensors

    def open(self) -> Tensor:
        self._block_tensors.open()
        tensor = self.parcel.open()
        if self._spec is None:
            return tensor
        from torch.distributed.tensor import DTensor

        return DTensor(tensor, self._spec, requires_grad=False)


def _is_worth_offloading(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter, FakeTensor)
    return plain and LEAST_BYTES <= tensor.nbytes <= tensor.untyped_storage().nbytes()


class Keeper:
    """Offloads the tensors that blocks save to `place`."""

    def __init__(self, place: Storage) -> None:
        self.place = place
        self._last: weakref.ref[_SavedTensors] | None = None

    def forward(self, run: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call `run`, the block's forward, and store the tensors that it saves."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        self.place.pace()
        weights = {_storage_id(parameter) for parameter in block.parameters()}
        block_tensors = _SavedTensors(self, weights, None if self._last is None else self._last())
        self._last = weakref.ref(block_tensors)
        with saved_tensors_hooks(block_tensors.pack, _open_saved_tensor):
            return run(*args, **kwargs)


class KeptForward:
    """Wrapper of a block's forward, `inner`, that stores saved tensors with a Keeper."""

    def __init__(self, keeper: Keeper, inner: Callable[..., Any], block: nn.Module) -> None:
        self.inner, self._keeper, self._block = inner, keeper, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._keeper.forward(self.inner, self._block, *args, **kwargs)


def _open_saved_tensor(saved: "Tensor | _SavedTensor") -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.open()


def _storage_id(parameter: Tensor) -> int:
    held = parameter._local_tensor if is_spread(parameter) else parameter
    storage: int = held.untyped_storage()._cdata
    return storage


def require_place(where: Offload, device: torch.device) -> None:
    """Raise BadInputError if a device's activations cannot be offloaded to this place."""
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
    """Make each block store the tensors that it saves in `place`. Results do not change."""
    keeper = Keeper(place)
    for block in blocks:
        block.forward = KeptForward(keeper, block.forward, block)
