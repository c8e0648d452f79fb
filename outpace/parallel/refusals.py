"""Refusals in a user's loop: if one rank refuses, all ranks end with the same message.

With gloo, the other ranks' collective fails when a peer exits, and they find the message in the
rendezvous store. With NCCL the collective waits, so a thread checks the store and ends the rank
(`refusal_watch`).
"""

import atexit
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property, lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

from outpace.parallel.refusal_watch import RefusalWatch, waits_for_ever
from outpace.records.errors import BadInputError, OutpaceError

_REFUSAL = "outpace/refusal"
_WAIT_S, _HEAR_S, _LOOK_AGAIN_S, _READ_AGAIN_S = 10.0, 1.0, 0.02, 0.002
_READ_LIMIT_S = 600.0  # how long a rank that reads waits for others, which may evaluate or save
_LOOK_FOR_ENDS_S = 0.5


@contextmanager
def refuse_together(world_size: int, in_step: bool = False) -> Iterator[None]:
    """Raise one rank's OutpaceError on all ranks. With NCCL, this ends the other ranks.

    The rank that raises the error waits at exit until the others have received it. If that rank
    catches the error and enters this context again, the error counts as handled, and other ranks no
    longer receive it.

    `in_step`: the context surrounds a training step, in which the other ranks may wait for the rank
    that raised the error. That rank then cannot enter its next step until all ranks have received
    the error or raised their own.
    """
    if world_size == 1:
        yield
        return
    _begin_call()
    watch = _start_watch()
    if watch is not None:
        watch.enter()
    try:
        yield
    except OutpaceError as error:
        if not error.on_all_ranks:
            _publish_refusal(str(error), world_size, in_step)
        raise
    except torch.OutOfMemoryError:  # raised as this rank's own error
        raise
    except RuntimeError as error:  # raised by gloo or by `peer_memory`
        sentence = _await_refusal()
        if sentence is None:
            raise
        refusal = BadInputError(sentence)
        refusal.on_all_ranks = True
        raise refusal from error
    finally:
        if watch is not None:
            watch.leave()


def refuse_between_steps(sentence: str) -> BadInputError:
    """Return an error for this rank to raise, and publish it for the other ranks.

    The other ranks raise it in their next call, as described in `refuse_together`.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        _publish_refusal(sentence, dist.get_world_size(), in_step=False, ahead=1)
    return BadInputError(sentence)


class LoopPosition:
    """This rank's position in the user's training loop, to compare with other ranks.

    The position is the number of calls so far, and of reads since the last call. Between calls,
    ranks communicate only when they read a value that is split over ranks. Before such a read, they
    compare positions, because a read on some ranks only would hang.
    """

    def __init__(self) -> None:
        self._call, self._reads = -1, 0
        store = _default_store()
        if store is not None:
            _publish_process(store)
        self.announce()

    def announce(self) -> None:
        """Publish that a call has begun, without waiting for other ranks."""
        self._publish_place(0)

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks have arrived at the same read.

        Raises BadInputError if another rank has begun its next call, has exited or does not arrive
        in time. `what` is a phrase for the read in that message, after "rank 0 alone".
        """
        store = _default_store()
        if store is None:
            return
        self._publish_place(self._reads + 1)
        until_s = time.monotonic() + _READ_LIMIT_S
        look_s = time.monotonic() + _LOOK_FOR_ENDS_S
        mine = self._call, self._reads
        keys = [_place_key(rank) for rank in range(dist.get_world_size())]
        while True:
            try:
                places = [tuple(map(int, one.split())) for one in store.multi_get(keys)]
                now_s = time.monotonic()
                behind = [rank for rank, place in enumerate(places) if place < mine]
                if now_s > look_s and behind:
                    look_s = now_s + _LOOK_FOR_ENDS_S
                    _require_running(store, behind, what)
            except RuntimeError as error:  # probably the rank that hosts the store has ended
                raise _explain_end(0, what, error) from error
            late = now_s > until_s
            ahead = [r for r, place in enumerate(places) if place > mine or (late and place < mine)]
            if ahead:
                raise refuse_between_steps(
                    f"rank {dist.get_rank()} alone {what}, of which each rank has only a part, "
                    f"while rank {ahead[0]} does not. Do this on all ranks (and print on one)."
                )
            if all(place == mine for place in places):
                dist.barrier()  # until all have seen it, because a rank that continues moves on
                return
            time.sleep(_READ_AGAIN_S)

    def _publish_place(self, reads: int) -> None:
        store = _default_store()
        if store is not None:
            call = _refusal_of_rank(store).call
            self._reads = reads if call == self._call else min(reads, 1)
            self._call = call
            store.set(_place_key(dist.get_rank()), f"{self._call} {self._reads}")


