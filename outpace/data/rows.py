"""Rows with named columns, from JSONL, TSV, CSV, Parquet and datasets: what tasks are made from."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from outpace.data.sources import Source, numbered_lines, open_dataset, open_source, readable
from outpace.records.errors import BadInputError

_TABLES = {".tsv": "\t", ".txt": "\t", ".csv": ","}
# Files of a benchmark's folder, by what they are for.
_TRAIN = ("train", "msr_paraphrase_train")
_VALIDATION = ("validation", "dev", "dev_matched", "valid", "msr_paraphrase_test")


@dataclass(frozen=True)
class Row:
    """One record. `where` says where it stands, for a person."""

    values: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class Table:
    """All rows of a source. `left_out` counts lines that do not have the header's columns."""

    reference: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    names: Mapping[str, tuple[str, ...]]  # of a dataset's columns of classes
    left_out: int = 0


def read_tables(references: Iterable[str]) -> list[Table]:
    """Every source, whole. Raises BadInputError for what is missing, broken or empty."""
    return [read_table(reference) for reference in references]


def read_table(reference: str) -> Table:
    """The rows of one --data argument. Raises BadInputError."""
    source = open_source(reference)
    if source.is_tokens:
        raise BadInputError(f"{reference} holds tokens, and a task needs rows with columns")
    table = _of_dataset(source) if source.kind == "dataset" else _of_files(source)
    if not table.rows:
        raise BadInputError(f"the data at {reference} has no rows")
    return table


def splits_of(references: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Training and validation data of what was named.

    A folder with train.tsv and dev.tsv (or the like) is its two files, and a dataset without a
    split is its `train` and `validation`; None where there is nothing to validate with.
    """
    pairs = [_split_of(reference) for reference in references]
    train = tuple(train for train, _ in pairs)
    found = tuple(validation for _, validation in pairs if validation is not None)
    return train, found if len(found) == len(pairs) else None


def _split_of(reference: str) -> tuple[str, str | None]:
    path = Path(reference)
    if reference.startswith("hf:"):
        return _dataset_split(reference)
    if not path.is_dir() or (path / "dataset_dict.json").is_file():
        return _dataset_split(f"hf:{reference}") if path.is_dir() else (reference, None)
    train, validation = _named(path, _TRAIN), _named(path, _VALIDATION)
    return (str(train) if train else reference, str(validation) if train and validation else None)


def _named(folder: Path, names: Sequence[str]) -> Path | None:
    kinds = (*_TABLES, ".jsonl", ".json", ".parquet")
    for name in names:
        for kind in kinds:
            if (folder / f"{name}{kind}").is_file():
                return folder / f"{name}{kind}"
    return None


def _dataset_split(reference: str) -> tuple[str, str | None]:
    """The training split and, of a dataset whose split is not named, the one to validate with."""
    name, config, *split = [*reference.removeprefix("hf:").split(":"), ""][:3]
    if any(split) or reference.count(":") > 2:
        return reference, None
    validation = f"hf:{name}:{config}:validation"
    try:
        open_dataset(validation)
    except BadInputError:
        return reference, None
    return reference, validation


def _of_dataset(source: Source) -> Table:
    import datasets

    dataset = open_dataset(source.reference)
    names = {
        name: tuple(kind.names)
        for name, kind in dataset.features.items()
        if isinstance(kind, datasets.ClassLabel)
    }
    rows = tuple(
        Row(values, f"{source.reference}, row {number}") for number, values in enumerate(dataset, 1)
    )
    return Table(source.reference, tuple(dataset.column_names), rows, names)


def _of_files(source: Source) -> Table:
    rows: list[Row] = []
    columns: dict[str, None] = {}
    left_out = 0
    for file in source.files:
        if file.suffix == ".json" and (listed := _json_list(file)) is not None:
            found = listed
        elif file.suffix in (".jsonl", ".ndjson", ".json"):
            found = list(_json_lines(file))
        elif file.suffix == ".parquet":
            found = list(_parquet(file))
        elif file.suffix in _TABLES:
            found, broken = _delimited(file, _TABLES[file.suffix])
            left_out += broken
        else:
            raise BadInputError(
                f"{file}: a task needs rows with columns. Give .jsonl, .tsv, .csv, .parquet or "
                "hf:NAME."
            )
        rows += found
        for row in found[:1]:
            columns |= dict.fromkeys(row.values)
    return Table(source.reference, tuple(columns), tuple(rows), {}, left_out)


def _json_list(file: Path) -> list[Row] | None:
    """The objects of a file that is one list, None for another's."""
    with readable(file) as stream:
        if stream.read(1) != b"[":
            return None
        stream.seek(0)
        try:
            values = json.load(stream)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"{file} is not JSON: {error}") from None
    if not all(isinstance(value, dict) for value in values):
        raise BadInputError(f"{file} is a list, but not all of its members are objects")
    return [Row(value, f"{file}, item {number}") for number, value in enumerate(values, 1)]


