"""The steps of a run as columns, which are quick to read even for a hundred thousand steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import json as arrow_json
from pydantic_core import from_json

from outpace.records.errors import BadInputError
from outpace.records.measurement import PARTS, WARMUP_STEPS, TimeParts
from outpace.records.run import resume_command
from outpace.reporting.charts.downsample import Floats

_NAMES = (
    "step", "tokens", "loss", "lr", "grad_norm", "step_time_s", "tokens_per_s", "mfu",
    "peak_memory_bytes", "skipped_steps", *(f"{part}_s" for part in PARTS),
)  # fmt: skip
_NEEDED = ("step", "step_time_s")
_LINES_AT_ONCE = 4096
_BYTES_AT_ONCE = 2**22


@dataclass(frozen=True)
class StepLog:
    """Steps of a run as columns: the fields of StepRecord, one value per step, NaN if unknown."""

    columns: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    @property
    def passed_s(self) -> Floats:
        """Return the cumulative step time at the end of each step, in seconds."""
        return np.nancumsum(self["step_time_s"])

    def steady(self, name: str) -> Floats:
        """Return a column without the warm-up steps, unless only a few steps would remain."""
        return self[name][WARMUP_STEPS if len(self) > 2 * WARMUP_STEPS else 0 :]

    def select(self, chosen: npt.NDArray[np.bool_]) -> "StepLog":
        """Return the steps at which the mask `chosen` is true."""
        return StepLog({name: values[chosen] for name, values in self.columns.items()})

    def median_parts(self) -> TimeParts:
        """Return the parts of a step of median length; unknown parts count as 0."""
        names = TimeParts.model_fields
        return TimeParts.of_steps(
            {name: np.nan_to_num(self.steady(name)).tolist() for name in names}
        )


def read_steps(path: Path) -> StepLog:
    """Read metrics.jsonl. A missing or empty file gives no steps.

    Skips an incomplete last line, which a killed run may leave. Raises BadInputError for other
    damage.
    """
    columns = _read_with_arrow(path) if path.is_file() else {}
    if columns is None:
        columns = _read_with_json(path)
    for values in columns.values():
        values[~np.isfinite(values)] = np.nan
    if any(np.isnan(columns.get(name, 0.0)).any() for name in _NEEDED):
        raise _damage_error(path)
    return StepLog(columns or {name: np.empty(0) for name in _NAMES})


def _read_with_arrow(path: Path) -> dict[str, Floats] | None:
    """Read metrics.jsonl with Arrow, which uses all cores.

    Return None if a line is not one flat object in standard JSON, for example if it was cut off or
    contains NaN.
    """
    data = path.read_bytes()
    if not _is_flat(data):
        return None
    schema = pa.schema([(name, pa.float64()) for name in _NAMES])
    try:
        table = arrow_json.read_json(
            BytesIO(data),
            arrow_json.ReadOptions(block_size=_BYTES_AT_ONCE),
            arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        return None
    return {name: np.array(table[name].to_numpy()) for name in _NAMES}


def _is_flat(data: bytes) -> bool:
    """Return whether each line is one object without nested objects.

    Arrow's parser crashes on a line that is null (pyarrow 26.0.1).
    """
    lines = data.count(b"\n")
    ends = data.count(b"}\n") == data.count(b"}") == data.count(b"{") == lines
    return ends and data.startswith(b"{") and data.count(b"\n{") == lines - 1


def _read_with_json(path: Path) -> dict[str, Floats]:
    lines = path.read_bytes().splitlines()
    tables = [_to_array(rows, path) for rows in _parse_chunks(lines, path)]
    table = np.concatenate(tables) if tables else np.empty((0, len(_NAMES)))
    return {name: table[:, place].copy() for place, name in enumerate(_NAMES)}


def _parse_chunks(lines: list[bytes], path: Path) -> Iterator[list[Any]]:
    for begin in range(0, len(lines), _LINES_AT_ONCE):
        chunk = lines[begin : begin + _LINES_AT_ONCE]
        last = begin + len(chunk) == len(lines)
        try:
            yield from_json(b"[" + b",".join(chunk) + b"]")
        except ValueError:
            if not last:
                raise _damage_error(path) from None
            yield _parse_without_last(chunk, path)


def _parse_without_last(lines: list[bytes], path: Path) -> list[Any]:
    try:
        return list(from_json(b"[" + b",".join(lines[:-1]) + b"]"))
    except ValueError:
        raise _damage_error(path) from None


def _damage_error(path: Path) -> BadInputError:
    lines = path.read_bytes().splitlines()
    first = next((number for number, line in enumerate(lines, 1) if not _is_step(line)), 1)
    return BadInputError(
        f"{path} is damaged: line {first} is not a step of a run, which has "
        f"{' and '.join(_NEEDED)} as numbers. Remove that line, or let "
        f"{resume_command(path.parent)} move it aside; all others are kept."
    )


def _is_step(line: bytes) -> bool:
    try:
        row = from_json(line)
    except ValueError:
        return False
    return isinstance(row, dict) and all(_is_finite_number(row.get(name)) for name in _NEEDED)


def _is_finite_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def _to_array(rows: list[Any], path: Path) -> Floats:
    try:
        values = [[row.get(name) for name in _NAMES] for row in rows]
        return np.array(values, np.float64).reshape(-1, len(_NAMES))
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise _damage_error(path) from None
