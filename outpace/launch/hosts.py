"""Trains on several hosts from one: over ssh, with torch's elastic agent on each of them.

Each host is asked first, and what stands against a training is said of all of them at once. Nothing
that a person typed is put into a remote command line: it goes through standard input.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from outpace.launch.agent import MARK
from outpace.launch.local import RANK_PREFIX, Ended, Report, WorkerError, conclude, signals_to
from outpace.probe.versions import variables
from outpace.records.errors import BadInputError
from outpace.records.hosts import Facts, Host, Question, Work

_SSH = ("ssh", "-T", "-o", "ControlMaster=no", "-o", "ControlPath=none",
        "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
        "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")  # fmt: skip
_ANSWER_S = 90  # imports torch
_CLOCK_S = 5.0
# What must be the same everywhere, for ranks to talk to each other and to compute the same.
_SAME = ("python", "outpace", "torch")
_OWN = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "LD_PRELOAD",
        "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # fmt: skip
# After the first host has ended in failure, the others have so long to find out by themselves.
_LEFT_S = 30.0


def start(hosts: Sequence[Host], command: list[str], paths: Sequence[str], out: Path) -> None:
    """Run `command` on every host, once per slot, and wait for all of them.

    `paths` must be there on all; `out` is where a shared folder must be. Raises BadInputError for
    what stands against it, WorkerError with what the rank that failed first said.
    """
    folder = Path.cwd()
    facts = _asked(hosts, folder, paths, out)
    at = [_address(one, facts) for one in facts]
    kept = Path("runs") / f"output-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    kept.mkdir(parents=True)
    print(
        f"outpace: {len(hosts)} hosts answer; what each rank writes is in {kept}", file=sys.stderr
    )
    first = f"[{at[0]}]" if ":" in at[0] else at[0]
    run_id, endpoint = uuid.uuid4().hex, f"{first}:{facts[0].port}"
    parts = [
        _Part(host, Work(
            folder=str(folder), command=tuple(command), slots=host.slots, nodes=len(hosts),
            node=number, endpoint=endpoint, run_id=run_id, address=at[number],
            environment=_passed_on(),
        ), kept)
        for number, host in enumerate(hosts)
    ]  # fmt: skip

    def pass_on(signum: int, _received: list[int]) -> None:
        for part in parts:
            part.say(signal.Signals(signum).name)

    with signals_to(pass_on) as signals:
        _wait(parts)
    _conclude(parts, signals)


def _passed_on() -> dict[str, str]:
    """Variables that change how something computes, but for what each host has of its own."""
    return {name: value for name, value in variables(os.environ).items() if name not in _OWN}


def _asked(hosts: Sequence[Host], folder: Path, paths: Sequence[str], out: Path) -> list[Facts]:
    """What each says of itself. Raises BadInputError with all that stands against a training."""
    with _token(out) as token:
        question = Question(folder=str(folder), seen=(*paths, str(token))).model_dump_json()
        with ThreadPoolExecutor(len(hosts)) as pool:
            answers = list(pool.map(lambda host: _ask(host, folder, question), hosts))
    problems, own = [], None
    for host, (answer, between) in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            problems.append(f"{host.name}: {answer}")
            continue
        own = own or (host, answer)
        problems += [f"{host.name}: {one}" for one in _against(answer, own, between, str(token))]
    if problems:
        raise BadInputError(
            "the hosts are not ready, and nothing was started:\n  " + "\n  ".join(problems)
        )
    return [answer for answer, _ in answers if isinstance(answer, Facts)]


@contextmanager
def _token(out: Path) -> Iterator[Path]:
    """A file in this folder, to be seen by all who share it; nothing of it is left."""
    new = not out.exists()
    token = out / f".outpace-{uuid.uuid4().hex}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        token.write_text("seen?")
    except OSError as error:
        raise BadInputError(
            f"--out {out}: nothing can be written there: {error.strerror}"
        ) from None
    try:
        yield token
    finally:
        token.unlink()
        if new:
            with suppress(OSError):  # another has written there meanwhile
                out.rmdir()


def _against(
    answer: Facts, first: tuple[Host, Facts], between: tuple[float, float], token: str
) -> Iterator[str]:
    """What of a host's answer stands against a training."""
    for name in _SAME:
        its, other = answer.versions.get(name), first[1].versions.get(name)
        if its != other:
            yield f"it has {name} {its}, and {first[0].name} has {other}; install the same"
    off = max(between[0] - answer.time_s, answer.time_s - between[1])
    if off > _CLOCK_S:
        yield f"its clock is {off:.0f} s off; set it by NTP"
    for path in answer.unseen:
        if path == token:
            yield (
                f"it does not see {Path(token).parent}, where the run is to be kept. Name a folder "
                "that all hosts share with --out"
            )
        else:
            yield f"there is no {path}"


