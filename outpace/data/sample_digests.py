"""Digests of a few samples of a user's data set, to compare the data sets of all ranks.

All ranks seed the generators of torch, NumPy and Python equally, so random augmentations agree.
Differences that the same data may have on different hosts are ignored: the last bits of decoded
values, the folders of paths, and the order of sets.
"""

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, get_worker_info

from outpace.data.seeding import seed_generators
from outpace.data.workers import forks_workers, start_method, starting_workers

_CHOSEN = 4  # additional samples, besides the first and the last
_DIGEST = 0x646967  # makes these seeds differ from those of training
_BLOCKS = 64  # number of blocks of an array whose means are compared
_MEASURED_BYTES = 2  # integers up to this size may be pixels or audio, which decoders round
_OF_SPREAD, _OF_SIZE = 0.05, 1e-3  # allowed differences: of decoders; of rounded means
_DEPTH = 8


@dataclass(frozen=True)
class Leaf:
    """Digest of an array: a hash of its values, or the means of its blocks.

    The means are for values that decoders may round differently, such as pixels; `exact` is then
    None.
    """

    shape: tuple[int, ...]
    exact: str | None
    means: tuple[float, ...]

    def resembles(self, other: "Leaf") -> bool:
        """Return whether two digests may be of the same array, decoded or rounded differently."""
        if (self.shape, self.exact) != (other.shape, other.exact):
            return False
        mine, theirs = np.array(self.means), np.array(other.means)
        if not mine.size:
            return True
        allowed = _OF_SPREAD * mine.std() + _OF_SIZE * np.sqrt(np.square(mine).mean())
        return bool(np.sqrt(np.square(mine - theirs).mean()) <= allowed)


@dataclass(frozen=True)
class Digest:
    """Digests of a sample's arrays in order, or of its texts if it has no numbers."""

    leaves: tuple[Leaf, ...]
    texts: str | None

    def resembles(self, other: "Digest") -> bool:
        """Return whether both digests may be of the same sample, decoded by different libraries."""
        return (
            self.texts == other.texts
            and len(self.leaves) == len(other.leaves)
            and all(map(Leaf.resembles, self.leaves, other.leaves))
        )


@dataclass(frozen=True)
class SampleDigests:
    """Digests of samples by their index; None for a sample without numbers and texts.

    Each sample is read twice with the same seeds; `unsteady` lists those that differ. `unread` is
    the reason if no sample could be read.
    """

    digests: Mapping[int, Digest | None]
    unsteady: tuple[int, ...]
    unread: str | None = None


@dataclass(frozen=True)
class SampleDifference:
    """A rank whose samples differ from rank 0's.

    `index` is the first sample that differs; `most` says whether most compared samples differ.
    """

    rank: int
    index: int
    most: bool


def digest_samples(
    dataset: Any, seed: int, workers: int = 0, timeout_s: float = 0.0
) -> SampleDigests:
    """Digest the first, the last and a few random samples chosen by `seed`, reading each twice.

    Another process reads them, so the data set's state in this process (generators, counters,
    caches, file positions) does not change before training. If processes cannot be forked and
    `workers` is 0, nothing is read.
    """
    indices = _choose_indices(len(dataset), seed)
    if not workers and not forks_workers():
        unread = "no process can be forked to read them, or another start method was chosen"
        return SampleDigests(dict.fromkeys(indices), (), unread)
    try:
        with starting_workers() as begin:
            found: list[tuple[Digest | None, Digest | None]] = list(
                DataLoader(
                    _RepeatedReads(dataset, seed, indices), batch_size=None, num_workers=1,
                    worker_init_fn=begin, multiprocessing_context=start_method(),
                    timeout=timeout_s, generator=torch.Generator(),
                )
            )  # fmt: skip
    except Exception as error:  # error in user code: training will report it
        lines = str(error).strip().splitlines() or [""]
        unread = f"{type(error).__name__}: {lines[-1]}"
        return SampleDigests(dict.fromkeys(indices), (), unread)
    pairs = list(zip(indices, found, strict=True))
    unsteady = tuple(index for index, (first, second) in pairs if first != second)
    return SampleDigests({index: first for index, (first, _) in pairs}, unsteady)


def find_difference(found: Sequence[SampleDigests]) -> SampleDifference | None:
    """Find a rank whose samples differ from rank 0's; return None if all ranks agree.

    The first rank for which most samples differ has precedence over ranks with fewer differences.
    Samples that are unsteady or have no digest are not compared.
    """
    differences = []
    for rank, other in enumerate(found):
        compared, differing = 0, []
        for index, digest in found[0].digests.items():
            theirs = other.digests.get(index)
            unsteady = index in found[0].unsteady or index in other.unsteady
            if unsteady or digest is None or theirs is None:
                continue
            compared += 1
            if not digest.resembles(theirs):
                differing.append(index)
        if differing:
            most = 2 * len(differing) > compared
            differences.append(SampleDifference(rank, differing[0], most))
    return min(differences, key=lambda one: not one.most, default=None)


