"""Sources that --data names: files, folders, globs, datasets, tokens, Python's own source."""

import filecmp
import glob
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from outpace.records.base import refuse_pipe, require_no_pointer
from outpace.records.errors import BadInputError, excerpt, json_error

# "text": each file is a document; "rows": files of records with named columns.
Kind = Literal["text", "rows", "dataset", "tokens"]
Form = Literal["text", "json", "csv", "tsv", "parquet", "tokens"]

# Suffixes that editors and merges give to older copies of files.
_OLDER_COPIES = ("~", ".bak", ".orig", ".swp")
_BYTECODE = "__pycache__"  # Python's cache, in any folder of sources that were run

# Kinds of files by suffix, in lower or upper case; any other file is plain text.
_FORMS: Mapping[str, Form] = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".jsonlines": "json", ".jl": "json",
    ".csv": "csv", ".tsv": "tsv",
    ".tab": "tsv", ".parquet": "parquet", ".pq": "parquet", ".bin": "tokens", ".idx": "tokens",
}  # fmt: skip
# Files that describe the data but are not part of it.
_ABOUT = re.compile(r"(readme|licen[cs]e|notice|citation|changelog|dataset_infos?|stats)\b", re.I)
_SNIFFED_BYTES = 1 << 16
_LONGEST_POINTER = 1024  # bytes of a Git LFS pointer
_IMAGE, _MEDIA = "an image", "sound or video"
# First bytes of other kinds of files. Texts may begin with the name of a format, so a signature
# that is only a name includes the version or the zero after it.
_SIGNATURES = {
    b"\x1f\x8b": "compressed with gzip", b"\x28\xb5\x2f\xfd": "compressed with Zstandard",
    b"\xfd7zXZ\x00": "compressed with xz", b"BZh": "compressed with bzip2",
    b"PK\x03\x04": "a ZIP archive", b"PAR1": "a Parquet file", b"ARROW1\x00": "an Arrow file",
    b"\x93NUMPY": "a NumPy array", b"%PDF-": "a PDF document", b"\x89HDF": "an HDF5 file",
    b"SQLite format 3\x00": "an SQLite database", b"\x80\x04\x95": "a pickle",
    b"MMIDIDX": "a Megatron index", b"Obj\x01": "an Avro file",
    b"TNTIDX": "a fairseq index", b"LITPKDS": "a PackedDataset of lit-gpt, with a header",
    **{b"GGUF%c" % version: "a GGUF model" for version in range(4)}, b"lmgg": "a GGML model",
    b"\x04\x22\x4d\x18": "compressed with LZ4", b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\xd0\xcf\x11\xe0": "an old Office document",
    b"\x89PNG": _IMAGE, b"\xff\xd8\xff": _IMAGE, b"GIF8": _IMAGE, b"II*\x00": _IMAGE,
    b"MM\x00*": _IMAGE,
    **{b"ID3%c" % version: _MEDIA for version in (2, 3, 4)},
    b"OggS\x00": _MEDIA, b"fLaC": _MEDIA, b"\x1aE\xdf\xa3": _MEDIA,
}  # fmt: skip
_RIFF = {b"WEBP": _IMAGE, b"WAVE": _MEDIA, b"AVI ": _MEDIA}
# Beginnings of texts in markup languages; for YAML, a list of records. Each pattern matches a text
# in one way only: repetitions that share characters take exponential time.
_MARKUP = {
    "HTML": re.compile(
        rb"\s*(?:<!--(?:(?!-->).)*-->\s*)*<(?:!doctype\s+html|html[\s>])", re.I | re.S
    ),
    "XML": re.compile(rb"\s*<\?xml\s"),
    "YAML": re.compile(
        rb"(?:[ \t\r]*(?:#[^\n]*|---[^\n]*)?\n)*- +[\"'\w]+ *:[^\n]*\n +[\"'\w]+ *:"
    ),
    "JSON": re.compile(rb"\s*[\[{]\s*(?:\{\s*)?\"[^\"\n]*\"\s*:"),
}
_SNIFFED_MARKUP_BYTES = 4096
# Split names that occur in file names (train.bin, fineweb_val_000000.bin, data.test.jsonl).
_TRAIN_NAME = re.compile(r"(^|[-_. ])(train|training)([-_. ]|$)", re.I)
_HELD_OUT_NAME = re.compile(
    r"(^|[-_. ])(val|valid|validation|dev|test|testing|eval|evaluation)([-_. ]|$)", re.I
)

