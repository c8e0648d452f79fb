"""Loading modules without looking for garbage among them."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def import_quickly() -> Iterator[None]:
    """Import modules such as torch, and what stands on it, a seventh sooner.

    What they make stays, so that no cycles are looked for while they come, nor later among what
    came; nothing is kept so where torch was there before, and much else beside it.
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