def _ask(host: Host, folder: Path, question: str) -> tuple[Facts | str, tuple[float, float]]:
    """A host's answer or why there is none; times between which it was given."""
    began_s = time.time()
    try:
        done = subprocess.run(
            _remote(host, folder, "check"), input=question + "\n", capture_output=True, text=True,
            env=_here(),
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return "there is no ssh on this host to reach it with", (began_s, began_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_S} s", (began_s, began_s)
    found = _marked(done.stdout)
    if done.returncode == 0 and found is not None:
        return Facts.parse(found, host.name), (began_s, time.time())
    said = next(iter(reversed(done.stderr.strip().splitlines())), "it said nothing")
    why = "cannot be reached" if done.returncode == 255 else "cannot run outpace there"
    return f"{why}: {said}", (began_s, began_s)


def _remote(host: Host, folder: Path, what: str) -> list[str]:
    """The command that starts the agent on a host; this one needs no ssh."""
    words = [sys.executable, "-m", "outpace.launch.agent", what]
    if host.name in ("localhost", "127.0.0.1", socket.gethostname()):
        return words
    return [*_SSH, host.name, f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"]


def _here() -> dict[str, str]:
    """This process's environment, but for where a person has come from by ssh."""
    return {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}


def _marked(output: str) -> dict[str, Any] | None:
    """What an agent said last: a login may print what it likes before."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    with suppress(ValueError, IndexError):
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
        return found
    return None


def _address(one: Facts, facts: Sequence[Facts]) -> str:
    """Of a host as the others reach it: of the one that asks, as those that were asked say."""
    asking = next((other.asked_from for other in facts if other.asked_from), None)
    return one.address or asking or "localhost"


@dataclass
class _Part:
    """A host's part that runs. `ended`: what its agent said at the end."""

    host: Host
    work: Work
    kept: Path
    ended: dict[str, Any] | None = None
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            _remote(self.host, Path(self.work.folder), "run"), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True, env=_here(),
        )  # fmt: skip
        self.say(self.work.model_dump_json())
        outputs = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self.readers = [
            threading.Thread(target=self._read, args=pair, daemon=True) for pair in outputs
        ]
        for reader in self.readers:
            reader.start()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Whoever listens there takes it for the end of all."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    @property
    def failed(self) -> bool:
        """Whether it is over, and not well."""
        if self.process.poll() is None:
            return False
        for reader in self.readers:
            reader.join()
        return self.ended is None or bool(self.ended["error"] or self.ended["failures"])

    def _read(self, lines: IO[str], shown: IO[str]) -> None:
        for line in lines:
            if line.startswith(MARK):
                self.ended = _marked(line)
            if line.startswith(MARK) or line == "\n":
                continue
            rank, _, rest = line.removeprefix(RANK_PREFIX).partition("] ")
            if not line.startswith(RANK_PREFIX) or not rank.isdecimal():
                self.errors.append(line.rstrip())
                self._keep(f"host-{self.work.node}", line)
                continue
            self._keep(f"rank-{rank}", rest)
            if rank == "0":  # as if it were here: tables, and --json's document
                shown.write(rest)
            else:
                sys.stderr.write(f"{self.host.name}, rank {rank}: {rest}")
            shown.flush()

    def _keep(self, name: str, line: str) -> None:
        with (self.kept / f"{name}.txt").open("a", encoding="utf-8") as file:
            file.write(line)


def _wait(parts: Sequence[_Part]) -> None:
    """Until all have ended; those that are left long after one has failed are asked to end."""
    failed_s = None
    while any(part.process.poll() is None for part in parts):
        time.sleep(0.05)
        if failed_s is None and any(part.failed for part in parts):
            failed_s = time.monotonic()
        if failed_s is not None and time.monotonic() - failed_s > _LEFT_S:
            for part in parts:
                part.close()
            failed_s = float("inf")
    for part in parts:
        for reader in part.readers:
            reader.join()


def _conclude(parts: Sequence[_Part], signals: Sequence[int]) -> None:
    """Raise the WorkerError that says why it ended, if it did not end well."""
    lost = [part for part in parts if part.ended is None]
    if lost and not signals:
        said = lost[0].errors[-1] if lost[0].errors else "it said nothing"
        raise WorkerError(
            f"{lost[0].host.name} was lost: {said}. The ranks of the other hosts were ended.", 1
        )
    failures: dict[int, int] = {}
    reports: list[Report] = []
    names: dict[int, str] = {}
    errors = []
    for part in parts:
        if part.ended is None:
            continue
        its = {int(rank): code for rank, code in part.ended["failures"].items()}
        said_by = [Report(**one) for one in part.ended["reports"]]
        names |= dict.fromkeys([*its, *(one.rank for one in said_by)], part.host.name)
        failures |= its
        reports += said_by
        errors += [f"{part.host.name}: {part.ended['error']}"] if part.ended["error"] else []
    conclude(Ended(failures, reports, signals, names))
    if signals and (lost or errors):
        name = signal.Signals(signals[0]).name
        raise WorkerError(f"stopped by {name} before training began", 128 + signals[0])
    if errors:
        raise WorkerError(errors[0], 1)
