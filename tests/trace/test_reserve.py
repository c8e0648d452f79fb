"""What the CUDA allocator keeps of its segments, by its rules."""

import pytest

from outpace.catalog.accelerators import ACCELERATORS
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.trace.account import account
from outpace.trace.reserve import CachingAllocator, peak_reserved_bytes

MIB = 2**20


def test_the_allocator_cuts_joins_and_keeps():
    assert peak_reserved_bytes([(1, 100)]) == 2 * MIB  # small: from a segment of 2 MiB
    assert peak_reserved_bytes([(1, 3 * MIB), (2, 3 * MIB)]) == 20 * MIB  # from one segment
    assert peak_reserved_bytes([(1, 11 * MIB)]) == 12 * MIB  # a segment of its own
    # Freed neighbours are joined, and what was taken is not given back.
    assert peak_reserved_bytes(
        [(1, 3 * MIB), (2, 3 * MIB), (1, -3 * MIB), (2, -3 * MIB), (3, 20 * MIB)]
    ) == (20 * MIB)
    assert (
        peak_reserved_bytes([(1, 30 * MIB), (1, -30 * MIB), (2, 2 * MIB), (3, 27 * MIB)])
        == 30 * MIB
    )
    # A remainder of 1 MiB or less is not cut off: the second finds nothing.
    allocator = CachingAllocator()
    allocator.allocate(1, 19 * MIB)
    allocator.allocate(2, MIB + 1)
    assert allocator.reserved_bytes == 40 * MIB


def test_empty_segments_go_back_where_there_is_no_room():
    events = [(1, 30 * MIB), (2, 3 * MIB), (1, -30 * MIB), (3, 60 * MIB)]
    assert peak_reserved_bytes(events) == 110 * MIB
    assert peak_reserved_bytes(events, 90 * MIB) == 80 * MIB  # the second's segment of 20 is in use
    assert peak_reserved_bytes(events, 70 * MIB) == 80 * MIB  # it does not fit


@pytest.mark.fakeworld
def test_a_traced_device_reserves_more_than_its_tensors_and_not_much_more():
    spec = ModelSpec.parse(
        {"family": "llama", "layers": 12, "hidden": 512, "heads": 8, "vocab": 8192,
         "max_positions": 1024},
        "test",
    )  # fmt: skip
    found = account(spec, Plan(precision="bf16", micro_batch=4), seq_len=1024,
                    accelerator=ACCELERATORS["H100 SXM"])  # fmt: skip
    assert 1.0 < found.reserved_bytes / found.peak_memory_bytes < 1.25
    assert account(spec, Plan(), seq_len=64).reserved_bytes is None
