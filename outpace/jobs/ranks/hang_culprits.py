"""Identification of the ranks that keep others waiting, from all ranks' snapshots."""

import json
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from outpace.jobs.ranks.rank_snapshot import process_state
from outpace.records.errors import EXIT_HANG, OutpaceError
from outpace.records.hang_report import RankSnapshot

# Phrases for messages, by the kernel's state of a process that does not run.
GONE = "is gone: check its last output and its host"
UNSEEN = "is gone or unreachable: check its last output and its host"
_NOT_RUNNING = {
    "stopped": "is stopped (by SIGSTOP, or a debugger)",
    "tracing-stop": "is stopped (by a debugger)",
    "gone": GONE,
    "zombie": GONE,
    "dead": GONE,
}
FAILED = "failed on its own: "


class RankLostError(OutpaceError):
    """Error for a rank that died, or did not answer in time.

    `what`: what this rank was doing. `sentence` names the lost rank; `why` is the original error.
    The exit code is EXIT_HANG while the lost rank's process exists, otherwise 1.
    """

    def __init__(self, what: str, sentence: str, why: str = "") -> None:
        message = f"{what}: {sentence}{why}"
        super().__init__(message)
        is_over = any(words in sentence for words in (GONE, UNSEEN, FAILED))
        self.exit_code = 1 if is_over else EXIT_HANG
        self.on_all_ranks = "rank 0 on " not in message  # rank 0 cannot report its own failure


def has_exited(who: dict[str, Any]) -> bool:
    """Return whether a rank's process on this host is stopped or gone, and so cannot answer."""
    here = who.get("host") == socket.gethostname()
    return here and process_state(int(who["pid"])) in _NOT_RUNNING


def read_process(store: Any, rank: int) -> dict[str, Any]:
    """Return the host and PID that a rank wrote to the rendezvous store; {} if it wrote none."""
    key = f"alive/who/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else {}


def silent_snapshot(rank: int, who: dict[str, Any], others: Iterable[RankSnapshot]) -> RankSnapshot:
    """Return a snapshot of a rank that does not answer, as seen by ranks on its host."""
    host, pid = str(who.get("host", "")), int(who.get("pid", 0))
    if host == socket.gethostname():
        seen = process_state(pid)
    else:
        seen = next((one.processes[rank] for one in others if rank in one.processes), "unseen")
    place = _NOT_RUNNING.get(seen, f"does not answer; its process is {seen}")
    if seen == "unseen":
        place = UNSEEN
    return RankSnapshot(rank=rank, host=host, pid=pid, state="silent", place=place)


def is_lost(one: RankSnapshot) -> bool:
    """Return whether a silent rank is lost for good, rather than just too busy to answer."""
    return one.state == "silent" and one.place in {*_NOT_RUNNING.values(), UNSEEN}


def find_culprits(found: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Return the ranks to blame for a hang; [] if none can be told apart from the others.

    Silent ranks are blamed first, then ranks that have begun fewer collectives than others, then
    ranks that compute while others wait.
    """
    silent = [one for one in found if one.state == "silent"]
    if silent:
        return silent
    begun = [{each.group: each.number for each in one.collectives} for one in found]
    most: dict[str, int] = {}
    for its in begun:
        for group, number in its.items():
            most[group] = max(most.get(group, 0), number)
    behind = [
        one
        for one, its in zip(found, begun, strict=True)
        if any(number < most[group] for group, number in its.items())
    ]
    if behind and len(behind) < len(found):
        # A rank that waits in another group may be waiting for a rank that computes.
        return [one for one in behind if one.state == "works"] or behind
    working = [one for one in found if one.state == "works"]
    return working if len(working) < len(found) else []


def format_culprits(guilty: Sequence[RankSnapshot]) -> str:
    """Describe the rank at fault and where it is; without one, the possible causes of the hang."""
    if not guilty:
        return (
            "all ranks are running, but not all arrived in time: one hangs, or a connection "
            "between two of them is broken"
        )
    one = guilty[0]
    who = f"rank {one.rank}" + (f" on {one.host}" if one.host else "")
    more = f" (and {len(guilty) - 1} more)" if len(guilty) > 1 else ""
    if one.state == "silent":
        return f"{who}{more} {one.place}"
    return f"{who}{more} has not arrived: in {one.doing}, it is at {one.place}"
