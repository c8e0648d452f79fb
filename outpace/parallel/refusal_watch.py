"""A watchdog that ends a rank which waits in a collective for a rank that has refused a call.

With gloo, a collective fails when a peer exits. With NCCL it waits, by default for ten minutes,
until NCCL's watchdog ends the process without mentioning the refusal. So during long calls, a
thread checks the rendezvous store for refusals, over a separate connection.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_LOOK_EVERY_S = 1.0
_PATIENCE_S = 5.0  # the time that a call may take before the store is checked
_GRACE_S = 10.0  # the time for the refusing rank to continue, or for this rank to end by itself
_EXIT_CODE = 2  # of BadInputError


class RefusalWatch:
    """A thread that ends this rank if it waits in a call that another rank has refused.

    To refuse a call is to raise an error in it and to publish the error for other ranks. A call
    lasts from `enter` to `leave`. `find(store)` acknowledges another rank's refusal and returns its
    message, or None if there is none.
    """

    def __init__(self, store: Store, find: Callable[[Store], str | None]) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._find = find
        self._call = 0
        self._since_s: float | None = None  # start of the call in progress
        self._thread = threading.Thread(
            target=self._watch_calls, name="outpace-refusals", daemon=True
        )
        self._thread.start()

    def enter(self) -> None:
        """Begin a call in which this rank may wait for others."""
        self._call += 1
        self._since_s = time.monotonic()

    def leave(self) -> None:
        """End the call; this rank no longer waits for others."""
        self._since_s = None

    def _watch_calls(self) -> None:
        seen: tuple[int, str, float] | None = None  # call number, refusal, and time
        while True:
            time.sleep(_LOOK_EVERY_S)
            call, since_s, now_s = self._call, self._since_s, time.monotonic()
            if since_s is None or (seen is not None and seen[0] != call):
                seen = None
                continue
            if now_s - since_s < _PATIENCE_S:
                continue
            try:
                sentence = self._find(self._store)
            except RuntimeError:  # the rank that hosts the store has ended
                sentence = None if seen is None else seen[1]
                now_s += _GRACE_S
            if sentence is None:
                seen = None
            elif seen is None:
                seen = (call, sentence, now_s)
            elif now_s - seen[2] >= _GRACE_S:
                end_rank(sentence)


def end_rank(sentence: str) -> None:
    """Print a sentence and end this process at once.

    The main thread cannot raise an error, because it waits in a collective.
    """
    print(f"outpace: {sentence}", file=sys.stderr, flush=True)
    os._exit(_EXIT_CODE)


def waits_for_ever() -> bool:
    """Return whether collectives of the default group keep waiting for a peer that has exited."""
    return "nccl" in str(dist.get_backend())
