"""Exit of a process whose main thread is stuck in a library, waiting for a lost rank.

gloo cannot interrupt a thread that waits in a collective, and a background save waits until the
timeout of its process group.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

End = Callable[[str, int], NoReturn]
Tidy = Callable[[str], None]

_TIDY_S = 10.0  # the disk may be lost together with the rank


def end_process(message: str, exit_code: int) -> NoReturn:
    """Print the reason to standard error and end this process, whatever its threads are doing."""
    with suppress(OSError, ValueError, AttributeError):
        print(f"outpace: {message}", file=sys.stderr, flush=True)
    os._exit(exit_code)


class ExitDeadline:
    """Context that ends the process if it is not left in time after `start`.

    `tidy` is called with the message first, then `end` with the message and the exit code.
    """

    def __init__(self, end: End | None, tidy: Tidy = lambda message: None) -> None:
        self._end = end or end_process
        self.tidy = tidy
        self._left = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> "ExitDeadline":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancel the deadline. Call this if the process continues or exits normally."""
        self._left.set()

    def start(self, message: str, exit_code: int, grace_s: float) -> None:
        """End the process after `grace_s` seconds, unless it has left the context by then."""

        def end_if_late() -> None:
            if not self._left.wait(grace_s):
                self.end_now(message, exit_code)

        threading.Thread(target=end_if_late, name="exit deadline", daemon=True).start()

    def end_now(self, message: str, exit_code: int) -> None:
        """Tidy up and end the process, unless it has left the context."""
        with self._lock:
            if self._left.is_set():
                return

            def tidy() -> None:
                with suppress(Exception):  # must end whatever happens
                    self.tidy(message)

            tidying = threading.Thread(target=tidy, name="tidy", daemon=True)
            tidying.start()
            tidying.join(_TIDY_S)
            self._end(message, exit_code)
