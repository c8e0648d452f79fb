"""Freeing cached memory gives back what the allocator keeps, and says how much that was."""

import ctypes
import os
import sys

import pytest
import torch

from outpace.records.errors import BadInputError
from outpace.training.memory import CacheFreer, peak_memory_bytes, reset_peak_memory

CPU = torch.device("cpu")
PIECES, PIECE_BYTES = 2000, 60_000  # too small for glibc to give back by itself

glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc"
)


@glibc
@pytest.mark.skipif("MALLOC_MMAP_THRESHOLD_" in os.environ, reason="nothing would be kept")
def test_what_is_freed_in_the_midst_of_the_heap_goes_back():
    freer = CacheFreer(CPU)
    freer.free()
    freer.pop_freed_bytes()
    held = [torch.ones(PIECE_BYTES // 4) for _ in range(PIECES)]
    kept = held[-1]  # at the heap's end: what lies before it stays with the process
    del held
    freer.free()
    freed = freer.pop_freed_bytes()
    assert 0.8 * PIECES * PIECE_BYTES < freed < 1.5 * PIECES * PIECE_BYTES
    assert freer.pop_freed_bytes() == 0 and bool(kept.all())


def test_a_device_without_such_a_cache_is_refused():
    with pytest.raises(BadInputError, match="Leave out --empty-cache"):
        CacheFreer(torch.device("mps"))


@pytest.mark.gpu
def test_reserved_memory_is_given_back_on_cuda():
    freer = CacheFreer(torch.device("cuda"))
    freer.free()
    freer.pop_freed_bytes()
    tensor = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del tensor
    freer.free()
    assert freer.pop_freed_bytes() >= 1 << 28


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_peaks_begin_again_where_the_system_can():
    large = torch.ones(64, 1 << 20)
    before = peak_memory_bytes(CPU)
    del large
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) < before - (200 << 20)
