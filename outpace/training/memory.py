"""Memory of this process: its peak, and what allocators cache."""

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from outpace.records.errors import BadInputError
from outpace.training.heap import c_library


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return peak memory so far: of tensors on CUDA, of the resident process on a CPU."""
    if device.type == "cuda":
        # `max_memory_allocated` builds and sorts a dictionary of all statistics at each call.
        known = torch.cuda.memory_stats_as_nested_dict(device)
        return int(known["allocated_bytes"]["all"]["peak"]) if known else 0
    if device.type == "cpu":
        # Linux reports KiB, macOS bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None


def reset_peak_memory(device: torch.device) -> None:
    """Reset `peak_memory_bytes` if the system can, and release unused memory.

    On a CPU, the peak can only be reset on Linux.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with suppress(BadInputError):
            CacheFreer(device).free()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


class CacheFreer:
    """Frees memory that an allocator caches: torch's on CUDA, glibc's on a CPU.

    Later allocations have to request it from the system again. Raises BadInputError on other
    devices.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._freed_bytes = 0
        if device.type != "cuda":
            self._trim = _glibc_trim(device)

    def free(self) -> None:
        """Free cached memory."""
        before = self._held_bytes()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            self._trim(0)
        self._freed_bytes += max(0, before - self._held_bytes())

    def _held_bytes(self) -> int:
        """Return the bytes that CUDA's allocator reserves, or that a CPU process occupies."""
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        return int(psutil.Process().memory_info().rss)

    def pop_freed_bytes(self) -> int:
        """Return the bytes released since the last call."""
        freed, self._freed_bytes = self._freed_bytes, 0
        return freed


def _glibc_trim(device: torch.device) -> "ctypes._NamedFuncPointer":
    """Return glibc's `malloc_trim`, which also releases free pages in the middle of the heap."""
    library = c_library() if device.type == "cpu" else None
    if not hasattr(library, "malloc_trim"):
        raise BadInputError(
            "--empty-cache: no cache can be freed here. The option works on CUDA devices, and on "
            "a CPU with glibc. Leave out --empty-cache."
        )
    return library.malloc_trim  # type: ignore[union-attr]
