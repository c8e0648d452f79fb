"""A watchdog that finds the rank at fault when a collective fails or takes too long.

Every rank has a thread that writes a snapshot to the store when another rank queries it. The
snapshots identify a rank that is gone, suspended, or stuck in a line of Python while others wait in
a collective.
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

# Seconds for ranks to answer a query, including the wait for a free core.
_ANSWER_S = 4.0
# Share of the collectives' time limit after which a waiting rank queries the others.
_LONG = 0.8
# Bounds in seconds on the time in which a process must end by itself after a collective failed;
# between them, the collectives' time limit applies.
_LEAST_UNWIND_S, _MOST_UNWIND_S = 10.0, 60.0
_STORE_LOST = f"the host of the rendezvous {UNSEEN}"
_ASKS = "alive/asks"
# Store keys: that a signal has ended a rank, and the number of ranks that know about it.
_INTERRUPTED, _KNOWING = "alive/interrupted", "alive/knowing"
# Store key: an error found before training that ends all ranks.
_MIXED = "alive/mixed"
_CHECK_JOBS = (
    "The process was refused. If two jobs started at the same time, their ranks may be mixed: then "
    "stop both, and start each with a MASTER_PORT of its own."
)
# Seconds for an interrupted rank to end by itself before it is killed.
_INTERRUPTED_S = 4.0
# gloo raises plain RuntimeErrors, and so does DDP for errors in its hook. If a connection failed,
# the message contains one of these texts.
_CONNECTIONS = ("gloo/transport/", "DistNetworkError: ")
# Parts of a message that mean nothing to users.
_SOURCE = re.compile(
    r"^(\[[^\]]*\.cc:\d+\]|Got the following error when running the callback: DistNetworkError:) "
)


@dataclass
class RankActivity:
    """The current activity of this rank, described for the user.

    `limited_s`: when the activity's clock started, if the collectives' time limit applies to it;
    otherwise None. `on_hang`: called on one of the ranks with a report on all, if ranks hang.
    `on_surplus`: called on rank 0 with a message, if a process of another job tries to join during
    training.
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
    """Watch the ranks while they communicate, and name the rank at fault if one is lost.

    A rank that is suspended, gone or disconnected is found within `timeout_s`, even if others wait
    for it without a time limit, as during a save or an action of rank 0. `deadline` then ends the
    process, since nothing else interrupts such a wait.

    `stop`: if a signal ends a rank before its first step is done or after its last step, all other
    ranks end as well, including ranks that compile or wait in a collective.

    If a rank is gone or does not join a collective, RankLostError replaces the backend's error, and
    names that rank and its activity. If a signal ended the rank, InterruptedRunError is raised
    instead. Other errors are unchanged. `timeout_s` is the process groups' time limit.

    With NCCL, ranks wait in `outpace.probing.timing.rank_clock.await_event`, and NCCL's watchdog
    ends a process at the time limit, after all ranks have been queried. This has never run, since
    no machine with two GPUs was available.
    """
    own = ExitDeadline(None)
    deadline = own if deadline is None else deadline
    watcher = _Watchdog(groups, doing, timeout_s, threading.get_ident(), deadline, stop)
    watcher.start()
    try:
        yield
    except RuntimeError as error:
        lost = _is_communication_error(error)
        # Errors with a type of their own, such as CUDA's, are not communication failures.
        if not lost and type(error) is not RuntimeError:
            raise
        if watcher.is_interrupted():
            assert stop is not None
            raise InterruptedRunError(stop.message) from None
        why = next(iter(_SOURCE.sub("", str(error)).strip().splitlines()), type(error).__name__)
        verdict = watcher.find_verdict(lost, why)
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


def _is_communication_error(error: RuntimeError) -> bool:
    said = str(error)
    return isinstance(error, dist.DistError) or any(sign in said for sign in _CONNECTIONS)


