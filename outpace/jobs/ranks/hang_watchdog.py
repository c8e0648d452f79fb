"""A watchdog that finds the rank at fault when a collective fails or takes too long.

Every rank has a thread that writes a snapshot to the store when another rank asks. This identifies
a rank that is gone, suspended, or stuck in a line of Python while others wait in a collective.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from outpace.jobs.ranks.hang_culprits import (
    FAILED,
    UNSEEN,
    RankLostError,
    find_culprits,
    format_culprits,
    has_exited,
    is_lost,
    read_process,
    silent_snapshot,
)
from outpace.jobs.ranks.hang_verdict import HangVerdict, HangVerdicts
from outpace.jobs.ranks.heartbeats import LISTEN_S, Heartbeats
from outpace.jobs.ranks.process_groups import Groups
from outpace.jobs.ranks.rank_snapshot import Position, find_position, snapshot_rank
from outpace.jobs.ranks.session import format_mixed
from outpace.launch.exit_deadline import ExitDeadline
from outpace.records.errors import EXIT_INTERRUPTED, BadInputError, InterruptedRunError
from outpace.records.hang_report import HangReport, RankSnapshot
from outpace.training.guards import StopSignal

# Seconds to allow for a rank that waits for a core, so that it does not count as dead.
_LOOK_S = 4.0
# Ranks are queried if a step takes longer than this share of the collectives' time limit.
_LONG = 0.8
# Bounds, in seconds, on the time for a process to end by itself after another rank made a
# collective fail; between these bounds, it is the collectives' time limit.
_LEAST_UNWIND_S, _MOST_UNWIND_S = 10.0, 60.0
_STORE_LOST = f"the host of the rendezvous {UNSEEN}"
_ASKS = "alive/asks"
# Keys: a signal has ended a rank, and how many ranks know about it.
_INTERRUPTED, _KNOWING = "alive/interrupted", "alive/knowing"
# Key: problems with the ranks that were found before training.
_MIXED = "alive/mixed"
_CHECK_JOBS = (
    "It was refused. If two jobs started at the same time, their ranks may be mixed: then stop "
    "both, and start each with a MASTER_PORT of its own."
)
# Seconds for an interrupted rank to end by itself before it is killed.
_INTERRUPTED_S = 4.0
# gloo raises plain RuntimeErrors, and so does DDP for errors in its hook; errors of failed
# connections contain one of these texts.
_CONNECTIONS = ("gloo/transport/", "DistNetworkError: ")
# Parts of a message that mean nothing to users.
_SOURCE = re.compile(
    r"^(\[[^\]]*\.cc:\d+\]|Got the following error when running the callback: DistNetworkError:) "
)


@dataclass
class RankActivity:
    """The current activity of this rank, described for the user.

    `limited_s` is the start time of an activity to which the collectives' time limit applies. If
    ranks hang, `on_hang` is called on one of them with a report on all. `on_surplus` is called on
    rank 0 with a message if a process of another job tries to join while these ranks train.
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
    """Watch the ranks while they communicate: each answers through the store when another asks.

    A rank that is suspended, gone or disconnected is found within `timeout_s` even if others wait
    for it without a time limit, as during a save or while rank 0 acts for all. `deadline` then ends
    the process, since nothing else interrupts that wait.

    If a signal ends a rank before its first step is done, or after its last (`stop`), all others
    end as well, including those that are compiling or waiting in a collective.

    If a rank is gone or does not join a collective, RankLostError replaces the backend's error and
    names that rank and its activity. If a signal ended that rank, InterruptedRunError replaces it.
    Other errors are unchanged. The wait is limited by `timeout_s`, the process groups' time limit.
    The NCCL path has never run, since no machine with two GPUs was available: there,
    `outpace.probing.timing.rank_clock.await_event` waits, and NCCL's watchdog ends the process
    after the query that precedes the limit.
    """
    own = ExitDeadline(None)
    deadline = own if deadline is None else deadline
    watcher = _Watchdog(groups, doing, timeout_s, threading.get_ident(), deadline, stop)
    watcher.start()
    try:
        yield
    except RuntimeError as error:
        lost = _communication(error)
        # CUDA errors and others have types which show that they are no communication failures.
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
        lost_rank = RankLostError(doing.what, verdict, f" ({why})")
        grace_s = min(max(timeout_s, _LEAST_UNWIND_S), _MOST_UNWIND_S)
        deadline.start(str(lost_rank), lost_rank.exit_code, grace_s)
        raise lost_rank from error
    finally:
        watcher.close()
        own.leave()


def _communication(error: RuntimeError) -> bool:
    """Return whether an error means that ranks could not reach each other, at least not in time."""
    said = str(error)
    return isinstance(error, dist.DistError) or any(sign in said for sign in _CONNECTIONS)


