"""Settings of torch's allocator of CUDA memory, before it starts."""

import sys
from collections.abc import MutableMapping

SETTINGS = "PYTORCH_ALLOC_CONF"  # torch reads it since 2.9
_OWN = (SETTINGS, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def grow_segments(environ: MutableMapping[str, str]) -> bool:
    """Let segments of CUDA memory grow in place; say whether they do by this.

    To be called before the first tensor is on a device: the allocator reads its settings once.
    Sizes that change from step to step then leave no pieces that are too small for anything
    (pytorch.org, "Optimizing memory usage with PYTORCH_ALLOC_CONF"). Who sets the allocator up by
    `environ` is not overruled.
    """
    if not sys.platform.startswith("linux") or any(name in environ for name in _OWN):
        return False
    environ[SETTINGS] = "expandable_segments:True"
    return True