# Folders of a cache, and what follows the hash in the names of entries.
_CACHED = {
    "tokens": "", "tokenizers": "", "hashes": "", "extents": "", "encoded": ".npz",
    "specs": ".json", "tokenizer_classes": ".json",
}  # fmt: skip
_HASH, _UNFINISHED = "[0-9a-f]{32}", r"(\.lock|(\.[\w-]+)?\.tmp)?"
_BLOCK_BYTES = 1 << 20
# Bytes to compare at each end of files of equal size, and the maximum number of files.
_COMPARED_BYTES, _COMPARED_FILES = 1 << 16, 1000
# Parsed JSON can take thirty times as much memory.
LINE_BYTES = 64 << 20
# Parts of the standard library that are not prose: tests, and generated tables.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3",
     "ensurepip", "turtledemo", "pydoc_data", "encodings"}
)  # fmt: skip
# Prefixes of the names of files that consist of tables, which a model would learn to write.
_TABLES = ("_sysconfigdata", "entities")


# Size, and times of the last change: `touch` can set the first time, but not the second.
State = tuple[int, int, int]


@dataclass(frozen=True)
class Source:
    """A data source. `files` is empty for datasets.

    `left_out`: files of a folder or pattern whose form differs from most of it, or that belong to
    another split. `outputs`: runs and cache folders within the data, which are not read. `lost`:
    broken links, in a folder or of a pattern.
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
        """Return whether the source already consists of tokens and needs no tokenizer."""
        return self.kind == "tokens"

    @property
    def hints(self) -> tuple[str, ...]:
        """Describe the files of a folder or pattern that are not read."""
        hints = []
        if self.left_out:
            hints.append(
                f"of {self.reference}, {len(self.files):,} files are read; "
                f"{_first_names([file.name for file in self.left_out])} left out, because they "
                "have another form or belong to another split. Name files with --data or "
                "--eval-data to read them"
            )
        if self.outputs:
            names = [str(folder.relative_to(self.reference)) for folder in self.outputs]
            hints.append(
                f"of {self.reference}, {_first_names(names)} left out, because they are runs or "
                "caches that outpace wrote. Name them with --data to read them"
            )
        if self.lost:
            names = [
                str(link.relative_to(self.reference) if Path(self.reference).is_dir() else link)
                for link in self.lost
            ]
            hints.append(
                f"of {self.reference}, {_first_names(names)} not read: a link leads to a missing "
                "file, as after an interrupted download. Fetch the data again"
            )
        return tuple(hints)


def _first_names(names: Sequence[str]) -> str:
    """Return the first of some names and the number of the others, with "is" or "are"."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"


def open_source(reference: str, *, rows: bool = False) -> Source:
    """Find the source that a --data argument names. Raises BadInputError if there is none.

    `rows`: use only files of records, even if most files are of other kinds.
    """
    try:
        return _source_by_kind(reference, rows)
    except OSError as error:  # forbidden folder, or name too long
        raise BadInputError(
            f"the data at {excerpt(reference)} cannot be found: {error.strerror}"
        ) from None