def _place_key(rank: int) -> str:
    return f"outpace/place-{rank}"


def _process_key(rank: int) -> str:
    return f"outpace/process-{rank}"


@lru_cache(maxsize=1)
def _publish_process(store: Store) -> None:
    """Publish this rank's host and process ID, and at exit that the process has ended."""
    key = _process_key(dist.get_rank())
    store.set(key, f"{_host_id()} {os.getpid()}")
    atexit.register(_publish_end, store, key)


def _publish_end(store: Store, key: str) -> None:
    with suppress(RuntimeError):  # the store's rank may have ended
        store.set(key, "ended")


def _require_running(store: Store, ranks: Sequence[int], what: str) -> None:
    host = _host_id()
    for rank in ranks:
        key = _process_key(rank)
        where, _, process = (store.get(key).decode() if store.check([key]) else "").partition(" ")
        if where == "ended" or (host and where == host and not _is_running(process)):
            raise _explain_end(rank, what)


def _explain_end(rank: int, what: str, error: RuntimeError | None = None) -> BadInputError:
    lines = str(error or "").strip().splitlines()
    said = f" or does not answer ({lines[0][:200]})" if lines else ""
    return refuse_between_steps(
        f"rank {dist.get_rank()} {what}, of which each rank has a part, but rank {rank} has ended"
        f"{said}. If it failed, its own error says why. Otherwise, do this on all ranks before "
        "one ends."
    )


