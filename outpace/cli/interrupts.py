"""Ctrl-C in commands that take a while to stop: confirm it immediately, and interrupt only once."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from outpace.launch.local import SAME_SIGNAL_S


class _InterruptHandler:
    """Handler of SIGINT: the first signal calls `notify` and raises KeyboardInterrupt.

    Every later one calls `end`. Signals that follow within a moment are ignored, since one key
    press may send several. `finished` is set when the context of `interrupt_once` has ended: from
    then on, signals go to the `previous` handler.
    """

    def __init__(
        self, notify: Callable[[], None], end: Callable[[], None], previous: Callable[..., object]
    ) -> None:
        self._notify, self._end, self._previous = notify, end, previous
        self._last_s: float | None = None
        self.finished = False

    @property
    def received(self) -> bool:
        return self._last_s is not None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        now_s, last_s = time.monotonic(), self._last_s
        self._last_s = now_s
        if last_s is not None and now_s - last_s < SAME_SIGNAL_S:
            return
        if self.finished:
            signal.signal(signum, self._previous)
            self._previous(signum, frame)
        elif last_s is not None:
            self._end()
        else:
            self._notify()
            raise KeyboardInterrupt


@contextmanager
def interrupt_once(notify: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Handle SIGINT in this context: the first one calls `notify()` and raises KeyboardInterrupt.

    A second SIGINT calls `end()`. Signals are handled as before if this is not the main thread, or
    if SIGINT is ignored.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    handler = _InterruptHandler(notify, end, previous)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        handler.finished = True
        if not handler.received:
            signal.signal(signal.SIGINT, previous)
