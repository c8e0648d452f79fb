"""A unique name for the joining ranks, in a store that other ranks may also use.

A launcher's store may hold keys of earlier groups of ranks: of an earlier run in the same
processes, or from before a restart or a change of hosts. A restart count cannot distinguish them,
since each host's elastic agent counts only the restarts that its own ranks caused.

Two jobs at one address are distinguished by the variables that their launchers set
(`job_identity`). If these are equal, more processes join than there are ranks: each surplus process
is refused, and rank 0 learns of it. A process that an elastic agent restarted is not surplus, since
the agent ended its predecessor: it takes over that rank, or waits for the next rank 0.
"""

import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from pydantic import ValidationError
from torch._C._distributed_c10d import Store

from outpace.records.base import Record
from outpace.records.errors import BadInputError
from outpace.records.ranks import Ranks

# Pause between checks for arriving ranks; it grows while no rank arrives.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
# Prefix of an answer that is a refusal instead of a session's name.
_REFUSAL = "refused: "
_APART = (
    "Give each job a MASTER_PORT of its own (torchrun: --master-port, or --rdzv-endpoint and "
    "--rdzv-id)"
)


class _Arrival(Record):
    """A process that joins a job: its token, rank, job and host, and whether it was restarted."""

    token: str
    rank: int
    world_size: int
    host: str
    pid: int
    job: dict[str, str]
    restarted: bool

    @property
    def process(self) -> str:
        return f"process {self.pid} on {self.host}"

    def find_difference(self, other: "_Arrival") -> str | None:
        """Return why a process must belong to another job; None if it may belong to this one."""
        if self.world_size != other.world_size:
            return f"a world of {other.world_size} processes, not {self.world_size}"
        for name, value in self.job.items():
            if other.job.get(name, value) != value:
                return f"{name}={other.job[name]}, not {value}"
        return None


@dataclass
class Session:
    """The name under which the ranks that have joined a job use the store.

    Rank 0 also uses it to find surplus processes, which join after all ranks have joined.
    """

    name: str
    arrival: _Arrival
    answered: int = 0  # tokens answered so far
    pending: set[int] = field(default_factory=set)

    def find_surplus(self, store: Store) -> str | None:
        """Refuse processes that joined after all ranks had; return a sentence about one of them.

        Call this on rank 0. The sentence is about a process that claims to belong to this job; it
        is None if there is none. A process that evidently belongs to another job is refused, but
        not reported. Processes that join the next session of their rank, or replace a rank's
        process, do not count.
        """
        claimed = f"surplus/{self.name}"
        found = _read_arrival(store, claimed) if store.check([claimed]) else None
        count = store.add("tokens", 0)
        self.pending |= {*range(self.answered + 1, count + 1)}
        self.answered = count
        for number in sorted(self.pending):
            if not store.check([f"token/{number}"]):
                continue
            self.pending.discard(number)
            key = store.get(f"token/{number}").decode()
            late = _parse_arrival(key)
            if late is None:
                continue
            different = self.arrival.find_difference(late)
            if different is None and (late.restarted or self._is_member(store, late)):
                continue
            why = f"it has {different}" if different else "all ranks of that job had already joined"
            store.set(f"session/{key}", f"{_REFUSAL}{_format_refusal(late, self.arrival, why)}")
            if different is None:
                found = found or late
        if found is None:
            return None
        return (
            f"{found.process} tried to join as rank {found.rank}, which had already joined. "
            "Another job uses the same MASTER_ADDR and MASTER_PORT, or a rank was started twice"
        )

    def require_no_surplus(self, store: Store) -> None:
        """Raise BadInputError if more processes joined than there are ranks. Only for rank 0."""
        found = self.find_surplus(store)
        if found is not None:
            raise BadInputError(format_mixed(found))

    def _is_member(self, store: Store, arrival: _Arrival) -> bool:
        key = f"member/{self.name}/{arrival.rank}"
        member = _read_arrival(store, key) if store.check([key]) else None
        return member is not None and (member.host, member.pid) == (arrival.host, arrival.pid)


def format_mixed(surplus: str) -> str:
    """Format the error message for a process that joins a full job before the first step."""
    return f"{surplus}: the ranks of two jobs may be mixed. {_APART}, and start them again."


