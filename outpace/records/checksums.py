"""Checksums of a folder's files, saved in the folder and verified when the files are read."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from outpace.records.base import read_object, require_no_pointer, write_atomic
from outpace.records.errors import BadInputError
from outpace.records.run import resume_command

CHECKSUMS_FILE = "checksums.json"
_BLOCK_BYTES = 1 << 22
_LARGE = (".safetensors", ".bin")  # verified when read, not when the folder is opened


def checksum(blocks: Iterable[bytes | memoryview]) -> str:
    """Return the xxh3_128 digest of a file's blocks in hexadecimal."""
    digest = xxhash.xxh3_128()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def file_checksum(path: Path) -> str:
    """Return a file's checksum. Raises BadInputError if it cannot be read."""
    return checksum(_read_blocks(path))


def write_checksums(folder: Path) -> None:
    """Write a file with the size and checksum of every file in `folder`, except in subfolders."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    entries = {
        path.name: {"bytes": path.stat().st_size, "xxh3_128": file_checksum(path)}
        for path in files
        if path.name != CHECKSUMS_FILE
    }
    write_atomic(folder / CHECKSUMS_FILE, json.dumps(entries, indent=1) + "\n")


def added_names(folder: Path) -> list[str]:
    """Return the names in a folder that its checksum file does not list.

    Skips hidden files and Python caches. Raises BadInputError if the checksum file is damaged.
    """
    listed = {CHECKSUMS_FILE, *_read_entries(folder)}
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if name not in listed and not name.startswith((".", "__"))]


def folder_damage(folder: Path) -> str | None:
    """Describe the first damage found in a folder; None if all files match their checksums."""
    try:
        names = _read_entries(folder)
        return next(
            (found for name in names if (found := _describe_damage(folder / name, names))), None
        )
    except BadInputError as error:
        return str(error)


def require_small_files(folder: Path) -> None:
    """Verify the checksums of a folder's small files, and the sizes of its large ones.

    Raises BadInputError if a file is damaged.
    """
    entries = _read_entries(folder)
    for name in entries:
        _require_undamaged(
            folder, _describe_damage(folder / name, entries, reads=not name.endswith(_LARGE))
        )


def require_readable(path: Path) -> None:
    """Refuse a file that is unreadable, is a Git LFS pointer, or does not match its checksum.

    Files without a saved checksum pass the last check.
    """
    require_no_pointer(path)
    entries = _read_entries(path.parent)
    if path.name in entries:
        _require_undamaged(path.parent, _describe_damage(path, entries))


def _require_undamaged(folder: Path, damage: str | None) -> None:
    if damage is None:
        return
    run = folder.parent
    again = f"run {resume_command(run)} to write it again"
    remedy = again if (run / "run.json").is_file() else "restore the original"
    raise BadInputError(
        f"{damage}. If it was damaged, {remedy}. If you changed it on purpose, remove "
        f"{folder / CHECKSUMS_FILE}."
    )


def _read_entries(folder: Path) -> dict[str, Any]:
    """Return the entries of a folder's checksum file by file name; empty without the file."""
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        return {}
    entries = read_object(path)
    for name, entry in entries.items():
        known = isinstance(entry, dict) and {"bytes", "xxh3_128"} <= entry.keys()
        if not known or Path(name).name != name:
            raise BadInputError(
                f"{path} is damaged: its entry for {name!r} is invalid. Restore the file, or "
                "remove it to skip the verification."
            )
    return entries


def _describe_damage(path: Path, entries: dict[str, Any], reads: bool = True) -> str | None:
    entry = entries[path.name]
    if not path.is_file():
        return f"{path} is {'a folder' if path.is_dir() else 'missing'}"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path} has {size} bytes instead of {entry['bytes']}"
    if reads and file_checksum(path) != entry["xxh3_128"]:
        return f"{path} does not match the checksum that was saved with it"
    return None


def _read_blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
