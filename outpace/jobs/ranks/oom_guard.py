"""Orderly end of all ranks when memory runs out, with the reason and settings that would fit.

A shortage is detected when an allocator raises, or when a monitoring thread finds this process's
memory above a limit. The training thread is then interrupted as soon as it is back in Python, and
unwinds without leaving half-written files. The other ranks learn of the shortage through the job's
store and are interrupted, too. If a rank cannot be interrupted, because it waits in a collective or
computes without end, the monitoring thread ends its process, if it was given a function for that
(`end`).
"""

import json
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import NoReturn

import torch
from torch._C._distributed_c10d import Store

from outpace.jobs.ranks.memory_monitor import Reading, Watch, call_off, first_too_high, interrupt
from outpace.probing.hardware.process_memory import anonymous_bytes, find_cgroup, give_back_free
from outpace.records.errors import EXIT_OUT_OF_MEMORY, OutOfMemoryError, OutpaceError
from outpace.records.ranks import Ranks
from outpace.records.units import show_bytes

# Seconds for the training thread to return to Python before the process is ended.
GRACE_S = 5.0
# Maximum seconds from the shortage to the end of every rank, including communication and
# predictions.
END_S = 120.0
_HEAR_EVERY = 10  # checks of memory per check of the store
_SHORT, _ANSWER, _HEARD = "memory/short", "memory/answer", "memory/heard"
_SHORT_ON_HOST = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_MIB = 1 << 20

End = Callable[[str, int], NoReturn]


@dataclass(frozen=True)
class Shortage:
    """A memory shortage on a rank, described for the user.

    `used_bytes`: how much the rank uses of the memory that ran out. `anatomy`: lines that list what
    holds it.
    """

    rank: int
    sentence: str
    used_bytes: int
    anatomy: tuple[str, ...] = ()
    advice: str = ""


