"""Answers in a terminal: the verdict, then tables and notes."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace.reporting.render.document import (
    Answer,
    Cell,
    Chart,
    Code,
    DataTable,
    Items,
    Number,
    Paragraph,
    Part,
    StyledText,
    cell_text,
)
from outpace.reporting.terminal.table import NAME_WIDTH, NarrowTable


def answer_text(answer: Answer) -> Group:
    """Format an answer for a terminal; charts are shown as tables."""
    verdict = [Text(line, style="bold") for line in answer.verdict]
    facts = "; ".join(f"{name}: {value}" for name, value in answer.facts)
    parts = [part_text(part) for part in answer.parts]
    return Group(Text(), *verdict, Text(), *parts, *([Text(f"{facts}.")] if facts else []))


def part_text(part: Part, name_width: int = NAME_WIDTH) -> RenderableType:
    """Format a part of an answer. Row names of tables may be folded to `name_width` columns."""
    if isinstance(part, Paragraph):
        return Text(part.text, style=part.style or "")
    if isinstance(part, Items):
        return _items_table(part)
    if isinstance(part, Chart):
        return _figures_table(part.table, name_width, part.title)
    if isinstance(part, DataTable):
        return _pairs_list(part) if len(part.columns) == 2 else _figures_table(part, name_width)
    return Text(f"{part.title}:\n{part.text if isinstance(part, Code) else part.alt}")


def _items_table(items: Items) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for mark, text in items.rows:
        table.add_row(_cell_text(mark), Text(text))
    return table


def _pairs_list(table: DataTable) -> Group:
    rows = tuple(("  •", f"{cell_text(name)}: {cell_text(other)}") for name, other in table.rows)
    return Group(Text(f"\n{table.title}:"), _items_table(Items(rows)))


def _figures_table(table: DataTable, name_width: int, title: str = "") -> RenderableType:
    """Format a table for a terminal. Cells that are not numbers become part of the row's name."""
    if not table.rows:
        return Text(f"{table.title}: none.")
    terminal = table.terminal or {name: name for name in table.columns}
    shown = [(at, terminal[name]) for at, name in enumerate(table.columns) if name in terminal]
    numbers = [(place, head) for place, head in shown if isinstance(table.rows[0][place], Number)]
    named = [pair for pair in shown if pair not in numbers]
    names = [[_cell_text(row[place]) for place, _ in named] for row in table.rows]
    heads = [Text(head) for _, head in named]
    for place in range(
        len(named) - 1
    ):  # aligned, except the last column, which may have several lines
        column = [heads[place], *(row[place] for row in names)]
        width = max(text.cell_len for text in column)
        for text in column:
            text.pad_right(width - text.cell_len)
    return NarrowTable(
        title or Text(" ").join(heads).plain.rstrip(),
        [Text(" ").join(row) for row in names],
        {head: [_cell_text(row[place]) for row in table.rows] for place, head in numbers},
        name_width=name_width,
    )


def _cell_text(cell: Cell) -> Text:
    if isinstance(cell, StyledText):
        return Text(cell.sign or cell.text, style=cell.style)
    return Text(cell.text if isinstance(cell, Number) else cell)
