"""Guards of a run: signal handling, stateless random numbers, deterministic kernels."""

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

# The kernel, a terminal and a launcher may each deliver a signal for a single key press.
_SAME_SIGNAL_S = 0.5
COLLECT_EVERY = 20  # steps
# Seconds after which a user who asked to end is told what the run is waiting for.
_SAID_AFTER_S = 1.0
NOTHING_TRAINED = "interrupted before the first step was done; nothing was trained"
_COMPLETE = "interrupted after the result was written; the run is complete"

Result = TypeVar("Result")


class _EndSignal(BaseException):
    """Interruption by a signal; a BaseException, so compilers do not mistake it for a failure."""


_WAITED_FOR = (
    "ending on request: finishing the current step, then saving a checkpoint. Another signal, or "
    "Ctrl-C pressed again, ends the run at once without saving"
)


class _Arrivals:
    """Signals that have reached the process, even those that Python has not handled yet.

    The kernel's handler writes their numbers to a pipe. Nothing is recorded outside the main
    thread, or if the program already uses such a pipe (as asyncio does).
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "_Arrivals":
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
        """Return whether a signal to end has arrived since the last call."""
        with self._lock, suppress(BlockingIOError):
            return self._pipe is not None and bool({*os.read(self._pipe[0], 4096)} & {*ENDING})
        return False


class StopSignal:
    """Handler of signals that ask a run to end (`ENDING`); the second one ends it immediately.

    Before the first step is done, there is nothing to save, so a signal raises InterruptedRunError.
    Later, `say` reports what the run is waiting for, if that takes a while. Use this as a context
    manager in the main thread; in other threads, signals are not handled.
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
        self._arrivals = _Arrivals()
        self._ended = False
        self._disarmed = False
        self._peer_ended = False
        self.message = NOTHING_TRAINED  # for an immediate interruption

    def __enter__(self) -> "StopSignal":
        self._thread = threading.get_ident()
        try:
            for number in ENDING:
                # A background job of a shell ignores SIGINT, but still handles other signals.
                if number in (signal.SIGTERM, signal.SIGINT) or may_handle(number):
                    self._previous[number] = signal.signal(number, self._receive)
        except ValueError:
            pass  # the owner of the main thread handles signals
        return self

    def __exit__(self, *_: object) -> None:
        self._say.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def unless_ended(self, work: Callable[[], Result]) -> Result:
        """Run code that a signal may end at any point. Raises InterruptedRunError with `message`.

        Use this for the first step and for everything after the last. An error after the signal
        counts as an interruption too, because other ranks leave. If a signal has ended another
        rank, this raises immediately.
        """
        try:
            with self._arrivals:
                self._raising = True
                if self.requested or self._peer_ended:  # while `work` ran
                    self._end(_EndSignal())
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
        """Ignore the first signal from now on: the remaining work takes only a moment.

        A second signal still ends the process.
        """
        self._raising, self._disarmed, self.message = False, True, _COMPLETE

    def ends_at_once(self) -> bool:
        """Return whether a signal ends this process immediately: before step 1 ends, or at the end.

        Any thread may call this, even while the main thread waits in a library and handles no
        signals.
        """
        return self._ended or (self._raising and self._arrivals.pop())

    def interrupt(self) -> bool:
        """End the main thread as a signal would, before its first step is done or after its last.

        This is for a thread that learns that a signal has ended another rank. During steps,
        `unless_ended` raises later. Returns False if signals are not handled here, or would end
        nothing.
        """
        if not self._previous or self._disarmed:
            return False
        self._peer_ended = True
        if not self.requested and not self._ended and (self._raising or not self.stepping):
            signal.pthread_kill(self._thread, signal.SIGTERM)
        return True

    def _end(self, error: BaseException) -> NoReturn:
        self._ended = True
        raise error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()  # another signal may arrive during this call, but not below
        if self.requested:
            if now_s - self._first_s > _SAME_SIGNAL_S:
                os._exit(128 + number)
            return
        self.requested, self._first_s = True, now_s
        if self._raising:
            self._end(_EndSignal())
        if self._ended or self._disarmed:
            return  # the process is about to end anyway
        if not self.stepping:
            self._end(InterruptedRunError(NOTHING_TRAINED))
        self._say.start()


@contextmanager
def collect_garbage_every(steps: int | None) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step, which collects garbage every `steps` steps.

    By default, Python would search all long-lived objects in the middle of a step, which takes a
    second with torch while the device waits, and ranks would do so one after another. Objects that
    already exist are excluded from collection. None leaves collection to Python.
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
    """Make all random numbers of a step a function of (seed, step, rank).

    Dropout then needs no saved generator state: a resumed run draws the same numbers.
    """
    seed_all_generators(device, seed, step, rank)


@contextmanager
def deterministic_kernels(
    wanted: bool, device: torch.device, environ: MutableMapping[str, str]
) -> Iterator[None]:
    """Restrict a GPU to deterministic kernels if `wanted`.

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
    # Uninitialised memory need not be filled, because nothing is read before it is written.
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
