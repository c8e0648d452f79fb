"""Launch of one process per rank on this host, with torch's elastic launcher.

The launcher passes a first signal on to each worker, which may take as long as it needs to finish
the step and save. A second signal kills the workers immediately. (Elastic's own handler would kill
them after a grace period.) Elastic starts every worker in its own session, so Ctrl-C in a terminal
reaches only the launcher, and each worker gets one signal per key press.
"""

import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from outpace.launch.forked_ranks import Begin, fork_ranks
from outpace.launch.network_interfaces import LOOPBACK, require_address
from outpace.launch.parent_watch import child_environment
from outpace.records.errors import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_OUT_OF_MEMORY,
    BadInputError,
    DivergedError,
    InterruptedRunError,
    OutOfMemoryError,
    OutpaceError,
)
from outpace.records.interpreter import PYTHON
from outpace.records.measurement import Measurement
from outpace.records.settings import TrainSettings
from outpace.records.signals import ENDING, may_handle

if TYPE_CHECKING:  # imports torch
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Grace period for the remaining ranks after one has failed. They cannot save any more.
_SHUTDOWN_S = 10
RUN_ID_PREFIX = "outpace-"
# With several hosts, lines of a rank's output begin with this and the rank, as in "[rank 3] ".
RANK_PREFIX = "[rank "
# A single Ctrl-C can arrive twice: from the terminal, and from a parent process that passes it on.
SAME_SIGNAL_S = 0.5


class WorkerError(OutpaceError):
    """Failure of a rank that exited with `exit_code`.

    `lost`: neither a request nor a setting caused the failure, so a restart may succeed.
    `answered`: the rank has already printed the command's answer.
    """

    def __init__(
        self, message: str, exit_code: int, lost: bool = False, answered: bool = False
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.lost, self.answered = lost, answered


@dataclass(frozen=True)
class RankReport:
    """A rank's last report: its message for the user and its intended exit code.

    `answered`: the rank has already printed the command's answer.
    """

    rank: int
    message: str
    exit_code: int
    time_s: float
    answered: bool = False


@dataclass(frozen=True)
class RanksEnd:
    """End of all ranks: exit codes and reports of failed ones, and the signals received.

    `hosts`: host by rank, if there are several hosts; otherwise empty.
    """

    failures: Mapping[int, int]
    reports: Sequence[RankReport]
    signals: Sequence[int]
    hosts: Mapping[int, str] = field(default_factory=dict)

    def format_rank(self, rank: int) -> str:
        """Return a rank's name for messages, such as "rank 3 on node-a"."""
        return f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}"


@dataclass(frozen=True)
class HostRendezvous:
    """Rendezvous of several hosts, and this host's position and address."""

    nodes: int
    place: int
    endpoint: str
    run_id: str
    local_addr: str


_ALONE = HostRendezvous(1, 0, f"{LOOPBACK}:0", "", LOOPBACK)


def start(
    nproc: int,
    command: list[str],
    on_first_signal: Callable[[], None] = lambda: None,
    begin: Begin | None = None,
) -> None:
    """Run `command` once per rank, or `begin` in forks of this process, and wait for all ranks.

    Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in
    its environment. Returns when every rank has exited with 0. Raises WorkerError with the message
    and exit code of the rank that failed first. `on_first_signal` is called when a first signal
    arrives. Other children of this process are not affected.
    """
    with nullcontext() if begin is None else fork_ranks(begin):
        ended = run_ranks(nproc, command, on_first_signal)
    conclude(ended)