@dataclass
class _HangQuery:
    """A query of all ranks during a long wait, and its verdict.

    `number`: number of the activity in which this rank waited. `position`: where it waited.
    `is_author`: whether this rank wrote the verdict, rather than another waiting rank.
    """

    number: int
    position: Position
    verdict: HangVerdict
    is_author: bool
    age_s: float = 0.0  # counted only while this process runs


@dataclass
class _Watchdog:
    """Watches one rank in two threads; after a failed collective, finds the rank to blame."""

    groups: Groups
    doing: RankActivity
    timeout_s: float
    trains: int  # ID of the training thread
    deadline: ExitDeadline
    stop: StopSignal | None = None
    interrupted: bool = False
    interruption_lock: threading.Lock = field(default_factory=threading.Lock)
    failed: str | None = None
    query: _HangQuery | None = None  # the query about the current wait
    answered: int = 0  # number of answered queries
    over: threading.Event = field(default_factory=threading.Event)
    # time since the store's last answer, counted only while this process runs
    store_silent_s: float = 0.0
    seen: tuple[int, str] | None = None  # latest verdict in the store
    seen_s: float = 0.0  # how long that verdict has been there
    reported_surplus: bool = False

    def __post_init__(self) -> None:
        self.rank = self.groups.ranks.rank
        self.everyone = range(self.groups.ranks.world_size)
        # Use new keys, since an earlier watchdog of these ranks may have left some.
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
            thread.join(_ANSWER_S)  # the thread ends, unless it waits for an unreachable host

    def _run(self) -> None:
        """Answer queries; query all ranks if a step takes too long or a rank is silent."""
        store: Any = self.store.clone()  # type: ignore[attr-defined]  # torch's stub
        shared: Any = self.groups.shared
        if shared is not None:
            shared = shared.clone()
        verdicts = HangVerdicts(store)
        with suppress(RuntimeError):  # if the store is gone, waiting ranks notice by themselves
            while not self.over.wait(LISTEN_S):
                if self.query is not None:
                    self._update_query(self.query, verdicts)
                if (asks := store.add(_ASKS, 0)) > self.answered:
                    self._write_snapshot(store, asks)
                if self._waits_long():
                    self._query_long_wait(store)
                elif self.beats.send_and_check(store):
                    self._end_if_rank_is_lost(store)
                self._obey_verdict(verdicts)
                self._share_interruption(store)
                self._check_surplus(store, shared)
                self.store_silent_s = 0.0
            self._withdraw_verdict(verdicts)
            self._share_interruption(store)
            self._await_interruption_known(store)
            self.beats.end(store)

    def _watch_store(self) -> None:
        """End this process if the store stops answering, since threads that query it block."""
        limit_s = self.timeout_s + 2 * _ANSWER_S  # only a query in `_run` takes that long
        while not self.over.wait(LISTEN_S):
            # counted rather than timed, since this process may have been suspended
            self.store_silent_s += LISTEN_S
            if self.store_silent_s > limit_s:
                self.deadline.end_now(f"{self.doing.what}: {_STORE_LOST}", 1)
                return

    def _end_if_rank_is_lost(self, store: Any) -> None:
        verdict = self._judge_ranks(store, doubtful=True, final=True)
        if verdict is None:  # too busy to send its heartbeat
            self.beats.reset()
        else:
            self._end_process(verdict)

    def _query_long_wait(self, store: Any) -> None:
        """Query all ranks before the time limit ends this process, possibly without a message."""
        self.doing.limited_s = None  # query only once
        number, position = self.doing.number, find_position(self.trains)
        verdict = self._judge_ranks(store, doubtful=False, final=False)
        if verdict is not None:
            self.query = _HangQuery(number, position, verdict, verdict.by == self.rank)

    def _update_query(self, query: _HangQuery, verdicts: HangVerdicts) -> None:
        """Drop this rank's query if it no longer waits; after `timeout_s`, end this process.

        The rank still waits if its position is the same as when it queried the others. Otherwise,
        the verdict is dropped as well. To end this process, the verdict is made final. If the
        backend ends processes without a message, as NCCL does, the author makes the verdict final
        shortly before the backend's limit.
        """
        query.age_s += LISTEN_S
        if (self.doing.number, find_position(self.trains)) != (query.number, query.position):
            self._withdraw_verdict(verdicts)
            self._restart_clock(query, 0.0)
        elif self.failed is not None:
            return
        elif query.age_s > self.timeout_s:
            standing = verdicts.finalize(query.verdict)
            if standing is not None:
                self._end_process(standing)
            self.query = None
        elif query.is_author and self.ends_silently and not query.verdict.final:
            if query.age_s > (1 - _LONG) * self.timeout_s - 2 * LISTEN_S:
                query.verdict = verdicts.finalize(query.verdict) or query.verdict
        # the author no longer waits, but this rank still does
        elif not query.is_author and verdicts.read() is None:
            self.query = None
            self._restart_clock(query, self.timeout_s)

    def _restart_clock(self, query: _HangQuery, ago_s: float) -> None:
        """Count the activity's time from `ago_s` seconds ago, unless another activity has begun.

        All ranks are queried again once this time is long.
        """
        if self.doing.number == query.number:
            self.doing.limited_s = time.monotonic() - ago_s

    def _withdraw_verdict(self, verdicts: HangVerdicts) -> None:
        query, self.query = self.query, None
        if query is not None and query.is_author:
            verdicts.replace(query.verdict, None)

    def _obey_verdict(self, verdicts: HangVerdicts) -> None:
        """End this rank if one final verdict has been stored for longer than the time limit.

        A verdict that stays even longer without becoming final is removed: the rank that wrote it
        must be lost.
        """
        verdict = verdicts.read()
        key = None if verdict is None else (verdict.number, verdict.sentence)
        self.seen_s = self.seen_s + LISTEN_S if key is not None and key == self.seen else 0.0
        self.seen = key
        if verdict is None or self.failed is not None:
            return
        if verdict.final and self.seen_s > self.timeout_s:
            self._end_process(verdict)
        elif not verdict.final and self.seen_s > self.timeout_s + 2 * _ANSWER_S:
            verdicts.replace(verdict, None)

    def _share_interruption(self, store: Any) -> None:
        """Tell all ranks if a signal ends this rank; end this rank if a signal ends another.

        The ranks learn of the signal through the store.
        """
        if self.stop is None or len(self.everyone) == 1:
            return
        with self.interruption_lock:
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

    def _check_surplus(self, store: Any, shared: Any) -> None:
        """Look for surplus processes: those that join when all ranks of the job have joined.

        During the training steps, rank 0 reports them once. Otherwise, all ranks end with an error.
        """
        session = self.groups.session
        if session is None or self.stop is None:
            return
        surplus = session.find_surplus(shared) if self.rank == 0 else None
        if self.stop.stepping:
            if surplus is not None and not self.reported_surplus:
                self.reported_surplus = True
                self.doing.on_surplus(f"{surplus}. {_CHECK_JOBS}")
            return
        if surplus is not None:
            store.set(_MIXED, format_mixed(surplus))
            time.sleep(2 * LISTEN_S)  # the others read it from this rank's store
        if store.check([_MIXED]):
            self.deadline.end_now(store.get(_MIXED).decode(), BadInputError.exit_code)

    def _await_interruption_known(self, store: Any) -> None:
        """Wait on rank 0 until all ranks know that a signal ends the job, or time is up.

        Rank 0 may serve the store, from which the others learn it.
        """
        until_s = time.monotonic() + _ANSWER_S
        while self.interrupted and self.rank == 0 and time.monotonic() < until_s:
            if store.add(_KNOWING, 0) >= len(self.everyone):
                return
            time.sleep(0.05)

    def is_interrupted(self) -> bool:
        """Return whether a signal ends the ranks, including a signal to another rank."""

        def check_store() -> None:
            with suppress(RuntimeError):
                self._share_interruption(self.store)

        _run_with_limit(check_store, _ANSWER_S)
        return self.interrupted

    def _end_process(self, verdict: HangVerdict) -> None:
        lost = RankLostError(self.doing.what, verdict.sentence)
        self.deadline.end_now(str(lost), lost.exit_code)

    def _waits_long(self) -> bool:
        since_s = self.doing.limited_s
        return since_s is not None and time.monotonic() - since_s > _LONG * self.timeout_s

    def _write_snapshot(self, store: Any, asks: int) -> None:
        """Write a snapshot of this rank to the store, in answer to the query with number `asks`."""
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

    def find_verdict(self, lost: bool, why: str) -> str | None:
        """Return a sentence about the rank to blame for this rank's failed collective.

        `lost`: whether the error is about a connection. Returns None if no other rank is to blame.
        """
        self.failed = f"a failed collective: {why}"
        found: list[HangVerdict | None] = []

        def find_blamed() -> None:
            with suppress(RuntimeError):
                found.append(self._judge_ranks(self.store, doubtful=not lost, final=True))

        _run_with_limit(find_blamed, 4 * _ANSWER_S)
        if not found:
            return _STORE_LOST if lost else None
        (verdict,) = found
        if verdict is None:
            return None
        # If this rank's error is not about a connection, and a rank failed on its own, keep the
        # error.
        if not lost and (FAILED in verdict.sentence or self.rank in verdict.blamed):
            return None
        if self.rank == 0:
            time.sleep(_ANSWER_S)  # this process may serve the store, which others still query
        return verdict.sentence

    def report_failure(self, error: str) -> None:
        sentence = f"rank {self.rank} on {socket.gethostname()} {FAILED}{error}"
        fault = HangVerdict(sentence=sentence, by=self.rank, blamed=(self.rank,), final=True)

        def write_fault() -> None:
            with suppress(RuntimeError):
                HangVerdicts(self.store).write(fault, unless=lambda one: one.final)

        _run_with_limit(write_fault, _ANSWER_S)

    def _judge_ranks(self, store: Any, doubtful: bool, final: bool) -> HangVerdict | None:
        """Query all ranks, and return the verdict on those to blame.

        The first rank to query writes the verdict to the store, and the others accept it. Returns
        None if all ranks make progress, or if all answer and it is `doubtful` whether one is lost.
        `final`: whether the verdict ends this rank. If so, a stored verdict is accepted only if it
        is final, since the rank that it blames may have arrived in the meantime.
        """
        verdicts = HangVerdicts(store)

        def takes_precedence(one: HangVerdict) -> bool:
            return one.final or not final

        known = verdicts.read()
        if known is not None and takes_precedence(known):
            return known
        asks, found = self._query_all(store)
        known = verdicts.read()
        if known is not None and takes_precedence(known):
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
        standing = verdicts.write(verdict, unless=takes_precedence)
        if standing == verdict:
            when = datetime.now(UTC).isoformat(timespec="seconds")
            with suppress(Exception):  # an orderly end matters more than the states of all ranks
                report = HangReport(sentence=verdict.sentence, when=when, ranks=tuple(found))
                self.doing.on_hang(report)
        return standing

    def _query_all(self, store: Any) -> tuple[int, list[RankSnapshot]]:
        """Ask all ranks for snapshots; return the query's number, and the snapshots by rank."""
        asks = store.add(_ASKS, 1)
        self._write_snapshot(store, asks)  # the thread that asks may be the one that answers
        until_s = time.monotonic() + _ANSWER_S
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
    """Call `ask`, which queries the store, and wait for it for at most `limit_s` seconds.

    The store of an unreachable host never answers.
    """
    asking = threading.Thread(target=ask, name="asking the store", daemon=True)
    asking.start()
    asking.join(limit_s)


def _has_answered(store: Any, rank: int, asks: int) -> bool:
    key = f"alive/answered/{rank}"
    return store.check([key]) and int(store.get(key)) >= asks
