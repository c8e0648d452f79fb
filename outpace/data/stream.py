"""Tokens in memory-mapped files, read as one long array."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.data.index import Index
from outpace.records.errors import BadInputError

Array = np.ndarray[Any, np.dtype[Any]]
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_SCANNED_TOKENS = 1 << 24


class Mapped:
    """A file of token ids, mapped into memory where it is used: pickled, it is a path only."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        # A plain array: slices of a memmap cost several times as much to make.
        self.ids: Array = np.asarray(np.memmap(path, dtype=dtype, mode="r"))

    def __reduce__(self) -> tuple[Any, ...]:
        return Mapped, (self._path, self._dtype)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Stream:
    """Tokens [start, stop) of some shards put end to end.

    `document_starts` are places from the start of the first shard on, sorted; None where they are
    not recorded. `extent` holds the smallest and the largest id of the shards where they are known.
    """

    shards: Sequence[Mapped]
    ends: Array  # cumulative lengths of the shards
    start: int
    stop: int
    document_starts: Array | None
    extent: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, begin: int, count: int) -> Array:
        """`count` tokens from place `begin` of this stream, as int64."""
        begin += self.start
        found = np.empty(count, dtype=np.int64)
        filled = 0
        shard = int(np.searchsorted(self.ends, begin, side="right"))
        while filled < count:
            offset = begin + filled - (int(self.ends[shard - 1]) if shard else 0)
            part = self.shards[shard].ids[offset : offset + count - filled]
            found[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return found

    def documents(self, begin: int, count: int) -> Array:
        """The number of the document that each of those tokens belongs to, int32 from 0 on."""
        assert self.document_starts is not None
        places = np.arange(begin, begin + count) + self.start
        numbers: Array = np.searchsorted(self.document_starts, places, side="right")
        found: Array = (numbers - numbers[0]).astype(np.int32)
        return found

    def cut(self, begin: int, end: int) -> "Stream":
        """The part from `begin` to `end`."""
        return replace(self, start=self.start + begin, stop=self.start + end)

    def followed_by(self, other: "Stream") -> "Stream":
        """All shards of this stream, then all of the other."""
        length = int(self.ends[-1])
        assert self.document_starts is not None and other.document_starts is not None
        starts = np.concatenate((self.document_starts, other.document_starts + length))
        extents = [stream.extent for stream in (self, other) if stream.extent is not None]
        both = (min(low for low, _ in extents), max(high for _, high in extents))
        return _stream((*self.shards, *other.shards), starts, both if len(extents) == 2 else None)

    def blocks(self) -> Iterator[Array]:
        """All tokens, a few at a time."""
        for begin in range(0, len(self), _SCANNED_TOKENS):
            yield self.read(begin, min(_SCANNED_TOKENS, len(self) - begin))

    def largest(self) -> int:
        """The largest token id, or one of the shards' that is larger still; −1 without tokens."""
        return self.measured()[1]

    def measured(self) -> tuple[int, int]:
        """The `extent`, by reading all tokens where it is not known; (0, −1) without tokens."""
        if self.extent is not None:
            return self.extent
        extents = [(int(block.min()), int(block.max())) for block in self.blocks()]
        low, high = zip(*extents, strict=True) if extents else ((0,), (-1,))
        return min(low), max(high)


def _stream(
    shards: Sequence[Mapped], document_starts: Array | None, extent: tuple[int, int] | None = None
) -> Stream:
    ends = np.cumsum([len(shard) for shard in shards]) if shards else np.zeros(1, dtype=np.int64)
    return Stream(tuple(shards), ends, 0, int(ends[-1]), document_starts, extent)


def cached_stream(entry: Path, index: Index, split: str) -> Stream:
    """One split of a cache entry."""
    part = index.splits[split]
    shards = [Mapped(entry / name, index.dtype) for name in part.shards]
    starts = np.load(entry / part.documents, mmap_mode="r", allow_pickle=False)
    return _stream(shards, np.asarray(starts), (0, part.largest))


def nanogpt_stream(path: Path) -> Stream:
    """A nanoGPT .bin: raw uint16 ids, no header, so nothing says where documents begin.

    Raises BadInputError for an odd size.
    """
    if path.stat().st_size % 2:
        raise BadInputError(
            f"{path} has an odd number of bytes, so it is no nanoGPT file (uint16 ids), or it was "
            "cut short"
        )
    return _stream([Mapped(path, "<u2")], None)


def megatron_stream(path: Path) -> Stream:
    """A Megatron-LM .bin with its .idx (MMIDIDX, version 1). Raises BadInputError."""
    idx = path.with_suffix(".idx")
    try:
        header = idx.read_bytes()
        if header[:9] != _MEGATRON_MAGIC:
            raise ValueError("it does not begin with MMIDIDX")
        version, code = int.from_bytes(header[9:17], "little"), header[17]
        if version != 1 or code not in _MEGATRON_DTYPES or code in (6, 7):
            raise ValueError(f"version {version} with dtype {code} is not supported")
        sequences, documents = (int(n) for n in np.frombuffer(header, "<u8", 2, 18))
        sizes = np.frombuffer(header, "<i4", sequences, 34)
        pointers = np.frombuffer(header, "<i8", sequences, 34 + 4 * sequences)
        borders = np.frombuffer(header, "<i8", documents, 34 + 12 * sequences)
        dtype = np.dtype(_MEGATRON_DTYPES[code])
        starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        if (sizes < 0).any() or not len(sizes):
            raise ValueError("it has no sequences, or some of less than no tokens")
        if (pointers != starts[:-1] * dtype.itemsize).any():
            raise ValueError("its sequences do not follow each other")
        if path.stat().st_size != starts[-1] * dtype.itemsize:
            raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not what it says")
        if (borders < 0).any() or (np.diff(borders) < 0).any():
            raise ValueError("its documents do not follow each other")
        document_starts = starts[borders[:-1]]
    except (OSError, ValueError, IndexError, OverflowError) as error:
        raise BadInputError(f"{idx} is not a readable Megatron index: {error}") from None
    return _stream([Mapped(path, dtype.str)], document_starts)
