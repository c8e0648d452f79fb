"""Training on several hosts, started from one of them over ssh, with torch's elastic agent on each.

A run consists of rounds. Each round starts on the hosts that are ready, and resumes from the last
checkpoint. It ends when a rank or host is lost, or when a host comes back.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from outpace.launch import preflight
from outpace.launch.local import (
    RANK_PREFIX,
    RUN_ID_PREFIX,
    SAME_SIGNAL_S,
    RankReport,
    RanksEnd,
    WorkerError,
    conclude,
    signals_to,
)
from outpace.launch.preflight import HostCheck
from outpace.launch.restarts import Restarts
from outpace.launch.ssh_agent import MARK, SILENCE_S
from outpace.probing.hardware.versions import variables
from outpace.records.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, BadInputError
from outpace.records.hosts import Elastic, Host, HostCommand, HostFacts, HostQuery
from outpace.records.run import resume_command

_OWN = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "LD_PRELOAD",
        "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # fmt: skip
# Seconds for the other hosts to notice that one has failed.
_LEFT_S = 30.0
_LOOK_OUT_S = 30.0  # time between checks of unreachable hosts
_ASK_AGAIN_S, _PATIENCE_S = 10.0, 600.0  # between checks, and in total, if too few hosts are left


@dataclass(frozen=True)
class Training:
    """A training run to start on several hosts.

    `command` starts a rank, and `again` a rank that resumes. `paths` must exist on all hosts, which
    share the run's folder `out`. `rounds`: IDs of the rounds so far, including the current one.
    Each round starts on the hosts that are ready, and resumes the run.
    """

    command: list[str]
    again: list[str]
    paths: Sequence[str]
    out: Path
    elastic: Elastic
    folder: Path = field(default_factory=Path.cwd)
    rounds: tuple[str, ...] = ()

    def check(
        self, hosts: Sequence[Host], like: HostCheck | None = None, during: bool = False
    ) -> list[HostCheck]:
        """Check the hosts; with `during`, ranks of the current round may be running on them."""
        rounds = self.rounds[:-1] if during else self.rounds
        question = HostQuery(
            folder=str(self.folder),
            seen=tuple(self.paths),
            earlier=tuple(f"{RUN_ID_PREFIX}{name}" for name in rounds),
        )
        return preflight.check_hosts(hosts, question, self.out, like)


def start(hosts: Sequence[Host], training: Training) -> None:
    """Train on the hosts until the run ends.

    Raises BadInputError if training cannot start, and WorkerError with the message of the rank that
    failed first.
    """
    elastic = training.elastic
    answers = training.check(hosts)
    _require_ready_hosts(answers, elastic)
    kept = Path("runs") / f"output-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    _create_output_folder(kept)
    restarts, most = Restarts(elastic.max_restarts, training.out, _print_status), len(hosts)
    while True:
        training = replace(training, rounds=(*training.rounds, uuid.uuid4().hex))
        using = [one for one in answers if one.ready][: min(most, elastic.max_nodes)]
        away = [one.host for one in answers if not one.ready]
        _print_status(f"{_format_hosts(using, hosts)}; each rank's output is in {kept}")
        try:
            back = _run_round(using, away, training, kept)
        except WorkerError as error:
            unfit = len(training.rounds) > 1 and error.exit_code == EXIT_BAD_INPUT
            if unfit and elastic.min_nodes < len(using) < len(hosts):
                most = len(using) - 1
                _print_status(f"{error} Trying again with {most} of the hosts")
            else:
                restarts.count(error)
        else:
            if back is None:
                return
            most = len(hosts)
            _print_status(f"{back} is back and rejoins")
        answers = _wait_for_hosts(hosts, training, using[0])


def _create_output_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise BadInputError(
            f"cannot create {folder}, the folder for the ranks' output, in {Path.cwd()}: "
            f"{error.strerror}. Start from a writable folder"
        ) from None


def _print_status(sentence: str) -> None:
    print(f"outpace: {sentence}", file=sys.stderr, flush=True)


def _format_hosts(using: Sequence[HostCheck], hosts: Sequence[Host]) -> str:
    names = ", ".join(one.host.name for one in using)
    return (
        f"{len(using)} hosts answer"
        if len(using) == len(hosts)
        else f"on {names} of {len(hosts)} hosts"
    )


def _require_ready_hosts(answers: Sequence[HostCheck], elastic: Elastic) -> None:
    problems = [one for answer in answers for one in answer.problems]
    wrong = any(answer.obstacles for answer in answers)
    ready = sum(answer.ready for answer in answers)
    if problems and (wrong or ready < elastic.min_nodes):
        raise BadInputError(
            "the hosts are not ready, so nothing was started:\n  " + "\n  ".join(problems)
        )
    for problem in problems:
        _print_status(f"{problem}. Starting without it")


def _wait_for_hosts(hosts: Sequence[Host], training: Training, like: HostCheck) -> list[HostCheck]:
    until_s, waited = time.monotonic() + _PATIENCE_S, False
    while True:
        try:
            answers = training.check(hosts, like)
            problems = "\n  ".join(one for answer in answers for one in answer.problems)
        except BadInputError as error:  # the disk may have been on the lost host
            answers, problems = [], str(error)
        ready = sum(one.ready for one in answers)
        if ready >= training.elastic.min_nodes:
            return answers
        few = f"{ready} of {len(hosts)} hosts are ready, and --min-nodes is "
        few += f"{training.elastic.min_nodes}:\n  {problems}"
        if time.monotonic() > until_s:
            raise WorkerError(f"{few}\nResume with: {resume_command(training.out)}", 1)
        if not waited:
            _print_status(f"waiting for hosts: {few}")
        waited = True
        time.sleep(_ASK_AGAIN_S)


def _run_round(
    using: Sequence[HostCheck], away: Sequence[Host], training: Training, kept: Path
) -> str | None:
    """Run one round on these hosts, and return None if the run is finished.

    Return the name of a host in `away` that came back, if the round ended because of that. Raises
    WorkerError if it failed.
    """
    agents = _start_agents(using, training, kept)
    end_request = _EndRequest(agents)

    def pass_on(signum: int, received: list[int]) -> None:
        end_request.end(signal.Signals(signum), again=len(received) > 1)

    wanted = away if len(using) < training.elastic.max_nodes else ()
    with (
        signals_to(pass_on) as signals,
        _watch_for_return(wanted, training, using[0], end_request) as back,
    ):
        _wait_for_agents(agents)
    try:
        _raise_failure(agents, signals)
    except WorkerError as error:
        # Ranks that were still starting had nothing to save.
        ended = error.lost or error.exit_code in (EXIT_INTERRUPTED, 128 + signal.SIGTERM)
        if back and not signals and ended:
            return back[0]
        raise
    return None


@dataclass
class _EndRequest:
    """Request to the ranks on all hosts to end; repeating it ends them immediately."""

    agents: "Sequence[_HostAgent]"
    over: threading.Event = field(default_factory=threading.Event)

    def end(self, signum: signal.Signals, again: bool = False) -> bool:
        """Ask the ranks on all hosts to end. Only the first call has an effect, unless `again`.

        Returns whether the ranks were asked now.
        """
        if self.over.is_set() and not again:
            return False
        self.over.set()
        for agent in self.agents:
            agent.send_line(signum.name)
        return True


def _start_agents(using: Sequence[HostCheck], training: Training, kept: Path) -> "list[_HostAgent]":
    facts: list[HostFacts] = [one.facts for one in using if one.facts is not None]
    at = preflight.addresses(facts)
    first = f"[{at[0]}]" if ":" in at[0] else at[0]
    endpoint = f"{first}:{facts[0].port}"
    command = training.command if len(training.rounds) == 1 else training.again
    return [
        _HostAgent(one.host, HostCommand(
            folder=str(training.folder), command=tuple(command), slots=one.host.slots,
            nodes=len(using), node=place, endpoint=endpoint, run_id=training.rounds[-1],
            address=at[place], environment=_passed_variables(),
        ), kept)
        for place, one in enumerate(using)
    ]  # fmt: skip


@contextmanager
def _watch_for_return(
    away: Sequence[Host], training: Training, like: HostCheck, end_request: _EndRequest
) -> Iterator[list[str]]:
    """Ask the ranks to save and end when a host in `away` is ready again.

    Yields a list, to which the name of that host is then added.
    """
    back: list[str] = []
    said: set[str] = set()

    def poll_hosts() -> None:
        while not end_request.over.wait(_LOOK_OUT_S):
            with suppress(BadInputError):  # the run's disk is gone, so a new round could not start
                answers = training.check(away, like, during=True)
                unfit = {problem for one in answers if one.obstacles for problem in one.problems}
                for problem in sorted(unfit - said):
                    _print_status(f"{problem}. It is back, but cannot rejoin in this state")
                said.update(unfit)
                ready = [one.host.name for one in answers if one.ready]
                if ready and end_request.end(signal.SIGTERM):
                    back.append(ready[0])

    looking = threading.Thread(target=poll_hosts, name="hosts away", daemon=True)
    if away:
        looking.start()
    yield back
    end_request.over.set()


def _passed_variables() -> dict[str, str]:
    """Return environment variables that affect computation, except host-specific ones."""
    return {name: value for name, value in variables(os.environ).items() if name not in _OWN}


@dataclass
class _HostAgent:
    """Connection to the agent of a host, which runs the host's ranks.

    `ended` is the agent's last message, which says how the ranks ended, or None until then. Each
    rank's output goes to a file in the folder `kept`, and the agent's own lines also to `errors`.
    """

    host: Host
    work: HostCommand
    kept: Path
    ended: dict[str, Any] | None = None
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            preflight.remote(self.host, Path(self.work.folder), "run"), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True, env=preflight.local_environment(),
        )  # fmt: skip
        self.send_line(self.work.model_dump_json())
        outputs = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self.readers = [
            threading.Thread(target=self._read_output, args=pair, daemon=True) for pair in outputs
        ]
        for reader in self.readers:
            reader.start()

    def send_line(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # the agent has ended
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    @property
    def failed(self) -> bool:
        if self.process.poll() is None:
            return False
        for reader in self.readers:
            reader.join()
        return self.ended is None or bool(self.ended["error"] or self.ended["failures"])

    def _read_output(self, lines: IO[str], shown: IO[str]) -> None:
        for line in lines:
            if line.startswith(MARK):
                self.ended = preflight.read_marked(line)
            elif line != "\n":
                with suppress(OSError, ValueError):  # nobody reads the output, or the disk is full
                    self._show_and_save(line, shown)

    def _show_and_save(self, line: str, shown: IO[str]) -> None:
        rank, _, rest = line.removeprefix(RANK_PREFIX).partition("] ")
        if not line.startswith(RANK_PREFIX) or not rank.isdecimal():
            self.errors.append(line.rstrip())
            self._append_to_file(f"host-{self.work.node}", line)
            return
        if rank == "0":  # shown as if it ran here: tables, and the document of --json
            shown.write(rest)
        else:
            sys.stderr.write(f"{self.host.name}, rank {rank}: {rest}")
        shown.flush()
        self._append_to_file(f"rank-{rank}", rest)  # last, since the disk may be full

    def _append_to_file(self, name: str, line: str) -> None:
        with (self.kept / f"{name}.txt").open("a", encoding="utf-8") as file:
            file.write(line)


def _wait_for_agents(agents: Sequence[_HostAgent]) -> None:
    """Wait until the agents of all hosts have ended, and send them heartbeats meanwhile.

    If one fails, the agents that are left after `_LEFT_S` seconds are ended. Their ranks cannot
    save any more, since a step needs all ranks.
    """
    failed_s, said_s = None, time.monotonic()
    while any(agent.process.poll() is None for agent in agents):
        time.sleep(0.05)
        if time.monotonic() - said_s > SILENCE_S / 12:
            said_s = time.monotonic()
            for agent in agents:
                agent.send_line("")
        if failed_s is None and any(agent.failed for agent in agents):
            failed_s = time.monotonic()
        if failed_s is not None and time.monotonic() - failed_s > _LEFT_S:
            failed_s = float("inf")
            _end_ranks(agents)
    for agent in agents:
        for reader in agent.readers:
            reader.join()


def _end_ranks(agents: Sequence[_HostAgent]) -> None:
    """End all ranks immediately, even in the middle of a step.

    This takes two signals, since a rank finishes its step after the first.
    """
    for agent in agents:
        agent.send_line(signal.SIGTERM.name)
    time.sleep(2 * SAME_SIGNAL_S)
    for agent in agents:
        agent.send_line(signal.SIGTERM.name)


def _raise_failure(agents: Sequence[_HostAgent], signals: Sequence[int]) -> None:
    lost = [agent for agent in agents if agent.ended is None]
    if lost and not signals:
        said = lost[0].errors[-1] if lost[0].errors else "it sent no message"
        raise WorkerError(
            f"{lost[0].host.name} was lost: {said}. The other hosts' ranks were ended", 1,
            lost=True,
        )  # fmt: skip
    failures: dict[int, int] = {}
    reports: list[RankReport] = []
    names: dict[int, str] = {}
    errors: list[tuple[bool, str]] = []
    for agent in agents:
        if agent.ended is None:
            continue
        # Ranks that `_end_ranks` killed did not cause the failure.
        ours = len(agent.ended["signals"]) > 1
        its = {
            int(rank): code
            for rank, code in agent.ended["failures"].items()
            if not (ours and code == -signal.SIGKILL)
        }
        said_by = [RankReport(**one) for one in agent.ended["reports"]]
        names |= dict.fromkeys([*its, *(one.rank for one in said_by)], agent.host.name)
        failures |= its
        reports += said_by
        if agent.ended["error"]:
            told = bool(agent.ended["signals"])
            errors.append((told, f"{agent.host.name}: {agent.ended['error']}"))
    conclude(RanksEnd(failures, reports, signals, names))
    if signals and (lost or errors):
        name = signal.Signals(signals[0]).name
        raise WorkerError(f"stopped by {name} before training started", 128 + signals[0])
    if errors:  # prefer hosts that had not been asked to end
        raise WorkerError(min(errors, key=lambda error: error[0])[1], 1, lost=True)
