"""Search for data files in folders."""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from outpace.records.base import refuse_pipe

# Suffixes of backup copies made by editors and merges.
_OLDER_COPIES = ("~", ".bak", ".orig", ".swp")
_BYTECODE = "__pycache__"  # Python's cache, in any folder of sources that were run
# Folders of a cache, with the suffix that entry names have after the hash.
_CACHED = {
    "tokens": "", "tokenizers": "", "hashes": "", "extents": "", "encoded": ".npz",
    "specs": ".json", "tokenizer_classes": ".json",
}  # fmt: skip
_HASH, _UNFINISHED = "[0-9a-f]{32}", r"(\.lock|(\.[\w-]+)?\.tmp)?"
_BLOCK_BYTES = 1 << 20


def files_below(
    root: Path, left_out: Collection[str] = ()
) -> tuple[list[Path], list[Path], list[Path]]:
    """Return a folder's files, the outputs of outpace in it, and broken links, as sorted lists.

    The search is recursive and follows links to folders. It skips hidden files, backup copies,
    Python bytecode, and folders whose names are in `left_out`.
    """
    found: list[str] = []
    lost: list[str] = []
    outputs: list[str] = []
    folders, linked = [str(root)], {os.path.realpath(root)}
    while folders:  # pathlib's walk takes seconds for 100,000 files
        folder = folders.pop()
        with os.scandir(folder) as scanned:
            entries = list(scanned)
        if folder != str(root) and _is_output(Path(folder), {entry.name for entry in entries}):
            outputs.append(folder)
            continue
        for entry in entries:
            older = entry.name.endswith(_OLDER_COPIES)
            if older or entry.name.startswith(".") or entry.name == _BYTECODE:
                continue
            if leads_nowhere(entry):
                lost.append(entry.path)
                continue
            if entry.is_dir() and entry.name not in left_out:
                if entry.is_symlink():  # visit each once, since links may be circular
                    target = os.path.realpath(entry.path)
                    if target in linked:
                        continue
                    linked.add(target)
                folders.append(entry.path)
            elif entry.is_file():
                found.append(entry.path)
    return sorted(map(Path, found)), sorted(map(Path, outputs)), sorted(map(Path, lost))


def _is_output(folder: Path, names: Collection[str]) -> bool:
    names = {name for name in names if not name.startswith(".")}
    if folder.name in _CACHED and names:
        entry = re.compile(f"{_HASH}({re.escape(_CACHED[folder.name])})?{_UNFINISHED}")
        return all(map(entry.fullmatch, names))
    if "run.json" not in names:
        return False
    with suppress(OSError):
        refuse_pipe(folder / "run.json")
        with (folder / "run.json").open("rb") as stream:
            head = stream.read(_BLOCK_BYTES)
        return all(f'"{name}"'.encode() in head for name in ("plan", "settings", "origins"))
    return False


def leads_nowhere(entry: "os.DirEntry[str] | Path") -> bool:
    """Return whether a path is a broken link or a link to itself."""
    return entry.is_symlink() and not os.path.exists(entry)  # noqa: PTH110 (text at hand)
