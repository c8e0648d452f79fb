"""Ranks forked from the launcher, which has already imported what they need.

A rank that is started as a command imports torch, which takes about a second of processor time.
Forked ranks start with torch loaded and share its memory. This works only on Linux and without
accelerators, whose libraries do not survive a fork.
"""

import atexit
import ctypes
import gc
import os
import signal
import stat
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from outpace.records.ranks import RANK_NAME
from outpace.records.signals import defer_signals

_NAP_S = 0.02
_SET_NAME = 15  # prctl's PR_SET_NAME

Begin = Callable[[], NoReturn]


def can_fork(device: str) -> bool:
    """Return whether ranks that compute on `device` ("cpu", "auto", …) may be forked."""
    import torch

    built_for = torch.accelerator.current_accelerator()  # does not query the driver
    return sys.platform == "linux" and (device == "cpu" or built_for is None)


def name_rank(rank: int) -> None:
    """Set this process's name to that of its rank, which `top` and `outpace watch` show."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NAME, f"{RANK_NAME}{rank}".encode(), 0, 0, 0)


@contextmanager
def fork_ranks(begin: Begin) -> Iterator[None]:
    """Make torch's launcher fork each rank to run `begin`, instead of starting a command.

    This also applies to restarted ranks. torch has no public API for it.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    api: Any = import_module("torch.distributed.elastic.multiprocessing.api")

    class ForkingHandler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            return Fork(begin, env)

    before, frozen = api.get_subprocess_handler, gc.get_freeze_count()
    api.get_subprocess_handler = ForkingHandler
    try:
        yield
    finally:
        api.get_subprocess_handler = before
        if not frozen:
            gc.unfreeze()


class Fork:
    """Forked process with those methods of subprocess.Popen that torch's launcher uses."""

    def __init__(self, begin: Begin, environ: Mapping[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # a collection in the fork would write to pages, which copies them
        self.returncode: int | None = None
        # Until the fork has reset them, a signal would run the launcher's handlers in it.
        with defer_signals() as held:
            # Python warns about forking while the thread of torch's store runs.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if self.pid == 0:
                _run_fork(begin, environ, held)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the process and return its exit code. Raises TimeoutExpired if too late."""
        end_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(_NAP_S)
        return code


def _run_fork(
    begin: Begin, environ: Mapping[str, str], held: set[int | signal.Signals]
) -> NoReturn:
    """Run `begin` in the fork, and end the process.

    The fork first leaves the launcher's session, and drops its signal handlers, sockets and exit
    functions. `held`: the signals that were blocked before the fork, and are again.
    """
    try:
        os.setsid()
        _restore_default_handlers()
        _close_sockets()
        atexit._clear()
        os.environ.clear()
        os.environ.update(environ)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        begin()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _restore_default_handlers() -> None:
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, default)


def _close_sockets() -> None:
    """Close the launcher's sockets, which would stay open for their peers until the fork ends."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(path.stat().st_mode) and int(path.name) > sys.stderr.fileno():
                os.close(int(path.name))
