"""Import of modules without garbage collection."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def import_quickly() -> Iterator[None]:
    """Import modules such as torch, and those that depend on it, a seventh faster.

    What they create stays alive, so the garbage collector does not search for cycles during the
    import, nor later among what it created; the latter only if torch was not loaded before with
    much else.
    """
    looked, first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        if looked:
            gc.enable()
