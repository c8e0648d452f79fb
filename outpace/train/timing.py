"""Where the time of a step goes, without waiting for the device in between."""

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass
class StepTimer:
    """Marks the ends of a step's parts: by the clock on a CPU, by events on a GPU.

    A part that is marked several times (forward, backward of each micro-batch) is added up.
    """

    device: torch.device
    _marks: list[tuple[str, Any]] = field(default_factory=list)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Start the step."""
        self._marks = [("", self._now())]

    def mark(self, part: str) -> None:
        """What was done since the last mark was `part`."""
        self._marks.append((part, self._now()))

    def take(self) -> list[tuple[str, Any]]:
        """Hand over the marks of the step; `durations` reads them when the device is done."""
        return self._marks


def durations(marks: list[tuple[str, Any]]) -> dict[str, float]:
    """Seconds by part. Waits for the last event on a GPU."""
    seconds: dict[str, float] = {}
    for (_, begin), (part, end) in pairwise(marks):
        if isinstance(begin, float):
            took = end - begin
        else:
            end.synchronize()
            took = begin.elapsed_time(end) / 1000
        seconds[part] = seconds.get(part, 0.0) + took
    return seconds


@dataclass
class OwnTime:
    """What this rank spends on a step by itself, not waiting for others.

    On a CPU all that its thread is busy with; on a GPU waiting for data and forwards, in which
    replicas exchange nothing.
    """

    device: torch.device
    _busy_s: float | None = None

    def take(self, marks_before: list[tuple[str, Any]]) -> float:
        """Seconds since it was taken last, on a GPU of the step before; -1 where not known."""
        if self.device.type == "cuda":
            parts = durations(marks_before)
            return parts["data"] + parts["forward"] if "forward" in parts else -1.0
        before, self._busy_s = self._busy_s, thread_busy_s()
        return -1.0 if before is None else self._busy_s - before


def thread_busy_s() -> float:
    """For how long this thread has run, or could have run if a core had been free.

    To wait for a core that another process has is no waiting for other ranks: it counts as busy,
    where the kernel tells (Linux). So threads that share cores are busy for longer.
    """
    try:
        ran_ns, waited_ns, _ = _SCHEDSTAT.read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) / 1e9
