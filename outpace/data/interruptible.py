"""Long calls into native libraries that signals can interrupt."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_interruptibly(work: Callable[[], Result]) -> Result:
    """Call `work` in a thread, so that this thread can handle signals in the meantime.

    Python handles signals only between its own instructions, and a call into a native library may
    take minutes. An exception from a signal handler is raised here; the thread then runs on in the
    background until `work` returns or the process exits.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # Rust panics are not Exceptions
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    ended.wait()
    if errors:
        raise errors[0]
    return results[0]
