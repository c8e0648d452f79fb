"""A snapshot of this rank: its threads' stacks, and collectives in torch's flight recorder."""

import json
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from outpace.nn.torch_versions import flight_recorder_dumps
from outpace.records.hang_report import CollectiveEvent, RankSnapshot

_LAST = 20  # latest collectives to keep
_OPEN = "started"  # gloo's stay "scheduled" even when finished
# Files whose functions wait for other ranks, directly or through autograd.
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/outpace/training/step.py")

Position = tuple[FrameType | None, int, dict[str, int]]


def snapshot_rank(
    rank: int, thread: int, doing: str, neighbours: Mapping[int, int], failed: str | None
) -> RankSnapshot:
    """Snapshot this rank; `thread` is the ID of its training thread.

    `neighbours`: PIDs of the ranks on this host. `failed`: description of the collective that
    failed.
    """
    frames = sys._current_frames()
    collectives = read_flight_recorder()
    at = traceback.extract_stack(frames[thread])[-1] if thread in frames else None
    open_ones = [one for one in collectives if one.state == _OPEN]
    waits = at is not None and any(word in at.filename for word in _WAITING)
    last = (open_ones or collectives)[-1:]
    if failed is not None:
        place = failed
    elif (waits or open_ones) and last:
        place = f"{last[0].name}, number {last[0].number} of {last[0].group}"
    else:
        place = "its main thread has ended" if at is None else _format_line(at)
    return RankSnapshot(
        rank=rank,
        host=socket.gethostname(),
        pid=psutil.Process().pid,
        doing=doing,
        state="waits" if failed is not None or waits or open_ones else "works",
        place=place,
        processes={one: process_state(pid) for one, pid in neighbours.items()},
        stacks=_format_stacks(frames, thread),
        collectives=tuple(_keep_latest(collectives)),
    )


def process_state(pid: int) -> str:
    """Return the kernel's state of a process: "running", "sleeping", "stopped", …; or "gone"."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def _format_line(at: traceback.FrameSummary) -> str:
    name = "/".join(Path(at.filename).parts[-2:])
    return f"{name}:{at.lineno} in {at.name}: {(at.line or '').strip()}"


def _keep_latest(events: list[CollectiveEvent]) -> list[CollectiveEvent]:
    """Return the latest collectives, and the last one of each group."""
    last = {one.group: place for place, one in enumerate(events)}
    kept = {*last.values(), *range(len(events))[-_LAST:]}
    return [events[place] for place in sorted(kept)]


def _format_stacks(frames: Mapping[int, FrameType], main: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    said = []
    for ident in sorted(frames, key=lambda one: one != main):
        if ident == threading.get_ident() and ident != main:
            continue
        name = "the thread that trains" if ident == main else names.get(ident, "a thread")
        said.append(f"{name}:\n{''.join(traceback.format_stack(frames[ident]))}")
    return "\n".join(said)


def find_position(thread: int) -> Position:
    """Return a thread's position: its frame, its instruction, and the last collectives.

    The position stays equal while the thread waits in one collective. The frame is needed because
    torch's flight recorder does not list messages between two ranks. Whoever keeps a position keeps
    the frame's local variables alive.
    """
    frame = sys._current_frames().get(thread)
    last = {one.group: one.number for one in read_flight_recorder()}
    return frame, -1 if frame is None else frame.f_lasti, last


def read_flight_recorder() -> list[CollectiveEvent]:
    """Return this rank's entries in torch's flight recorder; [] if there are none."""
    found: list[CollectiveEvent] = []
    for dump in flight_recorder_dumps():
        with suppress(ValueError, KeyError, TypeError, RuntimeError):
            found += _parse_entries(json.loads(dump()).get("entries", ()))
    return found


def _parse_entries(entries: Sequence[Mapping[str, Any]]) -> list[CollectiveEvent]:
    return [
        CollectiveEvent(
            group=_name_group(*one["process_group"]),
            number=int(one["p2p_seq_id"] if one["is_p2p"] else one["collective_seq_id"]),
            name=str(one["profiling_name"]).partition(":")[2] or str(one["profiling_name"]),
            state=str(one["state"]),
        )
        for one in entries
    ]


def _name_group(name: str, described: str) -> str:
    """Describe a group; all groups of one mesh axis share a description."""
    return f"group {name}" if described in ("", "undefined") else f"{described} (group {name})"