@dataclass
class _HangQuery:
    """A query of all ranks by a rank that has waited for a long time, and its verdict.

    `number` is the activity's number, `position` where this rank waited. `is_author`: this rank,
    not another waiting rank, wrote the verdict.
    """

    number: int
    position: Position
    verdict: HangVerdict
    is_author: bool
    age_s: float = 0.0  # counted only while this process runs


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
    look: _HangQuery | None = None  # a query about a wait that may not be over
    answered: int = 0  # number of answered queries
    over: threading.Event = field(default_factory=threading.Event)
    # time since the store's last answer, counted only while this process runs
    store_silent_s: float = 0.0
    seen: tuple[int, str] | None = None  # latest verdict in the store
    seen_s: float = 0.0  # how long that verdict has been there
    told_of_surplus: bool = False

    def __post_init__(self) -> None:
        self.rank = self.groups.ranks.rank
        self.everyone = range(self.groups.ranks.world_size)
        # Ignore what was written when these ranks were watched earlier.
        entries = self.groups.store.add(f"alive/entries/{self.rank}", 1)
        self.store = PrefixStore(f"watch-{entries}", self.groups.store)
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        self.store.set(f"alive/who/{self.rank}", json.dumps(who))
        # NCCL's watchdog ends a process at the limit without identifying the culprit.
        self.ends_silently = "nccl" in str(dist.get_backend_config())
        self.beats = Heartbeats(self.rank, len(self.everyone), self.timeout_s)
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
            thread.join(_LOOK_S)  # the thread ends, unless it waits for an unreachable host

    def _run(self) -> None:
        """Answer queries; query all ranks if a step takes too long or a rank is silent."""
        store: Any = self.store.clone()  # type: ignore[attr-defined]  # torch's stub
        shared: Any = self.groups.shared
        if shared is not None:
            shared = shared.clone()
        verdicts = HangVerdicts(store)
        with suppress(RuntimeError):  # without the store's rank, waiting ranks find out themselves
            while not self.over.wait(LISTEN_S):
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
        """End this process if the store stops answering, since threads that query it block."""
        limit_s = self.timeout_s + 2 * _LOOK_S  # only a query in `_run` takes that long
        while not self.over.wait(LISTEN_S):
            # counted rather than timed, since this process may have been suspended
            self.store_silent_s += LISTEN_S
            if self.store_silent_s > limit_s:
                self.deadline.end_now(f"{self.doing.what}: {_STORE_LOST}", 1)
                return

    def _look_for_lost(self, store: Any) -> None:
        """End the job if a rank is suspended, gone or unreachable."""
        verdict = self._look_around(store, doubtful=True, final=True)
        if verdict is None:  # too busy to send its heartbeat
            self.beats.reset()
        else:
            self._end(verdict)

    def _look_at_wait(self, store: Any) -> None:
        """Query all ranks before the time limit ends this process, possibly without a message."""
        self.doing.limited_s = None  # query only once
        number, position = self.doing.number, find_position(self.trains)
        verdict = self._look_around(store, doubtful=False, final=False)
        if verdict is not None:
            self.look = _HangQuery(number, position, verdict, verdict.by == self.rank)

    def _follow(self, look: _HangQuery, verdicts: HangVerdicts) -> None:
        """Drop a query when the wait is over; end the process if nothing else ends the wait."""
        look.age_s += LISTEN_S
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
            if look.age_s > (1 - _LONG) * self.timeout_s - 2 * LISTEN_S:
                look.verdict = verdicts.finalize(look.verdict) or look.verdict
        # the rank that asked no longer waits, but this one still does
        elif not look.is_author and verdicts.read() is None:
            self.look = None
            self._restart_clock(look, self.timeout_s)

    def _restart_clock(self, look: _HangQuery, ago_s: float) -> None:
        """Query again if the activity takes too long once more after the last query."""
        if self.doing.number == look.number:
            self.doing.limited_s = time.monotonic() - ago_s

    def _withdraw(self, verdicts: HangVerdicts) -> None:
        """Withdraw this rank's verdict, unless a rank has ended because of it."""
        look, self.look = self.look, None
        if look is not None and look.is_author:
            verdicts.replace(look.verdict, None)

    def _heed_verdict(self, verdicts: HangVerdicts) -> None:
        """End this rank on a verdict that it has not noticed by itself.

        If no rank ends because of a verdict, drop it: the rank that asked is lost.
        """
        verdict = verdicts.read()
        key = None if verdict is None else (verdict.number, verdict.sentence)
        self.seen_s = self.seen_s + LISTEN_S if key is not None and key == self.seen else 0.0
        self.seen = key
        if verdict is None or self.failed is not None:
            return
        if verdict.final and self.seen_s > self.timeout_s:
            self._end(verdict)
        elif not verdict.final and self.seen_s > self.timeout_s + 2 * _LOOK_S:
            verdicts.replace(verdict, None)

    def _heed_interruption(self, store: Any) -> None:
        """Tell all ranks that a signal ends this one, or learn that from another rank."""
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
        """Report surplus processes to rank 0; before training, end all ranks because of them."""
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
            time.sleep(2 * LISTEN_S)  # the others read it from this rank's store
        if store.check([_MIXED]):
            self.deadline.end_now(store.get(_MIXED).decode(), BadInputError.exit_code)

    def _await_knowing(self, store: Any) -> None:
        """Keep rank 0 running, since it may serve the store, until all ranks know of the
        interruption.
        """
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
        lost = RankLostError(self.doing.what, verdict.sentence)
        self.deadline.end_now(str(lost), lost.exit_code)

    def _long(self) -> bool:
        since_s = self.doing.limited_s
        return since_s is not None and time.monotonic() - since_s > _LONG * self.timeout_s

    def _answer(self, store: Any, asks: int) -> None:
        """Write a snapshot of this rank, once per query."""
        self.answered = asks
        ranks, host, neighbours = self.groups.ranks, socket.gethostname(), {}
        first = self.rank - ranks.local_rank
        for rank in range(first, first + ranks.local_world_size):
            who = read_process(store, rank)
            if who.get("host") == host:
                neighbours[rank] = int(who["pid"])
        found = snapshot_rank(self.rank, self.trains, self.doing.what, neighbours, self.failed)
        store.set(f"alive/stands/{self.rank}", found.model_dump_json())
        store.set(f"alive/answered/{self.rank}", str(asks))

    def verdict(self, lost: bool, why: str) -> str | None:
        """Return the rank to blame for a collective that failed on this rank.

        Returns None if no rank is to blame and nothing else shows that one is `lost`.
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
        # If all ranks failed on their own, no rank failed because of another.
        if not lost and (FAILED in verdict.sentence or self.rank in verdict.blamed):
            return None
        if self.rank == 0:
            time.sleep(_LOOK_S)  # this process may serve the store, which others still query
        return verdict.sentence

    def report_failure(self, error: str) -> None:
        """Tell ranks that will wait for this one that it has failed."""
        sentence = f"rank {self.rank} on {socket.gethostname()} {FAILED}{error}"
        fault = HangVerdict(sentence=sentence, by=self.rank, blamed=(self.rank,), final=True)

        def write_fault() -> None:
            with suppress(RuntimeError):
                HangVerdicts(self.store).write(fault, unless=lambda one: one.final)

        _run_with_limit(write_fault, _LOOK_S)

    def _look_around(self, store: Any, doubtful: bool, final: bool) -> HangVerdict | None:
        """Query all ranks and return the verdict; the first rank to ask writes it for the others.

        Returns None if all make progress, or if all answer and it is `doubtful` that one is lost.
        `final`: this rank ends because of the verdict, so of others' verdicts it accepts only one
        that has ended a rank, since the late rank may have arrived.
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
        guilty = [one for one in found if is_lost(one)]
        if not guilty and not doubtful:
            # All ranks are present, and they still wait for what the verdict is about.
            settled = None if known is None else verdicts.finalize(known)
            if settled is not None:
                return settled
            guilty = find_culprits(found)
        # If the error may be this rank's own, blame it only on a rank that is gone.
        if not guilty and (doubtful or not any(one.state == "waits" for one in found)):
            return None
        verdict = HangVerdict(
            sentence=format_culprits(guilty),
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
        """Return the query's number, and snapshots of all ranks."""
        asks = store.add(_ASKS, 1)
        self._answer(store, asks)  # the thread that asks may be the one that answers
        until_s = time.monotonic() + _LOOK_S
        missing = list(self.everyone)
        while missing and time.monotonic() < until_s:
            time.sleep(0.1)
            missing = [rank for rank in missing if not _has_answered(store, rank, asks)]
            if all(has_exited(read_process(store, rank)) for rank in missing):
                break
        found = {
            rank: RankSnapshot.model_validate_json(store.get(f"alive/stands/{rank}"))
            for rank in self.everyone
            if rank not in missing
        }
        for rank in missing:
            found[rank] = silent_snapshot(rank, read_process(store, rank), found.values())
        return asks, [found[rank] for rank in self.everyone]


def _run_with_limit(ask: Callable[[], None], limit_s: float) -> None:
    """Query the store with a time limit, since for an unreachable host it would wait forever."""
    asking = threading.Thread(target=ask, name="asking the store", daemon=True)
    asking.start()
    asking.join(limit_s)


def _has_answered(store: Any, rank: int, asks: int) -> bool:
    key = f"alive/answered/{rank}"
    return store.check([key]) and int(store.get(key)) >= asks
