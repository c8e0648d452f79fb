"""Wait at exit until gloo's threads have released the tensors that they sent."""

import atexit
import time
from pathlib import Path

_THREAD = "pt_gloo_runloop"
_LOOKS, _PAUSE_S, _LIMIT_S = 3, 1e-3, 2.0


def register_gloo_shutdown() -> None:
    """Make this process wait at exit until gloo's threads are idle.

    A gloo thread that releases a tensor while the interpreter shuts down aborts the process,
    although all work is done ("terminate called without an active exception", torch 2.13). Busy
    cores delay these threads: of 200 runs of examples/parallel.py, four at a time on two cores, 8
    aborted.
    """
    atexit.unregister(_wait_for_gloo_threads)
    atexit.register(_wait_for_gloo_threads)


def _wait_for_gloo_threads() -> None:
    """Sleep until several consecutive checks find gloo's threads idle, for at most `_LIMIT_S`."""
    quiet, until = 0, time.monotonic() + _LIMIT_S
    while quiet < _LOOKS and time.monotonic() < until:
        time.sleep(_PAUSE_S)  # releases the GIL to a thread that waits for it
        quiet = 0 if _is_gloo_thread_running() else quiet + 1


def _is_gloo_thread_running() -> bool:
    """Return whether a gloo thread is running or ready to run; always False except on Linux."""
    for status in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = status.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # the thread has ended
        if name == _THREAD and rest.split()[0] == "R":
            return True
    return False
