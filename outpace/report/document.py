"""What a report says, before it is a page: a verdict, and sections of words, tables and figures."""

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
class Table:
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
    """What the horizontal axis may show: the axis's title, and values for each trace."""

    label: str
    title: str
    values: tuple[Sequence[float | None], ...]


@dataclass(frozen=True)
class Figure:
    """Plotly's traces and layout, with what says the same in words and as a table.

    Strings in traces and layout are plain text, a line break in them "\\n"; only `hovertemplate`
    and `texttemplate` are plotly's own language, and hold nothing that a person chose.
    """

    kind: ClassVar[str] = "figure"
    title: str
    alt: str
    traces: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]
    table: Table
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
class Words:
    """A paragraph."""

    kind: ClassVar[str] = "words"
    text: str


@dataclass(frozen=True)
class Code:
    """Lines that are shown as they are: a command, what a model wrote."""

    kind: ClassVar[str] = "code"
    title: str
    text: str


Part = Table | Figure | Picture | Words | Code


@dataclass(frozen=True)
class Section:
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
    sections: tuple[Section, ...]


def in_words(value: Any) -> str:
    """A setting's value as a person writes it, not as Python does."""
    if value is None or value in ((), [], {}):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={in_words(own)}" for key, own in value.items())
    if isinstance(value, (tuple, list)):
        return " ".join(map(in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def pairs(title: str, rows: Sequence[tuple[str, str | None]]) -> Table:
    """Names and values; what is None is left out."""
    known = tuple((name, value) for name, value in rows if value is not None)
    return Table(title, ("", "value"), known)
