"""Exit of a process when its parent process ends, for any reason.

After `kill -9` of a launcher, its ranks get no notice. The kernel could signal them
(PR_SET_PDEATHSIG), but only on Linux, and also if only the thread that started them ends. A change
of the parent's process ID is visible on every system.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

# Variable with the process ID of outpace, set for commands that it starts.
PARENT = "OUTPACE_PARENT_PID"

_LOOK_S = 0.5
# Time for ranks to finish the step and save, although the launcher's store is gone.
_SAVE_S = 60.0


def child_environment() -> dict[str, str]:
    """Return environment variables for an outpace command that should end with this process."""
    return {**os.environ, PARENT: str(os.getpid())}


def end_with_parent(environ: Mapping[str, str]) -> None:
    """End this process when its parent ends, if the parent is outpace or torch's launcher.

    The process gets SIGTERM, so that it saves the run, and SIGKILL if that takes too long.
    """
    parent = os.getppid()
    of_launcher = "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ
    if of_launcher or environ.get(PARENT) == str(parent):
        threading.Thread(
            target=_end_when_parent_ends, args=(parent,), name="parent", daemon=True
        ).start()


def _end_when_parent_ends(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    with suppress(OSError, ValueError, AttributeError):
        print(
            f"outpace: process {parent}, which started this one, has ended, so this one ends "
            "too, as on SIGTERM",
            file=sys.stderr,
            flush=True,
        )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_S)
    os.kill(os.getpid(), signal.SIGKILL)
