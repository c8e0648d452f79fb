"""Memory-mapped files of tokens, read as one long array."""

import mmap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from outpace.data.file_kinds import require_tokens
from outpace.data.file_reader import readable
from outpace.data.index import Index
from outpace.records.errors import BadInputError

Array = np.ndarray[Any, np.dtype[Any]]
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_SCANNED_TOKENS = 1 << 19  # 4 MiB as int64, to scan all ids without a memory peak
# llm.c's files by magic number: dtype of the ids (None without tokens), and version.
_LLMC_MAGIC: Mapping[int, tuple[str | None, int]] = {
    20240520: ("<u2", 1), 20240801: ("<u4", 7), 20240522: (None, 1), 20240326: (None, 3),
}  # fmt: skip
_HEADER_BYTES = 1024
_LOOKED_AT = 1 << 20
_MOST_IDS = 1 << 20
_ALIKE = 0.9  # minimum share of indicative words that look like ids of 32 or 64 bits
_LEAST_PAIRS = 1000  # minimum number of pairs for statistical checks
# Even and odd bytes of this many pairs have the same distribution if it differs by less than this;
# random numbers have nearly 8 bits.
_COMPARED_PAIRS, _SAME_BYTES, _RANDOM_BITS = 20_000, 0.05, 7.5
_FEWER_BITS, _SMALLER = (
    1.0,
    0.7,
)  # margins for entropy and mean of upper bytes
# Bytes of a mapped file that may be resident in this process; the kernel caches them anyway.
_RESIDENT_BYTES = 32 << 20
_FAULT_BYTES = 2 << 20  # maximum that one page fault maps: a huge page

# How often a mapped file is checked while it is read, and how much of it is compared if its time or
# size has changed.
_CHECK_S = 0.1
_PLACES, _PLACE_BYTES = 64, 512
_START_AGAIN = (
    "Do not change files of tokens while a run uses them; write new ones under another name and "
    "rename them. A run resumes with the tokens that it had before; for others, start another run."
)


