"""Exact memory of a deep model, extrapolated from traces of two shallow ones.

Traces at two depths differ by the work of one period of layers, which may occur several times in a
part of a step. Comparing the traces finds this work, and repeating it gives the trace of a deeper
model. Traces that differ in any other way cannot be extrapolated (`IrregularError`).
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
# Cost per position with insertions, to prefer few positions. Much less than that of unequal bytes.
_INSERTION = 0.01


class IrregularError(Exception):
    """The traces of two depths differ by more than additional layers."""


@dataclass(frozen=True)
class Entry:
    """An allocation, or a free if `nbytes` is negative.

    `module` runs the operator, and `made_in` allocated the memory. `block` is the layer's number,
    −1 outside of layers.
    """

    nbytes: int
    kind: Kind
    operator: str
    module: str
    made_in: str
    block: int

    @property
    def key(self) -> tuple[object, ...]:
        """Properties that must be equal in two entries to match them between models' depths."""
        return (self.nbytes > 0, self.kind, self.operator, self.module)


@dataclass(frozen=True)
class PartTrace:
    """Memory changes in one part of a step, with layers that repeat stored once."""

    step: int
    part: Part
    entries: tuple[Entry, ...]
    repeats: tuple[tuple[int, int, int], ...]  # (first entry, end, number of repetitions)
    period: int  # layers per repetition
    flops: float
    bytes_moved: float


def to_part_trace(segment: Segment) -> PartTrace:
    """Convert a recorded segment; layer numbers in names become `*`."""
    entries = []
    for change in segment.changes:
        found = _BLOCK.search(change.module)
        entries.append(
            Entry(
                nbytes=change.sign * change.storage.nbytes,
                kind=change.storage.kind or "temporary",
                operator=change.operator,
                module=_BLOCK.sub("*", change.module),
                made_in=_BLOCK.sub("*", change.storage.module),
                block=int(found.group()) if found else -1,
            )
        )
    return PartTrace(
        step=segment.step,
        part=segment.part,
        entries=tuple(_sort_frees(entries)),
        repeats=(),
        period=1,
        flops=segment.flops,
        bytes_moved=segment.bytes_moved,
    )


def drop_temporaries(trace: PartTrace) -> PartTrace:
    """Return the trace without memory that is both allocated and freed in it."""
    living: dict[tuple[int, Kind], list[int]] = {}
    passing: set[int] = set()
    for number, entry in enumerate(trace.entries):
        alike = living.setdefault((abs(entry.nbytes), entry.kind), [])
        if entry.nbytes > 0:
            alike.append(number)
        elif alike:
            passing |= {alike.pop(), number}
    kept = tuple(entry for number, entry in enumerate(trace.entries) if number not in passing)
    return replace(trace, entries=kept)


