"""Import of modules without garbage collection."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def import_quickly() -> Iterator[None]:
    """Import modules such as torch, and those that depend on it, faster by a seventh.

    Objects created by the import stay alive, so the garbage collector does not search them for
    cycles during the import. Nor does it later, unless torch and much else had already been loaded.
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
