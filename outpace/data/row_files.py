"""Records with named columns from JSON, CSV, TSV and Parquet files, one at a time."""

import codecs
import csv
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from outpace.data.file_kinds import Form, advice_on_binary, binary_kind, chunk_kind, form_of
from outpace.data.reading import LINE_BYTES, numbered_lines, readable
from outpace.records.errors import BadInputError, json_error, quote_names

_READ_BYTES = 1 << 20
_QUOTED_CELL = re.compile(r'"(?:[^"]|"")*"')
_SPACES = " \t\r\n"
# Python code for users that reads the list of rows under a key, and writes one row per line.
_UNPACK = "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1]))[{!r}]]"
# Delimiters in tables of other tools, as users know them.
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_COLUMN_NAME = re.compile(r"[\"']?\w[\w .-]{0,40}[\"']?")
_NESTED = re.compile(rb'\s*\{\s*"([^"\\]+)"\s*:\s*\[\s*\{')
# Suffixes of files in which programs store token ids, with or without a header.
_RAW_SUFFIXES = (".npy", ".npz", ".dat", ".raw", ".ids", ".tokens", ".tok")
# Limits on NULs in a block of text: a file that exceeds both has holes or is not text.
_NUL_SHARE, _FEW_NULS = 1 / 16, 15
_HOLE_SHARE = 0.8  # in ASCII text as UTF-32, three of four bytes are NUL
# A beginning that is decoded to see whether it is text, and the share of characters that must be.
_PRINTABLE_BYTES, _PRINTABLE = 4096, 0.95


_CONTENTS = ("content", "value")  # of messages


@dataclass(frozen=True)
class Row:
    """One record.

    `where` tells the user its place in the data; `file` is set for JSON that is not a list.
    """

    values: Mapping[str, Any]
    where: str
    file: Path | None = None


def read_rows(
    file: Path,
    form: Form | None = None,
    columns: Sequence[str] | None = None,
    on_left_out: Callable[[str], None] | None = None,
) -> Iterator[tuple[Row, int]]:
    """Yield every record of a file, with its approximate size in bytes.

    `form` defaults to that of the suffix; only `columns` of a Parquet file are read. A line of a
    table without the header's columns is passed to `on_left_out`, or refused if that is None.
    Raises BadInputError, which names the place that cannot be read.
    """
    form = form or form_of(file)
    if form == "json":
        return _json_list(file) if first_sign(file) == "[" else _json_lines(file)
    if form == "parquet":
        return _parquet(file, columns)
    if form == "text":
        _require_tabs(file)
    return _table(file, "," if form == "csv" else "\t", on_left_out)


def _require_tabs(file: Path) -> None:
    """Refuse plain text; a .txt with tabs in its first line is a table, as in some benchmarks."""
    if file.suffix.lower() == ".txt":
        first = next((line for line in _lines_of(file) if line.strip()), "")
        if "\t" in first:
            return
    with readable(file) as stream:
        require_text(file, stream.read(_READ_BYTES))
    raise BadInputError(
        f"{file} is plain text, not rows with columns, as conversations and labels are. Give "
        ".jsonl, .json, .tsv, .csv, .parquet or hf:NAME. Training and eval take texts with --task "
        "pretrain."
    )


AS_TEXT = ". Write it as a text, or leave the row out."


def checked_text(text: Any, where: str, field: str) -> str:
    """Return the text of a record. Raises BadInputError if it is not text."""
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


def require_text(file: Path, block: bytes) -> None:
    """Refuse a file that begins with this block and is not UTF-8 text, even if it decodes.

    UTF-16 and UTF-32 without a byte order mark decode if the text is Latin, Greek or Cyrillic: each
    of its characters has a byte that is a control character, which no text contains.
    """
    if (kind := binary_kind(block) or chunk_kind(file, block)) is not None:
        raise BadInputError(
            f"{file} is {kind}, not text. {advice_on_binary(kind)}{_of_tokens(file)}"
        )
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return  # decoding will report it with its position
    if block.count(0) > _HOLE_SHARE * len(block):
        raise BadInputError(_describe_nuls(str(file), block))
    controls = len(block) - len(block.translate(None, bytes([*range(9), *range(14, 27)])))
    if block.count(0) and controls * 16 > len(block):
        encoding = _wide_encoding(block)
        remedy = (
            "so it is a binary file. Give its texts as .txt, .jsonl or Parquet, or leave it out."
            if encoding is None
            else f"as in {encoding}. Convert it, as with iconv -f {encoding} -t UTF-8, or leave it "
            "out."
        )
        raise BadInputError(
            f"{file} is not UTF-8 text: {controls:,} of its first {len(block):,} bytes are control "
            f"characters, the first at offset {block.find(0)}, {remedy}{_of_tokens(file)}"
        )