def run_ranks(
    nproc: int,
    command: list[str],
    on_first_signal: Callable[[], None] = lambda: None,
    host_rendezvous: HostRendezvous = _ALONE,
) -> RanksEnd:
    """Run this host's ranks as `start` does, and return how they ended."""
    if host_rendezvous is _ALONE:
        require_address(LOOPBACK)  # without it, torch's store would retry for a minute
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from outpace.launch import rendezvous as rendezvous
    from outpace.nn.torch_versions import launch_config

    # `conclude` reports in one sentence what elastic logs at length.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous.register()
    several = host_rendezvous is not _ALONE
    folder = tempfile.TemporaryDirectory(prefix="outpace-")
    with folder as logs, signals_to(_make_signal_forwarder(on_first_signal)) as signals:
        kept = Std.ALL if several else Std.NONE  # written to files, and shown line by line
        config = launch_config(
            _SHUTDOWN_S,
            min_nodes=host_rendezvous.nodes,
            max_nodes=host_rendezvous.nodes,
            nproc_per_node=nproc,
            run_id=f"{RUN_ID_PREFIX}{host_rendezvous.run_id or uuid.uuid4().hex}",
            rdzv_backend=rendezvous.NAME,
            rdzv_endpoint=host_rendezvous.endpoint,
            rdzv_configs={"place": host_rendezvous.place},
            local_addr=host_rendezvous.local_addr,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=kept, tee=kept),
            log_line_prefix_template=f"{RANK_PREFIX}${{rank}}] " if several else None,
            signals_to_handle="SIGQUIT",  # outpace handles the other signals
        )
        failures: Mapping[int, int] = {}
        try:
            with _limit_shutdown_time():
                elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            failures = _failed_exit_codes(error.failures)
        return RanksEnd(failures, _read_reports(Path(logs)), signals)


@contextmanager
def _limit_shutdown_time() -> Iterator[None]:
    """Limit the time for which torch's launcher waits for other ranks after one has failed.

    The limit is `_SHUTDOWN_S` seconds; torch 2.13 waits 30 s by default.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    whole = PContext.close

    def close(
        self: PContext, death_sig: signal.Signals | None = None, timeout: int = _SHUTDOWN_S
    ) -> None:
        whole(self, death_sig, timeout)

    PContext.close = close  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.close = whole  # type: ignore[method-assign]


def _failed_exit_codes(failures: "Mapping[int, ProcessFailure]") -> dict[int, int]:
    """Return the exit codes of ranks that failed by themselves.

    After a failure, elastic sends SIGTERM to the other ranks, and SIGKILL after `_SHUTDOWN_S`;
    these killed ranks are left out.
    """
    late_s = min(failure.timestamp for failure in failures.values()) + _SHUTDOWN_S
    return {
        rank: failure.exitcode
        for rank, failure in failures.items()
        if failure.exitcode != -signal.SIGKILL or failure.timestamp < late_s
    }


def start_settings(
    settings: TrainSettings, origins: Mapping[str, str], nproc: int, progress: bool = True
) -> Measurement:
    """Train on `nproc` new processes of this host from any Python program; return the result.

    With `progress`, rank 0 reports to standard error. Raises the errors that training in this
    process raises, WorkerError if a rank failed, and KeyboardInterrupt once interrupted workers
    have finished their step and saved.
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
        command = [*PYTHON, "-m", "outpace", "train", "--json"]
        output, code = _run_command([*command, "--handed-over", str(handed_over)])
    document = _parse_document(output)
    if code != 0:
        message = document.get("error", f"training ended with exit code {code}")
        raise _error_for_exit_code(str(message), code)
    return Measurement.parse(document, "the workers' result")


def _error_for_exit_code(message: str, exit_code: int) -> OutpaceError:
    for kind in (BadInputError, DivergedError, InterruptedRunError, OutOfMemoryError):
        if kind.exit_code == exit_code:
            return kind(message)
    return WorkerError(message, exit_code)


