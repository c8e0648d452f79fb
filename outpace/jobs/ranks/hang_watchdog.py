"""Watchdog that finds the rank at fault when a collective fails or takes too long.

Every rank has a thread that writes a snapshot to the store when another rank asks. This finds a
rank that is gone, was stopped, or hangs in a line of Python while others wait in a collective.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from outpace.jobs.ranks.hang_verdict import HangVerdict, HangVerdicts
from outpace.jobs.ranks.process_groups import Groups
from outpace.jobs.ranks.rank_snapshot import Position, find_position, process_state, snapshot_rank
from outpace.jobs.ranks.session import format_mixed
from outpace.launch.exit_deadline import ExitDeadline
from outpace.records.errors import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    BadInputError,
    InterruptedRunError,
    OutpaceError,
)
from outpace.records.hang_report import HangReport, RankSnapshot
from outpace.training.guards import StopSignal

_LISTEN_S = 0.5
# Factor that keeps a rank that waits for a core from being taken for dead.
_LOOK_S = 4.0
# Share of the time limit of collectives: ranks are queried if a step takes longer.
_LONG = 0.8
# Heartbeats per time limit, and the most seconds between two.
_BEATS, _MOST_BETWEEN_S = 8, 10.0
# Seconds that a process has to end by itself after a collective failed because of another rank: the
# time limit, within these bounds.
_LEAST_UNWIND_S, _MOST_UNWIND_S = 10.0, 60.0
# Kernel states of a process that has stopped working, in words.
_GONE = "is gone: look at its last output, and at its host"
_UNSEEN = "is gone, or cannot be reached: look at its last output, and at its host"
_NOT_RUNNING = {
    "stopped": "is stopped (by SIGSTOP, or a debugger)",
    "tracing-stop": "is stopped (by a debugger)",
    "gone": _GONE,
    "zombie": _GONE,
    "dead": _GONE,
}
_FAILED = "failed by itself: "
_OVER = (_GONE, _UNSEEN, _FAILED)
_STORE_LOST = f"the host where all meet {_UNSEEN}"
_ASKS = "alive/asks"
# Key that says that a signal has ended a rank, and how many ranks know it.
_INTERRUPTED, _KNOWING = "alive/interrupted", "alive/knowing"
# Key of what was found to be wrong with the ranks before they train.
_MIXED = "alive/mixed"
_CHECK_JOBS = (
    "It was refused. If two jobs were started at the same time, their ranks may be mixed: then "
    "stop both, and start each with a MASTER_PORT of its own."
)
# Seconds in which an interrupted rank ends by itself, before it is ended.
_INTERRUPTED_S = 4.0
# gloo raises plain RuntimeErrors, and so does DDP for errors of its hook; for failed connections
# they contain one of these.
_CONNECTIONS = ("gloo/transport/", "DistNetworkError: ")
# Parts of a message that mean nothing to the user.
_SOURCE = re.compile(
    r"^(\[[^\]]*\.cc:\d+\]|Got the following error when running the callback: DistNetworkError:) "
)


class RankLostError(OutpaceError):
    """A rank died, or did not answer in time, while others waited for it.

    `is_running`: its process still exists.
    """

    def __init__(self, message: str, is_running: bool) -> None:
        super().__init__(message)
        self.exit_code = EXIT_HANG if is_running else 1
        self.on_all_ranks = "rank 0 on " not in message  # rank 0 cannot report it itself


@dataclass
class RankActivity:
    """The current activity of this rank, in words for the user.

    `limited_s` is when it started an activity to which the collectives' time limit applies. If
    ranks hang, `on_hang` is called on one of them with a report on all of them. `on_surplus` is
    called on rank 0 with a sentence, if a process of another job comes while these ranks train.
    """

    what: str = "the beginning"
    limited_s: float | None = None
    on_hang: Callable[[HangReport], None] = lambda found: None
    on_surplus: Callable[[str], None] = lambda sentence: None
    number: int = 0  # number of the activity

    def begin(self, what: str, limited: bool = False) -> None:
        """Start a new activity."""
        self.what, self.limited_s = what, time.monotonic() if limited else None
        self.number += 1


@contextmanager
def hang_watchdog(
    groups: Groups,
    doing: RankActivity,
    timeout_s: float = 300.0,
    deadline: ExitDeadline | None = None,
    stop: StopSignal | None = None,
) -> Iterator[None]:
    """Watch the ranks while they communicate: each answers in the store when another asks.

    A rank that is stopped, gone or disconnected is also found within `timeout_s` if others wait for
    it without a time limit, as while a checkpoint is saved or rank 0 acts for all. `deadline` then
    ends the process, since nothing else interrupts that wait.

    If a signal ends a rank before its first step is done, or after its last (`stop`), all others
    end as well, including those that compile or wait in a collective.

    If a rank is gone or does not join a collective, RankLostError replaces the backend's error and
    names that rank and its activity. If a signal has ended that rank, InterruptedRunError replaces
    it. Other errors are unchanged. The wait is limited by the time limit of the process groups,
    `timeout_s`. NCCL's path has never run, since no machine with two GPUs was available: there,
    `outpace.probing.timing.rank_clock.await_event` waits, and NCCL's watchdog ends the process,
    after the query that is made before the limit.
    """
    own = ExitDeadline(None)
    deadline = own if deadline is None else deadline
    watcher = _Watchdog(groups, doing, timeout_s, threading.get_ident(), deadline, stop)
    watcher.start()
    try:
        yield
    except RuntimeError as error:
        lost = _communication(error)
        # Of CUDA, and others that are no failure of communication, the class says so.
        if not lost and type(error) is not RuntimeError:
            raise
        if watcher.is_interrupted():
            assert stop is not None
            raise InterruptedRunError(stop.message) from None
        why = next(iter(_SOURCE.sub("", str(error)).strip().splitlines()), type(error).__name__)
        verdict = watcher.verdict(lost, why)
        if verdict is None:
            watcher.report_failure(f"{type(error).__name__}: {why}")
            raise
        lost_rank = RankLostError(f"{doing.what}: {verdict} ({why})", _is_process_running(verdict))
        grace_s = min(max(timeout_s, _LEAST_UNWIND_S), _MOST_UNWIND_S)
        deadline.start(str(lost_rank), lost_rank.exit_code, grace_s)
        raise lost_rank from error
    finally:
        watcher.close()
        own.leave()


def _is_process_running(verdict: str) -> bool:
    """Return whether a verdict is about a rank whose process exists."""
    return not any(words in verdict for words in _OVER)


def _communication(error: RuntimeError) -> bool:
    """Return whether an error says that ranks could not reach each other, at all or in time."""
    said = str(error)
    return isinstance(error, dist.DistError) or any(sign in said for sign in _CONNECTIONS)


@dataclass
class _HangQuery:
    """A query of all ranks by one that has waited for a long time, and its verdict.

    `number` is that of the activity, `position` its line. `is_author`: this rank reached the
    verdict, rather than another waiting rank.
    """

    number: int
    position: Position
    verdict: HangVerdict
    is_author: bool
    age_s: float = 0.0  # while this process ran


@dataclass
class _Watchdog:
    """Threads that watch a rank, and its main thread's query after a failed collective."""

    groups: Groups
    doing: RankActivity
    timeout_s: float
    trains: int  # ID of the training thread
    deadline: ExitDeadline
    stop: StopSignal | None = None
    interrupted: bool = False
    hearing: threading.Lock = field(default_factory=threading.Lock)
    failed: str | None = None
    look: _HangQuery | None = None  # of a wait that may not be over
    answered: int = 0  # number of answered queries
    over: threading.Event = field(default_factory=threading.Event)
    store_silent_s: float = 0.0  # since the store's last answer, while this process ran
    seen: tuple[int, str] | None = None  # latest verdict in the store
    seen_s: float = 0.0  # how long it has been there
    told_of_surplus: bool = False

    def __post_init__(self) -> None:
        self.rank = self.groups.ranks.rank
        self.everyone = range(self.groups.ranks.world_size)
        # Ignore what was written while these ranks were watched before.
        entries = self.groups.store.add(f"alive/entries/{self.rank}", 1)
        self.store = PrefixStore(f"watch-{entries}", self.groups.store)
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        self.store.set(f"alive/who/{self.rank}", json.dumps(who))
        # NCCL's watchdog ends a process at the limit without finding the culprit.
        self.ends_silently = "nccl" in str(dist.get_backend_config())
        self.beats = _Heartbeats(self.rank, len(self.everyone), self.timeout_s)
        self.threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "alive"), (self._watch_store, "store deadline"))
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(_LOOK_S)  # unless it waits for a host that is cut off

    def _run(self) -> None:
        """Answer queries, and query all ranks if a step takes too long or a rank is silent."""
        store: Any = self.store.clone()  # type: ignore[attr-defined]  # torch's stub
        shared: Any = self.groups.shared
        if shared is not None:
            shared = shared.clone()
        verdicts = HangVerdicts(store)
        with suppress(RuntimeError):  # without the store's rank, waiting ranks find out themselves
            while not self.over.wait(_LISTEN_S):
                if self.look is not None:
                    self._follow(self.look, verdicts)
                if (asks := store.add(_ASKS, 0)) > self.answered:
                    self._answer(store, asks)
                if self._long():
                    self._look_at_wait(store)
                elif self.beats.send_and_check(store):
                    self._look_for_lost(store)
                self._heed_verdict(verdicts)
                self._heed_interruption(store)
                self._heed_surplus(store, shared)
                self.store_silent_s = 0.0
            self._withdraw(verdicts)
            self._heed_interruption(store)
            self._await_knowing(store)
            self.beats.end(store)

    def _watch_store(self) -> None:
        """End this process if the store does not answer, since threads that query it block."""
        limit_s = self.timeout_s + 2 * _LOOK_S  # only a query takes that long in `_run`
        while not self.over.wait(_LISTEN_S):
            self.store_silent_s += _LISTEN_S  # counted, since this process may have been stopped
            if self.store_silent_s > limit_s:
                self.deadline.end_now(f"{self.doing.what}: {_STORE_LOST}", 1)
                return

    def _look_for_lost(self, store: Any) -> None:
        """End the job if a rank is stopped, gone or cut off."""
        verdict = self._look_around(store, doubtful=True, final=True)
        if verdict is None:  # too busy for its heartbeat
            self.beats.reset()
        else:
            self._end(verdict)

    def _look_at_wait(self, store: Any) -> None:
        """Query all ranks before the time limit ends this process, possibly without a message."""
        self.doing.limited_s = None  # only once
        number, position = self.doing.number, find_position(self.trains)
        verdict = self._look_around(store, doubtful=False, final=False)
        if verdict is not None:
            self.look = _HangQuery(number, position, verdict, verdict.by == self.rank)

    def _follow(self, look: _HangQuery, verdicts: HangVerdicts) -> None:
        """Forget a query when the wait is over; end the process if nothing else ends the wait."""
        look.age_s += _LISTEN_S
        if (self.doing.number, find_position(self.trains)) != (look.number, look.position):
            self._withdraw(verdicts)
            self._restart_clock(look, 0.0)
        elif self.failed is not None:
            return
        elif look.age_s > self.timeout_s:
            standing = verdicts.finalize(look.verdict)
            if standing is not None:
                self._end(standing)
            self.look = None
        elif look.is_author and self.ends_silently and not look.verdict.final:
            if look.age_s > (1 - _LONG) * self.timeout_s - 2 * _LISTEN_S:
                look.verdict = verdicts.finalize(look.verdict) or look.verdict
        elif not look.is_author and verdicts.read() is None:  # its rank is free, this one is not
            self.look = None
            self._restart_clock(look, self.timeout_s)

    def _restart_clock(self, look: _HangQuery, ago_s: float) -> None:
        """Query again if the activity of the last query takes too long again."""
        if self.doing.number == look.number:
            self.doing.limited_s = time.monotonic() - ago_s

    def _withdraw(self, verdicts: HangVerdicts) -> None:
        """Withdraw this rank's verdict, unless a rank has ended because of it."""
        look, self.look = self.look, None
        if look is not None and look.is_author:
            verdicts.replace(look.verdict, None)

    def _heed_verdict(self, verdicts: HangVerdicts) -> None:
        """End with the others if this rank does not notice by itself.

        A verdict because of which no rank ends is dropped, since the rank that asked is lost.
        """
        verdict = verdicts.read()
        key = None if verdict is None else (verdict.number, verdict.sentence)
        self.seen_s = self.seen_s + _LISTEN_S if key is not None and key == self.seen else 0.0
        self.seen = key
        if verdict is None or self.failed is not None:
            return
        if verdict.final and self.seen_s > self.timeout_s:
            self._end(verdict)
        elif not verdict.final and self.seen_s > self.timeout_s + 2 * _LOOK_S:
            verdicts.replace(verdict, None)

    def _heed_interruption(self, store: Any) -> None:
        """Tell all ranks that a signal ends this one, or learn the same from another rank."""
        if self.stop is None or len(self.everyone) == 1:
            return
        with self.hearing:
            if self.interrupted:
                return
            if self.stop.ends_at_once():
                store.set(_INTERRUPTED, "1")
            elif not store.check([_INTERRUPTED]):
                return
            self.interrupted = True
            store.add(_KNOWING, 1)
        if self.stop.interrupt():
            self.deadline.start(self.stop.message, EXIT_INTERRUPTED, _INTERRUPTED_S)

    def _heed_surplus(self, store: Any, shared: Any) -> None:
        """Tell rank 0 of processes that come too many; before training, end all ranks for it."""
        session = self.groups.session
        if session is None or self.stop is None:
            return
        surplus = session.find_surplus(shared) if self.rank == 0 else None
        if self.stop.stepping:
            if surplus is not None and not self.told_of_surplus:
                self.told_of_surplus = True
                self.doing.on_surplus(f"{surplus}. {_CHECK_JOBS}")
            return
        if surplus is not None:
            store.set(_MIXED, format_mixed(surplus))
            time.sleep(2 * _LISTEN_S)  # the others read it from this rank's store
        if store.check([_MIXED]):
            self.deadline.end_now(store.get(_MIXED).decode(), BadInputError.exit_code)

    def _await_knowing(self, store: Any) -> None:
        """Let rank 0, which may serve the store, leave once all ranks know of the interruption."""
        until_s = time.monotonic() + _LOOK_S
        while self.interrupted and self.rank == 0 and time.monotonic() < until_s:
            if store.add(_KNOWING, 0) >= len(self.everyone):
                return
            time.sleep(0.05)

    def is_interrupted(self) -> bool:
        """Return whether a signal ended another rank before its first step was done."""

        def check_store() -> None:
            with suppress(RuntimeError):
                self._heed_interruption(self.store)

        _run_with_limit(check_store, _LOOK_S)
        return self.interrupted

    def _end(self, verdict: HangVerdict) -> None:
        sentence = verdict.sentence
        lost = RankLostError(f"{self.doing.what}: {sentence}", _is_process_running(sentence))
        self.deadline.end_now(str(lost), lost.exit_code)

    def _long(self) -> bool:
        since_s = self.doing.limited_s
        return since_s is not None and time.monotonic() - since_s > _LONG * self.timeout_s

    def _answer(self, store: Any, asks: int) -> None:
        """Write a snapshot of this rank, once for each query."""
        self.answered = asks
        ranks, host, neighbours = self.groups.ranks, socket.gethostname(), {}
        first = self.rank - ranks.local_rank
        for rank in range(first, first + ranks.local_world_size):
            who = _read_process(store, rank)
            if who.get("host") == host:
                neighbours[rank] = int(who["pid"])
        found = snapshot_rank(self.rank, self.trains, self.doing.what, neighbours, self.failed)
        store.set(f"alive/stands/{self.rank}", found.model_dump_json())
        store.set(f"alive/answered/{self.rank}", str(asks))

    def verdict(self, lost: bool, why: str) -> str | None:
        """Return the rank to blame for a collective that failed on this rank.

        None if no rank is to blame, and nothing else shows that one is `lost`.
        """
        self.failed = f"a failed collective: {why}"
        found: list[HangVerdict | None] = []

        def find_blamed() -> None:
            with suppress(RuntimeError):
                found.append(self._look_around(self.store, doubtful=not lost, final=True))

        _run_with_limit(find_blamed, 4 * _LOOK_S)
        if not found:
            return _STORE_LOST if lost else None
        (verdict,) = found
        if verdict is None:
            return None
        # If all fail by themselves, none fails because of another.
        if not lost and (_FAILED in verdict.sentence or self.rank in verdict.blamed):
            return None
        if self.rank == 0:
            time.sleep(_LOOK_S)  # it may hold the store, which others still query
        return verdict.sentence

    def report_failure(self, error: str) -> None:
        """Tell the ranks that will wait for this one that it has failed."""
        sentence = f"rank {self.rank} on {socket.gethostname()} {_FAILED}{error}"
        fault = HangVerdict(sentence=sentence, by=self.rank, blamed=(self.rank,), final=True)

        def write_fault() -> None:
            with suppress(RuntimeError):
                HangVerdicts(self.store).write(fault, unless=lambda one: one.final)

        _run_with_limit(write_fault, _LOOK_S)

    def _look_around(self, store: Any, doubtful: bool, final: bool) -> HangVerdict | None:
        """Query all ranks and return the blamed ones; the first rank to ask tells the others.

        None if all make progress, or if it is `doubtful` and all answer. `final`: this rank ends
        because of the verdict, so it accepts only one that has ended a rank, since the late rank
        may have arrived.
        """
        verdicts = HangVerdicts(store)

        def stands(one: HangVerdict) -> bool:
            return one.final or not final

        known = verdicts.read()
        if known is not None and stands(known):
            return known
        asks, found = self._query_all(store)
        known = verdicts.read()
        if known is not None and stands(known):
            return known
        guilty = [one for one in found if _is_lost(one)]
        if not guilty and not doubtful:
            # All ranks are there, and still wait for the subject of the verdict.
            settled = None if known is None else verdicts.finalize(known)
            if settled is not None:
                return settled
            guilty = find_culprits(found)
        # An error that may be this rank's own is only attributed to a rank that is gone.
        if not guilty and (doubtful or not any(one.state == "waits" for one in found)):
            return None
        verdict = HangVerdict(
            sentence=_format_culprits(guilty),
            by=self.rank,
            blamed=tuple(one.rank for one in guilty),
            number=asks,
            final=final,
        )
        standing = verdicts.write(verdict, unless=stands)
        if standing == verdict:
            when = datetime.now(UTC).isoformat(timespec="seconds")
            with suppress(Exception):  # an orderly end matters more than the states of all ranks
                report = HangReport(sentence=verdict.sentence, when=when, ranks=tuple(found))
                self.doing.on_hang(report)
        return standing

    def _query_all(self, store: Any) -> tuple[int, list[RankSnapshot]]:
        """Return the number of the query, and snapshots of all ranks."""
        asks = store.add(_ASKS, 1)
        self._answer(store, asks)  # its thread may be the one that asks
        until_s = time.monotonic() + _LOOK_S
        missing = list(self.everyone)
        while missing and time.monotonic() < until_s:
            time.sleep(0.1)
            missing = [rank for rank in missing if not _has_answered(store, rank, asks)]
            if all(_has_exited(_read_process(store, rank)) for rank in missing):
                break
        found = {
            rank: RankSnapshot.model_validate_json(store.get(f"alive/stands/{rank}"))
            for rank in self.everyone
            if rank not in missing
        }
        for rank in missing:
            found[rank] = _silent_snapshot(rank, _read_process(store, rank), found.values())
        return asks, [found[rank] for rank in self.everyone]


