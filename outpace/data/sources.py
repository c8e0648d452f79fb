"""Data sources for --data: files, folders, globs, datasets, token files, the standard library."""

import glob
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import xxhash

from outpace.data.file_kinds import form_of
from outpace.data.file_reader import State, readable, state_of
from outpace.data.folders import files_below, leads_nowhere
from outpace.data.hf_datasets import dataset_files, dataset_name, is_saved_dataset, open_dataset
from outpace.records.base import require_no_pointer
from outpace.records.errors import BadInputError, excerpt, json_error

# "text": each file is a document; "rows": files of records with named columns.
Kind = Literal["text", "rows", "dataset", "tokens"]

# Files that describe the data but are not part of it.
_ABOUT = re.compile(r"(readme|licen[cs]e|notice|citation|changelog|dataset_infos?|stats)\b", re.I)
_SNIFFED_BYTES = 1 << 16
_LONGEST_POINTER = 1024  # bytes of a Git LFS pointer
# Split names that occur in file names (train.bin, fineweb_val_000000.bin, data.test.jsonl).
_TRAIN_NAME = re.compile(r"(^|[-_. ])(train|training)([-_. ]|$)", re.I)
_HELD_OUT_NAME = re.compile(
    r"(^|[-_. ])(val|valid|validation|dev|test|testing|eval|evaluation)([-_. ]|$)", re.I
)

# Maximum number of files to inspect, since a folder may hold very many.
COMPARED_FILES = 1000
# Folders of the standard library to skip, such as tests, packages and generated tables.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3",
     "ensurepip", "turtledemo", "pydoc_data", "encodings"}
)  # fmt: skip
# Name prefixes of files that consist of tables, which a model should not learn to write.
_TABLES = ("_sysconfigdata", "entities")


@dataclass(frozen=True)
class Source:
    """A data source. `files` is empty for datasets.

    `left_out` lists files of a folder or pattern that have another format than the chosen files, or
    belong to another split. `outputs` lists runs and caches of outpace within the data, which are
    not read. `lost` lists broken links.
    """

    reference: str
    kind: Kind
    files: tuple[Path, ...] = ()
    total_bytes: int | None = None
    states: tuple[State, ...] = ()  # of the files when they were found
    left_out: tuple[Path, ...] = ()
    outputs: tuple[Path, ...] = ()
    lost: tuple[Path, ...] = ()

    @property
    def is_tokens(self) -> bool:
        """Return whether the source is already tokenized."""
        return self.kind == "tokens"

    @property
    def hints(self) -> tuple[str, ...]:
        """Hints about the files of a folder or pattern that are not read."""
        hints = []
        if self.left_out:
            hints.append(
                f"of {self.reference}, {len(self.files):,} files are read; "
                f"{_list_names([file.name for file in self.left_out])} left out, because they "
                "have another format or belong to another split. Name files with --data or "
                "--eval-data to read them"
            )
        if self.outputs:
            names = [str(folder.relative_to(self.reference)) for folder in self.outputs]
            hints.append(
                f"of {self.reference}, {_list_names(names)} left out, because they are runs or "
                "caches that outpace wrote. Name them with --data to read them"
            )
        if self.lost:
            names = [
                str(link.relative_to(self.reference) if Path(self.reference).is_dir() else link)
                for link in self.lost
            ]
            hints.append(
                f"of {self.reference}, {_list_names(names)} not read: a link leads to a missing "
                "file, as after an interrupted download. Fetch the data again"
            )
        return tuple(hints)


