"""Records from CSV and TSV files."""

import csv
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from outpace.data.file_reader import LINE_BYTES
from outpace.data.row import Row, require_distinct
from outpace.data.text_checks import lines_of
from outpace.records.errors import BadInputError, quote_names

_QUOTED_CELL = re.compile(r'"(?:[^"]|"")*"')
# Names of delimiters in messages.
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_COLUMN_NAME = re.compile(r"[\"']?\w[\w .-]{0,40}[\"']?")


def read_delimited(
    file: Path, delimiter: str, on_left_out: Callable[[str], None] | None
) -> Iterator[tuple[Row, int]]:
    """Yield the rows below a table's header, each with its approximate size in bytes.

    In GLUE's TSV files, a quotation mark is part of the text; in others, such as those from pandas,
    it quotes a cell (see `_uses_quotes`). In files without quoting, lines with fewer columns than
    the header, which some benchmarks have, are skipped and their locations passed to `on_left_out`.
    Raises BadInputError for such lines if `on_left_out` is None, and for all other lines that do
    not match the header.
    """
    quoted = delimiter == "," or _uses_quotes(file)
    cells = _read_csv(file, delimiter) if quoted else _read_tabs(file)
    header: list[str] | None = None
    for number, row, took in cells:
        if header is None:
            header = _COLA if _has_cola_columns(row) else row
            if header is row:
                _require_delimiter(file, delimiter, row)
                require_distinct(header, f"{file}, line {number}")
                continue
        where = f"{file}, line {number}"
        if row == header:
            raise BadInputError(
                f"{where} repeats the header, as happens when files are joined without removing "
                "their headers. Remove the repeated headers: "
                f"awk 'NR == 1 {{h = $0}} NR == 1 || $0 != h' {shlex.quote(str(file))}"
            )
        if len(row) == len(header):
            yield Row(dict(zip(header, row, strict=True)), where), took
        elif on_left_out is not None and not quoted and len(row) < len(header):
            on_left_out(where)
        else:
            raise BadInputError(
                f"{where} has {len(row)} columns, but the header has {len(header)}: "
                f"{quote_names(header)}. {_advise(len(row) > len(header), delimiter, quoted)}"
            )


def _advise(too_many: bool, delimiter: str, quoted: bool) -> str:
    if not too_many:
        return "Complete the line, or remove it."
    name = _DELIMITERS[delimiter]
    if quoted:
        return f"Put a text that contains {name} in quotation marks, or write the rows as .jsonl."
    return f"Replace {name} within a text by spaces, or write the rows as .jsonl."


def _require_delimiter(file: Path, delimiter: str, header: Sequence[str]) -> None:
    """Refuse a table whose only column name looks like several names with another delimiter."""
    if len(header) != 1:
        return
    for other, name in _DELIMITERS.items():
        names = header[0].split(other)
        if other != delimiter and len(names) > 1 and all(map(_COLUMN_NAME.fullmatch, names)):
            known = {",": "name it .csv", "\t": "name it .tsv"}
            remedy = known.get(other) or f"write it with {_DELIMITERS[delimiter]}"
            raise BadInputError(
                f"{file} is separated by {name}, but {_DELIMITERS[delimiter]} are expected: its "
                f"only column would be {header[0]!r}. To read it, {remedy}."
            )


def _uses_quotes(file: Path) -> bool:
    """Return whether a TSV file quotes cells as CSV does.

    It does if all cells that begin with a quotation mark are well-formed, and either the header is
    quoted or some marks are doubled. It also does if all rows have the same number of columns only
    when cells are quoted, for example because cells contain tabs and line breaks. Raises
    BadInputError for a single column with line breaks, which could be read either way.
    """
    columns = opened = 0
    named = doubled = False
    even = True
    for number, line in enumerate(lines_of(file), 1):
        cells = line.rstrip("\r\n").split("\t")
        if cells == [""]:
            continue
        if not columns:
            columns, named = len(cells), all(map(_QUOTED_CELL.fullmatch, cells))
        even = even and len(cells) == columns
        for cell in cells:
            if cell.startswith('"'):
                doubled = doubled or cell == '""' or '""' in cell[1:-1]
                opened = opened or (0 if _QUOTED_CELL.fullmatch(cell) else number)
        if opened and not even:
            break
    if not opened:
        return doubled or named
    if not _has_equal_widths_if_quoted(file) or (even and columns > 1 and not named):
        return False
    if even and not (named or doubled):
        raise BadInputError(
            f"{file}, line {opened}: a quotation mark begins a line and another one ends a later "
            "line, so these may be one text or several. Write the texts as .jsonl; or as .csv, "
            "where quotation marks around a text are not part of it."
        )
    return True


def _has_equal_widths_if_quoted(file: Path) -> bool:
    try:
        widths = (len(cells) for _, cells, _ in _read_csv(file, "\t"))
        first = next(widths)
        return all(width == first for width in widths)
    except BadInputError:
        return False


def _read_tabs(file: Path) -> Iterator[tuple[int, list[str], int]]:
    """Yield the line number, cells and length of each non-empty line."""
    for number, line in enumerate(lines_of(file), 1):
        if stripped := line.removesuffix("\n").removesuffix("\r"):
            yield number, stripped.split("\t"), len(line)


def _read_csv(file: Path, delimiter: str) -> Iterator[tuple[int, list[str], int]]:
    """Yield the number of the last line, the cells and the approximate length of each row."""
    csv.field_size_limit(LINE_BYTES)
    reader = csv.reader(lines_of(file), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row, sum(len(cell) + 1 for cell in row)
    except csv.Error as error:
        raise BadInputError(
            f"{file}, line {reader.line_num}: {error}. Is a quotation mark left open?"
        ) from None


_COLA = ["source", "label", "star", "sentence"]


def _has_cola_columns(first: Sequence[str]) -> bool:
    """Return whether a row has CoLA's columns: source, label, "*" or nothing, sentence."""
    return len(first) == 4 and first[1] in ("0", "1") and first[2] in ("", "*")
