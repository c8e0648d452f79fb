"""Clocks for calls that several ranks make together; all ranks get the same time."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from outpace.probing.timing.measure import Clock, clock_of

_POLL_S = 5e-5
# Fraction of the groups' time limit, at which NCCL's watchdog would kill the process without a
# message.
_PATIENCE = 0.8


class Event(Protocol):
    """Interface of an event on a device, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""


@dataclass(frozen=True)
class PreparedCall:
    """A function to time, and a `prepare(count)` that runs before `count` calls, untimed."""

    call: Callable[[], Any]
    prepare: Callable[[int], None]

    def __call__(self) -> Any:
        return self.call()


def await_event(event: Event, limit_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Wait for an event by polling, because waits in the driver have no time limit.

    After `limit_s`, abort `group`, whose collective the event waits for, and raise
    DistBackendError.
    """
    end_s = time.monotonic() + limit_s
    while not event.query():
        if time.monotonic() > end_s:
            if group is not None:
                with suppress(RuntimeError):  # some backends do not support it
                    group.abort()
            raise dist.DistBackendError(f"the device did not finish within {limit_s:.3g} s")
        time.sleep(_POLL_S)


def time_limit_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return how long a process group waits for its ranks, s."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit.total_seconds()


def await_device(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait until a device has finished its queued work, for at most the group's time limit.

    Raises DistBackendError when the limit is exceeded. The NCCL path has never run, since no
    machine with two GPUs was available.
    """
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        await_event(event, _PATIENCE * time_limit_s(group, device), group)


class PatientCudaClock:
    """CudaClock with a time limit, for collectives that a rank never joins.

    The polling interval does not affect the measured time, which is between two events on the
    device. Beyond the limit, the group is aborted and DistBackendError raised. The NCCL path has
    never run, since no machine with two GPUs was available; `await_event` was tested with fake
    events.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, limit_s: float) -> None:
        self._device, self._group, self._limit_s = device, group, limit_s

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Return the total time of `count` calls, between two events on the device, s."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        for _ in range(count):
            call()
        end.record(stream)
        await_event(end, self._limit_s, self._group)
        return float(begin.elapsed_time(end)) / 1e3

    def now_s(self) -> float:
        """Return seconds by the host's clock."""
        return time.perf_counter()


def patient_clock(device: torch.device, group: dist.ProcessGroup) -> Clock:
    """Return a clock for a group's collectives on a device, with the group's time limit."""
    if device.type == "cuda":
        return PatientCudaClock(device, group, _PATIENCE * time_limit_s(group, device))
    return clock_of(device)


class RanksClock:
    """Clock that returns the time of the slowest rank.

    All ranks start together. Waiting for each other and preparing a `PreparedCall` are not timed.
    `by_rank` holds every rank's seconds for the last calls, which differ if a rank is slow.
    `control` is a process group on the host, in which ranks wait for each other and send their
    times. All ranks must make the same calls in the same order.
    """

    def __init__(self, inner: Clock, control: dist.ProcessGroup) -> None:
        self._inner = inner
        self._control = control
        self.by_rank: tuple[float, ...] = ()

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Return the slowest rank's time for `count` calls."""
        if isinstance(call, PreparedCall):
            call.prepare(1 + count)
        dist.barrier(self._control)
        call()  # wakes the group's threads before the timed calls
        own_s = self._inner.seconds(call, count)
        found = [torch.empty(1, dtype=torch.float64) for _ in range(self._control.size())]
        dist.all_gather(found, torch.tensor([own_s], dtype=torch.float64), group=self._control)
        self.by_rank = tuple(one.item() for one in found)
        return max(self.by_rank)

    def now_s(self) -> float:
        """Return the time of rank 0's clock, on all ranks."""
        now = torch.tensor([self._inner.now_s()], dtype=torch.float64)
        dist.broadcast(now, 0, group=self._control)
        return now.item()
