"""Data files with the same contents."""

import filecmp
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import xxhash

from outpace.data.sources import COMPARED_FILES, Source

_COMPARED_BYTES = 1 << 16  # from each end of files of equal size


def files_in_both(train: Source, held_out: Source) -> list[Path]:
    """Return the validation files whose contents equal those of a training file.

    If there are very many validation files, only the first are checked. Empty files and indices are
    ignored.
    """
    wanted = _compared_sizes(held_out)
    sizes = set(wanted.values())
    alike: dict[tuple[int, str, str], list[Path]] = {}
    for file in train.files:
        if (size := file.stat().st_size) in sizes:
            alike.setdefault(_ends_of(file, size), []).append(file)
    if not alike:
        return []
    return [
        file
        for file, size in wanted.items()
        if _is_any_of(file, alike.get(_ends_of(file, size), ()))
    ]


def repeated_files(source: Source) -> list[Path]:
    """Return files of rows or tokens with the same contents as an earlier file.

    If there are very many files, only the first are checked.
    """
    if source.kind not in ("rows", "tokens"):
        return []
    sizes = _compared_sizes(source)
    times = Counter(sizes.values())
    seen: dict[tuple[int, str, str], list[Path]] = {}
    found = []
    for file, size in sizes.items():
        if times[size] > 1:
            alike = seen.setdefault(_ends_of(file, size), [])
            if _is_any_of(file, alike):
                found.append(file)
            alike.append(file)
    return found


def _compared_sizes(source: Source) -> dict[Path, int]:
    """Return the first files with their sizes, without empty files and indices."""
    return {
        file: size
        for file in source.files[:COMPARED_FILES]
        if (size := file.stat().st_size) and file.suffix.lower() != ".idx"
    }


def _is_any_of(file: Path, others: Iterable[Path]) -> bool:
    """Return whether a file has the contents of one of the others."""
    return any(filecmp.cmp(file, one, shallow=False) for one in others)


def _ends_of(file: Path, size: int) -> tuple[int, str, str]:
    """Return the size, the beginning and the end of a file."""
    with file.open("rb") as stream:
        begin = stream.read(_COMPARED_BYTES)
        stream.seek(max(0, size - _COMPARED_BYTES))
        end = stream.read(_COMPARED_BYTES)
    return size, xxhash.xxh3_128_hexdigest(begin), xxhash.xxh3_128_hexdigest(end)