def _source_by_kind(reference: str, rows: bool) -> Source:
    if reference == "stdlib":
        return _source_of(reference, "text", _library_files(Path(sysconfig.get_path("stdlib"))))
    if reference.startswith("hf:"):
        return Source(reference, "dataset")
    path = Path(reference)
    if path.is_dir():
        if _is_saved_dataset(path):
            return Source(f"hf:{reference}", "dataset")
        files, outputs, lost = _files_below(path)
        if not files:
            _refuse_lost(lost)
        if outputs and not files:
            raise BadInputError(
                f"{reference} contains only runs or a cache of outpace; is it the right folder?"
            )
        found = _of_several(reference, files, rows)
        return replace(found, outputs=tuple(outputs), lost=tuple(lost))
    if path.is_file():
        return _of_file(reference, path)
    prefixed = Path(f"{reference}.bin")  # Megatron's names; the prefix may contain a dot
    if prefixed.is_file() and prefixed.with_suffix(".idx").is_file():
        return _of_file(reference, prefixed)
    # pathlib's patterns cannot start at the root of the file system.
    named = [Path(match) for match in glob.glob(reference, recursive=True)]  # noqa: PTH207
    matches = _drop_repeated(match for match in named if match.is_file())
    lost = _drop_repeated(match for match in named if _leads_nowhere(match))
    if not matches:
        _refuse_lost(lost)
        raise BadInputError(
            f"no data at {reference!r}: there is no such file or folder, and as a pattern it "
            "matches no file. For a Hugging Face dataset write hf:NAME."
        )
    one = len(matches) == 1
    found = _of_file(reference, *matches) if one else _of_several(reference, matches, rows)
    return replace(found, lost=tuple(lost))


def _refuse_lost(lost: Sequence[Path]) -> None:
    """Raise BadInputError for data that consists only of broken links."""
    if lost:
        raise BadInputError(
            f"{lost[0]} is a link to {lost[0].readlink()}, which does not exist, as after an "
            "interrupted download. Fetch the data again, or copy it with the files that its links "
            "lead to (cp -rL)."
        )


def _drop_repeated(files: Iterable[Path]) -> list[Path]:
    """Return a pattern's files in order, each by its shortest path if links form a circle."""
    by_path = sorted(files, key=lambda file: len(str(file)), reverse=True)
    return sorted({(os.path.realpath(file.parent), file.name): file for file in by_path}.values())


def form_of(file: Path) -> Form:
    """Return the format of a file, by its suffix."""
    return _FORMS.get(file.suffix.lower(), "text")


def _of_file(reference: str, path: Path) -> Source:
    form = form_of(path)
    if form == "tokens":
        return _source_of(reference, "tokens", _with_indices([path]))
    if form == "text" and _has_rows(path):
        raise BadInputError(
            f"{path} contains JSON (an object per line, or a list of objects), whose syntax would "
            "be trained on as text. Rename it to .jsonl, so that its rows are read."
        )
    return _source_of(reference, "text" if form == "text" else "rows", [path])


def _with_indices(files: Iterable[Path]) -> list[Path]:
    """Return each .bin, followed by its .idx if it has one."""
    tokens = dict.fromkeys(
        file.with_suffix(".bin") if file.suffix.lower() == ".idx" else file for file in files
    )
    pairs = ((file, file.with_suffix(".idx")) for file in tokens)
    return [one for file, index in pairs for one in (file, index)[: 1 + index.is_file()]]


def _of_several(reference: str, files: list[Path], rows: bool) -> Source:
    """Return the files of a folder or pattern in the format that has the most bytes."""
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
    kind = _chosen_kind(groups, rows)
    chosen = sorted({*groups[kind], *(unclear if kind == "text" else ())})
    splits = _splits_by_name(chosen)
    # Source code has folders called test, so for texts all files must belong to splits.
    if kind != "text" or all(splits[file] for file in chosen if not _ABOUT.match(file.name)):
        chosen = _of_one_split(splits)
    if kind == "tokens":
        chosen = _with_indices(chosen)
    found = _source_of(reference, kind, chosen)
    return replace(found, left_out=tuple(file for file in files if file not in set(chosen)))


def _chosen_kind(groups: Mapping[Kind, Sequence[Path]], rows: bool) -> Kind:
    """Return rows if requested, else the kind with the most bytes, ignoring files of metadata."""
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
    """Return whether a .json begins with a list of objects, or has an object per line."""
    with readable(file) as stream:
        lines = stream.read(_SNIFFED_BYTES).removeprefix(b"\xef\xbb\xbf").split()
    head = b"".join(lines[:3])[:3]
    if head[:1] == b"[":
        return head == b'[{"'
    with readable(file) as stream:
        lines = [line for line in stream.read(_SNIFFED_BYTES).splitlines() if line.strip()]
    return len(lines) > 1 and all(map(_is_object, lines[:2]))


