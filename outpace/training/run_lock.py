"""Lock on a run's directory, which only one training job may hold at a time."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outpace.records.errors import BadInputError
from outpace.training.run_dir import TOKEN_PREFIX

_LOCK, _LOOK_AGAIN_S = f"{TOKEN_PREFIX}lock", 0.5
_TAKEN = (errno.EAGAIN, errno.EACCES)


@contextmanager
def lock_run(
    folder: Path, patience_s: float, say: Callable[[str], None] = lambda sentence: None
) -> Iterator[None]:
    """Lock `folder` against other training jobs until the context or the process ends.

    If another process holds the lock, report this and wait for up to `patience_s`, because earlier
    ranks of a requeued or restarted job may still be shutting down. Raises BadInputError if the
    lock is held for longer. Does nothing on a file system without locks.
    """
    until_s, said = time.monotonic() + patience_s, False
    while (lock := _try_lock(folder / _LOCK)) is None:
        if time.monotonic() >= until_s:
            raise BadInputError(
                f"another process is training in {folder}{_describe_holder(folder / _LOCK)}, and "
                "both runs would overwrite each other's files. Wait until that process ends, stop "
                "it, or use another --out."
            )
        if not said:
            say(
                f"another process is training in {folder}{_describe_holder(folder / _LOCK)}: "
                f"waiting for up to {patience_s:g} s for it to end"
            )
            said = True
        time.sleep(_LOOK_AGAIN_S)
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / _LOCK).unlink()
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    """Lock a file and return its descriptor; None if another process has the lock."""
    try:
        own = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise BadInputError(
            f"cannot write to {path.parent}: {error.strerror}. Make the folder writable, or use "
            "another --out."
        ) from None
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            return own  # this file system has no locks
        os.close(own)
        return None
    if not _is_same_file(path, own):  # the previous holder removed the file before we locked it
        os.close(own)
        return None
    os.truncate(own, 0)
    os.write(own, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return own


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _describe_holder(path: Path) -> str:
    with suppress(OSError):
        if said := path.read_text(errors="replace")[:200]:
            return f" ({said})"
    return ""
