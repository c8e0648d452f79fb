"""Locks on cache entries, so that one process creates an entry while others wait."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from outpace.records.errors import BadInputError

_LOOK_S = 1.0
_STOPPED_S = 60.0


@contextmanager
def entry_lock(path: Path, stopped_limit_s: float = _STOPPED_S) -> Iterator[None]:
    """Hold the lock file `path`, waiting while another process holds it.

    Raises BadInputError if the holder is a process on this host that has been stopped (by SIGSTOP
    or a debugger) for `stopped_limit_s`, because it will not finish. A killed process releases its
    lock.
    """
    lock, holder = FileLock(path), path.with_suffix(".holder")
    stopped_s = 0.0
    while True:
        try:
            lock.acquire(timeout=_LOOK_S)
            break
        except Timeout:
            stopped = _find_stopped_holder(holder)
            stopped_s = 0.0 if stopped is None else stopped_s + _LOOK_S
            if stopped is not None and stopped_s >= stopped_limit_s:
                pid, name = stopped
                raise BadInputError(
                    f"process {pid} ({name}), which makes {path.stem} in the cache {path.parent}, "
                    f"has been stopped for {stopped_limit_s:.0f} s. Continue it "
                    f"(kill -CONT {pid}), or end it (kill -KILL {pid}) and start again."
                ) from None
    try:
        with suppress(OSError):
            holder.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def _find_stopped_holder(holder: Path) -> tuple[int, str] | None:
    """Return the PID and name of the lock's holder if it is a stopped process on this host."""
    with suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
        told = json.loads(holder.read_text())
        if told["host"] == socket.gethostname():
            process = psutil.Process(int(told["pid"]))
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return process.pid, process.name()
    return None
