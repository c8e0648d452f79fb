"""Worker processes that load data: how to start them, and how to explain their failures."""

import errno
import gc
import multiprocessing
import multiprocessing.queues
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from outpace.records.errors import BadInputError

Begin = Callable[[int], None]

# Exit codes of workers that cannot send a batch, one for each missing resource.
_NO_SHARED_MEMORY, _NO_FILES, _NOT_SENT, _NO_SOCKET = 101, 102, 103, 104
_EXIT_CODE = re.compile(r"exit code (\d+)")
_SHARED_MEMORY = ("shared memory", "bus error", "no space left on device", "unable to mmap")
_FILES = ("too many open files", "ancdata")


def start_method() -> str | None:
    """Return "fork" on Linux, unless the user chose a start method; None otherwise.

    With fork, a script needs no main guard, and a worker's death is noticed immediately. None
    leaves the choice to Python.
    """
    chosen = cast("str | None", multiprocessing.get_start_method(allow_none=True))
    return "fork" if chosen is None and sys.platform == "linux" else None


def forks_workers() -> bool:
    """Return whether workers are forked, by default (`start_method`) or by the user's choice."""
    return "fork" in (start_method(), multiprocessing.get_start_method(allow_none=True))


@contextmanager
def starting_workers() -> Iterator[Begin]:
    """Yield the `worker_init_fn` for a DataLoader whose workers start in this context.

    Garbage collection is disabled during the context, so that workers never collect garbage of
    their parent: it may refer to threads and memory that do not exist after a fork, and freeing it
    would crash. Without such collections, pages shared with the parent also stay shared.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # The user, or a probe, chooses the number of workers.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            yield partial(_init_worker, collects)
    except OSError as error:
        _terminate_started_workers(error)
        raise
    finally:
        if collects:
            gc.enable()


def _terminate_started_workers(error: OSError) -> None:
    """Terminate the workers of a DataLoader's iterator that could not start all of them.

    Such an iterator cannot terminate them itself. It is found in the frames of the error.
    """
    step = error.__traceback__
    while step is not None:
        found = step.tb_frame.f_locals.get("self")
        if isinstance(found, _MultiProcessingDataLoaderIter) and hasattr(found, "_workers"):
            found._shutdown = True
            for worker in found._workers:
                worker.terminate()
            return
        step = step.tb_next


def _init_worker(collects: bool, worker: int) -> None:
    gc.freeze()
    if collects:
        gc.enable()
    # Otherwise, the thread that sends batches would only print its error, and training would hang.
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(_exit_worker)


def _exit_worker(error: BaseException, _batch: object) -> None:
    """Exit this worker so that its parent notices; its batch is lost."""
    codes = {"memory": _NO_SHARED_MEMORY, "files": _NO_FILES, "socket": _NO_SOCKET}
    code = codes.get(_find_scarce_resource(error) or "", _NOT_SENT)
    if code == _NOT_SENT:
        print(f"a batch cannot be handed over: {type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
    os._exit(code)


def _find_scarce_resource(error: BaseException) -> str | None:
    """Return which resource an error says is missing: "files", "memory", "socket" or "processes".

    Returns None for other errors.
    """
    number = getattr(error, "errno", None)
    said = str(error).lower()
    if number in (errno.EMFILE, errno.ENFILE) or any(one in said for one in _FILES):
        return "files"
    if number == errno.ENOSPC or any(one in said for one in _SHARED_MEMORY):
        return "memory"
    if "af_unix path too long" in said:
        return "socket"
    if number in (errno.ENOMEM, errno.EAGAIN):
        return "processes"
    return None


@contextmanager
def worker_troubles(
    workers: int, exit_codes: Callable[[], Sequence[int | None]] = tuple, elsewhere: bool = False
) -> Iterator[None]:
    """Convert errors that torch raises about `workers` to BadInputError, with advice.

    `exit_codes` returns the workers' exit codes, None for running ones. Set `elsewhere` for code
    that does not wait for batches: of its errors, only those are converted with which torch's
    signal handler reports the death of a worker.
    """
    try:
        yield
    except BadInputError as error:
        if not str(error).startswith("Caught "):
            raise
        # The error is from a worker; torch has put the traceback into the message.
        raise BadInputError(str(error).rpartition("BadInputError: ")[2].strip()) from None
    except (RuntimeError, OSError) as error:
        said = str(error)
        about_them = said.startswith("DataLoader worker") or not elsewhere
        if not workers or not about_them:
            raise
        if said.startswith("Caught "):  # raised by the data set in a worker
            raise
        reason = _explain_failure(error, said, exit_codes)
        if reason is None:
            raise
        raise BadInputError(
            f"--workers {workers}: {reason} Use fewer workers, or --workers 0, which loads data in "
            "the training process."
        ) from None


def _explain_failure(
    error: BaseException, message: str, exit_codes: Callable[[], Sequence[int | None]]
) -> str | None:
    """Explain why workers delivered no batch; return None if the error has another cause."""
    if message.startswith("DataLoader timed out"):
        limit = message.removeprefix("DataLoader timed out after ")
        return (
            f"no batch arrived within the time limit of {limit} (--comm-timeout-s)."
            f"{_suggest_main_guard()}"
        )
    if message.startswith("DataLoader worker"):
        code = _EXIT_CODE.search(message)
        ends = [int(code[1])] if code else [one for one in exit_codes() if one]
        if _NO_FILES in ends:
            return _SENTENCES["files"]
        if _NO_SHARED_MEMORY in ends or "bus error" in message.lower():
            return f"{_SENTENCES['memory']} {_describe_shared_memory()}"
        if _NO_SOCKET in ends:
            return _SENTENCES["socket"]
        if _NOT_SENT in ends:
            return "a batch could not be handed over (see above)."
        if "is killed by signal" in message or -signal.SIGKILL in ends:
            return _SENTENCES["killed"]
        return f"one of them exited unexpectedly.{_suggest_main_guard()}"
    lacking = _find_scarce_resource(error)
    if lacking is None:
        return None
    return _SENTENCES[lacking] + (f" {_describe_shared_memory()}" if lacking == "memory" else "")


def _suggest_main_guard() -> str:
    method = multiprocessing.get_start_method()
    if method == "fork":
        return ""
    return (
        f" Workers are started by {method!r}, which runs a script again: call outpace.train under "
        '`if __name__ == "__main__":`.'
    )


_SENTENCES = {
    "memory": "the shared memory through which they hand over batches is full.",
    "files": "the limit on open files (ulimit -n) is too low: each batch needs several.",
    "socket": "they hand over batches through sockets in the temporary folder, whose name is too "
    "long for that. Set TMPDIR=/tmp, or another short one.",
    "processes": "no more processes can be started, or there is too little memory for them.",
    "killed": "one of them was killed, as happens when memory runs out.",
}


def _describe_shared_memory() -> str:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return "A smaller --micro-batch needs less."
    free, size = (n * found.f_frsize / 2**20 for n in (found.f_bavail, found.f_blocks))
    return (
        f"/dev/shm has {size:,.1f} MiB, of which {free:,.1f} are free; a container can be given "
        "more (docker run --shm-size), and a smaller --micro-batch needs less."
    )
