"""Configuration of torch's CUDA allocator, which it reads once at its start."""

import sys
from collections.abc import MutableMapping

SETTINGS = "PYTORCH_ALLOC_CONF"  # torch reads it since 2.9
_OWN = (SETTINGS, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def grow_segments(environ: MutableMapping[str, str]) -> bool:
    """Enable expandable segments of CUDA memory, unless `environ` configures the allocator.

    Return whether this call enabled them. Call it before any tensor is on a device. With expandable
    segments, sizes that change from step to step cause less fragmentation (pytorch.org, "Optimizing
    memory usage with PYTORCH_ALLOC_CONF").
    """
    if not sys.platform.startswith("linux") or any(name in environ for name in _OWN):
        return False
    environ[SETTINGS] = "expandable_segments:True"
    return True
