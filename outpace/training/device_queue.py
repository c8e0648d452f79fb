"""A device's work queue: marks in it, and figures copied from the device without waiting.

A GPU lags behind the host that queues its work. Reading a tensor makes the host wait for all work
queued so far. Therefore, figures are copied to the host right after the work that computes them,
and read once the copy has arrived.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a work queue, such as a torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the device has reached this point."""

    def synchronize(self) -> None:
        """Wait until the device has reached this point."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this point to `end`; the device must have reached both."""


class DeviceQueue(Protocol):
    """Interface of a device for timers and figures. `steps_behind`: see `Loop`."""

    steps_behind: int

    def mark(self) -> Mark:
        """Return a mark at the end of all work queued so far."""

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Start copying a tensor; the copy is complete once the device reaches the next mark."""


@dataclass(frozen=True)
class HostMark:
    """A point in a host's work, which is reached as soon as it is marked."""

    time_s: float

    def query(self) -> bool:
        """Return True: the host has already reached this point."""
        return True

    def synchronize(self) -> None:
        """Return immediately."""

    def elapsed_time(self, end: "HostMark") -> float:
        """Return the milliseconds between two marks by the host's clock."""
        return (end.time_s - self.time_s) * 1000


class HostQueue:
    """Queue of a CPU, which runs its work immediately."""

    steps_behind = 0

    def mark(self) -> HostMark:
        """Return a mark at the current time."""
        return HostMark(time.perf_counter())

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor, since it may change before it is read."""
        return tensor.detach().clone()


class CudaQueue:
    """The current stream of a CUDA device."""

    steps_behind = 2

    def mark(self) -> Mark:
        """Record an event in the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into pinned memory, without waiting."""
        tensor = tensor.detach()
        return tensor.clone() if tensor.is_cpu else tensor.to("cpu", non_blocking=True)


def queue_of(device: torch.device) -> DeviceQueue:
    """Return the queue of a device. On Metal, as on a CPU, reading waits."""
    return CudaQueue() if device.type == "cuda" else HostQueue()


class DeviceFigures:
    """Small tensors on their way to the host. Mark the queue after constructing it."""

    def __init__(self, queue: DeviceQueue, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {name: queue.copy_to_host(tensor) for name, tensor in tensors.items()}

    def read(self, end: Mark) -> dict[str, list[float]]:
        """Return the numbers of each tensor, after waiting for `end`, a mark after the copies."""
        end.synchronize()
        return {name: copy.reshape(-1).tolist() for name, copy in self._copies.items()}