class _Heartbeats:
    """Heartbeats in the store: each rank writes its own, and checks that of the next.

    So the number of queries grows with the number of ranks, not that of pairs. Seconds are counted
    while this process runs, so a process that was stopped itself suspects no other.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._own, self._next = (f"alive/beat/{one % world_size}" for one in (rank, rank + 1))
        self._alone = world_size == 1
        self._limit_s = timeout_s
        self._every_s = min(timeout_s / _BEATS, _MOST_BETWEEN_S)
        self._number, self._since_own_s, self._since_next_s = 0, self._every_s, 0.0
        self._last: bytes | None = None

    def send_and_check(self, store: Any) -> bool:
        """Send this rank's heartbeat when it is due; return whether the next rank's is overdue."""
        if self._alone:
            return False
        self._since_own_s += _LISTEN_S
        self._since_next_s += _LISTEN_S
        if self._since_own_s >= self._every_s:
            self._since_own_s = 0.0
            self._number += 1
            store.set(self._own, str(self._number))
            found = store.get(self._next) if store.check([self._next]) else None
            if found != self._last or found == _ENDED:
                self._last = found
                self.reset()
        return self._since_next_s >= self._limit_s

    def reset(self) -> None:
        """Start counting from zero."""
        self._since_next_s = 0.0

    def end(self, store: Any) -> None:
        """Announce that no more heartbeats follow, and that nothing is wrong."""
        if not self._alone:
            store.set(self._own, _ENDED)


_ENDED = b"ended"


def _run_with_limit(ask: Callable[[], None], limit_s: float) -> None:
    """Query the store with a time limit, since it would wait forever for an unreachable host."""
    asking = threading.Thread(target=ask, name="asking the store", daemon=True)
    asking.start()
    asking.join(limit_s)


def _has_exited(who: dict[str, Any]) -> bool:
    """Return whether the state of a rank's process on this host shows that it will not answer."""
    here = who.get("host") == socket.gethostname()
    return here and process_state(int(who["pid"])) in _NOT_RUNNING


