"""Which ranks are alive: asked when a collective has failed on one of them."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from outpace.launch.group import Groups
from outpace.records.errors import OutpaceError

_BEAT_S = 0.5
# Several beats, so that a rank that waits for a core is not taken for dead.
_LOOK_S = 4.0
_VERDICT = "alive/verdict"
# gloo raises plain RuntimeErrors; where its connections failed, this source is named in them.
_CONNECTIONS = "gloo/transport/"


class RankLostError(OutpaceError):
    """A rank died, or did not answer in time, while others waited for it."""


@dataclass
class Doing:
    """What this rank is at, in words for a person."""

    what: str = "the beginning"


@contextmanager
def watched(groups: Groups, doing: Doing) -> Iterator[None]:
    """While ranks communicate: every rank keeps saying in the store that it lives.

    Raises RankLostError in place of the backend's error where a rank is gone, or does not come to
    what the others wait for; it names that rank and what was being done. Any other error stays what
    it is. The time limit of the process groups bounds the waiting. NCCL's path never ran, for lack
    of a machine with two GPUs: there the waiting is `outpace.probe.ranks_clock.ended`'s, and what
    NCCL's watchdog ends by itself (TORCH_NCCL_ASYNC_ERROR_HANDLING) says nothing of this.
    """
    ended = threading.Event()
    store: Any = groups.store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    beating = threading.Thread(
        target=_beat, args=(store, groups.ranks.rank, ended), name="alive", daemon=True
    )
    beating.start()
    try:
        yield
    except RuntimeError as error:
        lost = _communication(error)
        # Of CUDA, and others that are no failure of communication, the class says so.
        if not lost and type(error) is not RuntimeError:
            raise
        verdict = _verdict(groups, lost)
        if verdict is None:
            raise
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RankLostError(f"{doing.what}: {verdict} ({why})") from error
    finally:
        ended.set()
        beating.join()


def _beat(store: Any, rank: int, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # without the store's rank, those that wait find out
        while not ended.wait(_BEAT_S):
            store.add(f"alive/{rank}", 1)


def _communication(error: RuntimeError) -> bool:
    """Whether it says itself that ranks could not reach each other, or not in time."""
    return isinstance(error, dist.DistError) or _CONNECTIONS in str(error)


def _verdict(groups: Groups, lost: bool) -> str | None:
    """Who is gone. The first rank to ask says it to the others, before it is gone itself.

    None where nobody is, and it is not known otherwise that something is `lost`.
    """
    ranks, store = range(groups.ranks.world_size), groups.store
    try:
        if store.check([_VERDICT]):
            return store.get(_VERDICT).decode()
        before = [store.add(f"alive/{rank}", 0) for rank in ranks]
        time.sleep(_LOOK_S)
        gone = [rank for rank in ranks if store.add(f"alive/{rank}", 0) == before[rank]]
        if store.check([_VERDICT]):
            return store.get(_VERDICT).decode()
        if not gone and not lost:
            return None
        verdict = _said(gone)
        store.set(_VERDICT, verdict)
        if groups.ranks.rank == 0:
            time.sleep(_LOOK_S)  # it has the store, which others still ask
        return verdict
    except RuntimeError:
        return "rank 0 is gone, or cannot be reached"


def _said(gone: list[int]) -> str:
    if not gone:
        return (
            "all ranks are alive, but not all came to it in time: one hangs, or a connection "
            "between two is broken"
        )
    if len(gone) == 1:
        return f"rank {gone[0]} is gone: look at what it said last, and at its host"
    return f"ranks {', '.join(map(str, gone))} are gone: look at what they said last"
