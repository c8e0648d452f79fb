"""A report before it is a page: a verdict, and sections of paragraphs, tables and charts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Number:
    """A cell that is sorted by its `value` and shown as `text`; None: not known."""

    value: float | None
    text: str


Cell = str | Number


@dataclass(frozen=True)
class DataTable:
    """Rows of as many cells as there are columns."""

    kind: ClassVar[str] = "table"
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        lengths = {len(row) for row in self.rows} - {len(self.columns)}
        if lengths:
            raise ValueError(f"{self.title}: rows of {lengths} cells, {len(self.columns)} columns")


@dataclass(frozen=True)
class Choice:
    """A choice of the horizontal axis: its title, and values for each trace."""

    label: str
    title: str
    values: tuple[Sequence[float | None], ...]


@dataclass(frozen=True)
class Chart:
    """Plotly's traces and layout, with what says the same in words and as a table.

    Strings in traces and layout are plain text, a line break in them "\\n"; only `hovertemplate`
    and `texttemplate` are plotly's own language, and hold nothing that a user chose.
    """

    kind: ClassVar[str] = "figure"
    title: str
    alt: str
    traces: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]
    table: DataTable
    height_px: int = 360
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Picture:
    """An SVG document that outpace drew."""

    kind: ClassVar[str] = "picture"
    title: str
    alt: str
    svg: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    kind: ClassVar[str] = "words"
    text: str


@dataclass(frozen=True)
class Code:
    """Lines that are shown as they are: a command, what a model wrote."""

    kind: ClassVar[str] = "code"
    title: str
    text: str


Part = DataTable | Chart | Picture | Paragraph | Code


@dataclass(frozen=True)
class DocumentSection:
    """Parts under a heading."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Document:
    """One subject: the first line of the verdict is the headline; `facts` are a name and a value.

    `subject` is what it is of, in a word: run, comparison, tuning, plan, probe, certificate.
    """

    subject: str
    title: str
    verdict: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    sections: tuple[DocumentSection, ...]


def in_words(value: Any) -> str:
    """Write a setting's value as a user would, not as Python does."""
    if value is None or value in ((), [], {}):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={in_words(own)}" for key, own in value.items())
    if isinstance(value, (tuple, list)):
        return " ".join(map(in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def pairs(title: str, rows: Sequence[tuple[str, str | None]]) -> DataTable:
    """Names and values; what is None is left out."""
    known = tuple((name, value) for name, value in rows if value is not None)
    return DataTable(title, ("", "value"), known)
