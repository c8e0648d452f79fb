"""Isolation of untrusted work in a forked process with limits on memory and CPU time.

A chat template is a program, and the normalizers and patterns of a tokenizer can behave like one:
they may loop forever, allocate unlimited memory, or abort the process. Nothing in the same process
can prevent that.
"""

import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

import psutil

from outpace.records.errors import BadInputError
from outpace.records.signals import ENDING, defer_signals
from outpace.records.units import show_bytes

Result = TypeVar("Result")

_WAIT_S = 0.5
_ITEM, _ERROR, _END = "item", "error", "end"


class IsolatedError(BadInputError):
    """Raised if the work exceeds a limit or its process dies; the message says which."""


def call_isolated(
    work: Callable[[], Result], cpu_limit_s: float, memory_limit_bytes: int
) -> Result:
    """Call `work` in a forked process and return its result, like `iterate_isolated`."""
    (result,) = iterate_isolated(lambda: iter([work()]), cpu_limit_s, memory_limit_bytes)
    return result


def iterate_isolated(
    work: Callable[[], Iterator[Result]], cpu_limit_s: float, memory_limit_bytes: int
) -> Iterator[Result]:
    """Run `work` in a forked process and yield its items, which must be picklable.

    Each item may take `cpu_limit_s` seconds of CPU time, and the process may use
    `memory_limit_bytes` more memory than this one. Raises the errors of `work`, and IsolatedError.
    On systems other than Linux, `work` runs in this process, without limits.
    """
    if sys.platform != "linux":  # on other systems, forking with threads is not safe
        yield from work()
        return
    here, there = multiprocessing.Pipe(duplex=False)
    child = _fork(work, here, there, memory_limit_bytes)
    there.close()
    try:
        while True:
            kind, value = _receive(here, child, cpu_limit_s, memory_limit_bytes)
            if kind == _END:
                return
            if kind == _ERROR:
                raise value  # type: ignore[misc]  # it is an exception then
            yield value  # type: ignore[misc]
    finally:
        here.close()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _receive(
    here: Connection, child: int, cpu_limit_s: float, memory_limit_bytes: int
) -> tuple[str, object]:
    before_s = _cpu_time_s(child)
    while not here.poll(_WAIT_S):
        if _cpu_time_s(child) - before_s > cpu_limit_s:
            raise IsolatedError(f"it had not finished after {cpu_limit_s:.0f} s of CPU time")
    try:
        kind, value = here.recv()
    except EOFError:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        why = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise IsolatedError(
            f"its process ended with {why}, perhaps because it needs more than the "
            f"{show_bytes(memory_limit_bytes)} it is allowed"
        ) from None
    if isinstance(value, MemoryError):
        raise IsolatedError(f"it needs more than {show_bytes(memory_limit_bytes)} of memory")
    return kind, value


def _cpu_time_s(child: int) -> float:
    try:
        times = psutil.Process(child).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _fork(
    work: Callable[[], Iterator[object]],
    here: Connection,
    there: Connection,
    memory_limit_bytes: int,
) -> int:
    with defer_signals() as held:
        with warnings.catch_warnings():  # warnings about threads of libraries, which are idle
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _run_child(work, here, there, memory_limit_bytes, os.getppid(), held)
    return child


def _run_child(
    work: Callable[[], Iterator[object]],
    here: Connection,
    there: Connection,
    memory_limit_bytes: int,
    parent: int,
    held: set[int | signal.Signals],
) -> NoReturn:
    """Run `work` in the forked process, send each item to the parent, and exit."""
    try:
        here.close()
        faulthandler.disable()
        gc.disable()  # collecting the parent's garbage may use threads that do not exist here
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the parent's threads do not exist here
        for signum in ENDING:
            signal.signal(signum, signal.SIG_IGN)  # the parent handles it
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        # Discard what a library prints before it aborts.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _limit_memory(memory_limit_bytes)
        for item in work():
            if os.getppid() != parent:
                os._exit(1)
            there.send((_ITEM, item))
        there.send((_END, None))
    except BaseException as error:
        _send_error(there, error)
    finally:
        os._exit(0)


def _send_error(there: Connection, error: BaseException) -> None:
    try:
        there.send((_ERROR, error))
    except Exception:  # cannot be pickled
        with suppress(Exception):
            words = f"{type(error).__name__}: {error}"
            there.send((_ERROR, IsolatedError(words)))


def _limit_memory(more_bytes: int) -> None:
    with suppress(OSError, ValueError):
        limit = psutil.Process().memory_info().vms + more_bytes
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