def _json_lines(file: Path) -> Iterator[Row]:
    for number, line in numbered_lines(file):
        where = f"{file}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or getattr(error, "reason", None) or error
            raise BadInputError(
                f"{where} is not JSON: {reason}. Each line has to be an object."
            ) from None
        if not isinstance(values, dict):
            raise BadInputError(
                f"{where} holds a {type(values).__name__}; each line has to be an object"
            )
        yield Row(values, where)


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        for number, values in enumerate(parquet.read_table(file).to_pylist(), 1):
            yield Row(values, f"{file}, row {number}")
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise BadInputError(f"{file} is not a readable Parquet file: {error}") from None


def _delimited(file: Path, delimiter: str) -> tuple[list[Row], int]:
    """Rows of a table, and the number of lines that have other columns than its header.

    GLUE's tab-separated files do not quote: a quotation mark in them is one of the text.
    """
    with readable(file) as stream:
        try:
            text = stream.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadInputError(
                f"{file} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset "
                f"{error.start}. Convert it."
            ) from None
    cells = list(_tabbed(text) if delimiter == "\t" else _quoted(text, file))
    if not cells:
        return [], 0
    if _is_cola(cells[0][1]):
        cells.insert(0, (0, ["source", "label", "star", "sentence"]))
    header = cells[0][1]
    rows = [
        Row(dict(zip(header, row, strict=True)), f"{file}, line {number}")
        for number, row in cells[1:]
        if len(row) == len(header)
    ]
    return rows, len(cells) - 1 - len(rows)


def _tabbed(text: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line that has any, and its number."""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if line:
            yield number, line.split("\t")


def _quoted(text: str, file: Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row, and the number of its last line. Raises BadInputError."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise BadInputError(
            f"{file}, line {reader.line_num}: {error}. Is a quotation mark left open?"
        ) from None


def _is_cola(first: Sequence[str]) -> bool:
    """CoLA's files alone have no header: source, label, a star for what is wrong, sentence."""
    return len(first) == 4 and first[1] in ("0", "1") and first[2] in ("", "*")


def held_out(rows: Sequence[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to validate with, by the hash of their contents.

    Where there are too few rows for the hash to come near the fraction, the last are held out.
    Raises BadInputError where nothing would be left for one of the two.
    """
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        share = xxhash.xxh3_64_intdigest(_content(row)) / 2**64
        parts[share < fraction].append(row)
    share = len(parts[1]) / len(rows)
    if not fraction / 2 <= share <= min(2 * fraction, (1 + fraction) / 2):
        border = min(round(len(rows) * (1 - fraction)), len(rows) - 1)
        parts = (list(rows[:border]), list(rows[border:]))
    if not all(parts):
        raise BadInputError(
            f"{len(rows)} row is too little to train on and to hold a part out for validation. "
            "Give more, or name validation data with --eval-data."
        )
    return parts


def fingerprint(rows: Iterable[Row]) -> str:
    """One hash of what the rows hold, in order."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(_content(row))
    return digest.hexdigest()


def _content(row: Row) -> bytes:
    return json.dumps(dict(row.values), sort_keys=True, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)
