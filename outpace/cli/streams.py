"""Standard streams that work even if they are closed, full, or not in UTF-8."""

import codecs
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from outpace.records.errors import OutpaceError

_DESCRIPTORS = (0, 1, 2)
# Replacements for characters that the terminal's encoding lacks.
_INSTEAD = {"×": "x", "µ": "u", "–": "-", "—": "-", "−": "-", "·": ".", "→": "->", "≈": "~",
            "✓": "ok", "…": "...", "²": "2", "α": "alpha", "≤": "<=", "≥": ">=", "▌": "|",
            "é": "e", "É": "E"}  # fmt: skip


class OutputError(OutpaceError):
    """Standard output cannot be written."""


def repair_streams(argv: Sequence[str]) -> None:
    """Make this process's standard streams accept everything that is written.

    Closed descriptors are opened on the null device: otherwise, the next file to be opened would
    receive the output. Text that standard error does not accept is dropped, since there is nowhere
    to report it. Characters that the encoding lacks are replaced, in JSON by escapes.
    """
    for descriptor in _DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
    errors = "outpace-json" if "--json" in argv else "outpace-text"
    codecs.register_error("outpace-json", _escape_for_json)
    codecs.register_error("outpace-text", _replace_by_similar)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = _wrap_output(_Output(1), sys.stdout, errors)
    sys.stderr = _wrap_output(_LenientOutput(2), sys.stderr, "outpace-text")


def _wrap_output(raw: io.FileIO, before: TextIO | None, errors: str) -> io.TextIOWrapper:
    """Return a text stream for `raw` with the encoding and buffering of the stream `before`.

    `before` is None if the process was started with that stream closed.
    """
    known = isinstance(before, io.TextIOWrapper)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors=errors,
        line_buffering=bool(getattr(before, "line_buffering", False)) if known else raw.isatty(),
        write_through=bool(getattr(before, "write_through", False)),
    )


class _Output(io.FileIO):
    """Standard output that raises for the first failed write and drops all later ones."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is not None:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


class _LenientOutput(_Output):
    """A stream that drops what its disk or terminal does not accept."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data)
        return len(data)


def _escape_for_json(error: UnicodeError) -> tuple[str, int]:
    r"""Codec error handler: replace characters by JSON's escapes in ASCII, such as \u00d7."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = (units[at : at + 2].hex() for at in range(0, len(units), 2))
    return "".join(f"\\u{pair}" for pair in pairs), error.end


def _replace_by_similar(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: replace characters by similar ones, or by question marks."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(_INSTEAD.get(one, "?") for one in missing), error.end


def print_message(sentence: str) -> None:
    """Print a message to the user on standard error."""
    print(f"outpace: {sentence}", file=sys.stderr, flush=True)


def flush_output() -> None:
    """Flush standard output.

    Raises OutputError or BrokenPipeError if this fails, or if an earlier write failed.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _make_output_error(error) from None
    if reader_is_gone():  # rich does not report this
        raise BrokenPipeError
    error_before = output_error()  # argparse does not report this
    if error_before is not None:
        raise error_before


def reader_is_gone() -> bool:
    """Return whether the reader of standard output has closed it (`outpace … | head`)."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Output) and isinstance(raw.error, BrokenPipeError)


def output_error() -> OutputError | None:
    """Return the error of standard output, if it has failed."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.error if isinstance(raw, _Output) else None
    return None if error is None else _make_output_error(error)


def _make_output_error(error: OSError) -> OutputError:
    return OutputError(
        f"cannot write to standard output: {error.strerror}. Results that were saved "
        "are kept. Redirect the output elsewhere."
    )


def drop_output() -> None:
    """Redirect standard output to the null device, so that buffered output is dropped."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