@lru_cache(maxsize=1)
def _host_id() -> str:
    """Return an identifier of this system's boot and PID namespace; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def _is_running(process: str) -> bool:
    try:
        stat = Path("/proc", process, "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")  # a zombie, dead


class _RankRefusal:
    """The count of this rank's calls, and the error by which the rank refuses a call.

    The store keeps the error for other ranks until this rank's next call.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.call, self._handled_call = 0, 0  # numbers of calls; all ranks make the same calls
        self._registered = False
        self._world_size = 0
        self._entry = ""  # the store's entry: rank, a newline, and the sentence
        self._mine = ""
        self._found = ""  # another rank's refusal, found by the watch
        self._in_step, self._wait_s = False, _WAIT_S

    def publish(self, sentence: str, world_size: int, in_step: bool, ahead: int) -> None:
        """Store the message for other ranks until `withdraw`, unless a rank has stored one.

        `ahead` is the number of calls until the one that is refused: 0 for the current call.
        """
        if self._mine:
            return
        self._world_size, self._in_step = world_size, in_step
        self._mine = f"{dist.get_rank()}-{self.call + ahead}\n{sentence}"
        self._entry = self._store.compare_set(_REFUSAL, "", self._mine).decode()
        self._store.add(_receipts_key(self._entry), 1)
        if not self._registered:
            atexit.register(self._end_collectives)
        self._registered = True

    def withdraw(self) -> None:
        """Begin a call, and withdraw this rank's refusal of an earlier call.

        Raises BadInputError if other ranks are still in a step that this rank has refused.
        """
        if self._mine and self._in_step and not self._wait_until_heard():
            error = BadInputError(
                "this rank refused a step and began the next one while other ranks are still in "
                "the refused step. Let the error end the loop. It was: "
                f"{self._mine.partition(chr(10))[2]}"
            )
            error.on_all_ranks = True  # the others received the first one
            raise error
        self.call += 1
        if not self._mine:
            return
        self._handled_call = self.call - 1
        with suppress(RuntimeError):
            self._store.compare_set(_REFUSAL, self._mine, "")
        self._mine = ""

    def _wait_until_heard(self) -> bool:
        """Return whether all ranks have received the refusal or refused too, after a wait.

        After a first timeout, later calls do not wait.
        """
        until_s, key = time.monotonic() + self._wait_s, _receipts_key(self._entry)
        self._wait_s = 0.0
        with suppress(RuntimeError):  # the store's rank may have ended
            while self._store.add(key, 0) < self._world_size:
                if time.monotonic() > until_s:
                    return False
                time.sleep(_LOOK_AGAIN_S)
        self._wait_s = _WAIT_S
        return True

    def is_new(self, entry: str) -> bool:
        """Return whether a refusal concerns a later call than the last one that was handled.

        `entry` is the text of the refusal in the store.
        """
        call = entry.partition("\n")[0].rpartition("-")[2]
        return call.isdigit() and int(call) > self._handled_call

    def find(self, store: Store) -> str | None:
        """Return the message of another rank that has refused this call, and acknowledge it."""
        entry = store.get(_REFUSAL).decode() if store.check([_REFUSAL]) else ""
        where, _, sentence = entry.partition("\n")
        if entry in ("", self._mine) or where.rpartition("-")[2] != str(self.call):
            return None
        if entry != self._found:
            self._found = entry
            store.add(_receipts_key(entry), 1)
        return sentence

    @cached_property
    def watch(self) -> RefusalWatch:
        return RefusalWatch(self._store, self.find)

    def _end_collectives(self) -> None:
        """Make the other ranks' collectives fail.

        The store stays available until the other ranks have read the reason, or until a timeout.
        """
        if not self._mine:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        until_s, key = time.monotonic() + _WAIT_S, _receipts_key(self._entry)
        with suppress(RuntimeError):
            while time.monotonic() < until_s and self._store.add(key, 0) < self._world_size:
                time.sleep(_LOOK_AGAIN_S)


def _receipts_key(entry: str) -> str:
    return f"{_REFUSAL}-heard-{entry.partition(chr(10))[0]}"


@lru_cache(maxsize=1)
def _refusal_of_rank(store: Store) -> _RankRefusal:
    return _RankRefusal(store)


def _default_store() -> Store | None:
    return _get_default_store() if dist.is_initialized() else None


def _begin_call() -> None:
    store = _default_store()
    if store is not None:
        _refusal_of_rank(store).withdraw()


def _start_watch() -> RefusalWatch | None:
    """Return the watchdog; None if collectives fail by themselves when a rank has exited."""
    store = _default_store()
    return _refusal_of_rank(store).watch if store is not None and waits_for_ever() else None


def _publish_refusal(sentence: str, world_size: int, in_step: bool, ahead: int = 0) -> None:
    store = _default_store()
    if store is not None:
        with suppress(RuntimeError):  # the store's rank may have ended
            _refusal_of_rank(store).publish(sentence, world_size, in_step, ahead)


def _await_refusal() -> str | None:
    """Return another rank's refusal, and acknowledge it; None if none arrives in time."""
    store = _default_store()
    if store is None:
        return None
    until_s = time.monotonic() + _HEAR_S
    with suppress(RuntimeError):
        store.wait([_REFUSAL], timedelta(seconds=_HEAR_S))
        while not _refusal_of_rank(store).is_new(entry := store.get(_REFUSAL).decode()):
            if time.monotonic() > until_s:
                return None
            time.sleep(_LOOK_AGAIN_S)
        store.add(_receipts_key(entry), 1)
        return entry.partition("\n")[2]
    return None


def has_other_cause(error: Exception) -> bool:
    """Return whether an error comes from memory or a lost rank, not from the user's module."""
    if isinstance(error, torch.OutOfMemoryError | dist.DistError):
        return True
    text = str(error).lower()
    return "gloo" in text or "nccl" in text