def agree_on_session(
    store: Store,
    ranks: Ranks,
    timeout_s: float,
    job: Mapping[str, str] | None = None,
    restarted: bool = False,
) -> Session:
    """Wait until all ranks of the job have joined; return the session that only they share.

    All ranks must call this. Each rank other than 0 writes a new token to the store, and uses the
    name with which rank 0 answers it. Since the token is new, no rank 0 of an earlier start can
    have answered it. Rank 0 waits until all ranks have received the name, since tokens in the store
    may be old. Other ranks query the store a few times in total; rank 0 polls it, less often while
    no rank arrives. Raises RuntimeError if a rank does not join within `timeout_s`, and
    BadInputError if this process belongs to a different `job` than rank 0, or if its rank is taken
    and it was not `restarted`.
    """
    arrival = _Arrival(
        token=uuid.uuid4().hex, rank=ranks.rank, world_size=ranks.world_size,
        host=socket.gethostname(), pid=os.getpid(), job=dict(job or {}), restarted=restarted,
    )  # fmt: skip
    if ranks.rank == 0:
        return _publish_session(store, arrival, timeout_s)
    shown = arrival.model_dump_json()
    store.set(f"token/{store.add('tokens', 1)}", shown)
    invitation = f"session/{shown}"
    try:
        store.wait([invitation], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        raise RuntimeError("rank 0 did not join") from None
    name = store.get(invitation).decode()
    if name.startswith(_REFUSAL):
        raise BadInputError(name.removeprefix(_REFUSAL))
    first = store.add(f"joined/{name}/{ranks.rank}", 1) == 1
    if first or restarted:
        store.set(f"member/{name}/{ranks.rank}", shown)
        if first:
            store.add(f"joined/{name}", 1)
        return Session(name, arrival)
    store.set(f"surplus/{name}", shown)
    why = "another process had already joined as this rank"
    raise BadInputError(_format_refusal(arrival, _read_arrival(store, f"leader/{name}"), why))


def _publish_session(store: Store, leader: _Arrival, timeout_s: float) -> Session:
    """Send the session's name to every rank that publishes a token, until all ranks have joined."""
    name, world_size = leader.token, leader.world_size
    seen, waiting = 0, set[int]()  # tokens seen; a rank increments the count first
    pause_s, until_s = _FIRST_PAUSE_S, time.monotonic() + timeout_s
    store.set(f"leader/{name}", leader.model_dump_json())
    while store.add(f"joined/{name}", 0) < world_size - 1:
        count = store.add("tokens", 0)
        waiting |= {*range(seen + 1, count + 1)}
        shown = {number for number in waiting if store.check([f"token/{number}"])}
        for number in shown:
            key = store.get(f"token/{number}").decode()
            store.set(f"session/{key}", _answer_arrival(leader, _parse_arrival(key)))
        waiting -= shown
        if time.monotonic() > until_s:
            raise RuntimeError(_describe_missing_rank(store, name, world_size))
        pause_s = _FIRST_PAUSE_S if count > seen else min(2 * pause_s, _LONGEST_PAUSE_S)
        seen = count
        time.sleep(pause_s)
    return Session(name, leader, seen, waiting)


def _answer_arrival(leader: _Arrival, arrival: _Arrival | None) -> str:
    """Return rank 0's answer to a process: the session's name, or why the process is refused.

    A process of another job is refused.
    """
    different = None if arrival is None else leader.find_difference(arrival)
    if arrival is None or different is None:
        return leader.token
    return _REFUSAL + _format_refusal(arrival, leader, f"this one has {different}")


def _format_refusal(arrival: _Arrival, leader: _Arrival | None, why: str) -> str:
    rank_0 = "" if leader is None else f" (its rank 0 is {leader.process})"
    return (
        f"rank {arrival.rank} ({arrival.process}) found another job at this MASTER_ADDR and "
        f"MASTER_PORT{rank_0}: {why}. {_APART}. If it should be the same job, stop all its "
        "processes and start them again, each rank once and all by one launcher, or by torchrun "
        "with one --rdzv-id."
    )


def _read_arrival(store: Store, key: str) -> _Arrival | None:
    return _parse_arrival(store.get(key).decode())


def _parse_arrival(shown: str) -> _Arrival | None:
    """Parse a process's arrival; None if another version of outpace wrote it."""
    try:
        return _Arrival.model_validate_json(shown)
    except ValidationError:
        return None


def _describe_missing_rank(store: Store, name: str, world_size: int) -> str:
    missing = (rank for rank in range(1, world_size) if not store.check([f"joined/{name}/{rank}"]))
    return f"rank {next(missing, world_size - 1)} did not join"
