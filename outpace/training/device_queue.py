"""The queue of work of a device: points in it, and figures that are copied from it.

A GPU computes behind the host that gives it work. A host that reads a tensor waits until the device
has done all work up to now; so figures are copied to the host behind the work that makes them, and
read when the copy has arrived.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a queue of work. torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether the device has come to this point."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this point to `end`, to both of which the device has come."""


class DeviceQueue(Protocol):
    """Interface that timers and figures need of a device. `steps_behind`: see `Loop`."""

    steps_behind: int

    def mark(self) -> Mark:
        """The end of all work that has been queued up to now."""

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor; the copy is whole when the device has come to the next mark."""


@dataclass(frozen=True)
class HostMark:
    """A point in the work of a host, which is done as soon as it is queued."""

    time_s: float

    def query(self) -> bool:
        """Return True: the host has come here."""
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def elapsed_time(self, end: "HostMark") -> float:
        """Milliseconds by the host's clock."""
        return (end.time_s - self.time_s) * 1000


class HostQueue:
    """Queue of a CPU, which does what it is given at once."""

    steps_behind = 0

    def mark(self) -> HostMark:
        """Now."""
        return HostMark(time.perf_counter())

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """A copy, since the tensor may change before it is read."""
        return tensor.detach().clone()


class CudaQueue:
    """The current stream of a CUDA device."""

    steps_behind = 2

    def mark(self) -> Mark:
        """An event, recorded in the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Copy into pinned memory, which torch takes for copies that do not wait."""
        tensor = tensor.detach()
        return tensor.clone() if tensor.is_cpu else tensor.to("cpu", non_blocking=True)


def queue_of(device: torch.device) -> DeviceQueue:
    """The queue of a device. Metal's is read as a CPU's is: by waiting."""
    return CudaQueue() if device.type == "cuda" else HostQueue()


class DeviceFigures:
    """Tensors of a few numbers on their way to the host. Mark the queue after this is made."""

    def __init__(self, queue: DeviceQueue, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {name: queue.copy_to_host(tensor) for name, tensor in tensors.items()}

    def read(self, end: Mark) -> dict[str, list[float]]:
        """The numbers of each tensor; `end` is a mark after the copies, and waited for."""
        end.synchronize()
        return {name: copy.reshape(-1).tolist() for name, copy in self._copies.items()}
