"""Where text comes from: files, folders, globs, JSON lines, Parquet, datasets, Python's source."""

import codecs
import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from outpace.records.errors import BadInputError

Kind = Literal["text", "dataset", "nanogpt", "megatron"]

# A longer text is handed on in pieces, so that memory stays flat.
PIECE_BYTES = 1 << 20
_LEAST_PIECE = 1 << 14
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
    found: list[str] = []
    folders = [str(root)]
    while folders:  # pathlib's own walk takes seconds where there are 100,000 files
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file():
                    found.append(entry.path)
    return sorted(map(Path, found))


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
        relative = os.path.relpath(file, source.root)
        digest.update(f"{relative}\0{file.stat().st_size}\0".encode())
        with readable(file) as stream:
            while block := stream.read(PIECE_BYTES):
                digest.update(block)
    digest.update(text_field.encode())
    return digest.hexdigest()


def pieces(source: Source, text_field: str, cut: bool = True) -> Iterator[Piece]:
    """All text of a source in order; documents without text are left out.

    `cut` hands long documents on in pieces that end where a tokenizer with `cuts_at_lines` would
    end a token anyway. Raises BadInputError where the source cannot be read.
    """
    if source.kind == "dataset":
        yield from _all_in_pieces(_dataset_documents(source.reference, text_field), cut)
    for file in source.files:
        if file.suffix in (".jsonl", ".ndjson"):
            yield from _all_in_pieces(_json_lines(file, text_field), cut)
        elif file.suffix == ".parquet":
            yield from _all_in_pieces(_parquet(file, text_field), cut)
        else:
            yield from _plain(file, cut)


def _plain(file: Path, cut: bool) -> Iterator[Piece]:
    """One document; a long one in pieces, so that it is never whole in memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept, first, read, told = "", True, 0, 0
    with readable(file) as stream:
        while block := stream.read(PIECE_BYTES):
            kept += _decoded(decoder, block, file, read)
            read += len(block)
            # What came with the blocks before has been searched.
            border = _border(kept, max(_LEAST_PIECE, len(kept) - len(block) - 2), len(kept))
            if cut and border:
                yield Piece(kept[:border], first, False, read - told)
                kept, first, told = kept[border:], False, read
    kept += _decoded(decoder, b"", file, read)
    if kept:
        yield Piece(kept, first, True, read - told)


@contextmanager
def readable(file: Path) -> Iterator[BinaryIO]:
    """An open file. Raises BadInputError when it cannot be read."""
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror or error}") from None


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, file: Path, read: int) -> str:
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        # The decoder kept the first bytes of a character that the block before ended in.
        offset = read - len(decoder.getstate()[0]) + error.start
        raise BadInputError(
            f"{file} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {offset}. "
            "Convert it, or leave it out."
        ) from None


def _border(text: str, begin: int, end: int) -> int:
    """The last place in [begin, end) between two lines of which neither is blank there; 0 for none.

    Tokenizers join white space across lines, and some a line break with the signs that follow it,
    but none joins a character, one line break and a letter or digit.
    """
    place = end - 1
    while (place := text.rfind("\n", begin, place)) > 0:
        before = text[place - 1]
        if before != " " and before.isprintable() and text[place + 1].isalnum():
            return place + 1
    return 0


def _all_in_pieces(documents: Iterator[tuple[str, int]], cut: bool) -> Iterator[Piece]:
    for text, consumed in documents:
        if text:
            yield from _in_pieces(text, consumed, cut)


def _in_pieces(text: str, consumed: int, cut: bool) -> Iterator[Piece]:
    """A document that is in memory, in pieces when it is long."""
    begin = 0
    while cut and len(text) - begin > PIECE_BYTES:
        border = _border(text, begin + _LEAST_PIECE, begin + PIECE_BYTES)
        if not border:
            break
        yield Piece(text[begin:border], begin == 0, False, 0)
        begin = border
    yield Piece(text[begin:], begin == 0, True, consumed)


def _checked(text: Any, where: str, field: str) -> str:
    """The text of a record. Raises BadInputError when it is none."""
    if not isinstance(text, str):
        raise BadInputError(f"{where}: {field!r} is {type(text).__name__}, not text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInputError(
                f"{where}: {field!r} has half of a surrogate pair, "
                f"{text[error.start]!r}, at character {error.start}, which is no text"
            ) from None
    return text


def _json_lines(file: Path, field: str) -> Iterator[tuple[str, int]]:
    with readable(file) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                raise BadInputError(
                    f"{where} is not UTF-8 text: byte {line[error.start]:#04x} at its offset "
                    f"{error.start}. Convert it, or leave it out."
                ) from None
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", "too deeply nested")
                raise BadInputError(f"{where} is not JSON: {reason}") from None
            if not isinstance(record, dict) or field not in record:
                there = ", ".join(map(repr, record)) if isinstance(record, dict) else "no fields"
                raise BadInputError(
                    f"{where} has no field {field!r}, but {there}. Name it with --text-field."
                )
            yield _checked(record[field], where, field), len(line)


def _parquet(file: Path, field: str) -> Iterator[tuple[str, int]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        if field not in table.schema_arrow.names:
            raise BadInputError(
                f"{file} has no column {field!r}, but "
                f"{', '.join(map(repr, table.schema_arrow.names))}. Name it with --text-field."
            )
        share = file.stat().st_size // max(1, table.metadata.num_rows)
        batches = table.iter_batches(columns=[field], batch_size=1000)
        texts = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for row, text in enumerate(texts, 1):
            yield _checked(text, f"{file}, row {row}", field), share
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInputError(f"{file} is not a readable Parquet file: {error}") from None


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


def _dataset_documents(reference: str, field: str) -> Iterator[tuple[str, int]]:
    dataset = open_dataset(reference)
    if field not in dataset.column_names:
        raise BadInputError(
            f"{reference} has no column {field!r}, but {', '.join(map(repr, dataset.column_names))}"
            ". Name it with --text-field."
        )
    batches = dataset.select_columns([field]).iter(batch_size=1000)
    texts = chain.from_iterable(batch[field] for batch in batches)
    for row, text in enumerate(texts, 1):
        yield (found := _checked(text, f"{reference}, row {row}", field)), len(found)