def _has_answered(store: Any, rank: int, asks: int) -> bool:
    key = f"alive/answered/{rank}"
    return store.check([key]) and int(store.get(key)) >= asks


def _read_process(store: Any, rank: int) -> dict[str, Any]:
    key = f"alive/who/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else {}


def _silent_snapshot(
    rank: int, who: dict[str, Any], others: Iterable[RankSnapshot]
) -> RankSnapshot:
    """Make a snapshot of a rank that does not answer, from what other ranks on its host see."""
    host, pid = str(who.get("host", "")), int(who.get("pid", 0))
    if host == socket.gethostname():
        seen = process_state(pid)
    else:
        seen = next((one.processes[rank] for one in others if rank in one.processes), "unseen")
    place = _NOT_RUNNING.get(seen, f"does not answer; its process is {seen}")
    if seen == "unseen":
        place = _UNSEEN
    return RankSnapshot(rank=rank, host=host, pid=pid, state="silent", place=place)


def _is_lost(one: RankSnapshot) -> bool:
    """Return whether a silent rank is lost for good, rather than too busy to answer."""
    return one.state == "silent" and one.place in {*_NOT_RUNNING.values(), _UNSEEN}


def find_culprits(found: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Return silent ranks, or else those that have started fewer collectives than others."""
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
        # A rank that waits in another group may wait for one that works.
        return [one for one in behind if one.state == "works"] or behind
    working = [one for one in found if one.state == "works"]
    return working if len(working) < len(found) else []


def _format_culprits(guilty: Sequence[RankSnapshot]) -> str:
    if not guilty:
        return (
            "all ranks are running, but not all reached it in time: one hangs, or a connection "
            "between two is broken"
        )
    one = guilty[0]
    who = f"rank {one.rank}" + (f" on {one.host}" if one.host else "")
    more = f" (and {len(guilty) - 1} more)" if len(guilty) > 1 else ""
    if one.state == "silent":
        return f"{who}{more} {one.place}"
    return f"{who}{more} does not reach it: in {one.doing}, it is at {one.place}"
