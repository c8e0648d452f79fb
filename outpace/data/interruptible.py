"""Long library calls that signals can interrupt."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_interruptibly(work: Callable[[], Result]) -> Result:
    """Call `work` in a thread, and wait for it while this thread can handle signals.

    Python handles a signal only between its own instructions, and a native library may run for
    minutes within one. Exceptions of a handler are raised here; the thread continues, and ends with
    the process.
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
