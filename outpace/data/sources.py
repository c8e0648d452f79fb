"""Where text comes from: files, folders, globs, JSON lines, Parquet, datasets, Python's source."""

import codecs
import glob
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from outpace.records.errors import BadInputError

Kind = Literal["text", "dataset", "nanogpt", "megatron"]

# A longer text is handed on in pieces, so that memory stays flat.
PIECE_BYTES = 1 << 20
# Parts of the standard library that are no prose about Python: tests, and generated tables.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "idlelib",
     "lib2to3", "ensurepip", "turtledemo", "pydoc_data"}
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Part of a document; `first` and `last` mark its ends. `consumed` counts source bytes."""

    text: str
    first: bool
    last: bool
    consumed: int


@dataclass(frozen=True)
class Source:
    """A data source, found. `files` are empty for datasets."""

    reference: str
    kind: Kind
    files: tuple[Path, ...] = ()
    root: Path | None = None
    total_bytes: int | None = None


def open_source(reference: str) -> Source:
    """Find out what a --data argument means. Raises BadInputError when there is nothing there."""
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
    if path.with_suffix(".idx").is_file() and path.with_suffix(".bin").is_file():
        return _of_file(reference, path.with_suffix(".bin"))
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
    total = sum(file.stat().st_size for file in files)
    if total == 0:
        raise BadInputError(f"the data at {reference} is empty")
    return Source(reference, "text", tuple(files), root, total)


def _of_file(reference: str, path: Path) -> Source:
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    if path.suffix != ".bin":
        return _text(reference, [path], path.parent)
    if path.stat().st_size == 0:
        raise BadInputError(f"the data at {reference} is empty")
    kind: Kind = "megatron" if path.with_suffix(".idx").is_file() else "nanogpt"
    return Source(reference, kind, (path,), path.parent, path.stat().st_size)


def _files_below(root: Path) -> list[Path]:
    """Files of a folder, without hidden ones, in a stable order."""
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)
    )


def _library_files(root: Path) -> list[Path]:
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT.intersection(path.relative_to(root).parts[:-1])
        and path.stat().st_size > 0
        and _decodes(path)
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
    """A hash of names and contents: the same text anywhere gives the same value."""
    digest = xxhash.xxh3_128()
    if source.kind == "dataset":
        digest.update(str(open_dataset(source.reference)._fingerprint).encode())
    for file in source.files:
        below = source.root is not None and source.root in file.parents
        relative = file.relative_to(source.root) if source.root and below else file.name
        digest.update(f"{relative}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(PIECE_BYTES):
                digest.update(block)
    digest.update(text_field.encode())
    return digest.hexdigest()


def pieces(source: Source, text_field: str) -> Iterator[Piece]:
    """All text of a source in order. Raises BadInputError where it cannot be read."""
    if source.kind == "dataset":
        yield from _dataset_pieces(source.reference, text_field)
        return
    for file in source.files:
        if file.suffix in (".jsonl", ".ndjson"):
            yield from _json_lines(file, text_field)
        elif file.suffix == ".parquet":
            yield from _parquet(file, text_field)
        else:
            yield from _plain(file)


def _plain(file: Path) -> Iterator[Piece]:
    """One document; a long one in pieces that end where a token would end anyway."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept, first, read = "", True, 0
    with file.open("rb") as stream:
        while True:
            block = stream.read(PIECE_BYTES)
            try:
                kept += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                pending = len(decoder.getstate()[0]) if read else 0
                raise BadInputError(
                    f"{file} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset "
                    f"{max(0, read - pending) + error.start}. Convert it, or leave it out."
                ) from None
            read += len(block)
            if not block:
                break
            cut = _border(kept)
            if len(kept) > PIECE_BYTES // 2 and cut:
                yield Piece(kept[:cut], first, False, len(block))
                kept, first = kept[cut:], False
    if kept or not first:
        yield Piece(kept, first, True, 0 if not first else read)


def _border(text: str) -> int:
    """The last place between two lines where neither side is blank; 0 when there is none.

    Byte-level tokenizers join white space across lines, but never across such a place.
    """
    place = len(text) - 1
    while (place := text.rfind("\n", 1, place)) > 0:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place + 1
    return 0


def _whole(text: Any, where: str, field: str, consumed: int) -> Iterator[Piece]:
    """A document that is in memory, in pieces when it is long."""
    if not isinstance(text, str):
        raise BadInputError(f"{where}: {field!r} is {type(text).__name__}, not text")
    first = True
    while len(text) > PIECE_BYTES and (cut := _border(text[:PIECE_BYTES])):
        yield Piece(text[:cut], first, False, 0)
        text, first = text[cut:], False
    yield Piece(text, first, True, consumed)


def _json_lines(file: Path, field: str) -> Iterator[Piece]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadInputError(f"{where} is not JSON: {error}") from None
            if not isinstance(record, dict) or field not in record:
                there = ", ".join(map(repr, record)) if isinstance(record, dict) else "no fields"
                raise BadInputError(
                    f"{where} has no field {field!r}, but {there}. Name it with --text-field."
                )
            yield from _whole(record[field], where, field, len(line))


def _parquet(file: Path, field: str) -> Iterator[Piece]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        if field not in table.schema_arrow.names:
            raise BadInputError(
                f"{file} has no column {field!r}, but "
                f"{', '.join(map(repr, table.schema_arrow.names))}. Name it with --text-field."
            )
        rows = max(1, table.metadata.num_rows)
        for batch in table.iter_batches(columns=[field], batch_size=1000):
            for text in batch.column(0).to_pylist():
                yield from _whole(text, str(file), field, file.stat().st_size // rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInputError(f"{file} is not a readable Parquet file: {error}") from None


def open_dataset(reference: str) -> Any:
    """A Hugging Face dataset: hf:NAME[:CONFIG[:SPLIT]], where NAME may be a local path."""
    import datasets

    name, config, split, *more = (*reference.removeprefix("hf:").split(":"), "", "")[:4]
    if not name or (more and more[0]):
        raise BadInputError(f"{reference!r}: expected hf:NAME[:CONFIG[:SPLIT]]")
    split = split or "train"
    try:
        if _is_saved_dataset(Path(name)):
            found = datasets.load_from_disk(name)
            return found[split] if isinstance(found, datasets.DatasetDict) else found
        return datasets.load_dataset(name, config or None, split=split)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInputError(f"the dataset {reference} cannot be opened: {reason}") from None


def _dataset_pieces(reference: str, field: str) -> Iterator[Piece]:
    dataset = open_dataset(reference)
    if field not in dataset.column_names:
        raise BadInputError(
            f"{reference} has no column {field!r}, but {', '.join(map(repr, dataset.column_names))}"
            ". Name it with --text-field."
        )
    for batch in dataset.select_columns([field]).iter(batch_size=1000):
        for text in batch[field]:
            yield from _whole(text, reference, field, 0)
