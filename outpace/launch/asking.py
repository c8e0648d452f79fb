"""Asks hosts, before a training is started on them, whether it can be.

Nothing that a person typed is put into a remote command line: it goes through standard input.
"""

import json
import os
import shlex
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.launch.agent import MARK
from outpace.launch.interfaces import LOOPBACK
from outpace.records.errors import BadInputError
from outpace.records.hosts import Host, HostFacts, HostQuery
from outpace.records.python import PYTHON
from outpace.train.run_dir import TOKEN_PREFIX

_SSH = ("ssh", "-T", "-o", "ControlMaster=no", "-o", "ControlPath=none",
        "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
        "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")  # fmt: skip
_ANSWER_S = 90  # imports torch
_CLOCK_S = 5.0
# What must be the same everywhere, for ranks to talk to each other and to compute the same.
_SAME = ("python", "outpace", "torch")


@dataclass(frozen=True)
class Answered:
    """What came back from a host: its facts, or in `away` why there are none.

    `against`: what of the facts stands against a training there.
    """

    host: Host
    facts: HostFacts | None
    away: str = ""
    against: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether ranks can run there."""
        return self.facts is not None and not self.against

    @property
    def problems(self) -> list[str]:
        """For a person."""
        return [f"{self.host.name}: {one}" for one in (*self.against, self.away) if one]


def ask(
    hosts: Sequence[Host], question: HostQuery, out: Path, like: Answered | None = None
) -> list[Answered]:
    """What each host says to the question, and whether it sees where `out` is.

    What must be the same is compared with `like`, or the first that answers. Raises BadInputError
    where nothing can be written there.
    """
    with _token(out) as token:
        asked = question.model_copy(update={"seen": (*question.seen, str(token))})
        with ThreadPoolExecutor(len(hosts)) as pool:
            answers = list(pool.map(lambda host: _ask(host, asked), hosts))
    found = []
    first = None if like is None or like.facts is None else (like.host, like.facts)
    for host, (answer, between) in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            found.append(Answered(host, None, away=answer))
            continue
        first = first or (host, answer)
        against = tuple(_against(answer, first, between, {str(token): out}))
        found.append(Answered(host, answer, against=against))
    return found


@contextmanager
def _token(out: Path) -> Iterator[Path]:
    """A file in this folder, or where it will be, to be seen by all who share it; it is removed.

    A run takes an empty folder for its own while hosts that are away are asked: it passes over it.
    """
    places = (out.absolute(), *out.absolute().parents)
    try:  # also to look: the disk may be gone
        token = next(one for one in places if one.exists()) / f"{TOKEN_PREFIX}{uuid.uuid4().hex}"
        token.write_text("seen?")
    except OSError as error:
        raise BadInputError(
            f"--out {out}: nothing can be written there: {error.strerror}"
        ) from None
    try:
        yield token
    finally:
        with suppress(OSError):
            token.unlink()


def _against(
    answer: HostFacts,
    first: tuple[Host, HostFacts],
    between: tuple[float, float],
    tokens: dict[str, Path],
) -> Iterator[str]:
    """What of a host's answer stands against a training. `tokens`: files that stand for folders."""
    for name in _SAME:
        its, other = answer.versions.get(name), first[1].versions.get(name)
        if its != other:
            yield f"it has {name} {its}, and {first[0].name} has {other}; install the same"
    off = max(between[0] - answer.time_s, answer.time_s - between[1])
    if off > _CLOCK_S:
        yield f"its clock is {off:.0f} s off; set it by NTP"
    if answer.left:
        yield f"ranks of an earlier start are still there (process {answer.left[0]})"
    for path in answer.unseen:
        if path in tokens:
            yield (
                f"it does not see {tokens[path]}, where the run is to be kept. Name a folder that "
                "all hosts share with --out"
            )
        else:
            yield f"there is no {path}"


def _ask(host: Host, question: HostQuery) -> tuple[HostFacts | str, tuple[float, float]]:
    """A host's answer or why there is none; times between which it was given."""
    began_s = time.time()
    try:
        done = subprocess.run(
            remote(host, Path(question.folder), "check"), input=question.model_dump_json() + "\n",
            capture_output=True, text=True, errors="replace", env=here(), timeout=_ANSWER_S,
            check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return "there is no ssh on this host to reach it with", (began_s, began_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_S} s", (began_s, began_s)
    found = marked(done.stdout)
    if done.returncode == 0 and found is not None:
        with suppress(BadInputError):
            return HostFacts.parse(found, host.name), (began_s, time.time())
        return "it has another version of outpace; install the same", (began_s, began_s)
    said = next(iter(reversed(done.stderr.strip().splitlines())), "it said nothing")
    why = "cannot be reached" if done.returncode == 255 else "cannot run outpace there"
    return f"{why}: {said}", (began_s, began_s)


def remote(host: Host, folder: Path, what: str) -> list[str]:
    """The command that starts the agent on a host; this one needs no ssh."""
    words = [*PYTHON, "-m", "outpace.launch.agent", what]
    if host.name in ("localhost", "127.0.0.1", socket.gethostname()):
        return words
    found = os.environ.get("PYTHONPATH")  # where outpace may be, and is in the same place there
    if found:
        words = ["env", f"PYTHONPATH={found}", *words]
    return [*_SSH, host.name, f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"]


def here() -> dict[str, str]:
    """This process's environment, but for where a person has come from by ssh."""
    return {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}


def marked(output: str) -> dict[str, Any] | None:
    """What an agent said last: a login may print what it likes before."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    with suppress(ValueError, IndexError):
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
        return found
    return None


def addresses(facts: Sequence[HostFacts]) -> list[str]:
    """Of hosts as the others reach them: of the one that asks, as those that were asked say."""
    asking = next((one.asked_from for one in facts if one.asked_from), None)
    return [one.address or asking or LOOPBACK for one in facts]
