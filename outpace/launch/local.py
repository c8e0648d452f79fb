"""Starts one process per rank on this host with torch's elastic launcher, and speaks for them.

A signal to the launcher is passed on to each worker once, and the workers then have all the time
they need to finish the step and save; a second signal kills them at once. (Elastic's own handler
would kill them after a grace period.) Elastic gives every worker a session of its own, so that
Ctrl-C in a terminal reaches the launcher alone: one key press is one signal for every worker.
"""

import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from outpace.records.errors import (
    EXIT_INTERRUPTED,
    BadInputError,
    DivergedError,
    InterruptedRunError,
    OutOfMemoryError,
    OutpaceError,
)
from outpace.records.measurement import Measurement
from outpace.records.settings import TrainSettings

RUN_ID_PREFIX = "outpace-"
# One press of Ctrl-C can arrive twice: from the terminal, and passed on by a parent process.
SAME_SIGNAL_S = 0.5


class WorkerError(OutpaceError):
    """A rank failed. `exit_code` is that rank's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Report:
    """What a rank wrote before it ended: its message for a person and the exit code it meant."""

    rank: int
    message: str
    exit_code: int
    time_s: float


def start(nproc: int, command: list[str], told: Callable[[], None] = lambda: None) -> None:
    """Run `command` once per rank and wait for all of them.

    Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    in its environment. Returns when every rank ended with 0. Raises WorkerError with the message
    and exit code of the rank that failed first. Other children of this process are let be.
    `told` is called at once when the first signal to stop arrives.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What elastic would log, `_conclude` says in a sentence.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="outpace-") as logs, _pass_signals_on(told) as signals:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"{RUN_ID_PREFIX}{uuid.uuid4().hex}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle="SIGQUIT",  # the others are ours
            shutdown_timeout=10,  # for the ranks left when one has failed: nothing to save
        )
        failures: Mapping[int, int] = {}
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        _conclude(failures, _reports(Path(logs)), signals)


def start_settings(
    settings: TrainSettings, origins: Mapping[str, str], nproc: int, progress: bool = True
) -> Measurement:
    """Train on `nproc` processes of this host, from inside any Python program.

    Progress, if wanted, goes to standard error. Raises what training here would raise, WorkerError
    when a rank failed, KeyboardInterrupt after the workers have finished their step and saved.
    """
    with tempfile.TemporaryDirectory(prefix="outpace-") as folder:
        handed_over = Path(folder) / "settings.json"
        values = {
            "settings": settings.model_copy(update={"nproc": nproc}).model_dump(mode="json"),
            "origins": dict(origins),
            "progress": progress,
            "command": sys.argv,
        }
        handed_over.write_text(json.dumps(values), encoding="utf-8")
        command = [sys.executable, "-m", "outpace", "train", "--json"]
        output, code = _run_to_end([*command, "--handed-over", str(handed_over)])
    document = _last_document(output)
    if code != 0:
        message = document.get("error", f"training ended with exit code {code}")
        raise _error_of(str(message), code)
    return Measurement.parse(document, "the workers' result")


def _error_of(message: str, exit_code: int) -> OutpaceError:
    """The error that training in this process would have raised."""
    for kind in (BadInputError, DivergedError, InterruptedRunError, OutOfMemoryError):
        if kind.exit_code == exit_code:
            return kind(message)
    return WorkerError(message, exit_code)


def _run_to_end(command: list[str]) -> tuple[str, int]:
    """Run a command; an interrupt is passed on to it once, and it may take its time."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
        return output, process.returncode


def _last_document(output: str) -> dict[str, Any]:
    with suppress(ValueError):
        document = json.loads(output)
        if isinstance(document, dict):
            return document
    return {}


@contextmanager
def _pass_signals_on(told: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Forward SIGTERM, SIGINT and SIGHUP to the workers; yields the list of those received."""
    received: list[int] = []
    times: list[float] = []
    others = set(psutil.Process().children())

    def forward(signum: int, _frame: object) -> None:
        if times and time.monotonic() - times[-1] < SAME_SIGNAL_S:
            return
        times.append(time.monotonic())
        received.append(signum)
        if len(received) == 1:
            told()
        workers = set(psutil.Process().children()) - others
        if not workers:
            raise WorkerError(f"stopped by {_name(signum)} before training began", 128 + signum)
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(signum if len(received) == 1 else signal.SIGKILL)

    caught = [s for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if not _ignored(s)]
    before = {signum: signal.signal(signum, forward) for signum in caught}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _ignored(signum: int) -> bool:
    """Whether the parent asked for the signal to be ignored (nohup, a background job)."""
    return signal.getsignal(signum) is signal.SIG_IGN


def _reports(logs: Path) -> list[Report]:
    """What the ranks wrote into elastic's error files, the first first."""
    found = []
    for path in logs.glob("**/error.json"):
        with suppress(ValueError, KeyError, TypeError, OSError):
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            extra = message["extraInfo"]
            found.append(
                Report(
                    rank=int(path.parent.name),
                    message=str(message["message"]),
                    exit_code=int(extra["exit_code"]),
                    time_s=float(extra["time"]),
                )
            )
    return sorted(found, key=lambda report: report.time_s)


def _conclude(failures: Mapping[int, int], reports: list[Report], signals: list[int]) -> None:
    """Raise the WorkerError that says why the job ended, if it did not end well.

    `failures` has exit codes by rank, negative for a signal.
    """
    if len(signals) > 1:
        raise WorkerError(f"stopped at once by a second {_name(signals[1])}", 128 + signals[1])
    # A crash makes its neighbours fail too (their connections break), and elastic ends the rest
    # with SIGTERM: a rank that another signal killed comes first, then what was reported.
    killed = {
        rank: -code for rank, code in failures.items() if code < 0 and code != -signal.SIGTERM
    }
    if killed:
        rank, signum = min(killed.items())
        raise WorkerError(_killed_sentence(rank, signum), 128 + signum)
    if reports:
        first = min(reports, key=_blame)
        raise WorkerError(_attributed(first, reports), first.exit_code)
    if not failures:
        return
    if signals:
        raise WorkerError(f"stopped by {_name(signals[0])} before training began", 128 + signals[0])
    rank, code = min(failures.items(), key=lambda item: item[1] < 0)
    code = 128 - code if code < 0 else code
    raise WorkerError(f"rank {rank} ended with exit code {code} and said nothing", code)


def _blame(report: Report) -> tuple[bool, float]:
    """Order of reports: a crash may be the echo of another rank's refusal, never its cause."""
    return report.exit_code in (1, EXIT_INTERRUPTED), report.time_s


def _attributed(first: Report, reports: list[Report]) -> str:
    """The message; with its rank when it is not what all ranks would say."""
    if first.exit_code == 1:
        return f"rank {first.rank} failed:\n{first.message}"
    if first.rank == 0 or any(r.rank == 0 and r.message == first.message for r in reports):
        return first.message
    return f"rank {first.rank}: {first.message}"


def _killed_sentence(rank: int, signum: int) -> str:
    why = " (out of memory?)" if signum == signal.SIGKILL else ""
    return f"rank {rank} was killed by {_name(signum)}{why}; the other ranks were stopped"


def _name(signum: int) -> str:
    with suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"