def _is_object(line: bytes) -> bool:
    """Return whether a line is a JSON object, or the beginning of one longer than the part read."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return len(line) > _SNIFFED_BYTES // 2


def advice_on_binary(kind: str) -> str:
    """Return what to do about a file of this `binary_kind`."""
    if kind not in (_IMAGE, _MEDIA):
        return "Unpack or convert it, or leave it out."
    return (
        "Leave it out; or to train on such files, give --model FILE.py:build instead of --data, "
        "where build returns your module, its loss and a dataset that reads them."
    )


def binary_kind(head: bytes) -> str | None:
    """Name the kind of a binary file by its first bytes; None for text, tokens or unknown."""
    # An Arrow stream starts with a mark and the length of its schema.
    length = int.from_bytes(head[4:8], "little")
    if head.startswith(b"\xff\xff\xff\xff") and length % 8 == 0 and 0 < length < 1 << 20:
        return "an Arrow stream, as datasets writes it (name the folder of save_to_disk)"
    if head.startswith(b"RIFF") and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[257:262] == b"ustar":
        return "a tar archive"
    return next((kind for sign, kind in _SIGNATURES.items() if head.startswith(sign)), None)


def unread_split_hints(source: Source) -> list[str]:
    """Return a hint about splits that neither training nor validation uses."""
    if source.kind != "dataset":
        return []
    name, _, split = _dataset_name(source.reference)
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


def markup_hints(source: Source) -> list[str]:
    """Return a hint if files are in a markup language, which becomes part of the text."""
    if source.kind != "text" or source.reference == "stdlib":
        return []
    looked_at = source.files[:_COMPARED_FILES]
    found = [(file, kind) for file in looked_at if (kind := _markup_of(file)) is not None]
    if not found:
        return []
    kinds = " or ".join(dict.fromkeys(kind for _, kind in found))
    which = f"{found[0][0]} is {kinds}"
    if len(looked_at) > 1:
        which = f"{len(found):,} of {len(looked_at):,} files of {source.reference} ({found[0][0]}"
        which += f"{', …' if len(found) > 1 else ''}) {'are' if len(found) > 1 else 'is'} {kinds}"
    return [
        f"{which}, whose markup is trained on with the text. If that is not intended, extract the "
        "texts, or write them as rows of a .jsonl"
    ]


def _markup_of(file: Path) -> str | None:
    """Return a text file's markup language, judging by its suffix or its first bytes."""
    if file.suffix.lower() in (".yaml", ".yml"):
        return "YAML"
    with readable(file) as stream:
        head = stream.read(_SNIFFED_MARKUP_BYTES).removeprefix(b"\xef\xbb\xbf")
    found = next((kind for kind, begin in _MARKUP.items() if begin.match(head)), None)
    # Next to texts, a file with the suffix of JSON is part of a program.
    return None if found == "JSON" and form_of(file) == "json" else found


def files_in_both(train: Source, held_out: Source) -> list[Path]:
    """Return the validation files whose contents equal those of a training file.

    If there are very many validation files, only the first are checked. Empty files and indices
    contain nothing to train on.
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
        for file in source.files[:_COMPARED_FILES]
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


def require_tokens(file: Path, head: bytes) -> None:
    """Refuse a .bin whose first bytes belong to another kind of file."""
    kind = binary_kind(head)
    if kind is None and _is_litdata(head, file.stat().st_size):
        kind = "a chunk of litdata, with the offsets of its items in front"
    if kind is not None:
        raise BadInputError(
            f"{file} is {kind}, not token ids. Write them as uint16 or uint32 without a "
            "header, as numpy's tofile does, or as Megatron's .bin with its .idx."
        )


def _is_litdata(head: bytes, size: int) -> bool:
    """Return whether a file begins like a chunk of litdata, in 32-bit numbers: the number of items,
    where each begins, and where the last ends.
    """
    words = [int.from_bytes(head[at : at + 4], "little") for at in range(0, len(head) - 3, 4)]
    if len(words) < 3 or not words[0]:
        return False
    offsets = words[1 : 2 + words[0]]
    whole = len(offsets) == words[0] + 1
    begin = 4 * (words[0] + 2)
    rising = all(one <= following for one, following in pairwise(offsets))
    return offsets[0] == begin and rising and (not whole or offsets[-1] == size)


def row_files_below(folder: Path) -> list[Path]:
    """Return the files of a folder with the suffix of row files, except files of metadata."""
    return [
        file
        for file in _files_below(folder)[0]
        if form_of(file) not in ("text", "tokens") and not _ABOUT.match(file.name)
    ]


def is_held_out(file: Path) -> bool:
    """Return whether a file's name marks it as validation or test data."""
    return _split_by_name([file.stem]) == "held out"


