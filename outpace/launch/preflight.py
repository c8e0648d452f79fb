"""Checks of hosts before training starts on them.

User input is never part of a remote command line; it goes through standard input.
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

from outpace.launch.network_interfaces import LOOPBACK
from outpace.launch.ssh_agent import MARK
from outpace.records.errors import BadInputError
from outpace.records.hosts import Host, HostFacts, HostQuery
from outpace.records.interpreter import PYTHON
from outpace.training.run_dir import TOKEN_PREFIX

_SSH = ("ssh", "-T", "-o", "ControlMaster=no", "-o", "ControlPath=none",
        "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
        "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")  # fmt: skip
_ANSWER_S = 90  # includes importing torch
_CLOCK_S = 5.0
# Versions that must be the same on all hosts.
_SAME = ("python", "outpace", "torch")


@dataclass(frozen=True)
class HostCheck:
    """Result of checking a host: its facts, or why it did not answer (`unreachable`).

    `obstacles`: what prevents training on it.
    """

    host: Host
    facts: HostFacts | None
    unreachable: str = ""
    obstacles: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Return whether ranks can run on this host."""
        return self.facts is not None and not self.obstacles

    @property
    def problems(self) -> list[str]:
        """The host's problems as messages for the user."""
        return [f"{self.host.name}: {one}" for one in (*self.obstacles, self.unreachable) if one]


def check_hosts(
    hosts: Sequence[Host], question: HostQuery, out: Path, like: HostCheck | None = None
) -> list[HostCheck]:
    """Query all hosts, and check each one's facts and whether it sees the folder of `out`.

    Versions are compared with `like`, or with the first host that answers. Raises BadInputError if
    the folder is not writable.
    """
    with _marker_file(out) as token:
        asked = question.model_copy(update={"seen": (*question.seen, str(token))})
        with ThreadPoolExecutor(len(hosts)) as pool:
            answers = list(pool.map(lambda host: _query_host(host, asked), hosts))
    found = []
    first = None if like is None or like.facts is None else (like.host, like.facts)
    for host, (answer, between) in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            found.append(HostCheck(host, None, unreachable=answer))
            continue
        first = first or (host, answer)
        against = tuple(_find_obstacles(answer, first, between, {str(token): out}))
        found.append(HostCheck(host, answer, obstacles=against))
    return found


@contextmanager
def _marker_file(out: Path) -> Iterator[Path]:
    """Create a marker file, by which hosts show that they share the folder of `out`.

    Yields the file's path, which is in `out`, or in its nearest existing parent folder. The file is
    removed afterwards, and runs ignore it. Raises BadInputError if it cannot be written.
    """
    places = (out.absolute(), *out.absolute().parents)
    try:  # even looking for the folder fails if the disk is gone
        token = next(one for one in places if one.exists()) / f"{TOKEN_PREFIX}{uuid.uuid4().hex}"
        token.write_text("seen?")
    except OSError as error:
        raise BadInputError(f"--out {out}: cannot write there: {error.strerror}") from None
    try:
        yield token
    finally:
        with suppress(OSError):
            token.unlink()


def _find_obstacles(
    answer: HostFacts,
    first: tuple[Host, HostFacts],
    query_times_s: tuple[float, float],
    tokens: dict[str, Path],
) -> Iterator[str]:
    """Yield the reasons why ranks cannot train on a host, as messages for the user.

    `first` is the host whose versions are required, `query_times_s` is when the query began and
    ended, and `tokens` maps marker files to their folders.
    """
    for name in _SAME:
        its, other = answer.versions.get(name), first[1].versions.get(name)
        if its != other:
            yield f"it has {name} {its}, but {first[0].name} has {other}. Install the same version"
    off = max(query_times_s[0] - answer.time_s, answer.time_s - query_times_s[1])
    if off > _CLOCK_S:
        yield f"its clock is off by {off:.0f} s. Synchronise it by NTP"
    if answer.left:
        yield f"ranks of an earlier start are still running (process {answer.left[0]})"
    for path in answer.unseen:
        if path in tokens:
            yield (
                f"it does not see {tokens[path]}, the run's folder. Pass a folder that all hosts "
                "share as --out"
            )
        else:
            yield f"there is no {path}"


def _query_host(host: Host, question: HostQuery) -> tuple[HostFacts | str, tuple[float, float]]:
    """Return a host's facts, or why it did not answer, and when the query began and ended."""
    began_s = time.time()
    try:
        done = subprocess.run(
            remote(host, Path(question.folder), "check"), input=question.model_dump_json() + "\n",
            capture_output=True, text=True, errors="replace", env=local_environment(),
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return "there is no ssh on this host", (began_s, began_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_S} s", (began_s, began_s)
    found = read_marked(done.stdout)
    if done.returncode == 0 and found is not None:
        with suppress(BadInputError):
            return HostFacts.parse(found, host.name), (began_s, time.time())
        return "it has a different version of outpace. Install the same version", (began_s, began_s)
    said = next(iter(reversed(done.stderr.strip().splitlines())), "it sent no answer")
    why = "cannot be reached" if done.returncode == 255 else "cannot run outpace there"
    return f"{why}: {said}", (began_s, began_s)


def remote(host: Host, folder: Path, what: str) -> list[str]:
    """Return the command that starts outpace's agent on a host, by ssh unless it is this host.

    `folder`: the working directory there. `what`: what the agent does, "check" or "run".
    """
    words = [*PYTHON, "-m", "outpace.launch.ssh_agent", what]
    if host.name in ("localhost", "127.0.0.1", socket.gethostname()):
        return words
    found = os.environ.get("PYTHONPATH")  # may have outpace, on the other host too
    if found:
        words = ["env", f"PYTHONPATH={found}", *words]
    return [*_SSH, host.name, f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"]


def local_environment() -> dict[str, str]:
    """Return this process's environment without the variables of the user's ssh connection."""
    return {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}


def read_marked(output: str) -> dict[str, Any] | None:
    """Return an agent's last message in its output, which may have text of a login shell."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    with suppress(ValueError, IndexError):
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
        return found
    return None


def addresses(facts: Sequence[HostFacts]) -> list[str]:
    """Return the address by which the other hosts reach each host.

    It is the address at which ssh reached the host. For this host, it is the one from which ssh
    reached another host, or loopback's if there is none.
    """
    asking = next((one.asked_from for one in facts if one.asked_from), None)
    return [one.address or asking or LOOPBACK for one in facts]