def readings(limit_bytes: int | None, device: torch.device, ranks: Ranks) -> list[Reading]:
    """Return the memory limits to monitor: --memory-limit on a CPU, and the control group's limit.

    A control group (cgroup) is shared by all ranks of this host.
    """
    found = []
    if limit_bytes is not None and device.type == "cpu":
        above = limit_bytes + max(64 * _MIB, limit_bytes // 10)
        own = Reading("--memory-limit", limit_bytes, 1, anonymous_bytes, limit_bytes, above)
        found.append(own)
    group = find_cgroup()
    if group is not None and group.limit_bytes is not None:
        room = min(max(64 * _MIB, group.limit_bytes // 32), group.limit_bytes // 8)
        soft, hard = group.limit_bytes - room, group.limit_bytes - room // 2
        name, share = "the control group's limit", ranks.local_world_size
        found.append(Reading(name, group.limit_bytes, share, group.used_bytes, soft, hard))
    return found


class Guard:
    """A context that raises OutOfMemoryError on all ranks if one of them runs out of memory.

    The job sets these functions as soon as it can: `answer` formats the message about a shortage,
    `list_holders` lists what holds memory, `relieve` frees memory that training can spare, and
    `tidy` cleans up before the process ends. `end` then ends this process, with the message and an
    exit code.
    """

    def __init__(self, ranks: Ranks, device: torch.device, end: End | None) -> None:
        self.list_holders: Callable[[int], tuple[str, ...]] = lambda used_bytes: ()
        self.answer: Callable[[Shortage], str] = lambda shortage: shortage.sentence
        self.tidy: Callable[[str], None] = lambda message: None
        self.relieve: Callable[[], bool] = lambda: False
        self._ranks = ranks
        self._device = device
        self._end = end
        self._store: Store | None = None
        self._readings: Sequence[Reading] = ()
        self._watch: Watch | None = None
        self._looks = 0
        self._lock = threading.Lock()
        self._thread = 0
        self._shortage: Shortage | None = None
        self._since_s = 0.0
        self._unwinding = False
        self._answered: str | None = None

    def watch(self, readings: Sequence[Reading], store: Store | None) -> None:
        """Start monitoring memory and listening to other ranks through the job's store."""
        self._readings = readings
        self._store = store if self._ranks.world_size > 1 else None
        if readings or self._store is not None:
            self._watch = Watch(self._check_memory)

    def close(self) -> None:
        """Stop monitoring, at the end of the job."""
        if self._watch is not None:
            self._watch.close()

    def __enter__(self) -> "Guard":
        self._thread = threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._unwinding = True
            call_off(self._thread)
            shortage = self._shortage
        if shortage is None:
            own = None if error is None else self._shortage_of_error(error)
            if own is not None:
                shortage = self._agree_on_shortage(own)
            elif error is not None and not isinstance(error, OutpaceError):
                shortage = self._read_shortage()  # a collective fails when another rank ends
            if shortage is None:
                return
        traceback.clear_frames(trace)  # frees the failed step's activations
        give_back_free()
        raise OutOfMemoryError(self._get_message(shortage)) from None

    def _shortage_of_error(self, error: BaseException) -> Shortage | None:
        if isinstance(error, torch.OutOfMemoryError) and self._device.type == "cuda":
            return self._cuda_shortage(error)
        on_host = isinstance(error, RuntimeError) and any(w in str(error) for w in _SHORT_ON_HOST)
        if not on_host and not isinstance(error, MemoryError):
            return None
        used = anonymous_bytes()
        return Shortage(
            self._ranks.rank,
            f"the operating system refused memory to rank {self._ranks.rank}; its process "
            f"holds {show_bytes(used)}",
            used,
            self.list_holders(used),
        )

    def _cuda_shortage(self, error: BaseException) -> Shortage:
        stats = torch.cuda.memory_stats(self._device)
        used, reserved = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
        first = str(error).split(". ")
        asked = next((s for s in first if s.startswith("Tried to allocate")), "it requested more")
        return Shortage(
            self._ranks.rank,
            f"rank {self._ranks.rank}'s device is out of memory: {asked[0].lower()}{asked[1:]}; "
            f"tensors hold {show_bytes(used)}, the allocator {show_bytes(reserved)}",
            torch.cuda.max_memory_allocated(self._device),
            self.list_holders(used),
            fragmentation_advice(used, reserved, expandable_segments(self._device)),
        )

    # The following methods run in the monitoring thread, or in both threads.

    def _check_memory(self) -> bool:
        """Look for a shortage here or on other ranks; after one, make sure that this process ends.

        Returns False, since monitoring continues until `close`.
        """
        if self._shortage is None:
            over = first_too_high(self._readings)
            if over is not None and not self.relieve():
                self._interrupt_training(self._agree_on_shortage(self._shortage_over_limit(over)))
            elif self._looks % _HEAR_EVERY == 0:
                heard = self._read_shortage()
                if heard is not None:
                    self._interrupt_training(heard)
            self._looks += 1
            return False
        return self._enforce_end()

    def _shortage_over_limit(self, over: Reading) -> Shortage:
        used, kept = over.now(), over.limit_bytes - over.soft_bytes
        rest = f" minus {show_bytes(kept)} for a clean shutdown" if kept else ""
        return Shortage(
            self._ranks.rank,
            f"rank {self._ranks.rank} needs more memory than it may use: {show_bytes(used)}, but "
            f"{over.limit} is {show_bytes(over.limit_bytes)}{rest}",
            used // over.ranks,
            self.list_holders(anonymous_bytes()),
        )

    def _interrupt_training(self, shortage: Shortage) -> None:
        with self._lock:
            self._shortage, self._since_s = shortage, time.monotonic()
            if not self._unwinding and self._thread:
                interrupt(self._thread)

    def _enforce_end(self) -> bool:
        """Wait for the training thread to unwind; end the process if that takes too long."""
        assert self._shortage is not None
        waited_s = time.monotonic() - self._since_s
        pressed = any(reading.now() > reading.hard_bytes for reading in self._readings)
        if pressed:
            self.relieve()
        late = waited_s > (END_S if self._unwinding else GRACE_S)
        if self._end is not None and (late or (pressed and not self._unwinding)):
            self._end_process(self._end, self._shortage, pressed)
        return False

    def _end_process(self, end: End, shortage: Shortage, pressed: bool) -> NoReturn:
        """End the process with the message about a memory shortage.

        `pressed`: memory use is above the hard limit. The message then leaves out which settings
        would fit, since there is no time to predict them.
        """
        with self._lock:
            message = self._answered
        if message is None:
            message = (
                f"out of memory: {shortage.sentence}" if pressed else self._get_message(shortage)
            )
        with suppress(Exception):  # must end whatever happens
            self.tidy(message)
        end(message, EXIT_OUT_OF_MEMORY)

    def _agree_on_shortage(self, shortage: Shortage) -> Shortage:
        """Return the job's first shortage: this one, or one that another rank reported earlier."""
        if self._store is None:
            return shortage
        with suppress(Exception):  # without a store, there is nobody to tell
            told = self._thread_store().compare_set(_SHORT, "", json.dumps(asdict(shortage)))
            return _parse_shortage(told)
        return shortage

    def _read_shortage(self) -> Shortage | None:
        if self._store is None:
            return None
        try:
            store = self._thread_store()
            return _parse_shortage(store.get(_SHORT)) if store.check([_SHORT]) else None
        except RuntimeError:
            return None

    def _thread_store(self) -> Store:
        """Return this thread's own connection to the store.

        Threads that share a connection block each other.
        """
        assert self._store is not None
        kept = threading.current_thread().__dict__
        if "_outpace_store" not in kept or kept["_outpace_store"][0] is not self:
            kept["_outpace_store"] = (self, self._store.clone())  # type: ignore[attr-defined]
        store: Store = kept["_outpace_store"][1]
        return store

    def _get_message(self, shortage: Shortage) -> str:
        """Return the message that all ranks show, written by the rank that ran out of memory."""
        if shortage.rank == self._ranks.rank:
            message = self._make_message(shortage)
        else:
            message = self._await_message(shortage)
        with self._lock:
            self._answered = message
        return message

    def _make_message(self, shortage: Shortage) -> str:
        try:
            message = self.answer(shortage)
        except Exception as error:  # an orderly end matters more than the answer
            message = f"{shortage.sentence} (no proposals: {error})"
        if self._store is not None:
            with suppress(Exception):
                store = self._thread_store()
                store.set(_ANSWER, message)
                until_s = time.monotonic() + GRACE_S
                others = self._ranks.world_size - 1
                while store.add(_HEARD, 0) < others and time.monotonic() < until_s:
                    time.sleep(0.05)
        return message

    def _await_message(self, shortage: Shortage) -> str:
        with suppress(Exception):
            store = self._thread_store()
            until_s = time.monotonic() + END_S - GRACE_S
            while time.monotonic() < until_s:
                if store.check([_ANSWER]):
                    message: str = store.get(_ANSWER).decode()
                    store.add(_HEARD, 1)
                    return message
                time.sleep(0.05)
        return shortage.sentence


def _parse_shortage(stored: bytes) -> Shortage:
    values = json.loads(stored)
    return Shortage(**{**values, "anatomy": tuple(values["anatomy"])})


def expandable_segments(device: torch.device) -> bool:
    """Return whether the CUDA allocator already uses expandable segments."""
    settings = torch.cuda.memory._snapshot(device)["allocator_settings"]
    return bool(settings["expandable_segments"])


def fragmentation_advice(used_bytes: int, reserved_bytes: int, expandable: bool) -> str:
    """Return advice if much of the allocator's memory is lost to fragmentation; else ""."""
    unused = reserved_bytes - used_bytes
    if expandable or unused < max(256 * _MIB, reserved_bytes // 10):
        return ""
    return (
        f"The allocator holds {show_bytes(unused)} in blocks that are too small (fragmentation). "
        "Set PYTORCH_ALLOC_CONF=expandable_segments:True and run the same command again."
    )