def _list_names(names: Sequence[str]) -> str:
    """Return up to three names and the number of further ones, followed by "is" or "are"."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"


def open_source(reference: str, *, rows: bool = False) -> Source:
    """Return the source that a --data argument names. Raises BadInputError if there is none.

    With `rows`, files of records are preferred, even if most files have other formats.
    """
    try:
        return _find_source(reference, rows)
    except OSError as error:  # forbidden folder, or name too long
        raise BadInputError(
            f"the data at {excerpt(reference)} cannot be found: {error.strerror}"
        ) from None


def _find_source(reference: str, rows: bool) -> Source:
    if reference == "stdlib":
        return _make_source(
            reference, "text", _list_library_files(Path(sysconfig.get_path("stdlib")))
        )
    if reference.startswith("hf:"):
        return Source(reference, "dataset")
    path = Path(reference)
    if path.is_dir():
        if is_saved_dataset(path):
            return Source(f"hf:{reference}", "dataset")
        files, outputs, lost = files_below(path)
        if not files:
            _refuse_broken_links(lost)
        if outputs and not files:
            raise BadInputError(
                f"{reference} contains only runs or a cache of outpace; is it the right folder?"
            )
        found = _source_of_files(reference, files, rows)
        return replace(found, outputs=tuple(outputs), lost=tuple(lost))
    if path.is_file():
        return _source_of_file(reference, path)
    prefixed = Path(f"{reference}.bin")  # Megatron's names; the prefix may contain a dot
    if prefixed.is_file() and prefixed.with_suffix(".idx").is_file():
        return _source_of_file(reference, prefixed)
    # pathlib's patterns cannot start at the root of the file system.
    named = [Path(match) for match in glob.glob(reference, recursive=True)]  # noqa: PTH207
    matches = _drop_repeated_files(match for match in named if match.is_file())
    lost = _drop_repeated_files(match for match in named if leads_nowhere(match))
    if not matches:
        _refuse_broken_links(lost)
        raise BadInputError(
            f"no data at {reference!r}: there is no such file or folder, and as a pattern it "
            "matches no file. For a Hugging Face dataset write hf:NAME."
        )
    one = len(matches) == 1
    found = (
        _source_of_file(reference, *matches) if one else _source_of_files(reference, matches, rows)
    )
    return replace(found, lost=tuple(lost))


def _refuse_broken_links(lost: Sequence[Path]) -> None:
    if lost:
        raise BadInputError(
            f"{lost[0]} is a link to {lost[0].readlink()}, which does not exist, as after an "
            "interrupted download. Fetch the data again, or copy it with the files that its links "
            "lead to (cp -rL)."
        )


def _drop_repeated_files(files: Iterable[Path]) -> list[Path]:
    """Return files sorted, with only the shortest of several paths to the same file."""
    by_path = sorted(files, key=lambda file: len(str(file)), reverse=True)
    return sorted({(os.path.realpath(file.parent), file.name): file for file in by_path}.values())


def _source_of_file(reference: str, path: Path) -> Source:
    form = form_of(path)
    if form == "tokens":
        return _make_source(reference, "tokens", _add_indices([path]))
    if form == "text" and _has_rows(path):
        raise BadInputError(
            f"{path} contains JSON (an object per line, or a list of objects), whose syntax would "
            "be trained on as text. Rename it to .jsonl, so that its rows are read."
        )
    return _make_source(reference, "text" if form == "text" else "rows", [path])


def _add_indices(files: Iterable[Path]) -> list[Path]:
    """Return each .bin, followed by its .idx if it has one."""
    tokens = dict.fromkeys(
        file.with_suffix(".bin") if file.suffix.lower() == ".idx" else file for file in files
    )
    pairs = ((file, file.with_suffix(".idx")) for file in tokens)
    return [one for file, index in pairs for one in (file, index)[: 1 + index.is_file()]]


def _source_of_files(reference: str, files: list[Path], rows: bool) -> Source:
    """Return a source of the files in the format that has the most bytes."""
    if not files:
        raise BadInputError(f"no files below {reference}; is it the right folder?")
    groups: dict[Kind, list[Path]] = {"tokens": [], "rows": [], "text": []}
    unclear: list[Path] = []
    for file in files:
        form = form_of(file)
        if form == "json" and file.suffix.lower() == ".json" and not _has_rows(file):
            unclear.append(file)  # a configuration, or a file with a single record
        else:
            groups[form if form in ("text", "tokens") else "rows"].append(file)
    if rows or not any(groups.values()):
        groups["rows"] += unclear if not groups["rows"] else []
    kind = _choose_kind(groups, rows)
    chosen = sorted({*groups[kind], *(unclear if kind == "text" else ())})
    splits = _splits_from_paths(chosen)
    # Source code has folders named test, so text files are split by name only if all of them name a
    # split.
    if kind != "text" or all(splits[file] for file in chosen if not _ABOUT.match(file.name)):
        chosen = [file for file, split in splits.items() if split != "held out"] or chosen
    if kind == "tokens":
        chosen = _add_indices(chosen)
    found = _make_source(reference, kind, chosen)
    return replace(found, left_out=tuple(file for file in files if file not in set(chosen)))


def _choose_kind(groups: Mapping[Kind, Sequence[Path]], rows: bool) -> Kind:
    """Return "rows" if requested, else the kind with the most bytes, ignoring metadata files."""
    if rows and groups["rows"]:
        return "rows"
    sizes = {
        kind: sum(1 + file.stat().st_size for file in files if not _ABOUT.match(file.name))
        for kind, files in groups.items()
    }
    if not any(sizes.values()):
        return next(kind for kind, files in groups.items() if files)
    return max(sizes, key=lambda kind: sizes[kind])


def _has_rows(file: Path) -> bool:
    """Return whether a file begins with a JSON list of objects, or has one object per line."""
    with readable(file) as stream:
        lines = stream.read(_SNIFFED_BYTES).removeprefix(b"\xef\xbb\xbf").split()
    head = b"".join(lines[:3])[:3]
    if head[:1] == b"[":
        return head == b'[{"'
    with readable(file) as stream:
        lines = [line for line in stream.read(_SNIFFED_BYTES).splitlines() if line.strip()]
    return len(lines) > 1 and all(map(_starts_json_object, lines[:2]))


def _starts_json_object(line: bytes) -> bool:
    """Return whether a line is a JSON object, or the start of an object that was cut off."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return len(line) > _SNIFFED_BYTES // 2


