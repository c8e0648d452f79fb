"""Imports with garbage collection paused."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def import_quickly() -> Iterator[None]:
    """Import modules such as torch, and those that depend on it, in six sevenths of the time.

    Imported objects stay alive, so the garbage collector need not search them for cycles during the
    import. They are also excluded later, unless torch and much else was already loaded.
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