def _splits_by_name(files: Sequence[Path]) -> dict[Path, str | None]:
    """Return the split of each file ("train" or "held out"), by its name and its folder names."""
    root = Path(os.path.commonpath([file.parent for file in files]))
    return {
        file: _split_by_name((*file.relative_to(root).parent.parts, file.stem)) for file in files
    }


def _split_by_name(names: Sequence[str]) -> str | None:
    """Return the split given by the last name that indicates one, if any."""
    for name in reversed(names):
        if _TRAIN_NAME.search(name):
            return "train"
        if _HELD_OUT_NAME.search(name):
            return "held out"
    return None


def _of_one_split(splits: Mapping[Path, str | None]) -> list[Path]:
    """Drop files named as held out if there are others."""
    return [file for file, split in splits.items() if split != "held out"] or list(splits)


def _source_of(reference: str, kind: Kind, files: list[Path]) -> Source:
    states = tuple(map(state_of, files))
    total = sum(size for size, *_ in states)
    if total == 0:
        raise BadInputError(f"the data at {reference} is empty")
    for file, (size, *_) in zip(files, states, strict=True):
        if size < _LONGEST_POINTER:
            require_no_pointer(file)
    return Source(reference, kind, tuple(files), total, states)


def state_of(file: Path) -> State:
    """Return a file's size and times. Raises BadInputError."""
    try:
        stat = file.stat()
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror or error}") from None
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def check_unchanged(source: Source) -> None:
    """Raise BadInputError if a file has changed since the source was found."""
    for file, state in zip(source.files, source.states, strict=True):
        if state_of(file) != state:
            raise BadInputError(
                f"{file} changed while it was being read, so nothing was kept of it. Run this "
                "again when it is complete."
            )


def _files_below(
    root: Path, left_out: Collection[str] = ()
) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the files in a folder, including linked folders, and the output of outpace in it.

    The files include broken links, in a stable order, but neither hidden files, copies left by
    editors and merges, nor Python's bytecode.

    `left_out`: names of folders.
    """
    found: list[str] = []
    lost: list[str] = []
    outputs: list[str] = []
    folders, linked = [str(root)], {os.path.realpath(root)}
    while folders:  # pathlib's walk takes seconds for 100,000 files
        folder = folders.pop()
        with os.scandir(folder) as scanned:
            entries = list(scanned)
        if folder != str(root) and _is_of_outpace(Path(folder), {entry.name for entry in entries}):
            outputs.append(folder)
            continue
        for entry in entries:
            older = entry.name.endswith(_OLDER_COPIES)
            if older or entry.name.startswith(".") or entry.name == _BYTECODE:
                continue
            if _leads_nowhere(entry):
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


def _is_of_outpace(folder: Path, names: Collection[str]) -> bool:
    """Return whether a folder is a run or a cache of outpace, which may be inside the data."""
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


def _leads_nowhere(entry: "os.DirEntry[str] | Path") -> bool:
    """Return whether a path is a link to nothing or to itself."""
    return entry.is_symlink() and not os.path.exists(entry)  # noqa: PTH110 (text at hand)


def _library_files(root: Path) -> list[Path]:
    return [
        path
        for path in _files_below(root, _LEFT_OUT)[0]
        if path.suffix == ".py" and not path.name.startswith(_TABLES)
        if path.stat().st_size > 0 and _decodes(path)
    ]


def _decodes(path: Path) -> bool:
    """Return whether a file is UTF-8; a few of the standard library deliberately are not."""
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
    """Return a hash of the contents, independent of their location and names."""
    digest = xxhash.xxh3_128()
    files = source.files
    if source.kind == "dataset":
        # The dataset's own fingerprint is that of the code that created it, not of the data.
        dataset = open_dataset(source.reference)
        digest.update(str(dataset._fingerprint).encode())
        files = dataset_files(dataset)
    for file in files:
        form = "text" if source.kind == "text" else form_of(file)
        digest.update(f"{form}\0{file.stat().st_size}\0".encode())
        with readable(file) as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
    digest.update(text_field.encode())
    return digest.hexdigest()


def dataset_files(dataset: Any) -> tuple[Path, ...]:
    """Return the files that hold an opened dataset's rows."""
    return tuple(Path(one["filename"]) for one in dataset.cache_files)


