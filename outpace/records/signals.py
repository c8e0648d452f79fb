"""Signals by which a user, a terminal or a scheduler asks a process to end."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# How schedulers announce that a job's time is nearly up or that it is preempted: SLURM by the
# signal that --signal names (sbatch(1)), submitit by SIGUSR2, Grid Engine by any of these
# (queue_conf(5)). Each of them kills a process that does not handle it.
ANNOUNCEMENTS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *ANNOUNCEMENTS)


def may_handle(number: signal.Signals) -> bool:
    """Return whether outpace may handle a signal that asks it to end. It may not if the parent
    ignores the signal (nohup, a background job), or if the user's code handles it (submitit's
    requeue).
    """
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN:
        return False
    if number not in ANNOUNCEMENTS or not callable(handler):
        return True
    return getattr(handler, "__module__", "").startswith("outpace.")


@contextmanager
def defer_signals() -> Iterator[set[int | signal.Signals]]:
    """Block all signals around a fork, and run handlers of those in `ENDING` only afterwards.

    Yields the signals that were blocked before, which a fork restores. Python runs handlers between
    any two instructions of the main thread, including callbacks that modules register for forks,
    where an exception from a handler is printed and lost. Blocking signals is not enough, since
    another thread then receives them.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with _deferred_handlers():
            yield held
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextmanager
def _deferred_handlers() -> Iterator[None]:
    """Run handlers only after the block. Only the main thread runs handlers at all."""
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
