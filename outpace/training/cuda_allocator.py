"""Settings of torch's CUDA allocator, which must be set before it starts."""

import sys
from collections.abc import MutableMapping

SETTINGS = "PYTORCH_ALLOC_CONF"  # torch reads it since 2.9
_OWN = (SETTINGS, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def grow_segments(environ: MutableMapping[str, str]) -> bool:
    """Enable expandable segments of CUDA memory; return whether this call did.

    Call this before any tensor is on a device, because the allocator reads its settings once. With
    expandable segments, sizes that change from step to step leave no unusable fragments
    (pytorch.org, "Optimizing memory usage with PYTORCH_ALLOC_CONF"). A configuration of the
    allocator in `environ` is left unchanged.
    """
    if not sys.platform.startswith("linux") or any(name in environ for name in _OWN):
        return False
    environ[SETTINGS] = "expandable_segments:True"
    return True
