"""Freeing cached memory gives back what the allocator keeps, and says how much that was."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from outpace.records.errors import BadInputError
from outpace.train.memory import CacheFreer

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
    freer.take()
    held = [torch.ones(PIECE_BYTES // 4) for _ in range(PIECES)]
    kept = held[-1]  # at the heap's end: what lies before it stays with the process
    del held
    freer.free()
    freed = freer.take()
    assert 0.8 * PIECES * PIECE_BYTES < freed < 1.5 * PIECES * PIECE_BYTES
    assert freer.take() == 0 and bool(kept.all())


FAULTS = """
import os, resource, sys, torch
from outpace.train.memory import keep_freed_memory

kept = keep_freed_memory(torch.device("cpu"), os.environ) if sys.argv[1] == "keep" else None
faults = []
for _ in range(20):  # the first of them take new memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = torch.ones(1 << 23, requires_grad=True)
    (x.detach() * 2 + x).exp().sum().backward()
    del x
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults), kept)
"""


@glibc
def test_what_was_freed_is_there_for_the_next_step():
    """Each tensor of 32 MiB is 8,192 pages, each of which is a fault where it is new."""

    def faults(*, keep, **environment):
        words = [sys.executable, "-c", FAULTS, "keep" if keep else "not"]
        kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
        said = subprocess.run(
            words, env=kept | environment, capture_output=True, text=True, check=True
        ).stdout.split()
        return int(said[0]), said[1]

    (with_it, kept), (without, _) = faults(keep=True), faults(keep=False)
    assert kept == "True" and with_it < 1000 and without > 30_000
    assert faults(keep=True, MALLOC_ARENA_MAX="2")[1] == "False"  # it is the user's


def test_a_device_without_such_a_cache_is_refused():
    with pytest.raises(BadInputError, match="Leave it out"):
        CacheFreer(torch.device("mps"))


@pytest.mark.gpu
def test_reserved_memory_is_given_back_on_cuda():
    freer = CacheFreer(torch.device("cuda"))
    freer.free()
    freer.take()
    tensor = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del tensor
    freer.free()
    assert freer.take() >= 1 << 28