class MappedTokens:
    """A memory-mapped file of token ids. Pickling stores only its path, dtype and offset.

    Reading raises BadInputError if the file was overwritten or truncated after it was mapped:
    training would read different tokens, or the kernel would kill the process. Appending to the
    file is safe, and so is replacing it by renaming, because the old file stays mapped.
    """

    def __init__(self, path: Path, dtype: str, offset: int = 0) -> None:
        self.path, self._dtype, self._offset = path, dtype, offset
        # A plain array: slices of a memmap are several times slower.
        mapped = np.memmap(path, dtype=dtype, mode="r", offset=offset)
        base: object = mapped.base
        self._map = base if isinstance(base, mmap.mmap) else None
        self.ids: Array = np.asarray(mapped)
        self._read_bytes = 0
        self._state, self._digest = _read_file_state(path), self._compute_digest()
        self._checked_s = time.monotonic()

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedTokens, (self.path, self._dtype, self._offset)

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, offset: int, count: int) -> Array:
        """Return ids from mapped pages, and release the pages from time to time.

        Otherwise, the whole file would become resident during training and count toward peak
        memory.
        """
        self._require_unchanged()
        found = self.ids[offset : offset + count]
        self._read_bytes += found.nbytes + _FAULT_BYTES
        if self._read_bytes > _RESIDENT_BYTES and self._map is not None:
            if hasattr(self._map, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
                self._map.madvise(mmap.MADV_DONTNEED)
            self._read_bytes = 0
        return found

    def _require_unchanged(self) -> None:
        now_s = time.monotonic()
        if now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        try:
            state = _read_file_state(self.path)
        except OSError:  # deleted
            return
        if state == self._state or state[0] != self._state[0]:
            return
        if state[1] < self._offset + self.ids.nbytes:
            raise BadInputError(
                f"{self.path} was truncated to {state[1]:,} bytes while it was being read. "
                f"{_START_AGAIN}"
            )
        if self._compute_digest() != self._digest:
            raise BadInputError(
                f"{self.path} was overwritten while it was being read. {_START_AGAIN}"
            )
        self._state = state

    def _compute_digest(self) -> str:
        """Hash blocks of ids from throughout the file.

        The blocks are read rather than mapped, since mapped pages count as memory of this process.
        """
        last = max(self.ids.nbytes - _PLACE_BYTES, 0)
        digest = xxhash.xxh3_128()
        with self.path.open("rb") as file:
            for place in np.unique(np.linspace(0, last, _PLACES).astype(np.int64)):
                file.seek(self._offset + int(place))
                digest.update(file.read(min(_PLACE_BYTES, self.ids.nbytes)))
        return digest.hexdigest()

    def load(self, offset: int, count: int) -> Array:
        """Read ids into memory rather than map them, since mapped pages stay resident."""
        at = self._offset + offset * self.ids.itemsize
        return np.fromfile(self.path, dtype=self._dtype, count=count, offset=at)


def _read_file_state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class Stream:
    """Tokens [start, stop) of consecutive shards.

    `document_starts` holds sorted positions, counted from the start of the first shard, or is None
    if unknown. `extent` holds the smallest and the largest id of the shards, if known.
    """

    shards: Sequence[MappedTokens]
    ends: Array  # cumulative lengths of the shards
    start: int
    stop: int
    document_starts: Array | None
    extent: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def id_bytes(self) -> int:
        """Size in bytes of the narrowest id type."""
        return min(shard.ids.itemsize for shard in self.shards)

    def read(self, begin: int, count: int, mapped: bool = True) -> Array:
        """Return `count` tokens from position `begin`, as int64.

        `mapped` uses mapped pages, for few tokens; otherwise, tokens are read from the files.
        """
        begin += self.start
        found = np.empty(count, dtype=np.int64)
        filled = 0
        shard = int(np.searchsorted(self.ends, begin, side="right"))
        while filled < count:
            offset = begin + filled - (int(self.ends[shard - 1]) if shard else 0)
            left = count - filled
            ids = self.shards[shard]
            part = ids.part(offset, left) if mapped else ids.load(offset, left)
            found[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return found

    def documents(self, begin: int, count: int) -> Array:
        """Return the document number of each of `count` tokens from `begin`, as int32 from 0."""
        assert self.document_starts is not None
        places = np.arange(begin, begin + count) + self.start
        numbers: Array = np.searchsorted(self.document_starts, places, side="right")
        found: Array = (numbers - numbers[0]).astype(np.int32)
        return found

    def cut(self, begin: int, end: int) -> "Stream":
        """Return the tokens [begin, end) of this stream as a stream."""
        return replace(self, start=self.start + begin, stop=self.start + end)

    def concatenate(self, other: "Stream") -> "Stream":
        """Return a stream of all shards of this stream, followed by all shards of `other`."""
        length = int(self.ends[-1])
        assert self.document_starts is not None and other.document_starts is not None
        starts = np.concatenate((self.document_starts, other.document_starts + length))
        extent = None
        if self.extent is not None and other.extent is not None:
            extent = (min(self.extent[0], other.extent[0]), max(self.extent[1], other.extent[1]))
        return _make_stream((*self.shards, *other.shards), starts, extent)

    def blocks(self) -> Iterator[Array]:
        """Yield all tokens in blocks."""
        for begin in range(0, len(self), _SCANNED_TOKENS):
            yield self.read(begin, min(_SCANNED_TOKENS, len(self) - begin), mapped=False)

    def largest(self) -> int:
        """Return the largest id, or −1 without tokens.

        If `extent` is known, this is the largest id of the whole shards, an upper bound for the
        stream.
        """
        return self.compute_extent()[1]

    def first_above(self, largest: int) -> tuple[Path, int, int]:
        """Return the file, position and value of the first id above `largest`, which must exist.

        Whole shards are searched, even if the stream covers only a part of them.
        """
        for shard in self.shards:
            for begin in range(0, len(shard), _SCANNED_TOKENS):
                above = np.flatnonzero(shard.ids[begin : begin + _SCANNED_TOKENS] > largest)
                if len(above):
                    place = begin + int(above[0])
                    return shard.path, place, int(shard.ids[place])
        raise ValueError(f"no id is above {largest}")

    def compute_extent(self) -> tuple[int, int]:
        """Return the smallest and the largest id, reading all tokens if `extent` is None.

        Returns (0, −1) without tokens.
        """
        if self.extent is not None:
            return self.extent
        extents = [(int(block.min()), int(block.max())) for block in self.blocks()]
        low, high = zip(*extents, strict=True) if extents else ((0,), (-1,))
        return min(low), max(high)


def _make_stream(
    shards: Sequence[MappedTokens],
    document_starts: Array | None,
    extent: tuple[int, int] | None = None,
) -> Stream:
    ends = np.cumsum([len(shard) for shard in shards]) if shards else np.zeros(1, dtype=np.int64)
    return Stream(tuple(shards), ends, 0, int(ends[-1]), document_starts, extent)


def cached_stream(entry: Path, index: Index, split: str) -> Stream:
    """Open one split of a cache entry as a stream."""
    part = index.splits[split]
    shards = [MappedTokens(entry / name, index.dtype) for name in part.shards]
    starts = np.load(entry / part.documents, mmap_mode="r", allow_pickle=False)
    return _make_stream(shards, np.asarray(starts), (0, part.largest))


def token_stream(files: Sequence[Path]) -> Stream:
    """Open .bin files as one stream, in the format given by each file's .idx or contents.

    Raises BadInputError for a file without tokens, or one that ends within an id.
    """
    streams = [
        megatron_stream(path) if path.with_suffix(".idx") in files else _open_plain_file(path)
        for path in files
        if path.suffix.lower() != ".idx"
    ]
    if len(streams) > 1 and all(stream.document_starts is not None for stream in streams):
        return reduce(Stream.concatenate, streams)
    if len(streams) == 1:
        return streams[0]
    return _make_stream([shard for stream in streams for shard in stream.shards], None)


def _open_plain_file(path: Path) -> Stream:
    """Open a .bin file without an index; its document starts are unknown.

    llm.c's files have a header of 256 int32 values: magic number, version, number of tokens. Files
    without a header, such as nanoGPT's, hold 16-bit ids, or 32- or 64-bit ids if the upper bits of
    all words are zero.
    """
    size = path.stat().st_size
    with readable(path) as stream:
        head = stream.read(_HEADER_BYTES)
    header = np.frombuffer(head, "<i4", len(head) // 4)
    if len(header) and int(header[0]) in _LLMC_MAGIC:
        return _open_llmc_file(path, header, size)
    require_tokens(path, head)
    if size % 2:
        raise BadInputError(
            f"{path} has an odd number of bytes, so it is not a file of uint16 ids like nanoGPT's, "
            "or it is truncated"
        )
    return _make_stream([MappedTokens(path, _detect_dtype(path, size))], None)


def _open_llmc_file(path: Path, header: Array, size: int) -> Stream:
    """Open a file with llm.c's header (dev/data/data_common.py in llm.c).

    Raises BadInputError if the header does not match the file, or if there are no tokens.
    """
    dtype, version = _LLMC_MAGIC[int(header[0])]
    found, count = (int(n) for n in header[1:3])
    if dtype is None or len(header) * 4 < _HEADER_BYTES or found != version:
        raise BadInputError(
            f"{path} begins like a file of llm.c (magic number {header[0]}, version {found}), but "
            "is not one with tokens to train on."
        )
    if size != _HEADER_BYTES + count * np.dtype(dtype).itemsize:
        raise BadInputError(
            f"{path} has {size} bytes, but its llm.c header says {count} tokens of "
            f"{np.dtype(dtype).itemsize} bytes after {_HEADER_BYTES} bytes. Was it cut short?"
        )
    if not count:
        raise BadInputError(f"{path} holds no tokens")
    return _make_stream([MappedTokens(path, dtype, _HEADER_BYTES)], None)


def _detect_dtype(path: Path, size: int) -> str:
    """Return the dtype of the ids: the widest one for which the upper bits of all words are zero.

    16-bit ids look like 32-bit ids only if every second id is below 16, or, where all ids are below
    16, only if every second id is 0.
    """
    for dtype, least in (("<u8", 8), ("<u4", 16)):
        width = np.dtype(dtype).itemsize
        if size % width or size < least * width:
            continue
        words = np.asarray(np.memmap(path, dtype=dtype, mode="r")[:_LOOKED_AT])
        _require_ids_only(path, words)
        if 0 < words.max() < (_MOST_IDS if (words & 0xFFFF).max() >= 16 else 1 << 16):
            return dtype
    halves = np.fromfile(path, dtype="<u2", count=2 * _LOOKED_AT)
    _require_no_floats(path, halves)
    each = halves[:_LOOKED_AT].view("<u1").reshape(-1, 2)
    _require_two_byte_ids(path, each)
    pairs = halves[: len(halves) // 2 * 2].reshape(-1, 2)
    if len(pairs) >= _LEAST_PAIRS:
        _require_no_header(path, pairs)
        _require_little_endian(path, pairs.view(">u4"))
        _require_lower_bytes_first(path, each)
    return "<u2"


def _require_ids_only(path: Path, words: Array) -> None:
    """Refuse 32- or 64-bit ids with other words among them: a header, or negative padding.

    Such a file would be read as 16-bit ids, of which every second one is 0. The upper half of
    nearly all of its words is below 16; in real 16-bit ids, upper halves are as large as lower
    halves.
    """
    low, rest = words & 0xFFFF, words >> 16
    told = (low >= 16) | (rest >= 16)
    narrow = told & (rest < 16)
    if not narrow.any() or narrow.sum() < _ALIKE * told.sum() or narrow.sum() == told.sum():
        return
    place = int(np.flatnonzero(told & ~narrow)[0])
    value = int(words.view(words.dtype.str.replace("u", "i"))[place])
    raise BadInputError(
        f"{path} holds {8 * words.itemsize}-bit ids, but its word {place:,} is {value:,}, not an "
        "id: a number that marks padding, or a part of a header. Write the ids alone, as in "
        "ids[ids >= 0].astype('uint32').tofile(FILE)."
    )


def _require_little_endian(path: Path, words: Array) -> None:
    low, high = (words & 0xFFFF) < 16, (words >> 16) < 16
    if high.mean() > _ALIKE and low.mean() < 1 - _ALIKE / 3:
        raise BadInputError(
            f"{path} holds big-endian 32- or 64-bit ids. Write them in little-endian "
            "order, as numpy's ids.astype('<u4').tofile(FILE)."
        )


def _require_no_header(path: Path, pairs: Array) -> None:
    """Refuse 32-bit ids after a header, which would be read as 16-bit ids.

    Nearly every second 16-bit word of such a file is below 16, because it is the upper half of an
    id.
    """
    first, second = (pairs < 16).mean(axis=0)
    if max(first, second) > _ALIKE > 1 - _ALIKE > min(first, second):
        raise BadInputError(
            f"{path}: nearly every second of its 16-bit ids is below 16, so they are 32-bit ids "
            "behind a header. Write the ids alone, as numpy's tofile does."
        )


def _require_no_floats(path: Path, halves: Array) -> None:
    for dtype, width in (("<f8", 4), ("<f4", 2)):
        if len(halves) % width:
            continue
        with np.errstate(all="ignore"):
            values = halves.view(dtype)
            whole = (values >= 0) & (values < _MOST_IDS) & (np.floor(values) == values)
        if whole.all() and values.any():
            raise BadInputError(
                f"{path} holds {16 * width}-bit floating-point numbers, not ids. Write them "
                "with numpy as integers, as in ids.astype('uint32').tofile(FILE)."
            )


def _require_two_byte_ids(path: Path, pairs: Array) -> None:
    """Refuse text and one-byte ids, of which two bytes each would be read as one 16-bit id.

    In such files, bytes have the same distribution at even and odd offsets, or are all below 128.
    In two-byte ids, most of which are above 255, lower bytes take all values.
    """
    if len(pairs) < _LEAST_PAIRS or pairs[:, 1].astype(bool).mean() <= 0.5:
        return
    even, odd = _byte_shares(pairs)
    alike = len(pairs) >= _COMPARED_PAIRS and np.abs(even - odd).sum() / 2 < _SAME_BYTES
    if pairs.max() < 128 or (alike and _entropy_bits(even) < _RANDOM_BITS):
        raise BadInputError(
            f"{path} is text, or holds one-byte ids, judging by its bytes, not 16-, 32- or "
            "64-bit ids. Name a text .txt; write ids as uint16 with numpy, as in "
            "ids.astype('uint16').tofile(FILE)."
        )


def _require_lower_bytes_first(path: Path, pairs: Array) -> None:
    """Refuse big-endian 16-bit ids.

    Upper bytes take fewer values than lower bytes and are smaller, since frequent tokens have small
    ids.
    """
    even, odd = _byte_shares(pairs)
    first, second = pairs.mean(axis=0)
    if _entropy_bits(odd) > _entropy_bits(even) + _FEWER_BITS and first < _SMALLER * second:
        raise BadInputError(
            f"{path} appears to hold big-endian 16-bit ids. Write them in little-endian order, "
            "as numpy's "
            "ids.astype('<u2').tofile(FILE)."
        )


def _byte_shares(pairs: Array) -> list[Array]:
    """Return the relative frequency of each byte value at even and at odd offsets."""
    return [np.bincount(column, minlength=256) / len(pairs) for column in pairs.T]


def _entropy_bits(shares: Array) -> float:
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def megatron_stream(path: Path) -> Stream:
    """Open a Megatron-LM .bin file with its .idx (MMIDIDX, version 1).

    Raises BadInputError if the index is damaged or has another version.
    """
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
            raise ValueError("it has no sequences, or some with negative lengths")
        if (pointers != starts[:-1] * dtype.itemsize).any():
            raise ValueError(
                "its sequences are not contiguous: the pointers do not match the sequence lengths. "
                "Write the .idx file again"
            )
        if path.stat().st_size != starts[-1] * dtype.itemsize:
            raise ValueError(
                f"{path.name} has {path.stat().st_size} bytes, which contradicts the index"
            )
        if (borders < 0).any() or (np.diff(borders) < 0).any():
            raise ValueError(
                "the first sequences of its documents are negative or decrease. Write the .idx "
                "file again"
            )
        if not len(borders) or borders[0] != 0 or borders[-1] != sequences:
            ends = f"{borders[0]} to {borders[-1]}" if len(borders) else "none"
            raise ValueError(
                f"it has {sequences} sequences, but its documents belong to other sequences "
                f"({ends}), as happens if files are merged without their documents. Create it "
                "again from the "
                "texts"
            )
        document_starts = starts[borders[:-1]]
    except (OSError, ValueError, IndexError, OverflowError) as error:
        raise BadInputError(f"{idx} is not a readable Megatron index: {error}") from None
    return _make_stream([MappedTokens(path, dtype.str)], document_starts)
