"""Memory of this process: its peak, and what allocators keep without need."""

import ctypes
import resource
import sys
from collections.abc import Mapping

import psutil
import torch

from outpace.records.errors import BadInputError


def peak_memory_bytes(device: torch.device) -> int | None:
    """Largest so far: of tensors on CUDA, of the resident process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "cpu":
        # Linux counts KiB, macOS bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None


# glibc's names in malloc.h, and the largest that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _LARGEST = -1, -4, 2**31 - 1


def keep_freed_memory(device: torch.device, environment: Mapping[str, str]) -> bool:
    """Let glibc keep what tensors on a CPU gave back, for the next step; say whether it does.

    By itself it returns large ones to the system at once, and each step pays for the same pages
    again: a tenth to a sixth of its time (docs/log.md). Who sets glibc up by `environment` is not
    overruled.
    """
    own = [name for name in environment if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    library = _c_library(device)
    if own or library is None or not hasattr(library, "mallopt"):
        return False
    # In this order: a heap that takes all, and gives nothing back.
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, _LARGEST))


def _c_library(device: torch.device) -> ctypes.CDLL | None:
    """The system's own, where tensors are in the memory that it gives out."""
    return ctypes.CDLL(None) if device.type == "cpu" and sys.platform == "linux" else None


class CacheFreer:
    """Gives back what an allocator keeps for later: torch's on CUDA, glibc's on a CPU.

    What comes later pays for it by asking the system anew. Raises BadInputError where there is
    neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._freed_bytes = 0
        if device.type != "cuda":
            self._trim = _glibc_trim(device)

    def free(self) -> None:
        """Give back what is not in use."""
        before = self._held_bytes()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            self._trim(0)
        self._freed_bytes += max(0, before - self._held_bytes())

    def _held_bytes(self) -> int:
        """What the allocator has reserved on CUDA, the resident process on a CPU."""
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        return int(psutil.Process().memory_info().rss)

    def take(self) -> int:
        """The bytes that were given back since this was asked last."""
        freed, self._freed_bytes = self._freed_bytes, 0
        return freed


def _glibc_trim(device: torch.device) -> "ctypes._NamedFuncPointer":
    """Its `malloc_trim`, which gives free pages in the midst of the heap back, too."""
    library = _c_library(device)
    if not hasattr(library, "malloc_trim"):
        raise BadInputError(
            "--empty-cache: there is no cache that can be freed here. It works on CUDA devices, "
            "and on the CPU with glibc. Leave it out."
        )
    return library.malloc_trim  # type: ignore[union-attr]
