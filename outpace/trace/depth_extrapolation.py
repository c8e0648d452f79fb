"""Exact memory of a deep model, derived from two shallow models with equal layers.

Records at two depths differ by the work of one period of layers, once or several times in each part
of a step. Comparing them finds this work, which is repeated for the deep model's other periods. If
the records differ in any other way, they cannot be extended (`IrregularError`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from outpace.records.memory import KINDS, Kind, Part
from outpace.trace.allocation_tracer import Segment

_BLOCK = re.compile(r"(?<=blocks\.)\d+")
# Cost of an insertion: less than that of differing bytes, so ties prefer the fewest positions.
_INSERTION = 0.01


class IrregularError(Exception):
    """Raised if two depths differ by more than repeated layers."""


@dataclass(frozen=True)
class Entry:
    """A change of memory. `block` is the layer's number, −1 outside layers."""

    nbytes: int
    kind: Kind
    operator: str
    module: str
    made_in: str
    block: int

    @property
    def key(self) -> tuple[object, ...]:
        """The properties that are the same in equal layers."""
        return (self.nbytes, *self.loose)

    @property
    def loose(self) -> tuple[object, ...]:
        """The key without bytes, for entries whose bytes depend on the number of layers."""
        return (self.nbytes > 0, self.kind, self.operator, self.module)


@dataclass(frozen=True)
class Strip:
    """Changes in one part of a step, for one depth of the model."""

    step: int
    part: Part
    entries: tuple[Entry, ...]
    repeats: tuple[tuple[int, int, int], ...]  # (first entry, end, number of repetitions)
    period: int  # layers per repetition
    flops: float
    bytes_moved: float


def strip_of(segment: Segment) -> Strip:
    """Convert a recorded segment; layer numbers are removed from names."""
    entries = []
    for change in segment.changes:
        found = _BLOCK.search(change.module)
        entries.append(
            Entry(
                nbytes=change.sign * change.piece.nbytes,
                kind=change.piece.kind or "temporary",
                operator=change.operator,
                module=_BLOCK.sub("*", change.module),
                made_in=_BLOCK.sub("*", change.piece.module),
                block=int(found.group()) if found else -1,
            )
        )
    return Strip(
        step=segment.step,
        part=segment.part,
        entries=tuple(_in_order(entries)),
        repeats=(),
        period=1,
        flops=segment.flops,
        bytes_moved=segment.bytes_moved,
    )


def drop_temporaries(strip: Strip) -> Strip:
    """Drop memory that is allocated and freed within the strip."""
    living: dict[tuple[int, Kind], list[int]] = {}
    passing: set[int] = set()
    for number, entry in enumerate(strip.entries):
        alike = living.setdefault((abs(entry.nbytes), entry.kind), [])
        if entry.nbytes > 0:
            alike.append(number)
        elif alike:
            passing |= {alike.pop(), number}
    kept = tuple(entry for number, entry in enumerate(strip.entries) if number not in passing)
    return replace(strip, entries=kept)


