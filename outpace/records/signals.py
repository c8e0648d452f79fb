"""Signals with which a user, a terminal or a scheduler asks a process to end."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Signals with which schedulers announce the end of a job's time or its preemption: SLURM sends the
# one given with --signal (sbatch(1)), submitit SIGUSR2, Grid Engine any of these (queue_conf(5)).
# A process that does not handle them is killed.
ANNOUNCEMENTS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *ANNOUNCEMENTS)


def may_handle(number: signal.Signals) -> bool:
    """Return whether outpace may handle a signal that asks it to end.

    It may not if the parent ignored the signal (nohup, a background job), or if the user's code
    handles it (submitit's requeue).
    """
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN:
        return False
    if number not in ANNOUNCEMENTS or not callable(handler):
        return True
    return getattr(handler, "__module__", "").startswith("outpace.")


@contextmanager
def defer_signals() -> Iterator[set[int | signal.Signals]]:
    """Block all signals around a fork, and run the handlers of `ENDING` signals only afterwards.

    Yields the previous signal mask, for the child to restore. Without this, Python may run handlers
    within the callbacks that modules register for forks, where an exception is printed and lost.
    Blocking signals alone is not enough, because another thread may receive them.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with _deferred_handlers():
            yield held
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextmanager
def _deferred_handlers() -> Iterator[None]:
    """Defer the handlers of `ENDING` signals, which run in the main thread, until the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    for ending in ENDING:
        handler = signal.getsignal(ending)
        if callable(handler):
            handlers[ending] = handler
            signal.signal(ending, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            handlers[number](number, sys._getframe())