def _wide_encoding(block: bytes) -> str | None:
    """Return the encoding in which the beginning of a file is text without a byte order mark."""
    for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        text = block[:_PRINTABLE_BYTES].decode(encoding, errors="replace")
        printable = sum(sign.isprintable() or sign in "\n\r\t" for sign in text)
        latin = sum(sign < "\u0600" for sign in text)
        if min(printable, latin) > _PRINTABLE * len(text):
            return encoding
    return None


def _of_tokens(file: Path) -> str:
    """Say how to name a file of token ids if this file may be one."""
    if file.suffix.lower() not in _RAW_SUFFIXES:
        return ""
    return " If it holds ids of tokens, write them with numpy's tofile into a file named .bin."


def require_whole(file: Path, block: bytes, offset: int) -> None:
    """Refuse a text file with runs of NULs; `offset` is where this block begins."""
    if block.count(0) > max(_FEW_NULS, _NUL_SHARE * len(block)):
        raise BadInputError(_describe_nuls(str(file), block, offset))


def _describe_nuls(where: str, block: bytes, offset: int = 0) -> str:
    """Describe a text that has NUL characters, and what to do about it."""
    return (
        f"{where} has {block.count(0):,} NUL characters, the first at offset "
        f"{offset + block.find(0):,}: a copy or a download of it was probably cut off, or it is "
        "not text. Fetch it again, or leave it out."
    )


class RepeatedKeyError(ValueError):
    """Raised if an object in a JSON text has a key more than once, so its value is ambiguous."""


def read_value(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, or its subclass RepeatedKeyError."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedKeyError(
            _describe_repetition([key for key, _ in pairs], "an object has the key")
        )
    return found


def _describe_repetition(names: Iterable[str], what: str) -> str:
    """Append the repeated name to the words `what`."""
    name, times = Counter(names).most_common(1)[0]
    return (
        f"{what} {name!r} {'twice' if times == 2 else f'{times} times'}, and it is unknown which "
        "one is meant. Keep one."
    )


def _require_distinct(names: Sequence[str], where: str) -> None:
    """Refuse a table with two columns of the same name; several columns may have no name."""
    named = [name for name in names if name.strip()]
    if len(set(named)) < len(named):
        raise BadInputError(f"{where}: {_describe_repetition(named, 'the header has the column')}")


def nested_rows(row: Row) -> str:
    """Return the end of a sentence about rows nested in this row, with a remedy; '' if none are.

    Rows are nested if a name holds a list of objects, as in {"data": [...]}, or columns.
    """
    lists = {
        name: len(value)
        for name, value in row.values.items()
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    }
    if lists:
        name = max(lists, key=lambda name: lists[name])
        return _suggest_unpacking(row.file, name, f"a list of {lists[name]:,} objects")
    return rows_in_columns(row)


