"""What torch's CUDA allocator reserves for tensors: they are cut from segments that it keeps."""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator

from outpace.records.memory import KINDS
from outpace.trace.extend import Course

_MIB = 2**20
Events = Iterable[tuple[int, int]]  # (number of a storage, bytes: negative when it is freed)


class CachingAllocator:
    """The rules of torch's CUDA allocator (c10/cuda/CUDACachingAllocator.cpp), one stream.

    Sizes are rounded up to 512 bytes. Up to 1 MiB they are cut from segments of 2 MiB, below 10 MiB
    from segments of 20 MiB, above each has one of its own, rounded up to 2 MiB. The smallest free
    block that suffices is taken and split; neighbours that are free are joined. Nothing is ever
    given back, so `reserved_bytes` is its own peak.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._segments = 0
        # Of the large and of the small pool: free blocks as (size, segment, offset), in order.
        self._free: tuple[list[tuple[int, int, int]], ...] = ([], [])
        self._used: dict[int, tuple[bool, int, int, int]] = {}

    def allocate(self, number: int, size: int) -> None:
        """A block for storage `number`."""
        size = max(512, _up(size, 512))
        small = size <= _MIB
        pool = self._free[small]
        place = bisect.bisect_left(pool, (size, -1, -1))
        block, segment, offset = (
            pool.pop(place) if place < len(pool) else self._new_segment(size, small)
        )
        rest = block - size
        if rest >= 512 if small else rest > _MIB:
            bisect.insort(pool, (rest, segment, offset + size))
            block = size
        self._used[number] = (small, block, segment, offset)

    def _new_segment(self, size: int, small: bool) -> tuple[int, int, int]:
        whole = 2 * _MIB if small else 20 * _MIB if size < 10 * _MIB else _up(size, 2 * _MIB)
        self.reserved_bytes += whole
        self._segments += 1
        return whole, self._segments, 0

    def free(self, number: int) -> None:
        """Give the block of storage `number` back to its pool."""
        small, size, segment, offset = self._used.pop(number)
        pool = self._free[small]
        touching = [
            one
            for one in pool
            if one[1] == segment and (one[2] + one[0] == offset or offset + size == one[2])
        ]
        for one in touching:
            pool.remove(one)
            offset, size = min(offset, one[2]), size + one[0]
        bisect.insort(pool, (size, segment, offset))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def reserved(events: Events) -> int:
    """Bytes that the allocator has taken from the device after these events."""
    allocator = CachingAllocator()
    for number, size in events:
        if size > 0:
            allocator.allocate(number, size)
        else:
            allocator.free(number)
    return allocator.reserved_bytes


def events_of(course: Course) -> Iterator[tuple[int, int]]:
    """A rank's course as storages that come and go, without what lies elsewhere.

    Which of several like storages is freed is not written down: it is taken to be the last.
    """
    living: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    away = KINDS.index("offloaded")
    changes = zip(course.nbytes.tolist(), course.kind.tolist(), strict=True)
    for number, (nbytes, kind) in enumerate(changes):
        alike = living[abs(nbytes), kind]
        if kind == away or not nbytes:
            continue
        if nbytes > 0:
            alike.append(number)
            yield number, nbytes
        elif alike:
            yield alike.pop(), nbytes
