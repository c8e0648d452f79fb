"""Memory that torch's CUDA allocator reserves, simulated from allocations and frees."""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator

from outpace.records.memory import KINDS
from outpace.trace.depth_extrapolation import AllocationHistory, IrregularError

_MIB = 2**20
Events = Iterable[tuple[int, int]]  # (storage number, bytes; negative when freed)


class CachingAllocator:
    """Model of torch's CUDA allocator (c10/cuda/CUDACachingAllocator.cpp) for one stream.

    Sizes are rounded up to 512 bytes. Sizes up to 1 MiB come from segments of 2 MiB, those below 10
    MiB from segments of 20 MiB, and larger ones get their own segment, rounded up to 2 MiB. The
    smallest sufficient free block is split; free neighbours are merged. Segments are kept until a
    new one would exceed `capacity_bytes`; then empty ones are released.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.reserved_bytes = 0
        self.peak_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._segments: list[int] = []  # segment sizes by number
        # Free blocks of the large and the small pool, as sorted (size, segment, offset).
        self._free: tuple[list[tuple[int, int, int]], ...] = ([], [])
        # The same blocks by their start, with sizes, and by their end.
        self._starts: dict[tuple[int, int], int] = {}
        self._ends: dict[tuple[int, int], int] = {}
        self._used: dict[int, tuple[bool, int, int, int]] = {}

    def allocate(self, number: int, size: int) -> None:
        """Allocate a block for storage `number`."""
        size = max(512, _round_up(size, 512))
        small = size <= _MIB
        pool = self._free[small]
        place = bisect.bisect_left(pool, (size, -1, -1))
        if place < len(pool):
            block, segment, offset = self._remove_free(small, pool[place])
        else:
            block, segment, offset = self._reserve_segment(size, small)
        rest = block - size
        if rest >= 512 if small else rest > _MIB:
            self._insert_free(small, (rest, segment, offset + size))
            block = size
        self._used[number] = (small, block, segment, offset)

    def _reserve_segment(self, size: int, small: bool) -> tuple[int, int, int]:
        whole = 2 * _MIB if small else 20 * _MIB if size < 10 * _MIB else _round_up(size, 2 * _MIB)
        if self._capacity_bytes is not None and self.reserved_bytes + whole > self._capacity_bytes:
            self._release_empty()
        self.reserved_bytes += whole
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        self._segments.append(whole)
        return whole, len(self._segments) - 1, 0

    def _release_empty(self) -> None:
        for small in (False, True):
            for block in [one for one in self._free[small] if one[0] == self._segments[one[1]]]:
                self._remove_free(small, block)
                self.reserved_bytes -= block[0]

    def free(self, number: int) -> None:
        """Return the block of storage `number` to its pool."""
        small, size, segment, offset = self._used.pop(number)
        after = self._starts.get((segment, offset + size))
        if after is not None:
            self._remove_free(small, (after, segment, offset + size))
            size += after
        before = self._ends.get((segment, offset))
        if before is not None:
            self._remove_free(small, (offset - before, segment, before))
            size, offset = size + offset - before, before
        self._insert_free(small, (size, segment, offset))

    def _insert_free(self, small: bool, block: tuple[int, int, int]) -> None:
        size, segment, offset = block
        bisect.insort(self._free[small], block)
        self._starts[segment, offset] = size
        self._ends[segment, offset + size] = offset

    def _remove_free(self, small: bool, block: tuple[int, int, int]) -> tuple[int, int, int]:
        size, segment, offset = block
        del self._free[small][bisect.bisect_left(self._free[small], block)]
        del self._starts[segment, offset]
        del self._ends[segment, offset + size]
        return block


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def peak_reserved_bytes(events: Events, capacity_bytes: int | None = None) -> int:
    """Return the most bytes that the allocator has reserved at any time during `events`."""
    allocator = CachingAllocator(capacity_bytes)
    for number, size in events:
        if size > 0:
            allocator.allocate(number, size)
        else:
            allocator.free(number)
    return allocator.peak_bytes


def events_of(history: AllocationHistory) -> Iterator[tuple[int, int]]:
    """Yield the allocations and frees of a history, without offloaded storages.

    A history does not say which of several storages of equal size is freed. This assumes the latest
    one. Raises IrregularError if a storage is freed that was never allocated.
    """
    living: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    away = KINDS.index("offloaded")
    changes = zip(history.nbytes.tolist(), history.kind.tolist(), strict=True)
    for number, (nbytes, kind) in enumerate(changes):
        if kind == away or not nbytes:
            continue
        alike = living[abs(nbytes), kind]
        if nbytes > 0:
            alike.append(number)
            yield number, nbytes
        elif alike:
            yield alike.pop(), nbytes
        else:
            raise IrregularError(
                f"{-nbytes} bytes of {KINDS[kind]} are freed without an allocation"
            )
