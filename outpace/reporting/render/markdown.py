"""Documents as Markdown and CSV: text and tables, including the data of charts."""

import csv
import io
import re
from collections.abc import Iterator, Sequence

from outpace.reporting.render.document import (
    Chart,
    Code,
    DataTable,
    Document,
    Items,
    Number,
    Paragraph,
    Part,
    Picture,
    cell_text,
)

# Characters that have a meaning in Markdown, or in HTML within Markdown.
_MARKUP = re.compile(r"([\\`*_\[\]<>|#~$&])")
_COLUMNS = ("report", "section", "table", "row", "column", "value", "text")
# Prefixes that make a spreadsheet evaluate a text as a formula.
_COMPUTED = ("=", "+", "-", "@")


def markdown(documents: Sequence[Document]) -> str:
    """Render documents as Markdown: headings, sentences and tables."""
    return "\n".join(line for document in documents for line in _document(document)) + "\n"


def _document(document: Document) -> Iterator[str]:
    yield f"# {_text(document.title)}\n"
    for number, line in enumerate(document.verdict):
        yield f"**{_text(line)}**\n" if number == 0 else f"{_text(line)}\n"
    yield from (f"- {_text(name)}: {_text(value)}" for name, value in document.facts)
    for section in document.sections:
        yield f"\n## {_text(section.title)}\n"
        for part in section.parts:
            yield from _part(part)


def _part(part: Part) -> Iterator[str]:
    if isinstance(part, Paragraph):
        yield f"{_text(part.text)}\n"
    elif isinstance(part, Items):
        yield from (f"- {_text(f'{cell_text(mark)} {text}')}" for mark, text in part.rows)
        yield ""
    elif isinstance(part, Code):
        longest = max(map(len, re.findall("`+", part.text)), default=0)
        fence = "`" * max(3, longest + 1)
        yield f"{_text(part.title)}:\n\n{fence}\n{part.text}\n{fence}\n"
    elif isinstance(part, Picture):
        yield f"**{_text(part.title)}.** {_text(part.alt)}\n"
    elif isinstance(part, Chart):
        yield f"**{_text(part.title)}.** {_text(part.alt)}\n"
        yield from _table(part.table)
    else:
        yield f"**{_text(part.title)}**\n"
        yield from _table(part)


def _table(table: DataTable) -> Iterator[str]:
    yield f"| {' | '.join(map(_text, table.columns))} |"
    yield f"|{'|'.join([' --- '] * len(table.columns))}|"
    for row in table.rows:
        yield f"| {' | '.join(_text(cell_text(cell)) for cell in row)} |"
    yield ""


def _text(words: str) -> str:
    """Put a text on one line, and escape Markdown."""
    return _MARKUP.sub(r"\\\1", " ".join(words.split()))


def table_csv(documents: Sequence[Document]) -> str:
    """Render documents as CSV: a line per table cell or sentence, with position, value and text."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for document in documents:
        verdict = [(str(number), "", line) for number, line in enumerate(document.verdict)]
        for row, value, text in verdict:
            writer.writerow(map(_safe, (document.title, "verdict", "", row, "", value, text)))
        for name, value in document.facts:
            writer.writerow(map(_safe, (document.title, "facts", "", "0", name, "", value)))
        for section in document.sections:
            for part in section.parts:
                for place in _lines(part):
                    writer.writerow(map(_safe, (document.title, section.title, *place)))
    return file.getvalue()


def _lines(part: Part) -> Iterator[tuple[str, ...]]:
    """Yield the lines of a part: table title, row, column, value and text."""
    if isinstance(part, Paragraph):
        yield "", "0", "", "", part.text
    elif isinstance(part, Items):
        for number, (mark, text) in enumerate(part.rows):
            yield "", str(number), cell_text(mark), "", text
    elif isinstance(part, DataTable | Chart):
        table = part.table if isinstance(part, Chart) else part
        for cell in _cells(table):
            yield table.title, *cell


def _cells(table: DataTable) -> Iterator[tuple[str, str, str, str]]:
    for number, row in enumerate(table.rows):
        for column, cell in zip(table.columns, row, strict=True):
            value = cell.value if isinstance(cell, Number) else None
            yield str(number), column, "" if value is None else repr(value), cell_text(cell)


def _safe(text: str) -> str:
    """Return a number unchanged, and a text on one line that spreadsheets do not evaluate."""
    try:
        float(text)
    except ValueError:
        line = " ".join(text.split())
        return f"'{line}" if line.startswith(_COMPUTED) else line
    return text