def unread_split_hints(source: Source) -> list[str]:
    """Return a hint about splits that are used for neither training nor validation."""
    if source.kind != "dataset":
        return []
    name, _, split = dataset_name(source.reference)
    path = Path(name, "dataset_dict.json")
    if not path.is_file():
        return []
    try:
        splits = json.loads(path.read_bytes()).get("splits", [])
    except (ValueError, AttributeError, RecursionError) as error:
        raise BadInputError(f"cannot read {path}: {json_error(error)}") from None
    others = [str(one) for one in splits if one != split]
    if not others:
        return []
    return [
        f"of {source.reference}, the split {split!r} is read, and a part of it is held out for "
        f"validation; {', '.join(map(repr, others))} {'is' if len(others) == 1 else 'are'} not. "
        f"To validate on one, name it: --eval-data hf:{name}::{others[-1]}"
    ]


def row_files_below(folder: Path) -> list[Path]:
    """Return the row files below a folder, except metadata files."""
    return [
        file
        for file in files_below(folder)[0]
        if form_of(file) not in ("text", "tokens") and not _ABOUT.match(file.name)
    ]


def is_held_out(file: Path) -> bool:
    """Return whether a file's name marks it as validation or test data."""
    return _split_from_names([file.stem]) == "held out"


def _splits_from_paths(files: Sequence[Path]) -> dict[Path, str | None]:
    """Return the split of each file ("train", "held out" or None), judging by names in its path."""
    root = Path(os.path.commonpath([file.parent for file in files]))
    return {
        file: _split_from_names((*file.relative_to(root).parent.parts, file.stem)) for file in files
    }


def _split_from_names(names: Sequence[str]) -> str | None:
    """Return "train" or "held out" by the last name that marks a split; None if none does."""
    for name in reversed(names):
        if _TRAIN_NAME.search(name):
            return "train"
        if _HELD_OUT_NAME.search(name):
            return "held out"
    return None


def _make_source(reference: str, kind: Kind, files: list[Path]) -> Source:
    states = tuple(map(state_of, files))
    total = sum(size for size, *_ in states)
    if total == 0:
        raise BadInputError(f"the data at {reference} is empty")
    for file, (size, *_) in zip(files, states, strict=True):
        if size < _LONGEST_POINTER:
            require_no_pointer(file)
    return Source(reference, kind, tuple(files), total, states)


def check_unchanged(source: Source) -> None:
    """Raise BadInputError if a file has changed since the source was found."""
    for file, state in zip(source.files, source.states, strict=True):
        if state_of(file) != state:
            raise BadInputError(
                f"{file} changed while it was being read, so it was not cached. Run this again "
                "when it is complete."
            )


def _list_library_files(root: Path) -> list[Path]:
    return [
        path
        for path in files_below(root, _LEFT_OUT)[0]
        if path.suffix == ".py" and not path.name.startswith(_TABLES)
        if path.stat().st_size > 0 and _is_utf8(path)
    ]


def _is_utf8(path: Path) -> bool:
    """Return whether a file is UTF-8; a few files of the standard library deliberately are not."""
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def fingerprint(source: Source, text_field: str) -> str:
    """Return a hash of the contents of a source, independent of file names and locations."""
    digest = xxhash.xxh3_128()
    files = source.files
    if source.kind == "dataset":
        # A dataset's own fingerprint identifies the code that created it, not the data.
        dataset = open_dataset(source.reference)
        digest.update(str(dataset._fingerprint).encode())
        files = dataset_files(dataset)
    for file in files:
        form = "text" if source.kind == "text" else form_of(file)
        digest.update(f"{form}\0{file.stat().st_size}\0".encode())
        with readable(file) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    digest.update(text_field.encode())
    return digest.hexdigest()
