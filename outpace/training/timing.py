"""Timing of a step's parts, without waiting for the device in between."""

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from outpace.training.device_queue import DeviceQueue, Mark

_SCHEDSTAT = Path("/proc/thread-self/schedstat")

# A mark, with the part of the step that ends there.
Marks = Sequence[tuple[str, Mark]]


class StepTimer:
    """Marks the ends of a step's parts in a device's queue.

    Parts marked several times (forward and backward of each micro-batch) are summed. A step starts
    where the previous one ended, so step times leave no gaps.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._end: Mark | None = None
        self._marks: list[tuple[str, Mark]] = []

    def begin(self) -> None:
        """Start the step; work since the previous one counts as "other"."""
        now = self._queue.mark()
        self._marks = [("", now)] if self._end is None else [("", self._end), ("other", now)]

    def mark(self, part: str) -> None:
        """Attribute the time since the last mark to `part`."""
        self._marks.append((part, self._queue.mark()))

    def pop_marks(self) -> Marks:
        """Return the step's marks; pass them to `durations` once the device is done."""
        self._end = self._marks[-1][1]
        return self._marks

    def pause(self) -> None:
        """Exclude the time until the next `begin` from all steps."""
        self._end = None


def durations(marks: Marks) -> dict[str, float]:
    """Return seconds by part, from marks that the device has reached."""
    seconds: dict[str, float] = {}
    for (_, begin), (part, end) in pairwise(marks):
        seconds[part] = seconds.get(part, 0.0) + begin.elapsed_time(end) / 1000
    return seconds


class BusyTime:
    """Time that this rank spends on a step without waiting for others.

    On a CPU, this is the time in which the rank's thread is busy. On a GPU, it is the time spent
    waiting for data and in forwards, during which replicas do not communicate.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._on_host = queue.steps_behind == 0
        self._busy_s: float | None = None
        self._running: deque[Marks] = deque()
        self._latest_s = -1.0

    def add(self, marks: Marks) -> None:
        """Record that a step has been queued."""
        if not self._on_host:
            self._running.append(marks)

    def pop_seconds(self) -> float:
        """Return the seconds since the last call; on a GPU, the seconds of the latest finished
        step.

        Returns −1 if unknown. Never waits.
        """
        if self._on_host:
            before, self._busy_s = self._busy_s, thread_busy_s()
            return -1.0 if before is None else self._busy_s - before
        while self._running and self._running[0][-1][1].query():
            parts = durations(self._running.popleft())
            self._latest_s = parts["data"] + parts["forward"] if "forward" in parts else -1.0
        return self._latest_s


def thread_busy_s() -> float:
    """Return how long this thread has run, or could have run on a free core.

    Time spent waiting for a core that another process uses counts as busy if the kernel reports it
    (Linux), because it is not spent waiting for other ranks. Threads that share cores are therefore
    busy for longer.
    """
    try:
        ran_ns, waited_ns, _ = _SCHEDSTAT.read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) / 1e9
