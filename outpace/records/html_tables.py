"""HTML tables of records, for notebooks."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from pydantic import BaseModel

from outpace.records.units import show_bytes, show_count, show_seconds, show_share

_SHARES = ("mfu", "hfu", "level", "share", "utilisation", "slowdown")
_BYTES = ("bytes", "memory", "by_kind", "by_module", "by_rank")
_MOST_ROWS = 20
_MOST_VALUES = 8


def record_html(record: BaseModel) -> str:
    """Return a record's name and a table of its required and non-default values.

    Nested records and lists can be expanded.
    """
    return f"<p><b>{type(record).__name__}</b></p>{_fields_table(record)}"


def _fields_table(record: BaseModel) -> str:
    return _make_table((), [(name, _cell(name, value)) for name, value in _given_values(record)])


def _given_values(record: BaseModel) -> Iterator[tuple[str, Any]]:
    """Yield the values of required fields, and those that differ from the field's default."""
    for name, field in type(record).model_fields.items():
        value = getattr(record, name)
        if field.is_required() or value != field.get_default(call_default_factory=True):
            yield name, value


def _cell(name: str, value: Any) -> str:
    if isinstance(value, BaseModel):
        return _details_element(type(value).__name__, _fields_table(value))
    if isinstance(value, Mapping):
        rows = [(str(key), _cell(name, inner)) for key, inner in value.items()]
        return _details_element(f"{len(rows)}", _make_table((), rows)) if rows else "none"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return _list_cell(name, value)
    return escape(_format_scalar(name, value))


def _list_cell(name: str, values: Sequence[Any]) -> str:
    if not values:
        return "none"
    if all(isinstance(one, BaseModel) for one in values):
        return _records_cell(values)
    shown = [_cell(name, one) for one in values[:_MOST_VALUES]]
    more = [f"and {len(values) - _MOST_VALUES:,} more"] if len(values) > _MOST_VALUES else []
    between = "<br>" if any(isinstance(one, str) and " " in one for one in values) else ", "
    return between.join([*shown, *more])


def _records_cell(records: Sequence[BaseModel]) -> str:
    """Return a table of records, with the columns `summary_fields` or else all scalar fields."""
    first, shown = type(records[0]), records[:_MOST_ROWS]
    summary: Sequence[str] = getattr(first, "summary_fields", ())
    names = summary or [
        name
        for name in first.model_fields
        if any(_is_scalar(getattr(one, name, None)) for one in shown)
    ]
    rows = [
        tuple(_cell(name.rpartition(".")[2], _value_at(one, name)) for name in names)
        for one in shown
    ]
    table = _make_table([name.rpartition(".")[2] for name in names], rows)
    more = len(records) - len(shown)
    table += f"<p>and {more:,} more</p>" if more else ""
    return _details_element(f"{len(records):,}", table, is_open=bool(summary))


def _is_scalar(value: Any) -> bool:
    return value is not None and not isinstance(value, (BaseModel, Mapping, tuple, list))


def _value_at(record: BaseModel, path: str) -> Any:
    """Return the value at a dotted path such as "estimate.step_time_s"."""
    found: Any = record
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _format_scalar(name: str, value: Any) -> str:
    """Format a scalar in the unit that the end of its name states."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if name.endswith(("_per_s", "_hz", "_w")):
        return show_count(value)
    if name.endswith("_s"):
        return show_seconds(value)
    if name.endswith(_BYTES):
        return show_bytes(value)
    if name.endswith(_SHARES):
        return show_share(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _make_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; without `head`, the first column has the names of the rows."""
    lines = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"] if head else []
    for first, *rest in rows:
        begin = f"<td>{first}</td>" if head else f"<th>{escape(first)}</th>"
        lines.append(f"<tr>{begin}{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _details_element(title: str, content: str, *, is_open: bool = False) -> str:
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>"
        f"{content}</details>"
    )
