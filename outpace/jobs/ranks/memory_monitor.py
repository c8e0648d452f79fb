"""A monitor of a process's memory during training, to end runs before the kernel kills them."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.probing.hardware.process_memory import give_back_free

# At 3 GB/s, a training step allocates about 60 MB between two checks.
POLL_S = 0.02
_JOIN_S = 5.0


@dataclass(frozen=True)
class Reading:
    """A monitored memory limit: above `soft_bytes` the run must end, above `hard_bytes` at once.

    `limit`: the limit's name for the user. `limit_bytes`: its size. `ranks`: number of ranks that
    share it. `now`: a function that returns the bytes in use.
    """

    limit: str
    limit_bytes: int
    ranks: int
    now: Callable[[], int]
    soft_bytes: int
    hard_bytes: int

    def too_high(self) -> bool:
        """Return whether use is too high even after the C library has released cached memory."""
        if self.now() <= self.soft_bytes:
            return False
        give_back_free()
        return self.now() > self.soft_bytes


class Interruption(BaseException):
    """Exception that `interrupt` raises in another thread.

    It is a BaseException, so no `except Exception` catches it.
    """


def interrupt(thread: int) -> None:
    """Raise Interruption in a thread as soon as it returns to Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(Interruption)
    )


def call_off(thread: int) -> None:
    """Withdraw an Interruption that has not been raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


class Watch:
    """A thread that calls `look` at intervals, until it returns True or the watch is closed."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            if self._look():
                return

    def close(self) -> None:
        """End the thread, unless it is waiting for an unreachable host."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)


def first_too_high(readings: Sequence[Reading]) -> Reading | None:
    """Return the first reading above its limit."""
    return next((reading for reading in readings if reading.too_high()), None)
