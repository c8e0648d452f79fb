"""Import of modules without garbage collection."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def import_quickly() -> Iterator[None]:
    """Import modules such as torch, and those that depend on it, a seventh faster.

    Objects created by the import stay alive, so the garbage collector does not search them for
    cycles, neither during the import nor later. The latter applies only if torch was not loaded
    before together with much else.
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
