"""Signal handling, garbage collection, random numbers and deterministic kernels of a run."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch

from outpace.data.seeding import seed_all_generators
from outpace.records.errors import BadInputError, InterruptedRunError
from outpace.records.signals import ENDING, may_handle

# A single key press may deliver a signal several times, through the terminal and a launcher.
_SAME_SIGNAL_S = 0.5
COLLECT_EVERY = 20  # steps
# Seconds after a signal until the user is told what the run is waiting for.
_SAID_AFTER_S = 1.0
NOTHING_TRAINED = "interrupted before the first step was done; nothing was trained"
_COMPLETE = "interrupted after the result was written; the run is complete"

Result = TypeVar("Result")


class _EndSignal(BaseException):
    """Interruption by a signal. A BaseException, so that compilers do not catch it as a failure."""


_WAITED_FOR = (
    "ending on request: finishing the current step, then saving a checkpoint. Another signal, or "
    "Ctrl-C pressed again, ends the run at once without saving"
)


class _PendingSignals:
    """Record of signals that have reached the process, even if Python has not handled them yet.

    Python's C handler writes their numbers to a pipe. Nothing is recorded outside of the main
    thread, or if the program already uses such a pipe, as asyncio does.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "_PendingSignals":
        with suppress(ValueError):
            before = signal.set_wakeup_fd(-1)
            if before != -1:
                signal.set_wakeup_fd(before)
                return self
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._pipe is not None:
                signal.set_wakeup_fd(-1)
                for end in self._pipe:
                    os.close(end)
                self._pipe = None

    def pop(self) -> bool:
        """Return whether a signal that ends a run has arrived since this was last called."""
        with self._lock, suppress(BlockingIOError):
            return self._pipe is not None and bool({*os.read(self._pipe[0], 4096)} & {*ENDING})
        return False


class StopSignal:
    """Handler of signals that ask a run to end (`ENDING`); a second signal ends it immediately.

    Before the first step has ended, there is nothing to save, so a signal raises
    InterruptedRunError. Later, it sets `requested`, and `say` reports what the run is waiting for
    if that takes a while. Use this as a context manager in the main thread; in other threads,
    signals are not handled.
    """

    def __init__(self, say: Callable[[str], None] = lambda sentence: None) -> None:
        self.requested = False
        self.stepping = False
        self._raising = False
        self._say = threading.Timer(_SAID_AFTER_S, say, (_WAITED_FOR,))
        self._say.daemon = True
        self._first_s = 0.0
        self._previous: dict[int, Any] = {}
        self._thread = threading.get_ident()
        self._pending = _PendingSignals()
        self._ended = False
        self._disarmed = False
        self._peer_ended = False
        self.message = NOTHING_TRAINED  # for an immediate interruption

    def __enter__(self) -> "StopSignal":
        self._thread = threading.get_ident()
        try:
            for number in ENDING:
                # SIGINT is handled even if it is ignored, as in background jobs of a shell.
                if number in (signal.SIGTERM, signal.SIGINT) or may_handle(number):
                    self._previous[number] = signal.signal(number, self._handle_signal)
        except ValueError:
            pass  # not the main thread, which handles signals
        return self

    def __exit__(self, *_: object) -> None:
        self._say.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def unless_ended(self, work: Callable[[], Result]) -> Result:
        """Call `work` so that a signal can interrupt it at any point, and return its result.

        Raises InterruptedRunError when a signal interrupts it, or at once if a signal has already
        ended this or another rank. After a signal, any error of `work` counts as an interruption,
        since it may only mean that other ranks have left. Use this for the first step, and for
        everything after the last.
        """
        try:
            with self._pending:
                self._raising = True
                if self.requested or self._peer_ended:  # while `work` ran
                    self._raise_end(_EndSignal())
                found = work()
                self._raising = False
        except _EndSignal:
            raise InterruptedRunError(self.message) from None
        except Exception:
            if self._ended:
                raise InterruptedRunError(self.message) from None
            raise
        finally:
            self._raising = False
        return found

    def disarm(self) -> None:
        """Ignore the first signal from now on, because the remaining work takes only a moment.

        A second signal still ends the process.
        """
        self._raising, self._disarmed, self.message = False, True, _COMPLETE

    def ends_at_once(self) -> bool:
        """Return whether a signal has ended this process, or will once Python can handle it.

        Any thread may call this, even while the main thread waits in a library and handles no
        signals.
        """
        return self._ended or (self._raising and self._pending.pop())

    def interrupt(self) -> bool:
        """Interrupt the main thread because a signal has ended another rank.

        Any thread may call this. Before the first step has ended and after the last one, it acts
        like a signal; during steps, the next `unless_ended` raises. Returns False if signals are
        not handled here, or are ignored.
        """
        if not self._previous or self._disarmed:
            return False
        self._peer_ended = True
        if not self.requested and not self._ended and (self._raising or not self.stepping):
            signal.pthread_kill(self._thread, signal.SIGTERM)
        return True

    def _raise_end(self, error: BaseException) -> NoReturn:
        self._ended = True
        raise error

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()  # another signal may arrive during this call, but not below
        if self.requested:
            if now_s - self._first_s > _SAME_SIGNAL_S:
                os._exit(128 + number)
            return
        self.requested, self._first_s = True, now_s
        if self._raising:
            self._raise_end(_EndSignal())
        if self._ended or self._disarmed:
            return  # the process is about to end anyway
        if not self.stepping:
            self._raise_end(InterruptedRunError(NOTHING_TRAINED))
        self._say.start()


@contextmanager
def collect_garbage_every(steps: int | None) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step, which collects garbage every `steps` steps.

    Python's own collections occur in the middle of a step. With torch loaded, a full one takes a
    second, during which the device waits, and it occurs on each rank at another time. Objects that
    exist already are excluded from collection. None leaves collection to Python.
    """
    if steps is None or not gc.isenabled():
        yield lambda: None
        return
    done = count(1)

    def after_step() -> None:
        if next(done) % steps == 0:
            gc.collect(1)

    frozen = gc.get_freeze_count()
    gc.freeze()
    gc.disable()
    try:
        yield after_step
    finally:
        gc.enable()
        if not frozen:
            gc.unfreeze()


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed all generators from (seed, step, rank).

    A resumed run then draws the same numbers without saved generator states.
    """
    seed_all_generators(device, seed, step, rank)


@contextmanager
def deterministic_kernels(
    wanted: bool, device: torch.device, environ: MutableMapping[str, str]
) -> Iterator[None]:
    """Use only deterministic kernels on a GPU in the context, if `wanted`.

    This sets CUBLAS_WORKSPACE_CONFIG in `environ`, because cuBLAS is deterministic only with a
    workspace of fixed size (NVIDIA, cuBLAS, "Results Reproducibility"). Raises BadInputError if an
    operator has no deterministic kernel.
    """
    if not wanted or device.type != "cuda":
        yield
        return
    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    memory = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # torch would fill uninitialised memory, which nothing reads here.
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        what = str(error).partition(". ")[0]
        raise BadInputError(
            f"--deterministic: {what}. Leave out --deterministic for this model."
        ) from None
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
