"""Detection of data files with identical contents."""

import filecmp
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import xxhash

from outpace.data.sources import COMPARED_FILES, Source

_COMPARED_BYTES = 1 << 16  # from each end of files of equal size


def files_in_both(train: Source, held_out: Source) -> list[Path]:
    """Return the validation files that are identical to a training file.

    Only the first COMPARED_FILES validation files are checked. Empty files and .idx files are
    ignored.
    """
    wanted = _compared_sizes(held_out)
    sizes = set(wanted.values())
    alike: dict[tuple[int, str, str], list[Path]] = {}
    for file in train.files:
        if (size := file.stat().st_size) in sizes:
            alike.setdefault(_hash_ends(file, size), []).append(file)
    if not alike:
        return []
    return [
        file
        for file, size in wanted.items()
        if _equals_any(file, alike.get(_hash_ends(file, size), ()))
    ]


def repeated_files(source: Source) -> list[Path]:
    """Return the files of rows or tokens that are identical to an earlier file.

    Only the first COMPARED_FILES files are checked.
    """
    if source.kind not in ("rows", "tokens"):
        return []
    sizes = _compared_sizes(source)
    times = Counter(sizes.values())
    seen: dict[tuple[int, str, str], list[Path]] = {}
    found = []
    for file, size in sizes.items():
        if times[size] > 1:
            alike = seen.setdefault(_hash_ends(file, size), [])
            if _equals_any(file, alike):
                found.append(file)
            alike.append(file)
    return found


def _compared_sizes(source: Source) -> dict[Path, int]:
    """Return the sizes of the first files, except empty files and .idx files."""
    return {
        file: size
        for file in source.files[:COMPARED_FILES]
        if (size := file.stat().st_size) and file.suffix.lower() != ".idx"
    }


def _equals_any(file: Path, others: Iterable[Path]) -> bool:
    return any(filecmp.cmp(file, one, shallow=False) for one in others)


def _hash_ends(file: Path, size: int) -> tuple[int, str, str]:
    with file.open("rb") as stream:
        begin = stream.read(_COMPARED_BYTES)
        stream.seek(max(0, size - _COMPARED_BYTES))
        end = stream.read(_COMPARED_BYTES)
    return size, xxhash.xxh3_128_hexdigest(begin), xxhash.xxh3_128_hexdigest(end)
