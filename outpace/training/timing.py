"""Timing of the parts of a step without waiting for the device."""

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from outpace.training.device_queue import DeviceQueue, Mark

_SCHEDSTAT = Path("/proc/thread-self/schedstat")

# Parts of a step, each with the mark at its end.
Marks = Sequence[tuple[str, Mark]]


class StepTimer:
    """Timer that marks the ends of a step's parts in a device's queue.

    Parts that occur several times (forward and backward of each micro-batch) add up. A step starts
    where the previous one ended, so no time is lost between steps.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._end: Mark | None = None
        self._marks: list[tuple[str, Mark]] = []

    def begin(self) -> None:
        """Start a step. Work since the end of the previous one counts as "other"."""
        now = self._queue.mark()
        self._marks = [("", now)] if self._end is None else [("", self._end), ("other", now)]

    def mark(self, part: str) -> None:
        """Attribute the time since the last mark to `part`."""
        self._marks.append((part, self._queue.mark()))

    def pop_marks(self) -> Marks:
        """End the step and return its marks, for `durations` once the device has reached them."""
        self._end = self._marks[-1][1]
        return self._marks

    def pause(self) -> None:
        """Exclude the time until the next `begin` from all steps."""
        self._end = None


def durations(marks: Marks) -> dict[str, float]:
    """Return the seconds of each part from marks that the device has reached."""
    seconds: dict[str, float] = {}
    for (_, begin), (part, end) in pairwise(marks):
        seconds[part] = seconds.get(part, 0.0) + begin.elapsed_time(end) / 1000
    return seconds


class BusyTime:
    """Counter of the time of a step in which this rank works instead of waiting for others.

    On a CPU, it is the time in which the rank's main thread is busy. On a GPU, it is the time that
    the rank waits for data and runs forwards, because replicas do not communicate then.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._on_host = queue.steps_behind == 0
        self._busy_s: float | None = None
        self._running: deque[Marks] = deque()
        self._latest_s = -1.0

    def add(self, marks: Marks) -> None:
        """Add the marks of a step, which the device may not have finished."""
        if not self._on_host:
            self._running.append(marks)

    def pop_seconds(self) -> float:
        """Return the busy seconds since the last call; on a GPU, those of the latest finished step.

        Return −1 if the time is unknown. This never waits for the device.
        """
        if self._on_host:
            before, self._busy_s = self._busy_s, thread_busy_s()
            return -1.0 if before is None else self._busy_s - before
        while self._running and self._running[0][-1][1].query():
            parts = durations(self._running.popleft())
            self._latest_s = parts["data"] + parts["forward"] if "forward" in parts else -1.0
        return self._latest_s


def thread_busy_s() -> float:
    """Return the seconds for which this thread has run or waited for a core.

    Waiting for a core is not waiting for other ranks, so it counts as busy if the kernel reports it
    (Linux).
    """
    try:
        ran_ns, waited_ns, _ = _SCHEDSTAT.read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) / 1e9