def _sort_frees(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Sort each run of frees by the same operator by size.

    Their original order depends on addresses, which differ between traces.
    """
    for freed, some in groupby(entries, lambda e: e.nbytes < 0 and (e.operator, e.module)):
        run = list(some)
        yield from sorted(run, key=lambda e: (e.kind, e.nbytes)) if freed else run


def extend(
    shallow: Sequence[PartTrace], deeper: Sequence[PartTrace], times: int, period: int = 1
) -> list[PartTrace]:
    """Return traces of a model that is `times * period` layers deeper than `deeper`.

    `shallow` is the trace of a model with `period` fewer layers than `deeper`. Raises
    IrregularError if the two differ by more than these layers.
    """
    if [(s.step, s.part) for s in shallow] != [(s.step, s.part) for s in deeper]:
        raise IrregularError("the parts of a step differ")
    return [
        _extend_part(one, other, times, period) for one, other in zip(shallow, deeper, strict=True)
    ]


def _extend_part(shallow: PartTrace, deeper: PartTrace, times: int, period: int) -> PartTrace:
    a, b = shallow.entries, deeper.entries
    entries: list[Entry] = []
    repeats: list[tuple[int, int, int]] = []
    for i, more in enumerate(_count_insertions(a, b)):
        if more:
            j = len(entries)
            entries.extend(b[j : j + more])
            repeats += [(*span, times + 1) for span in _split_at_jumps(b, j, j + more)]
        if i < len(a):
            entries.append(_extrapolate_entry(a[i], b[len(entries)], times))
    return PartTrace(
        step=deeper.step,
        part=deeper.part,
        entries=tuple(entries),
        repeats=tuple(repeats),
        period=period,
        flops=deeper.flops + times * (deeper.flops - shallow.flops),
        bytes_moved=deeper.bytes_moved + times * (deeper.bytes_moved - shallow.bytes_moved),
    )


def _count_insertions(a: Sequence[Entry], b: Sequence[Entry]) -> list[int]:
    """Align `a` with `b` and count the entries inserted in `b` before each of `a` and at the end.

    The alignment has the lowest cost. Each position with insertions has a cost, and so has each
    match of entries with different sizes. Entries with different `key` never match.
    """
    extra = len(b) - len(a)
    if extra < 0:
        raise IrregularError("the deeper model does less")
    numbers: dict[object, int] = {}
    keys_of_a = [numbers.setdefault(entry.key, len(numbers)) for entry in a]
    keys = np.array([numbers.setdefault(entry.key, len(numbers)) for entry in b])
    sizes = np.array([float(entry.nbytes) for entry in b])
    cost = np.full(extra + 1, np.inf)  # by number of insertions so far
    cost[0] = 0
    came_from = np.empty((len(a) + 1, extra + 1), dtype=np.int32)
    for i in range(len(a) + 1):
        cost = _open_insertion(cost, came_from[i])
        if i < len(a):
            window = slice(i, i + extra + 1)
            cost = cost + _relative_difference(sizes[window], a[i].nbytes)
            cost[keys[window] != keys_of_a[i]] = np.inf
    if not np.isfinite(cost[extra]):
        raise IrregularError("the depths differ by more than repeated layers")
    counts, k = [], extra
    for i in range(len(a), -1, -1):
        counts.append(k - int(came_from[i, k]))
        k = int(came_from[i, k])
    return counts[::-1]


def _split_at_jumps(b: Sequence[Entry], begin: int, end: int) -> list[tuple[int, int]]:
    """Split the inserted entries `begin` to `end` where their layer numbers jump.

    If all layers' matrices come before all layers' vectors, for example, then a deeper model has
    insertions in both lists.
    """
    starts, last = [begin], -1
    for n in range(begin, end):
        if b[n].block >= 0:
            if last >= 0 and abs(b[n].block - last) > 1:
                starts.append(n)
            last = b[n].block
    return list(zip(starts, [*starts[1:], end], strict=True))


def _relative_difference(sizes: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    larger = np.maximum(np.abs(sizes), abs(size))
    return np.abs(sizes - size) / np.maximum(larger, 1)


def _open_insertion(cost: NDArray[np.float64], came_from: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the lowest costs of alignments in which entries may be inserted at this position.

    `cost` and the result are indexed by the total number of insertions so far. The number before
    this position is written to `came_from`; of equal costs, the fewest insertions here win.
    """
    least = np.minimum.accumulate(cost)
    numbers = np.arange(len(cost))
    where = np.maximum.accumulate(np.where(cost == least, numbers, 0))
    stays = cost <= least + _INSERTION
    came_from[:] = np.where(stays, numbers, where)
    return np.where(stays, cost, least + _INSERTION)


def _extrapolate_entry(one: Entry, other: Entry, times: int) -> Entry:
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
class AllocationHistory:
    """All memory changes in execution order, including those of repeated layers.

    Change n is described by `entries[origin[n]]`. It belongs to `traces[trace_of[n]]` and to layer
    `block[n]`, and allocates or frees `nbytes[n]` bytes of kind `KINDS[kind[n]]`. Afterwards,
    `live_bytes[n]` bytes are live.
    """

    traces: Sequence[PartTrace]
    entries: Sequence[Entry]
    origin: NDArray[np.int64]
    trace_of: NDArray[np.int64]
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


def unroll(traces: Sequence[PartTrace]) -> AllocationHistory:
    """Expand the repeated layers of traces into a history of all changes."""
    entries = [entry for trace in traces for entry in trace.entries]
    origins, numbers, blocks = [], [], []
    begin = 0
    for number, trace in enumerate(traces):
        indices, shifts = _unroll_indices(trace)
        origins.append(indices + begin)
        numbers.append(np.full(len(indices), number))
        held = np.array([entry.block for entry in trace.entries], dtype=np.int64)[indices]
        blocks.append(np.where(held < 0, -1, held + trace.period * shifts))
        begin += len(trace.entries)
    origin = np.concatenate(origins)
    nbytes = np.array([entry.nbytes for entry in entries], dtype=np.int64)[origin]
    kinds = np.array([KINDS.index(entry.kind) for entry in entries], dtype=np.int64)
    return AllocationHistory(
        traces=traces,
        entries=entries,
        origin=origin,
        trace_of=np.concatenate(numbers),
        block=np.concatenate(blocks),
        nbytes=nbytes,
        kind=kinds[origin],
        live_bytes=np.cumsum(np.where(kinds[origin] == KINDS.index("offloaded"), 0, nbytes)),
    )


def _unroll_indices(trace: PartTrace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return indices of entries in execution order, and the repetition that each belongs to."""
    indices: list[NDArray[np.int64]] = []
    shifts: list[NDArray[np.int64]] = []

    def append_once(begin: int, end: int, shift: int) -> None:
        indices.append(np.arange(begin, end))
        shifts.append(np.full(end - begin, shift))

    at = 0
    for begin, end, times in trace.repeats:
        append_once(at, begin, 0)
        for turn in range(times):
            append_once(begin, end, times - 1 - turn if trace.part == "backward" else turn)
        at = end
    append_once(at, len(trace.entries), 0)
    return np.concatenate(indices), np.concatenate(shifts)
