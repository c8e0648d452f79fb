"""Records with named columns, and messages about records in an unexpected format."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.records.errors import BadInputError

# Python command for users, which reads the list of rows under a key and prints one per line.
_UNPACK = "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1]))[{!r}]]"
_CONTENTS = ("content", "value")  # of messages


@dataclass(frozen=True)
class Row:
    """One record.

    `where` is its location, for messages. `file` is set for records of a JSON file that is not a
    list.
    """

    values: Mapping[str, Any]
    where: str
    file: Path | None = None


AS_TEXT = ". Write it as a text, or leave the row out."


def checked_text(text: Any, where: str, field: str) -> str:
    """Return `text` if it is a valid string. Raises BadInputError otherwise."""
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise BadInputError(f"{where}: {field!r} is {kind}, not text{AS_TEXT}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInputError(
                f"{where}: {field!r} has half of a surrogate pair, "
                f"{text[error.start]!r}, at character {error.start}, which is not valid text"
            ) from None
    return text


def describe_repetition(names: Iterable[str], what: str) -> str:
    """Return a sentence that says which name is repeated.

    `what` is the beginning of the sentence: "the header has the column".
    """
    name, times = Counter(names).most_common(1)[0]
    return (
        f"{what} {name!r} {'twice' if times == 2 else f'{times} times'}, and it is unknown which "
        "one is meant. Keep one."
    )


def require_distinct(names: Sequence[str], where: str) -> None:
    """Refuse a table in which two columns have the same name; blank names may repeat."""
    named = [name for name in names if name.strip()]
    if len(set(named)) < len(named):
        raise BadInputError(f"{where}: {describe_repetition(named, 'the header has the column')}")


def nested_rows(row: Row) -> str:
    """Return how to unpack rows nested in this row, as the end of a sentence, or ''.

    Rows are nested if a key holds a list of objects, as in {"data": [...]}, or if the record is a
    whole table, with a list per column or an object per row number.
    """
    lists = {
        name: len(value)
        for name, value in row.values.items()
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    }
    if lists:
        name = max(lists, key=lambda name: lists[name])
        return suggest_unpacking(row.file, name, f"a list of {lists[name]:,} objects")
    return rows_in_columns(row)


def rows_in_columns(row: Row) -> str:
    """Return how to convert rows stored by column or number, as the end of a sentence, or ''."""
    if (count := _count_whole_rows(row.values)) is not None:
        return (
            f". Its values are {count:,} whole rows, as pandas writes them with orient='index' or "
            "'split': write them with to_json(FILE, orient='records', lines=True)."
        )
    columns = [
        [*value.values()] if isinstance(value, dict) else value for value in row.values.values()
    ]
    if not columns or not all(isinstance(column, list) for column in columns):
        return ""
    lengths = {len(column) for column in columns}
    plain = not any(isinstance(one, (list, dict)) for column in columns for one in column)
    if not plain or len(lengths) > 1 or min(lengths) < 2:
        return ""
    return (
        f". Its values are columns of {lengths.pop():,} rows: write one object per line, as "
        "pandas does with to_json(FILE, orient='records', lines=True)."
    )


def _count_whole_rows(values: Mapping[str, Any]) -> int | None:
    """Return the number of rows in an object that pandas wrote with orient="index" or "split".

    An "index" object maps numbers to rows; a "split" object has `columns` and `data`. Returns None
    for other objects.
    """
    columns, data = values.get("columns"), values.get("data")
    if isinstance(columns, list) and isinstance(data, list) and data:
        whole = all(isinstance(row, list) and len(row) == len(columns) for row in data)
        return len(data) if whole else None
    rows = [*values.values()]
    if len(rows) < 2 or not all(isinstance(row, dict) for row in rows):
        return None
    if list(values) != [str(number) for number in range(len(rows))]:
        return None
    return len(rows) if all(row.keys() == rows[0].keys() for row in rows) else None


def suggest_unpacking(file: Path | None, name: str, what: str) -> str:
    """Return how to write the objects under a key as rows, as the end of a sentence."""
    source = "FILE" if file is None else str(file)
    command = shlex.join(["python3", "-c", _UNPACK.format(name), source])
    return (
        f". Its {name!r} is {what}: if these are the rows, write them with {command} > rows.jsonl"
    )


def without_fillers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls that Arrow and similar formats add to nested objects.

    Arrow gives every object in a column the keys of all others, so a call's arguments or a tool's
    parameters have the keys of all tools. Null contents of messages are kept, since they may be
    intended.
    """
    return {name: _drop_nulls(value) for name, value in values.items()}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_drop_nulls(one) for one in value]
    if isinstance(value, dict):
        return {
            key: _drop_nulls(one)
            for key, one in value.items()
            if one is not None or key in _CONTENTS
        }
    return value
