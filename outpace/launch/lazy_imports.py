"""Faster imports, with garbage collection paused."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def import_quickly() -> Iterator[None]:
    """Pause garbage collection in the context, to import torch in a seventh less time.

    Imported objects stay alive, so collections during the import would find nothing. If torch was
    not loaded before, later collections skip all objects that exist at the end.
    """
    was_enabled, first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        if was_enabled:
            gc.enable()
