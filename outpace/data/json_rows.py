"""Records from JSON files: one object per line, a list of objects, or a single object."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from outpace.data.file_reader import LINE_BYTES, numbered_lines, readable
from outpace.data.row import Row, describe_repetition, suggest_unpacking
from outpace.data.text_checks import describe_nuls, require_line_ends, require_text
from outpace.records.errors import BadInputError, json_error

READ_BYTES = 1 << 20
_SPACES = " \t\r\n"
_NESTED = re.compile(rb'\s*\{\s*"([^"\\]+)"\s*:\s*\[\s*\{')


class RepeatedKeyError(ValueError):
    """Raised if a JSON object has the same key more than once, so its value is ambiguous."""


def read_value(text: str) -> Any:
    """Parse a JSON text. Raises ValueError, or its subclass RepeatedKeyError for repeated keys."""
    return json.loads(text, object_pairs_hook=_require_distinct_keys)


def _require_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedKeyError(
            describe_repetition([key for key, _ in pairs], "an object has the key")
        )
    return found


def first_sign(file: Path) -> str:
    """Return the first character in a file's first 4 KiB that is not white space, or ''."""
    with readable(file) as stream:
        head = stream.read(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip()
    return head[:1].decode("latin-1")


def _format_json_error(error: Exception, column: int | None = None) -> str:
    """Describe a JSON error and its column; `column` overrides the column of the error."""
    if isinstance(error, json.JSONDecodeError):
        message = error.msg.removesuffix(" at").removesuffix(" starting")
        return f"{message} at column {error.colno if column is None else column}"
    return json_error(error)


def json_lines(file: Path) -> Iterator[tuple[Row, int]]:
    """Yield each object of a JSON Lines file, or a file's only object, with its size in bytes."""
    alone = True
    for number, line in numbered_lines(file):
        where = f"{file}, line {number}"
        if alone:
            require_text(file, line)
        try:
            # Without the line end, since an error after it would have the wrong column.
            values = read_value(line.decode("utf-8-sig").rstrip(_SPACES))
        except UnicodeDecodeError as error:
            raise BadInputError(
                f"{where} is not UTF-8 text: byte {line[error.start]:#04x} at its offset "
                f"{error.start}. Convert it, or leave it out."
            ) from None
        except RepeatedKeyError as error:
            raise BadInputError(f"{where}: {error}") from None
        except (ValueError, RecursionError) as error:
            if alone and (single := _read_single_object(file)) is not None:
                yield single
                return
            if alone:
                require_line_ends(file, line)
            if b"\0" in line:
                raise BadInputError(describe_nuls(where, line)) from None
            raise BadInputError(
                f"{where} is not JSON: {_format_json_error(error)}. Each line must be an object, "
                f"as `jq -c .` writes them{_advise_unpacking(file) if alone else '.'}"
            ) from None
        alone = False
        if not isinstance(values, dict):
            raise BadInputError(
                f"{where} holds a {type(values).__name__}; each line must be an object"
            )
        yield Row(values, where, file), len(line)


def _advise_unpacking(file: Path) -> str:
    """Return how to unpack the rows in a file that is one object and too large to parse.

    The text is the end of a sentence: "." if the file is smaller or has no such rows.
    """
    if file.stat().st_size <= LINE_BYTES:
        return "."
    with readable(file) as stream:
        head = stream.read(1 << 12).removeprefix(codecs.BOM_UTF8)
    found = _NESTED.match(head)
    return "." if found is None else suggest_unpacking(file, found[1].decode(), "a list of objects")


def _read_single_object(file: Path) -> tuple[Row, int] | None:
    """Return a file's only object, written over several lines, and the size of the file.

    Returns None for other files.
    """
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


def json_list(file: Path) -> Iterator[tuple[Row, int]]:
    """Yield the objects of a file that is one JSON list, reading the file incrementally.

    Each object comes with its length in characters.
    """
    with readable(file) as stream:
        text = _JsonText(file, stream)
        text.skip(_SPACES)
        text.skip("[")
        for number in range(1, 1 << 62):
            text.skip(_SPACES)
            if text.peek() == "]":
                _require_end(file, text)
                return
            where = f"{file}, item {number}"
            if number > 1:
                if text.peek() != ",":
                    raise BadInputError(
                        f"{where} is not JSON: expected a comma or the list's end at "
                        f"line {text.line_number()}, not {text.peek() or 'the end of the file'!r}"
                    )
                text.skip(",", 1)
                text.skip(_SPACES)
            values, took = text.parse_value(where)
            if not isinstance(values, dict):
                raise BadInputError(
                    f"{where}, line {text.line_number()}, is a {type(values).__name__}; each must "
                    "be an object"
                )
            yield Row(values, where), took


def _require_end(file: Path, text: "_JsonText") -> None:
    """Refuse text after the end of the list, such as a second list, which would be ignored."""
    text.skip("]", 1)
    text.skip(_SPACES)
    if text.peek():
        raise BadInputError(
            f"{file}, line {text.line_number()}: there is more text after the end of the list "
            f"({text.peek()!r}), as in files that were joined. Join them with `jq -c '.[]'` into a "
            ".jsonl, or keep one list."
        )


class _JsonText:
    """JSON text of a file, read and parsed incrementally."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._scanner = json.JSONDecoder(object_pairs_hook=_require_distinct_keys)
        self._text, self._at, self._lines, self._read = "", 0, 1, 0
        self._column = 1  # of the current first character
        self._ended = False

    def _read_more(self) -> None:
        """Read another block, twice as long as the unparsed text.

        Doubling keeps the total time of repeated parsing linear.
        """
        self._lines, self._column = self._position(self._at)
        self._text, self._at = self._text[self._at :], 0
        block = self._stream.read(max(READ_BYTES, 2 * len(self._text)))
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

    def peek(self) -> str:
        """Return the next character without consuming it; '' at the end."""
        while self._at == len(self._text) and not self._ended:
            self._read_more()
        return self._text[self._at : self._at + 1]

    def skip(self, signs: str, most: int | None = None) -> None:
        """Skip characters that are in `signs`, at most `most` of them if given."""
        left = most
        while (sign := self.peek()) and sign in signs and left != 0:
            self._at += 1
            left = None if left is None else left - 1

    def line_number(self) -> int:
        """Return the current line number, counted from 1."""
        return self._position(self._at)[0]

    def _position(self, at: int) -> tuple[int, int]:
        """Return the line and column, counted from 1, of the character at index `at`."""
        begin = self._text.rfind("\n", 0, at)
        column = self._column + at if begin < 0 else at - begin
        return self._lines + self._text.count("\n", 0, at), column

    def parse_value(self, where: str) -> tuple[Any, int]:
        """Parse the next value; return it and its length in characters.

        Raises BadInputError if the text is not JSON.
        """
        while True:
            try:
                found, end = self._scanner.raw_decode(self._text, self._at)
            except RepeatedKeyError as error:
                raise BadInputError(f"{where}, line {self.line_number()}: {error}") from None
            except (ValueError, RecursionError) as error:
                far = len(self._text) - self._at > LINE_BYTES
                if self._ended or far or isinstance(error, RecursionError):
                    at = error.pos if isinstance(error, json.JSONDecodeError) else self._at
                    # Do not report a position in the white space at the end.
                    line, column = self._position(min(at, len(self._text.rstrip(_SPACES))))
                    raise BadInputError(
                        f"{where}, line {line}, is not JSON: {_format_json_error(error, column)}"
                    ) from None
                self._read_more()
                continue
            took = end - self._at
            self._at = end
            return found, took
