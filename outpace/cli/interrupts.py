"""Ctrl-C in commands that take a while to stop: confirm it immediately, and interrupt only once."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from outpace.launch.local import SAME_SIGNAL_S


class _InterruptHandler:
    """Signal handler: the first signal interrupts, and a later one calls `end`.

    Repeated signals of the same key press are ignored. If a signal ended the block, the handler
    stays installed while the process ends; otherwise, the previous handler is restored.
    """

    def __init__(
        self, told: Callable[[], None], end: Callable[[], None], before: Callable[..., object]
    ) -> None:
        self._told, self._end, self._before = told, end, before
        self._last_s: float | None = None
        self.left = False

    @property
    def received(self) -> bool:
        """Return whether a signal was received."""
        return self._last_s is not None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        now_s, last_s = time.monotonic(), self._last_s
        self._last_s = now_s
        if last_s is not None and now_s - last_s < SAME_SIGNAL_S:
            return
        if self.left:
            signal.signal(signum, self._before)
            self._before(signum, frame)
        elif last_s is not None:
            self._end()
        else:
            self._told()
            raise KeyboardInterrupt


@contextmanager
def interrupt_once(told: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT, after calling `told`; a second one calls `end`.

    Does nothing outside of the main thread, or if SIGINT is ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    once = _InterruptHandler(told, end, before)
    signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        once.left = True
        if not once.received:
            signal.signal(signal.SIGINT, before)