def _choose_indices(count: int, seed: int) -> list[int]:
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _DIGEST))))
    chosen = draw.integers(0, count, _CHOSEN).tolist() if count else []
    return sorted({*chosen, *((0, count - 1) if count else ())})


class _RepeatedReads(Dataset[tuple[Digest | None, Digest | None]]):
    """Data set that reads each sample twice and returns both digests."""

    def __init__(self, dataset: Any, seed: int, indices: Sequence[int]) -> None:
        self._dataset = dataset
        self._seed = seed
        self._indices = indices
        self._began = False

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> tuple[Digest | None, Digest | None]:
        if not self._began and get_worker_info() is not None:
            self._began = True
            _separate_file_positions()
        return self._read_digest(self._indices[place]), self._read_digest(self._indices[place])

    def _read_digest(self, index: int) -> Digest | None:
        seed_generators(self._seed, index, _DIGEST)
        if hasattr(self._dataset, "__getitems__"):
            return digest_of(self._dataset.__getitems__([index]))
        return digest_of(self._dataset[index])


def _separate_file_positions() -> None:
    """Give this process its own positions in files that are open for reading only.

    A forked process shares positions with its parent, so its reads would change those of the
    parent.
    """
    listed = Path("/proc/self/fd")
    for path in list(listed.iterdir()) if listed.is_dir() else ():
        with suppress(OSError):
            number = int(path.name)
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if flags & os.O_ACCMODE != os.O_RDONLY or not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            own = os.open(path, flags)
            try:
                os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, number, inheritable=os.get_inheritable(number))
            finally:
                os.close(own)


def digest_of(sample: Any) -> Digest | None:
    """Digest a sample's numbers, or its texts if it has no numbers.

    Returns None if it has neither, or cannot be inspected.
    """
    try:
        values = list(_iterate_values(sample, 0))
        leaves = tuple(_digest_array(value) for value in values if isinstance(value, np.ndarray))
    except Exception:  # a user's object that cannot be inspected
        return None
    if leaves:
        return Digest(leaves, None)
    digest = xxhash.xxh3_128()
    for text in values:
        digest.update(f"{len(text)} ".encode() + text)
    return Digest((), digest.hexdigest()) if values else None


def _digest_array(array: np.ndarray[Any, Any]) -> Leaf:
    flat = array.reshape(-1)
    integers = flat.dtype.kind in "biu"
    if integers and (flat.size == 1 or flat.itemsize > _MEASURED_BYTES or flat.dtype.kind == "b"):
        wide = np.ascontiguousarray(flat, np.uint64 if flat.dtype.kind == "u" else np.int64)
        return Leaf(array.shape, xxhash.xxh3_128_hexdigest(wide.tobytes()), ())
    if flat.dtype.kind == "c":
        flat = np.stack((flat.real, flat.imag), -1).reshape(-1)
    finite = np.nan_to_num(flat.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    blocks = np.array_split(finite, min(_BLOCKS, finite.size)) if finite.size else []
    return Leaf(array.shape, None, tuple(float(block.mean()) for block in blocks))


def _iterate_values(value: Any, depth: int) -> Iterator[Any]:
    """Yield the numbers of a sample as arrays, and its texts as bytes, in order."""
    if depth > _DEPTH or value is None:
        return
    if isinstance(value, str | PurePath | bytes | bytearray):
        yield _encode_text(value)
    elif (array := _to_array(value)) is not None:
        yield array
    else:
        for one in _iterate_members(value):
            yield from _iterate_values(one, depth + 1)


def _encode_text(value: str | PurePath | bytes | bytearray) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    # Paths differ between hosts, so compare the file's name.
    named = isinstance(value, PurePath) or (value.startswith("/") and len(value.split()) == 1)
    return (PurePath(value).name if named else str(value)).encode(errors="surrogatepass")


def _to_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a tensor, array, image or number as a NumPy array; None for anything else."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        plain = plain.to_dense() if plain.layout != torch.strided else plain
        floats = plain.is_floating_point() and plain.element_size() < 4
        return (plain.float() if floats else plain).resolve_conj().resolve_neg().numpy()
    number = isinstance(value, bool | int | float | complex)
    known = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    if isinstance(value, type) or not (number or known):
        return None
    array = np.asarray(value)
    return array if array.dtype.kind in "biufc" else None


def _iterate_members(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, set | frozenset):  # their order differs between processes
        yield from sorted(value, key=repr)
    elif isinstance(value, np.ndarray):
        yield from value.reshape(-1).tolist()
    elif isinstance(value, list | tuple):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from vars(value).values()
