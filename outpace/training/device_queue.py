"""Work queue of a device, with marks for timing and copies to the host without waiting.

A GPU runs behind the host that queues its work, and reading a tensor makes the host wait for all
queued work. So figures are copied to the host right after the work that computes them, and read
once the copy has arrived.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A position in a device's queue of work, such as a torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the device has reached this point."""

    def synchronize(self) -> None:
        """Wait until the device has reached this point."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this point to `end`; the device must have reached both."""


class DeviceQueue(Protocol):
    """Interface to a device's queue of work.

    `steps_behind` is the number of steps that the host may be ahead of the device.
    """

    steps_behind: int

    def mark(self) -> Mark:
        """Return a mark after all work queued so far."""

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Start copying a tensor; the copy is complete once the device reaches a later mark."""


@dataclass(frozen=True)
class HostMark:
    """A time on the host's clock, in place of a mark in a queue. All work before it is done."""

    time_s: float

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return immediately."""

    def elapsed_time(self, end: "HostMark") -> float:
        """Return the milliseconds from this mark to `end`, by the host's clock."""
        return (end.time_s - self.time_s) * 1000


class HostQueue:
    """Queue of a CPU, which runs work immediately."""

    steps_behind = 0

    def mark(self) -> HostMark:
        """Return a mark at the current time."""
        return HostMark(time.perf_counter())

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy, since the tensor may change before it is read."""
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
        """Start copying a tensor to pinned host memory."""
        tensor = tensor.detach()
        return tensor.clone() if tensor.is_cpu else tensor.to("cpu", non_blocking=True)


def queue_of(device: torch.device) -> DeviceQueue:
    """Return the queue of a device; Metal is treated like a CPU, so reading figures waits."""
    return CudaQueue() if device.type == "cuda" else HostQueue()


class DeviceFigures:
    """Small tensors that are being copied to the host.

    Call the queue's `mark` after the construction, and pass the mark to `read`.
    """

    def __init__(self, queue: DeviceQueue, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {name: queue.copy_to_host(tensor) for name, tensor in tensors.items()}

    def read(self, end: Mark) -> dict[str, list[float]]:
        """Wait for `end`, a mark after the copies, and return the numbers of each tensor."""
        end.synchronize()
        return {name: copy.reshape(-1).tolist() for name, copy in self._copies.items()}
