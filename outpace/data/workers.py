"""Forks that load data leave alone what they inherit."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

Begin = Callable[[int], None]


@contextmanager
def leaving_inherited() -> Iterator[Begin]:
    """What is given is the `worker_init_fn` of a DataLoader whose workers are started within.

    They never collect what their parent had left to be collected: it may hold threads and memory
    that a fork does not have, whose end there is a segmentation fault. Nor do collections write to
    memory that both share.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield partial(_begin, collects)
    finally:
        if collects:
            gc.enable()


def _begin(collects: bool, worker: int) -> None:
    gc.freeze()
    if collects:
        gc.enable()
