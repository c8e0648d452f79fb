"""Rows with named columns, from JSONL, TSV, CSV and Parquet files and from datasets."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from outpace.data.hf_datasets import open_dataset
from outpace.data.row import Row, nested_rows, without_fillers
from outpace.data.row_files import read_rows
from outpace.data.sources import Source, is_held_out, open_source, row_files_below
from outpace.records.errors import BadInputError

_NAMED = (".tsv", ".txt", ".csv", ".jsonl", ".json", ".parquet")
# Files in a benchmark's folder, by purpose.
_TRAIN = ("train", "msr_paraphrase_train")
_VALIDATION = (
    "validation", "dev", "dev_matched", "valid", "val", "eval", "msr_paraphrase_test",
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """All rows of a source.

    `names` are the class names of each class column of a dataset, and `left_out` the locations of
    lines that were skipped because they have fewer columns than the header.
    """

    reference: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    names: Mapping[str, tuple[str, ...]]
    left_out: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


def read_tables(references: Iterable[str]) -> list[Table]:
    """Read each source completely. Raises BadInputError if one is missing, damaged or empty."""
    return [read_table(reference) for reference in references]


def read_table(reference: str) -> Table:
    """Read all rows of one --data argument. Raises BadInputError if there are none."""
    source = open_source(reference, rows=True)
    if source.is_tokens:
        raise BadInputError(f"{reference} holds tokens, and a task needs rows with columns")
    table = _read_dataset(source) if source.kind == "dataset" else _read_files(source)
    if not table.rows:
        if table.left_out:
            _raise_for_short_line(source)
        raise BadInputError(f"the data at {reference} has no rows")
    return table


def _raise_for_short_line(source: Source) -> None:
    for file in source.files:
        for _ in read_rows(file):
            pass


def splits_of(references: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the training data and the validation data of the given sources.

    A folder with train.tsv and dev.tsv (or similar names) provides both as files. A dataset
    provides its splits `train` and `validation`, unless the source names one split. The validation
    data is None unless every source has some.
    """
    pairs = [_find_splits(reference) for reference in references]
    train = tuple(train for train, _ in pairs)
    found = tuple(validation for _, validation in pairs if validation is not None)
    return train, found if len(found) == len(pairs) else None


def unread_file_hints(references: Sequence[str]) -> list[str]:
    """Return hints about row files that are not read because their folder has split files."""
    hints = []
    for reference in references:
        if not Path(reference).is_dir():
            continue
        read = [Path(name) for name in _find_splits(reference) if name is not None]
        if not all(path.is_file() for path in read):
            continue
        others = [
            path.name
            for path in row_files_below(Path(reference))
            if path not in read and not is_held_out(path)
        ]
        if others:
            more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
            names = " and ".join(path.name for path in read)
            hints.append(
                f"of {reference}, {names} {'is' if len(read) == 1 else 'are'} read; "
                f"{others[0]}{more} {'is' if len(others) == 1 else 'are'} left out. Name files "
                "with --data to read them"
            )
    return hints


def _find_splits(reference: str) -> tuple[str, str | None]:
    path = Path(reference)
    if reference.startswith("hf:"):
        return _find_dataset_splits(reference)
    if not path.is_dir() or (path / "dataset_dict.json").is_file():
        return _find_dataset_splits(f"hf:{reference}") if path.is_dir() else (reference, None)
    train, validation = _find_split_file(path, _TRAIN), _find_split_file(path, _VALIDATION)
    return (str(train) if train else reference, str(validation) if train and validation else None)


def _find_split_file(folder: Path, names: Sequence[str]) -> Path | None:
    for name in names:
        for kind in _NAMED:
            if (folder / f"{name}{kind}").is_file():
                return folder / f"{name}{kind}"
    return None


def _find_dataset_splits(reference: str) -> tuple[str, str | None]:
    """Return the training split, and the validation split if there is one and no split is named."""
    name, config, *split = [*reference.removeprefix("hf:").split(":"), ""][:3]
    if any(split) or reference.count(":") > 2:
        return reference, None
    validation = f"hf:{name}:{config}:validation"
    try:
        open_dataset(validation)
    except BadInputError:
        return reference, None
    return reference, validation


def _read_dataset(source: Source) -> Table:
    import datasets

    dataset = open_dataset(source.reference)
    names = {
        name: tuple(kind.names)
        for name, kind in dataset.features.items()
        if isinstance(kind, datasets.ClassLabel)
    }
    rows = tuple(
        Row(without_fillers(values), f"{source.reference}, row {number}")
        for number, values in enumerate(dataset, 1)
    )
    return Table(source.reference, tuple(dataset.column_names), rows, names)


def _read_files(source: Source) -> Table:
    rows: list[Row] = []
    columns: dict[str, None] = {}
    left_out: list[str] = []
    for file in source.files:
        found = [row for row, _ in read_rows(file, on_left_out=left_out.append)]
        rows += found
        for row in found[:1]:
            columns |= dict.fromkeys(row.values)
    return Table(
        source.reference, tuple(columns), tuple(rows), {}, tuple(left_out), hints=source.hints
    )


def split_rows(rows: Sequence[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """Split rows into training and validation rows by the hash of their contents.

    If the validation fraction by hash is far from `fraction`, as with few rows, the last rows are
    held out instead. Raises BadInputError if either split would be empty.
    """
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        share = xxhash.xxh3_64_intdigest(_serialize(row)) / 2**64
        parts[share < fraction].append(row)
    share = len(parts[1]) / len(rows)
    if not fraction / 2 <= share <= min(2 * fraction, (1 + fraction) / 2):
        border = min(round(len(rows) * (1 - fraction)), len(rows) - 1)
        parts = (list(rows[:border]), list(rows[border:]))
    if not all(parts):
        raise BadInputError(
            f"{len(rows)} row cannot be divided into training and validation data. "
            f"Give more, or name validation data with --eval-data{nested_rows(rows[0]) or '.'}"
        )
    return parts


def fingerprint(rows: Iterable[Row]) -> str:
    """Return a hash of the contents of the rows, in order."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(_serialize(row))
    return digest.hexdigest()


def overlap_hints(train: Sequence[Row], validation: Sequence[Row]) -> list[str]:
    """Return a hint on how many validation rows are also training rows."""
    learned = {xxhash.xxh3_128_digest(_serialize(row)) for row in train}
    found = [row.where for row in validation if xxhash.xxh3_128_digest(_serialize(row)) in learned]
    if not found:
        return []
    return [
        f"{len(found):,} of {len(validation):,} rows held out for validation are also among the "
        f"training rows, word for word (first {found[0]}): the validation loss is lower than it "
        "would be on new rows. Leave repeated rows out, or name others with --eval-data"
    ]


def nul_hints(rows: Iterable[Row]) -> list[str]:
    """Return a hint on how many rows contain NUL characters, and where the first one is."""
    found = [row.where for row in rows if _has_nul(row.values)]
    if not found:
        return []
    return [
        f"{len(found):,} rows have NUL characters, which usually come from a file that was "
        f"truncated or converted wrongly, and are trained on unchanged (first {found[0]})"
    ]


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(map(_has_nul, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_nul, value))


def _serialize(row: Row) -> bytes:
    return json.dumps(dict(row.values), sort_keys=True, default=_to_json_value).encode() + b"\n"


def _to_json_value(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)