def _in_order(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Sort simultaneous frees, for example of autocast's copies, independently of addresses."""
    for freed, some in groupby(entries, lambda e: e.nbytes < 0 and (e.operator, e.module)):
        run = list(some)
        yield from sorted(run, key=lambda e: (e.kind, e.nbytes)) if freed else run


def extend(
    shallow: Sequence[Strip], deeper: Sequence[Strip], times: int, period: int = 1
) -> list[Strip]:
    """Extrapolate beyond `deeper`, by `times` the difference in depth to `shallow`.

    The two are `period` layers apart. Raises IrregularError.
    """
    if [(s.step, s.part) for s in shallow] != [(s.step, s.part) for s in deeper]:
        raise IrregularError("the parts of a step differ")
    return [
        _extend_one(one, other, times, period) for one, other in zip(shallow, deeper, strict=True)
    ]


def _extend_one(shallow: Strip, deeper: Strip, times: int, period: int) -> Strip:
    a, b = shallow.entries, deeper.entries
    entries: list[Entry] = []
    repeats: list[tuple[int, int, int]] = []
    for i, more in enumerate(_count_insertions(a, b)):
        if more:
            j = len(entries)
            entries.extend(b[j : j + more])
            repeats += [(*piece, times + 1) for piece in _split_at_jumps(b, j, j + more)]
        if i < len(a):
            entries.append(_extrapolate_entry(a[i], b[len(entries)], times))
    return Strip(
        step=deeper.step,
        part=deeper.part,
        entries=tuple(entries),
        repeats=tuple(repeats),
        period=period,
        flops=deeper.flops + times * (deeper.flops - shallow.flops),
        bytes_moved=deeper.bytes_moved + times * (deeper.bytes_moved - shallow.bytes_moved),
    )


def _count_insertions(a: Sequence[Entry], b: Sequence[Entry]) -> list[int]:
    """Count the changes that only `b` has, before each change of `a` and after the last.

    They follow from the cheapest embedding of `a` in `b`. A match with different bytes has a cost,
    as has each position with insertions; changes of different kinds never match.
    """
    extra = len(b) - len(a)
    if extra < 0:
        raise IrregularError("the deeper model does less")
    numbers: dict[object, int] = {}
    sort_of_a = [numbers.setdefault(entry.loose, len(numbers)) for entry in a]
    sorts = np.array([numbers.setdefault(entry.loose, len(numbers)) for entry in b])
    sizes = np.array([float(entry.nbytes) for entry in b])
    cost = np.full(extra + 1, np.inf)  # by number of insertions so far
    cost[0] = 0
    came_from = np.empty((len(a) + 1, extra + 1), dtype=np.int32)
    for i in range(len(a) + 1):
        cost = _open_insertion(cost, came_from[i])
        if i < len(a):
            window = slice(i, i + extra + 1)
            cost = cost + _unlikeness(sizes[window], a[i].nbytes)
            cost[sorts[window] != sort_of_a[i]] = np.inf
    if not np.isfinite(cost[extra]):
        raise IrregularError("the depths differ by more than repeated layers")
    counts, k = [], extra
    for i in range(len(a), -1, -1):
        counts.append(k - int(came_from[i, k]))
        k = int(came_from[i, k])
    return counts[::-1]


def _split_at_jumps(b: Sequence[Entry], begin: int, end: int) -> list[tuple[int, int]]:
    """Split inserted changes where they jump from the last layer to the first.

    For example, a list of all layers' matrices, followed by one of their vectors, gains one layer
    in each list.
    """
    pieces, last = [begin], -1
    for n in range(begin, end):
        if b[n].block >= 0:
            if last >= 0 and abs(b[n].block - last) > 1:
                pieces.append(n)
            last = b[n].block
    return list(zip(pieces, [*pieces[1:], end], strict=True))


def _unlikeness(sizes: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return the relative difference of sizes: 0 if they are equal, at most 1."""
    larger = np.maximum(np.abs(sizes), abs(size))
    return np.abs(sizes - size) / np.maximum(larger, 1)


def _open_insertion(cost: NDArray[np.float64], came_from: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the costs if an insertion may start here; write predecessors to `came_from`.

    Among alternatives of equal cost, prefer the one that inserts the least here.
    """
    least = np.minimum.accumulate(cost)
    numbers = np.arange(len(cost))
    where = np.maximum.accumulate(np.where(cost == least, numbers, 0))
    stays = cost <= least + _INSERTION
    came_from[:] = np.where(stays, numbers, where)
    return np.where(stays, cost, least + _INSERTION)


def _extrapolate_entry(one: Entry, other: Entry, times: int) -> Entry:
    """Extrapolate a change that both depths have: its bytes, and its layer counted from the end."""
    if one.nbytes == other.nbytes and one.block == other.block:
        return other
    return Entry(
        nbytes=other.nbytes + times * (other.nbytes - one.nbytes),
        kind=other.kind,
        operator=other.operator,
        module=other.module,
        made_in=other.made_in,
        block=other.block + times * (other.block - one.block),
    )


@dataclass(frozen=True)
class AllocationCourse:
    """All changes of memory in sequence, with repeated ones expanded.

    Change n is `entries[origin[n]]`, in strip `strip_of[n]` and layer `block[n]`. Change n has
    `nbytes[n]` bytes of `kind[n]`, an index into KINDS, and leaves `live_bytes[n]` live.
    """

    strips: Sequence[Strip]
    entries: Sequence[Entry]
    origin: NDArray[np.int64]
    strip_of: NDArray[np.int64]
    block: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    kind: NDArray[np.int64]
    live_bytes: NDArray[np.int64]

    def by_kind(self, positions: Sequence[int]) -> list[dict[Kind, int]]:
        """Return live bytes by kind after the changes at `positions`."""
        sums = np.zeros(len(KINDS), dtype=np.int64)
        found, done = [], 0
        for position in positions:
            these = slice(done, position + 1)
            np.add.at(sums, self.kind[these], self.nbytes[these])
            found.append({k: int(n) for k, n in zip(KINDS, sums, strict=True) if n})
            done = position + 1
        return found


def course_of(strips: Sequence[Strip]) -> AllocationCourse:
    """Expand repeated changes."""
    entries = [entry for strip in strips for entry in strip.entries]
    origins, numbers, blocks = [], [], []
    begin = 0
    for number, strip in enumerate(strips):
        indices, shifts = _unroll(strip)
        origins.append(indices + begin)
        numbers.append(np.full(len(indices), number))
        held = np.array([entry.block for entry in strip.entries], dtype=np.int64)[indices]
        blocks.append(np.where(held < 0, -1, held + strip.period * shifts))
        begin += len(strip.entries)
    origin = np.concatenate(origins)
    nbytes = np.array([entry.nbytes for entry in entries], dtype=np.int64)[origin]
    kinds = np.array([KINDS.index(entry.kind) for entry in entries], dtype=np.int64)
    return AllocationCourse(
        strips=strips,
        entries=entries,
        origin=origin,
        strip_of=np.concatenate(numbers),
        block=np.concatenate(blocks),
        nbytes=nbytes,
        kind=kinds[origin],
        live_bytes=np.cumsum(np.where(kinds[origin] == KINDS.index("offloaded"), 0, nbytes)),
    )


def _unroll(strip: Strip) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return entry numbers in execution order, and the offset of each entry's layer number."""
    indices: list[NDArray[np.int64]] = []
    shifts: list[NDArray[np.int64]] = []

    def append_once(begin: int, end: int, shift: int) -> None:
        indices.append(np.arange(begin, end))
        shifts.append(np.full(end - begin, shift))

    at = 0
    for begin, end, times in strip.repeats:
        append_once(at, begin, 0)
        for turn in range(times):
            append_once(begin, end, times - 1 - turn if strip.part == "backward" else turn)
        at = end
    append_once(at, len(strip.entries), 0)
    return np.concatenate(indices), np.concatenate(shifts)
