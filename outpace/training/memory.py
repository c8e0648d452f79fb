"""Peak memory of this process, and release of memory that allocators cache."""

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
    """Return peak memory so far: allocated by tensors on CUDA, resident memory on a CPU."""
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
    """Reset the peak of `peak_memory_bytes`, and release cached memory.

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
    """Freer of the memory that an allocator caches: torch's on CUDA, glibc's on a CPU.

    Later allocations request it from the system again. Raises BadInputError on other devices.
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
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        return int(psutil.Process().memory_info().rss)

    def pop_freed_bytes(self) -> int:
        """Return the bytes freed since the last call."""
        freed, self._freed_bytes = self._freed_bytes, 0
        return freed


def _glibc_trim(device: torch.device) -> "ctypes._NamedFuncPointer":
    """Return glibc's `malloc_trim`, which releases free pages, even in the middle of the heap."""
    library = c_library() if device.type == "cpu" else None
    if not hasattr(library, "malloc_trim"):
        raise BadInputError(
            f"--empty-cache cannot free a cache on device {device.type}. It works on CUDA devices, "
            "and on a CPU with glibc. Leave out --empty-cache."
        )
    return library.malloc_trim  # type: ignore[union-attr]