def _run_command(command: list[str]) -> tuple[str, int]:
    """Run a command and return its output and exit code.

    Pass an interrupt on to it, wait for it as long as it takes, and raise KeyboardInterrupt.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=child_environment()
    ) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
        return output, process.returncode


def _parse_document(output: str) -> dict[str, Any]:
    with suppress(ValueError):
        document = json.loads(output)
        if isinstance(document, dict):
            return document
    return {}


@contextmanager
def signals_to(pass_on: Callable[[int, list[int]], None]) -> Iterator[list[int]]:
    """Call `pass_on` with each signal that ends a run, and with all that were received so far.

    Yields the list of received signals. A signal that follows the last one within SAME_SIGNAL_S
    seconds is ignored. At the end, the previous signal handlers are restored.
    """
    received: list[int] = []
    times: list[float] = []

    def forward(signum: int, _frame: object) -> None:
        if times and time.monotonic() - times[-1] < SAME_SIGNAL_S:
            return
        times.append(time.monotonic())
        received.append(signum)
        pass_on(signum, received)

    caught = [one for one in ENDING if may_handle(one)]
    before = {signum: signal.signal(signum, forward) for signum in caught}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _make_signal_forwarder(on_first_signal: Callable[[], None]) -> Callable[[int, list[int]], None]:
    """Return a handler that passes signals on to child processes started from now on."""
    others = set(psutil.Process().children())

    def pass_on(signum: int, received: list[int]) -> None:
        if len(received) == 1:
            on_first_signal()
        workers = set(psutil.Process().children()) - others
        if not workers:
            raise WorkerError(
                f"stopped by {_signal_name(signum)} before training started", 128 + signum
            )
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(signum if len(received) == 1 else signal.SIGKILL)

    return pass_on


def _read_reports(logs: Path) -> list[RankReport]:
    found = []
    for path in logs.glob("**/error.json"):
        with suppress(ValueError, KeyError, TypeError, OSError):
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            extra = message["extraInfo"]
            found.append(
                RankReport(
                    rank=int(extra["rank"]),
                    message=str(message["message"]),
                    exit_code=int(extra["exit_code"]),
                    time_s=float(extra["time"]),
                    answered=bool(extra.get("answered")),
                )
            )
    return sorted(found, key=lambda report: report.time_s)


def conclude(ended: RanksEnd) -> None:
    """Raise a WorkerError with the cause if ranks failed or were stopped; else return."""
    failures, reports, signals = ended.failures, ended.reports, ended.signals
    if len(signals) > 1:
        raise WorkerError(
            f"stopped at once by a second {_signal_name(signals[1])}", 128 + signals[1]
        )
    # If a rank crashes, the ranks that communicate with it fail because their connections break,
    # and elastic ends the rest with SIGTERM. So ranks killed by other signals (exit codes are then
    # negative) are the likeliest cause, then those with reports.
    killed = {
        rank: -code for rank, code in failures.items() if code < 0 and code != -signal.SIGTERM
    }
    if killed:
        rank, signum = min(killed.items())
        sentence = _format_killed(ended.format_rank(rank), signum)
        raise WorkerError(sentence, 128 + signum, lost=not signals)
    if reports:
        first = min(reports, key=_cause_sort_key)
        lost = first.exit_code in (1, EXIT_HANG) and not signals
        raise WorkerError(_format_report(first, ended), first.exit_code, lost, first.answered)
    if not failures:
        return
    if signals:
        raise WorkerError(
            f"stopped by {_signal_name(signals[0])} before training started", 128 + signals[0]
        )
    rank, code = min(failures.items(), key=lambda item: item[1] < 0)
    code = 128 - code if code < 0 else code
    sentence = f"{ended.format_rank(rank)} ended with exit code {code} without a message"
    raise WorkerError(sentence, code, lost=True)


def _cause_sort_key(report: RankReport) -> tuple[bool, float]:
    """Return a sort key that puts causes first: a refusal may cause crashes, but not vice versa."""
    return report.exit_code in (1, EXIT_INTERRUPTED), report.time_s


def _format_report(first: RankReport, ended: RanksEnd) -> str:
    """Return a report's message, with the rank's name unless rank 0 reports the same."""
    who = ended.format_rank(first.rank)
    if first.exit_code == 1:
        return f"{who} failed:\n{first.message}"
    if first.exit_code in (EXIT_OUT_OF_MEMORY, EXIT_HANG):
        return first.message  # the message already names the rank at fault
    if first.rank == 0 or any(r.rank == 0 and r.message == first.message for r in ended.reports):
        return first.message
    return f"{who}: {first.message}"


def _format_killed(who: str, signum: int) -> str:
    why = " (out of memory?)" if signum == signal.SIGKILL else ""
    return f"{who} was killed by {_signal_name(signum)}{why}; the other ranks were stopped"


def _signal_name(signum: int) -> str:
    with suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"
