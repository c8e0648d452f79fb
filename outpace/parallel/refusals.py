"""Ranks of a user's own loop end with one sentence, where one of them refuses.

The others wait for it in a collective, which fails when it has left. They find the sentence in the
store where the ranks met.
"""

import atexit
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

from outpace.records.errors import BadInputError, OutpaceError

_SENTENCE, _HEARD = "outpace/refusal", "outpace/refusal-heard"
_WAIT_S, _LOOK_AGAIN_S = 10.0, 0.02


@contextmanager
def refusing_together(world_size: int) -> Iterator[None]:
    """Within, an error of outpace's on one rank becomes the error of all.

    A rank that raises one waits, when its process ends, until the others have heard it.
    """
    if world_size == 1:
        yield
        return
    try:
        yield
    except OutpaceError as error:
        if not error.on_all_ranks:
            _tell(str(error), world_size)
        raise
    except RuntimeError:  # of gloo, or of ranks that read each other's memory
        sentence = _heard()
        if sentence is None:
            raise
        refusal = BadInputError(sentence)
        refusal.on_all_ranks = True
        raise refusal from None


def _store() -> Store | None:
    found: Store | None = _get_default_store() if dist.is_initialized() else None
    return found


def _tell(sentence: str, world_size: int) -> None:
    store = _store()
    if store is None:
        return
    with suppress(RuntimeError):  # it is with a rank that has left
        store.compare_set(_SENTENCE, "", sentence)
        store.add(_HEARD, 1)
        atexit.register(_leave, store, world_size)


def _leave(store: Store, world_size: int) -> None:
    """Let the others' collectives fail, and keep the store until they have read why."""
    if dist.is_initialized():
        dist.destroy_process_group()
    until_s = time.monotonic() + _WAIT_S
    with suppress(RuntimeError):
        while time.monotonic() < until_s and store.add(_HEARD, 0) < world_size:
            time.sleep(_LOOK_AGAIN_S)


def _heard() -> str | None:
    """What another rank refused; None where none did within a moment."""
    store = _store()
    if store is None:
        return None
    with suppress(RuntimeError):
        store.wait([_SENTENCE], timedelta(seconds=1))
        sentence = store.get(_SENTENCE).decode()
        store.add(_HEARD, 1)
        return sentence
    return None