def rows_in_columns(row: Row) -> str:
    """Describe rows stored by column, as lists or by row number, in the form of `nested_rows`."""
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
    """Return the number of rows of an object that has rows by number, or lists of cells and their
    `columns`; None for other objects.
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


def _suggest_unpacking(file: Path | None, name: str, what: str) -> str:
    """Return the end of a sentence: how to read rows that are under a key of an object."""
    source = "FILE" if file is None else str(file)
    command = shlex.join(["python3", "-c", _UNPACK.format(name), source])
    return (
        f". Its {name!r} is {what}: if these are the rows, write them with {command} > rows.jsonl"
    )


def first_sign(file: Path) -> str:
    """Return a file's first character that is not white space; empty if there is none."""
    with readable(file) as stream:
        head = stream.read(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip()
    return head[:1].decode("latin-1")


def _format_json_error(error: Exception, column: int | None = None) -> str:
    """Describe why JSON cannot be read, with the column (by default, that of the error)."""
    if isinstance(error, json.JSONDecodeError):
        message = error.msg.removesuffix(" at").removesuffix(" starting")
        return f"{message} at column {error.colno if column is None else column}"
    return json_error(error)


def _json_lines(file: Path) -> Iterator[tuple[Row, int]]:
    alone = True
    for number, line in numbered_lines(file):
        where = f"{file}, line {number}"
        if alone:
            require_text(file, line)
        try:
            # Without the line end, after which truncation would go unnoticed.
            values = read_value(line.decode("utf-8-sig").rstrip(_SPACES))
        except UnicodeDecodeError as error:
            raise BadInputError(
                f"{where} is not UTF-8 text: byte {line[error.start]:#04x} at its offset "
                f"{error.start}. Convert it, or leave it out."
            ) from None
        except RepeatedKeyError as error:
            raise BadInputError(f"{where}: {error}") from None
        except (ValueError, RecursionError) as error:
            if alone and (single := _single_object(file)) is not None:
                yield single
                return
            if alone:
                _require_line_ends(file, line)
            if b"\0" in line:
                raise BadInputError(_describe_nuls(where, line)) from None
            raise BadInputError(
                f"{where} is not JSON: {_format_json_error(error)}. Each line must be an object, "
                f"as `jq -c .` writes them{_nested_name(file) if alone else '.'}"
            ) from None
        alone = False
        if not isinstance(values, dict):
            raise BadInputError(
                f"{where} holds a {type(values).__name__}; each line must be an object"
            )
        yield Row(values, where, file), len(line)


def _nested_name(file: Path) -> str:
    """Describe nested rows of a file too large to read whole, like `nested_rows`; else '.'."""
    if file.stat().st_size <= LINE_BYTES:
        return "."
    with readable(file) as stream:
        head = stream.read(1 << 12).removeprefix(codecs.BOM_UTF8)
    found = _NESTED.match(head)
    return (
        "." if found is None else _suggest_unpacking(file, found[1].decode(), "a list of objects")
    )


def _single_object(file: Path) -> tuple[Row, int] | None:
    """Return the only object of a file, written over several lines; None for other files."""
    size = file.stat().st_size
    if size > LINE_BYTES:
        return None
    with readable(file) as stream:
        try:
            values = read_value(stream.read().decode("utf-8-sig"))
        except RepeatedKeyError as error:
            raise BadInputError(f"{file}: {error}") from None
        except (ValueError, RecursionError):
            return None
    return (Row(values, str(file), file), size) if isinstance(values, dict) else None


def _json_list(file: Path) -> Iterator[tuple[Row, int]]:
    """Yield the objects of a file that is one list, without loading the whole file."""
    with readable(file) as stream:
        text = _Text(file, stream)
        text.skip(_SPACES)
        text.skip("[")
        for number in range(1, 1 << 62):
            text.skip(_SPACES)
            if text.sign() == "]":
                _require_end(file, text)
                return
            where = f"{file}, item {number}"
            if number > 1:
                if text.sign() != ",":
                    raise BadInputError(
                        f"{where} is not JSON: expected a comma or the list's end at "
                        f"line {text.line()}, not {text.sign() or 'the end of the file'!r}"
                    )
                text.skip(",", 1)
                text.skip(_SPACES)
            values, took = text.value(where)
            if not isinstance(values, dict):
                raise BadInputError(
                    f"{where}, line {text.line()}, is a {type(values).__name__}; each must be "
                    "an object"
                )
            yield Row(values, where), took


def _require_end(file: Path, text: "_Text") -> None:
    """Refuse content after a file's list, such as a second list, which would not be read."""
    text.skip("]", 1)
    text.skip(_SPACES)
    if text.sign():
        raise BadInputError(
            f"{file}, line {text.line()}: there is more text after the end of the list "
            f"({text.sign()!r}), as in files that were joined. Join them with `jq -c '.[]'` into a "
            ".jsonl, or keep one list."
        )


class _Text:
    """The text of a file from an offset, read only as far as needed."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._scanner = json.JSONDecoder(object_pairs_hook=_object)
        self._text, self._at, self._lines, self._read = "", 0, 1, 0
        self._column = 1  # of the current first character
        self._ended = False

    def _more(self) -> None:
        """Double the text in memory, which keeps the total time of repeated scans linear."""
        self._lines, self._column = self._position(self._at)
        self._text, self._at = self._text[self._at :], 0
        block = self._stream.read(max(_READ_BYTES, 2 * len(self._text)))
        if not self._read:
            require_text(self._file, block)
        self._ended = not block
        try:
            self._text += self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            offset = self._read - len(self._decoder.getstate()[0]) + error.start
            raise BadInputError(
                f"{self._file} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset "
                f"{offset}. Convert it, or leave it out."
            ) from None
        self._read += len(block)

    def sign(self) -> str:
        """Return the next character; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            self._more()
        return self._text[self._at : self._at + 1]

    def skip(self, signs: str, most: int | None = None) -> None:
        """Skip characters in `signs`."""
        left = most
        while (sign := self.sign()) and sign in signs and left != 0:
            self._at += 1
            left = None if left is None else left - 1

    def line(self) -> int:
        """Return the line's number, from 1."""
        return self._position(self._at)[0]

    def _position(self, at: int) -> tuple[int, int]:
        """Return the line and column, each from 1, of the character at an index of the text."""
        begin = self._text.rfind("\n", 0, at)
        column = self._column + at if begin < 0 else at - begin
        return self._lines + self._text.count("\n", 0, at), column

    def value(self, where: str) -> tuple[Any, int]:
        """Read the next value; return it and its source text. Raises BadInputError."""
        while True:
            try:
                found, end = self._scanner.raw_decode(self._text, self._at)
            except RepeatedKeyError as error:
                raise BadInputError(f"{where}, line {self.line()}: {error}") from None
            except (ValueError, RecursionError) as error:
                far = len(self._text) - self._at > LINE_BYTES
                if self._ended or far or isinstance(error, RecursionError):
                    at = error.pos if isinstance(error, json.JSONDecodeError) else self._at
                    # Start the search after the last character that is not white space.
                    line, column = self._position(min(at, len(self._text.rstrip(_SPACES))))
                    raise BadInputError(
                        f"{where}, line {line}, is not JSON: {_format_json_error(error, column)}"
                    ) from None
                self._more()
                continue
            took = end - self._at
            self._at = end
            return found, took


def without_fillers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a columnar format without the nulls that the format adds within columns.

    Arrow gives each object of a column the keys of all others, so a call's arguments, or a tool's
    parameters, have the keys of all tools. A message's content, however, may legitimately be null.
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


def _parquet(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[Row, int]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        _require_distinct(names, str(file))
        missing = next((name for name in columns or () if name not in names), None)
        if missing is not None:
            raise BadInputError(
                f"{file} has no column {missing!r}, but {quote_names(names)}. "
                "Name it with --text-field."
            )
        share = file.stat().st_size // max(1, table.metadata.num_rows)
        number = 0
        for batch in table.iter_batches(
            columns=None if columns is None else list(columns), batch_size=1000
        ):
            for values in batch.to_pylist():
                number += 1
                yield Row(without_fillers(values), f"{file}, row {number}"), share
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise BadInputError(f"{file} is not a readable Parquet file: {error}") from None


def _table(
    file: Path, delimiter: str, on_left_out: Callable[[str], None] | None
) -> Iterator[tuple[Row, int]]:
    """Yield rows of a table below its header.

    GLUE's tab-separated files do not use quoting: a quotation mark is part of the text. Others do,
    such as files from pandas (see `_quotes`).
    """
    quoted = delimiter == "," or _quotes(file)
    cells = _read_csv(file, delimiter) if quoted else _read_tabs(file)
    header: list[str] | None = None
    for number, row, took in cells:
        if header is None:
            header = _COLA if _is_cola(row) else row
            if header is row:
                _require_delimiter(file, delimiter, row)
                _require_distinct(header, f"{file}, line {number}")
                continue
        where = f"{file}, line {number}"
        if row == header:
            raise BadInputError(
                f"{where} repeats the header, as in files that were joined with theirs. Leave such "
                f"lines out: awk 'NR == 1 {{h = $0}} NR == 1 || $0 != h' {shlex.quote(str(file))}"
            )
        if len(row) == len(header):
            yield Row(dict(zip(header, row, strict=True)), where), took
        elif on_left_out is not None:
            on_left_out(where)
        else:
            raise BadInputError(
                f"{where} has {len(row)} columns, but the header has {len(header)}: "
                f"{quote_names(header)}"
            )


def _require_delimiter(file: Path, delimiter: str, header: Sequence[str]) -> None:
    """Refuse a table whose only column name is a list of names with another delimiter."""
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


def _require_line_ends(file: Path, line: bytes) -> None:
    """Refuse a file that is read as one line because its lines end in carriage returns only."""
    if b"\r" in line.rstrip(b"\r\n") and not line.endswith(b"\n"):
        raise BadInputError(
            f"{file} has lines that end with carriage returns only, as on old systems. Convert it, "
            f"as with tr '\\r' '\\n' < {shlex.quote(str(file))}."
        )


def _lines_of(file: Path) -> Iterator[str]:
    """Yield a text's lines with their line ends. Raises BadInputError if it is not UTF-8."""
    offset = 0
    with readable(file) as stream:
        while line := stream.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise BadInputError(
                    f"{file} has a line longer than {LINE_BYTES >> 20} MiB at offset {offset}"
                )
            if not offset:
                require_text(file, line)
                _require_line_ends(file, line)
            require_whole(file, line, offset)
            mark = len(codecs.BOM_UTF8) if not offset and line.startswith(codecs.BOM_UTF8) else 0
            try:
                yield line[mark:].decode()
            except UnicodeDecodeError as error:
                raise BadInputError(
                    f"{file} is not UTF-8 text: byte {line[mark + error.start]:#04x} at offset "
                    f"{offset + mark + error.start}. Convert it."
                ) from None
            offset += len(line)


def _quotes(file: Path) -> bool:
    """Return whether tab-separated cells that begin with a quotation mark are quoted, as in CSV.

    They are if all are well-formed and either the header is quoted or some marks are doubled. They
    also are if only quoting gives all rows the header's columns, for example because cells contain
    tabs and line breaks. Raises BadInputError for a single column with line breaks, which could be
    read either way.
    """
    columns = opened = 0
    named = doubled = False
    even = True
    for number, line in enumerate(_lines_of(file), 1):
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
    if not _is_even_if_quoted(file) or (even and columns > 1 and not named):
        return False
    if even and not (named or doubled):
        raise BadInputError(
            f"{file}, line {opened}: a quotation mark begins a line and another one ends a later "
            "line, so these may be one text or several. Write the texts as .jsonl; or as .csv, "
            "where quotation marks around a text are not part of it."
        )
    return True


def _is_even_if_quoted(file: Path) -> bool:
    """Return whether all rows of a table with quoted cells between tabs have the same number of
    columns.
    """
    try:
        widths = (len(cells) for _, cells, _ in _read_csv(file, "\t"))
        first = next(widths)
        return all(width == first for width in widths)
    except BadInputError:
        return False


def _read_tabs(file: Path) -> Iterator[tuple[int, list[str], int]]:
    """Yield the number, the cells and the size in bytes of each line that has cells."""
    for number, line in enumerate(_lines_of(file), 1):
        if stripped := line.removesuffix("\n").removesuffix("\r"):
            yield number, stripped.split("\t"), len(line)


def _read_csv(file: Path, delimiter: str) -> Iterator[tuple[int, list[str], int]]:
    """Yield the number of the last line, the cells and the size in bytes of each row."""
    csv.field_size_limit(LINE_BYTES)
    reader = csv.reader(_lines_of(file), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row, sum(len(cell) + 1 for cell in row)
    except csv.Error as error:
        raise BadInputError(
            f"{file}, line {reader.line_num}: {error}. Is a quotation mark left open?"
        ) from None


_COLA = ["source", "label", "star", "sentence"]


def _is_cola(first: Sequence[str]) -> bool:
    """Return whether a row has CoLA's columns: source, label, a star if wrong, sentence."""
    return len(first) == 4 and first[1] in ("0", "1") and first[2] in ("", "*")
