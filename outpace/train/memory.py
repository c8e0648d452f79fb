"""Peak memory of this process."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int | None:
    """Largest so far: of tensors on CUDA, of the resident process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "cpu":
        # Linux counts KiB, macOS bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None
