"""Running a function on a group of forked processes, with a time limit.

The function may hang or crash: the caller learns how each rank ended, and no process is left
behind.
"""

import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from outpace.launch.forked_ranks import Fork, name_rank
from outpace.launch.network_interfaces import LOOPBACK, use_interface
from outpace.launch.parent_watch import child_environment, end_with_parent
from outpace.records.errors import BadInputError, OutpaceError
from outpace.records.ranks import Ranks

_LOOK_AGAIN_S = 0.01
_GRACE_S = 5.0  # for other ranks to end after one has failed
_UNFINISHED = 3


@dataclass(frozen=True)
class RankEnd:
    """End of a rank: `said` is its error message, `at` the last phase that it reported.

    `refused`: the error was an OutpaceError, whose message is for the user. `exit_code` is negative
    for a signal, and None if the rank exceeded the time limit.
    """

    exit_code: int | None
    said: str | None
    at: str
    refused: bool = False

    @property
    def fine(self) -> bool:
        """Return whether the rank completed."""
        return self.exit_code == 0


class ForkedRank:
    """A forked rank: its position among the ranks, and a way to report its phase."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks = ranks
        self._at = folder / f"rank-{ranks.rank}.at"

    def note_phase(self, what: str) -> None:
        """Report the start of a phase, which the result names if it is the last one."""
        self._at.write_text(what, encoding="utf-8")


def run_forked(
    size: int, action: Callable[[ForkedRank], None], limit_s: float, folder: Path
) -> list[RankEnd]:
    """Run `action` on `size` ranks of this host with a gloo group, and return how each ended.

    The ranks' output goes to `folder`, where it replaces that of an earlier job. The calling
    process must be safe to fork: without a process group, and without use of an accelerator.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in (folder / "store", *folder.glob("rank-*.*")):
        # files of an earlier job, which would be read as this job's
        left.unlink(missing_ok=True)
    until_s, frozen = time.monotonic() + limit_s, gc.get_freeze_count()
    forks = [
        Fork(partial(_run_rank, rank, size, action, limit_s, folder), child_environment())
        for rank in range(size)
    ]
    try:
        failed_s: float | None = None
        while None in (codes := [_poll_rank(fork) for fork in forks]):
            now_s = time.monotonic()
            if failed_s is None and any(codes):
                failed_s = now_s
            if now_s > until_s or (failed_s is not None and now_s > failed_s + _GRACE_S):
                break
            time.sleep(_LOOK_AGAIN_S)
    finally:
        ended = [_poll_rank(fork) for fork in forks]
        for fork in forks:
            _kill_rank(fork)
        if not frozen:
            gc.unfreeze()
    return [_read_rank_end(rank, code, folder) for rank, code in enumerate(ended)]


def _poll_rank(fork: Fork) -> int | None:
    """Return the exit code of a rank, or None while it runs.

    If the rank has ended, all processes that it started are killed. This is done before the rank is
    reaped, because the ID of its process group may be reused afterwards.
    """
    if fork.returncode is None:
        seen = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is not None:
            _kill_group(fork)
    return fork.poll()


def _kill_rank(fork: Fork) -> None:
    if _poll_rank(fork) is None:
        _kill_group(fork)
        with suppress(OSError):
            os.kill(fork.pid, signal.SIGKILL)  # it may not have its own group yet
        fork.wait(10.0)


def _kill_group(fork: Fork) -> None:
    with suppress(OSError):
        os.killpg(fork.pid, signal.SIGKILL)


def _read_rank_end(rank: int, code: int | None, folder: Path) -> RankEnd:
    def read(name: str) -> str:
        path = folder / f"rank-{rank}.{name}"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    refused = read("refused")
    return RankEnd(code, refused or read("error") or None, read("at") or "starting", bool(refused))


def _run_rank(
    rank: int, size: int, action: Callable[[ForkedRank], None], limit_s: float, folder: Path
) -> NoReturn:
    code = _UNFINISHED
    try:
        name_rank(rank)
        _redirect_output(folder / f"rank-{rank}.log")
        end_with_parent(os.environ)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # threads do not survive a fork, and ranks share the cores
        ranks = Ranks(rank=rank, local_rank=rank, world_size=size, local_world_size=size)
        with use_interface(LOOPBACK):
            dist.init_process_group(
                "gloo",
                store=FileStore(str(folder / "store"), size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=limit_s),
            )
            _require_gradients()
            action(ForkedRank(ranks, folder))
            dist.barrier()
        code = 0
    except BaseException as raised:
        error = _find_cause(raised)
        refused = isinstance(error, OutpaceError)
        if not refused:
            traceback.print_exc()
        said = str(error) if refused else _describe_error(error)
        name = f"rank-{rank}.{'refused' if refused else 'error'}"
        (folder / name).write_text(said, encoding="utf-8")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _require_gradients() -> None:
    """Raise BadInputError if torch refuses to compute gradients in this fork.

    It refuses if the parent process has started backward threads for accelerators. A torch that is
    built for accelerators starts them even on a host without one, in the first backward pass after
    a trace, such as the compiler's.
    """
    try:
        torch.zeros((), requires_grad=True).backward()
    except RuntimeError as error:
        if "fork" not in str(error):
            raise
        raise BadInputError(
            "this program has already computed gradients with an accelerator, or with a compiled "
            "model, so torch cannot compute them in processes forked from it. Call outpace.verify "
            "before any backward pass (in a notebook, restart the kernel), or use "
            "`outpace verify --model FILE.py:FUNCTION`."
        ) from None


def _find_cause(error: BaseException) -> BaseException:
    """Return the error's cause if torch's pipeline stage has wrapped it, otherwise the error."""
    wrapped = error.__cause__ if "] failed to run" in str(error) else None
    return wrapped or error


def _describe_error(error: BaseException) -> str:
    """Return an error's type and the first line of its message.

    If that line ends with a colon, the next line follows, and so on.
    """
    said: list[str] = []
    for line in str(error).strip().splitlines():
        said.append(line.strip())
        if not said[-1].endswith(":"):
            break
    return f"{type(error).__name__}: {' '.join(said)}"


def _redirect_output(path: Path) -> None:
    """Redirect this process's output to a file, including output from C."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
