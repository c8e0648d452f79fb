"""Reading of metrics.jsonl and evals.jsonl, and truncating them when a run resumes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from outpace.records.base import put_aside, write_atomic
from outpace.records.errors import BadInputError
from outpace.records.line_checksums import ChangedLineError, strip_checksum
from outpace.records.measurement import Evaluation, StepRecord

Entry = TypeVar("Entry", StepRecord, Evaluation)
_SHOWN = 3


@dataclass(frozen=True)
class Line(Generic[Entry]):
    """A valid line of a log: its number in the file from 1, its bytes and its record."""

    number: int
    content: bytes
    record: Entry


@dataclass(frozen=True)
class RunLog(Generic[Entry]):
    """A log file: its valid lines in order, and how it is damaged, if it is."""

    path: Path
    lines: tuple[Line[Entry], ...] = ()
    damage: str | None = None

    @property
    def last_step(self) -> int:
        """Step of the last line; 0 if there is none."""
        return self.lines[-1].record.step if self.lines else 0

    def cut(self, keeps: Callable[[Entry], bool], say: Callable[[str], None]) -> None:
        """Remove the lines whose records `keeps` rejects from the file.

        A damaged file is kept under another name, which is reported through `say`.
        """
        kept = [line.content for line in self.lines if keeps(line.record)]
        if self.damage is not None:
            say(
                f"{self.path}: {self.damage}. It is kept as {put_aside(self.path)}, and "
                f"{len(kept)} readable lines are kept."
            )
            write_atomic(self.path, b"".join(kept))
        elif kept != [line.content for line in self.lines[: len(kept)]]:
            write_atomic(self.path, b"".join(kept))
        elif self.path.exists():
            _truncate(self.path, kept)


def read_log(path: Path, kind: type[Entry]) -> RunLog[Entry]:
    """Read a log whose lines are records of `kind`; a missing file counts as empty.

    An incomplete last line, which a killed process may leave, is ignored. Raises BadInputError if
    the file cannot be read.
    """
    if path.is_fifo():  # reading would wait for a writer
        return RunLog(path, damage="it is a named pipe")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return RunLog(path)
    except IsADirectoryError:
        return RunLog(path, damage="it is a folder")
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    *whole, rest = content.split(b"\n")
    found: list[Line[Entry]] = []
    changed: set[int] = set()
    for number, text in enumerate((*whole, rest), start=1):
        try:
            found.append(Line(number, text + b"\n", kind.model_validate_json(strip_checksum(text))))
        except ChangedLineError:
            changed.add(number)
        except ValidationError:
            pass
    lines = _drop_unordered_lines(found)
    taken = {line.number for line in lines}
    lost = [number for number in range(1, len(whole) + 1) if number not in taken]
    return RunLog(path, tuple(lines), _describe_damage(lost, changed, kind) if lost else None)


def _drop_unordered_lines(lines: Sequence[Line[Entry]]) -> list[Line[Entry]]:
    """Return the lines whose steps increase, and drop those that are out of order.

    A line is dropped if its step is not above that of the last line kept. It is also dropped if the
    next line follows the last one kept, but not this one: then this line's step is too high.
    """
    kept: list[Line[Entry]] = []
    for line, after in zip_longest(lines, lines[1:]):
        before = kept[-1].record.step if kept else -1
        step = line.record.step
        ahead = after is not None and before < after.record.step <= step
        if step > before and not ahead:
            kept.append(line)
    return kept


def _describe_damage(numbers: Sequence[int], changed: set[int], kind: type[Entry]) -> str:
    what = "step" if issubclass(kind, StepRecord) else "evaluation"
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    if changed.issuperset(numbers):
        lines = f"line {shown} was" if len(numbers) == 1 else f"lines {shown}{more} were"
        return f"{lines} changed since outpace wrote it: a checksum does not match"
    if len(numbers) == 1:
        return f"line {shown} is not a valid {what} that follows the previous one"
    return f"lines {shown}{more} are not valid {what}s that follow the previous ones"


def _truncate(path: Path, kept: Sequence[bytes]) -> None:
    """Truncate a file after the lines `kept`, adding a newline that the last one may lack."""
    length = sum(map(len, kept))
    if path.stat().st_size < length:
        with path.open("ab") as file:
            file.write(b"\n")
    os.truncate(path, length)
