"""Hosts to train on, as given by `--hosts a:4,b:4` or a file."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, StringConstraints

from outpace.records.base import Record
from outpace.records.errors import BadInputError, excerpt

# A host name for ssh, optionally with a user, that ssh cannot mistake for an option.
_NAME = r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*"
_SLOTS = re.compile(r"0*[1-9][0-9]{0,5}")
_LINE = re.compile(r"(\S+)(?:\s+(?:slots|max_slots)\s*=\s*(\S+))?\s*(?:max[-_]slots\s*=\s*\S+)?")


class Host(Record):
    """A host's name for ssh, and its number of ranks."""

    name: Annotated[str, StringConstraints(pattern=f"^{_NAME}$")]
    slots: PositiveInt


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse hosts in the form 'a:4,b:4'.

    Raises BadInputError if the text has another form or names a host twice.
    """
    found = []
    for part in text.split(","):
        name, colon, slots = part.strip().rpartition(":")
        if not colon:
            raise BadInputError(
                f"--hosts {text}: {part.strip()!r} does not give a number of ranks. Write "
                f"{part.strip() or 'HOST'}:4"
            )
        found.append(_make_host(name, slots, f"--hosts {text}"))
    return _require_distinct(found, f"--hosts {text}")


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a hostfile of Open MPI or Horovod, with lines 'a slots=4' and # comments.

    Raises BadInputError if the file is unreadable, has another form or names a host twice.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadInputError(f"--hostfile {path} cannot be read: {why}") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        matched = _LINE.fullmatch(words)
        if matched is None:
            raise BadInputError(
                f"--hostfile {path}, line {number}: {excerpt(words)} is not 'HOST slots=4'"
            )
        found.append(_make_host(matched[1], matched[2] or "1", f"--hostfile {path}, line {number}"))
    if not found:
        raise BadInputError(
            f"--hostfile {path} names no host. Write one line 'HOST slots=4' per host"
        )
    return _require_distinct(found, f"--hostfile {path}")


def _make_host(name: str, slots: str, where: str) -> Host:
    if not _SLOTS.fullmatch(slots):
        raise BadInputError(
            f"{where}: {excerpt(slots)} is not a number of ranks per host, from 1 to 999999"
        )
    if not re.fullmatch(_NAME, name):
        raise BadInputError(
            f"{where}: {excerpt(name)} is not the name of a host, such as node1, "
            "node1.example.com or user@node1"
        )
    return Host(name=name, slots=int(slots))


def _require_distinct(hosts: list[Host], where: str) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInputError(f"{where} names {twice} twice. Combine its ranks into one entry")
    return tuple(hosts)


class Elastic(Record):
    """Limits of an elastic run: on how many hosts it may run, and how often it may restart."""

    min_nodes: PositiveInt
    max_nodes: PositiveInt
    max_restarts: NonNegativeInt


class HostQuery(Record):
    """Query to a host before a job is started on it. The answer is a `HostFacts`."""

    folder: str
    seen: tuple[str, ...] = ()  # paths that must exist
    earlier: tuple[str, ...] = ()  # earlier starts of the same training, which must have ended


class HostFacts(Record):
    """A host's answer to a query.

    `address`: this host's address as seen from the first host; `asked_from`: the first host's
    address; both are None on the first host itself. `port`: a free port. `left`: processes of
    earlier starts that are still running.
    """

    versions: dict[str, str]
    time_s: float
    address: str | None
    asked_from: str | None
    unseen: tuple[str, ...]
    port: PositiveInt
    left: tuple[int, ...] = ()


class HostCommand(Record):
    """The command that one host runs for a job."""

    folder: str
    command: tuple[str, ...]
    slots: PositiveInt
    nodes: PositiveInt
    node: int
    endpoint: str
    run_id: str
    address: str
    environment: dict[str, str] = Field(default_factory=dict)