def open_dataset(reference: str) -> Any:
    """Open a Hugging Face dataset: hf:NAME[:CONFIG[:SPLIT]], where NAME may be a local path.

    Its rows have plain Python values, regardless of the format in which it was saved; images and
    audio are bytes.
    """
    name, config, split = _dataset_name(reference)
    try:
        return _drop_format(_open_split(reference, name, config, split))
    except BadInputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInputError(f"the dataset {reference} cannot be opened: {reason}") from None


def _open_split(reference: str, name: str, config: str, split: str) -> Any:
    import datasets

    if not _is_saved_dataset(Path(name)):
        return datasets.load_dataset(name, config or None, split=split)
    found = datasets.load_from_disk(name)
    if not isinstance(found, datasets.DatasetDict):
        if split != "train":  # only the training rows were requested
            raise BadInputError(
                f"the dataset {reference} has no splits, so no {split!r}; write hf:{name}"
            )
        return found
    if split not in found:
        raise BadInputError(
            f"the dataset {reference} has no split {split!r}, but "
            f"{', '.join(map(repr, found))}; write hf:{name}::SPLIT"
        )
    return found[split]


def _drop_format(dataset: Any) -> Any:
    """Return a dataset that yields plain Python values and does not decode media."""
    import datasets

    features = {name: _keep_stored_media(kind) for name, kind in dataset.features.items()}
    formatted = dataset.format["type"] is not None or dataset.format["columns"] != [*features]
    if not formatted and features == dict(dataset.features):
        return dataset
    dataset = dataset.with_format(None)  # a copy
    dataset.info.features = datasets.Features(features)
    return dataset


def _keep_stored_media(kind: Any) -> Any:
    """Return a column's type, changed so that images, audio and the like are not decoded."""
    if isinstance(kind, dict):
        return {name: _keep_stored_media(inner) for name, inner in kind.items()}
    if hasattr(kind, "feature"):  # a list
        inner = _keep_stored_media(kind.feature)
        return kind if inner == kind.feature else replace(kind, feature=inner)
    if getattr(kind, "decode", False) and type(kind).__name__ != "Json":
        return replace(kind, decode=False)
    return kind


def _dataset_name(reference: str) -> tuple[str, str, str]:
    """Split hf:NAME[:CONFIG[:SPLIT]] into its parts; a folder's name may contain colons."""
    whole = reference.removeprefix("hf:")
    if _is_saved_dataset(Path(whole)):
        return whole, "", "train"
    name, *rest = whole.split(":")
    if not name or len(rest) > 2:
        raise BadInputError(f"{reference!r}: expected hf:NAME[:CONFIG[:SPLIT]]")
    config, split = (*rest, "", "")[:2]
    return name, config, split or "train"


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not blank, with their numbers from 1.

    Raises BadInputError for an unreadable file, and for a line that is too large for memory.
    """
    with readable(file) as stream:
        for number in count(1):
            line = stream.readline(LINE_BYTES + 1)
            if not line:
                return
            if len(line) > LINE_BYTES:
                raise BadInputError(
                    f"{file}, line {number} is longer than {LINE_BYTES >> 20} MiB, and each line "
                    "must fit in memory. Split it, or put a long text into its own file."
                )
            if line.strip():
                yield number, line


@contextmanager
def readable(file: Path) -> Iterator[BinaryIO]:
    """Open a file. Raises BadInputError if it cannot be read."""
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror or error}") from None
