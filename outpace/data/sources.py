"""What a --data argument means: files, folders, globs, datasets, tokens, Python's own source."""

import glob
import os
import sysconfig
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from outpace.records.errors import BadInputError, shown

Kind = Literal["text", "dataset", "nanogpt", "megatron"]

_BLOCK_BYTES = 1 << 20
# JSON can make thirty times as much of it in memory.
_LINE_BYTES = 64 << 20
# Parts of the standard library that are no prose about Python: tests, and generated tables.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "idlelib",
     "lib2to3", "ensurepip", "turtledemo", "pydoc_data"}
)  # fmt: skip


# Size, and times of the last change; `touch` sets the first of the two, but nothing the second.
State = tuple[int, int, int]


@dataclass(frozen=True)
class Source:
    """A data source, found. `files` are empty for datasets."""

    reference: str
    kind: Kind
    files: tuple[Path, ...] = ()
    root: Path | None = None
    total_bytes: int | None = None
    states: tuple[State, ...] = ()  # of the files when they were found

    @property
    def is_tokens(self) -> bool:
        """Whether it is tokens already, so that it needs no tokenizer."""
        return self.kind in ("nanogpt", "megatron")


def open_source(reference: str) -> Source:
    """Find out what a --data argument means. Raises BadInputError when there is nothing there."""
    try:
        return _opened(reference)
    except OSError as error:  # a folder that may not be looked into, a name longer than may be
        raise BadInputError(
            f"the data at {shown(reference)} cannot be found: {error.strerror}"
        ) from None


def _opened(reference: str) -> Source:
    if reference == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return _text(reference, _library_files(root), root)
    if reference.startswith("hf:"):
        return Source(reference, "dataset")
    path = Path(reference)
    if path.is_dir():
        if _is_saved_dataset(path):
            return Source(f"hf:{reference}", "dataset")
        return _text(reference, _files_below(path), path)
    if path.is_file():
        return _of_file(reference, path)
    prefixed = Path(f"{reference}.bin")  # Megatron names its data so; the prefix may hold a dot
    if prefixed.is_file() and prefixed.with_suffix(".idx").is_file():
        return _of_file(reference, prefixed)
    # pathlib's own patterns cannot begin at the root of the file system.
    found = glob.glob(reference, recursive=True)  # noqa: PTH207
    matches = sorted(Path(match) for match in found if Path(match).is_file())
    if not matches:
        raise BadInputError(
            f"no data at {reference!r}: there is no such file or folder, and as a pattern it "
            "matches no file. For a Hugging Face dataset write hf:NAME."
        )
    return _text(reference, matches, Path(matches[0].anchor or "."))


def _text(reference: str, files: list[Path], root: Path) -> Source:
    if not files:
        raise BadInputError(f"no files below {reference}; is it the right folder?")
    return _found(reference, "text", files, root)


def _found(reference: str, kind: Kind, files: list[Path], root: Path) -> Source:
    states = tuple(map(_state, files))
    total = sum(size for size, *_ in states)
    if total == 0:
        raise BadInputError(f"the data at {reference} is empty")
    return Source(reference, kind, tuple(files), root, total, states)


def _state(file: Path) -> State:
    try:
        stat = file.stat()
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror or error}") from None
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def check_unchanged(source: Source) -> None:
    """Raises BadInputError when a file has changed since the source was found."""
    for file, state in zip(source.files, source.states, strict=True):
        if _state(file) != state:
            raise BadInputError(
                f"{file} changed while it was being read, so nothing was kept of it. Run this "
                "again when it is complete."
            )


def _of_file(reference: str, path: Path) -> Source:
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    if path.suffix != ".bin":
        return _text(reference, [path], path.parent)
    index = path.with_suffix(".idx")
    if index.is_file():
        return _found(reference, "megatron", [path, index], path.parent)
    return _found(reference, "nanogpt", [path], path.parent)


def _files_below(root: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Files of a folder and of those it links to, without hidden ones, in a stable order.

    `left_out`: names of folders.
    """
    found: list[str] = []
    folders, linked = [str(root)], {os.path.realpath(root)}
    while folders:  # pathlib's own walk takes seconds where there are 100,000 files
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith(".") or _leads_nowhere(entry):
                    continue
                if entry.is_dir():
                    if entry.name in left_out:
                        continue
                    if entry.is_symlink():  # each once, so that a circle of links has an end
                        target = os.path.realpath(entry.path)
                        if target in linked:
                            continue
                        linked.add(target)
                    folders.append(entry.path)
                elif entry.is_file():
                    found.append(entry.path)
    return sorted(map(Path, found))


def _leads_nowhere(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a link to nothing, or to itself."""
    return entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110 (text at hand)


def _library_files(root: Path) -> list[Path]:
    return [
        path
        for path in _files_below(root, _LEFT_OUT)
        if path.suffix == ".py" and path.stat().st_size > 0 and _decodes(path)
    ]


def _decodes(path: Path) -> bool:
    """A few files of the library are in other encodings on purpose."""
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (
        (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    )


def fingerprint(source: Source, text_field: str) -> str:
    """A hash of contents and of names below the source's root."""
    digest = xxhash.xxh3_128()
    if source.kind == "dataset":
        digest.update(str(open_dataset(source.reference)._fingerprint).encode())
    for file in source.files:
        relative = os.path.relpath(file, source.root)
        digest.update(f"{relative}\0{file.stat().st_size}\0".encode())
        with readable(file) as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
    digest.update(text_field.encode())
    return digest.hexdigest()


def open_dataset(reference: str) -> Any:
    """A Hugging Face dataset: hf:NAME[:CONFIG[:SPLIT]], where NAME may be a local path."""
    import datasets

    name, config, split = _dataset_name(reference)
    try:
        if not _is_saved_dataset(Path(name)):
            return datasets.load_dataset(name, config or None, split=split)
        found = datasets.load_from_disk(name)
        if not isinstance(found, datasets.DatasetDict):
            return found
        if split not in found:
            raise BadInputError(
                f"the dataset {reference} has no split {split!r}, but "
                f"{', '.join(map(repr, found))}; write hf:{name}::SPLIT"
            )
        return found[split]
    except BadInputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInputError(f"the dataset {reference} cannot be opened: {reason}") from None


def _dataset_name(reference: str) -> tuple[str, str, str]:
    """Name, configuration and split of hf:NAME[:CONFIG[:SPLIT]]; a folder's name may have colons"""
    whole = reference.removeprefix("hf:")
    if _is_saved_dataset(Path(whole)):
        return whole, "", "train"
    name, *rest = whole.split(":")
    if not name or len(rest) > 2:
        raise BadInputError(f"{reference!r}: expected hf:NAME[:CONFIG[:SPLIT]]")
    config, split = (*rest, "", "")[:2]
    return name, config, split or "train"


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, and their numbers from 1.

    Raises BadInputError for a file that cannot be read, and for a line that memory should not hold.
    """
    with readable(file) as stream:
        for number in count(1):
            line = stream.readline(_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > _LINE_BYTES:
                raise BadInputError(
                    f"{file}, line {number} is longer than {_LINE_BYTES >> 20} MiB, and a line is "
                    "held in memory whole. Divide it, or give a long text as a file of its own."
                )
            if line.strip():
                yield number, line


@contextmanager
def readable(file: Path) -> Iterator[BinaryIO]:
    """An open file. Raises BadInputError when it cannot be read."""
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror or error}") from None
