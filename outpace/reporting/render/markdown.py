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
    return "\n".join(line for document in documents for line in _document_lines(document)) + "\n"


def _document_lines(document: Document) -> Iterator[str]:
    yield f"# {_escape(document.title)}\n"
    for number, line in enumerate(document.verdict):
        yield f"**{_escape(line)}**\n" if number == 0 else f"{_escape(line)}\n"
    yield from (f"- {_escape(name)}: {_escape(value)}" for name, value in document.facts)
    for section in document.sections:
        yield f"\n## {_escape(section.title)}\n"
        for part in section.parts:
            yield from _part_lines(part)


def _part_lines(part: Part) -> Iterator[str]:
    if isinstance(part, Paragraph):
        yield f"{_escape(part.text)}\n"
    elif isinstance(part, Items):
        yield from (f"- {_escape(f'{cell_text(mark)} {text}')}" for mark, text in part.rows)
        yield ""
    elif isinstance(part, Code):
        longest = max(map(len, re.findall("`+", part.text)), default=0)
        fence = "`" * max(3, longest + 1)
        yield f"{_escape(part.title)}:\n\n{fence}\n{part.text}\n{fence}\n"
    elif isinstance(part, Picture):
        yield f"**{_escape(part.title)}.** {_escape(part.alt)}\n"
    elif isinstance(part, Chart):
        yield f"**{_escape(part.title)}.** {_escape(part.alt)}\n"
        yield from _table_lines(part.table)
    else:
        yield f"**{_escape(part.title)}**\n"
        yield from _table_lines(part)


def _table_lines(table: DataTable) -> Iterator[str]:
    yield f"| {' | '.join(map(_escape, table.columns))} |"
    yield f"|{'|'.join([' --- '] * len(table.columns))}|"
    for row in table.rows:
        yield f"| {' | '.join(_escape(cell_text(cell)) for cell in row)} |"
    yield ""


def _escape(words: str) -> str:
    return _MARKUP.sub(r"\\\1", " ".join(words.split()))


def table_csv(documents: Sequence[Document]) -> str:
    """Render documents as CSV, with a line per table cell or sentence.

    Each line names the place in the document, followed by the number and the text found there.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for document in documents:
        verdict = [(str(number), "", line) for number, line in enumerate(document.verdict)]
        for row, value, text in verdict:
            writer.writerow(map(_neutralise, (document.title, "verdict", "", row, "", value, text)))
        for name, value in document.facts:
            writer.writerow(map(_neutralise, (document.title, "facts", "", "0", name, "", value)))
        for section in document.sections:
            for part in section.parts:
                for place in _csv_lines(part):
                    writer.writerow(map(_neutralise, (document.title, section.title, *place)))
    return file.getvalue()


def _csv_lines(part: Part) -> Iterator[tuple[str, ...]]:
    """Yield the lines of a part as (table title, row, column, value, text)."""
    if isinstance(part, Paragraph):
        yield "", "0", "", "", part.text
    elif isinstance(part, Items):
        for number, (mark, text) in enumerate(part.rows):
            yield "", str(number), cell_text(mark), "", text
    elif isinstance(part, DataTable | Chart):
        table = part.table if isinstance(part, Chart) else part
        for cell in _table_cells(table):
            yield table.title, *cell


def _table_cells(table: DataTable) -> Iterator[tuple[str, str, str, str]]:
    for number, row in enumerate(table.rows):
        for column, cell in zip(table.columns, row, strict=True):
            value = cell.value if isinstance(cell, Number) else None
            yield str(number), column, "" if value is None else repr(value), cell_text(cell)


def _neutralise(text: str) -> str:
    """Return a text on one line that spreadsheets do not evaluate; numbers stay unchanged."""
    try:
        float(text)
    except ValueError:
        line = " ".join(text.split())
        return f"'{line}" if line.startswith(_COMPUTED) else line
    return text
