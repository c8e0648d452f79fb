"""Tables that fit terminals of any width without truncating figures."""

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000
NAME_WIDTH = 24  # minimum width of long names
_MOST_BESIDE = 4  # maximum number of names to show as columns


class NarrowTable:
    """A table for narrow terminals, with a row per name.

    `figures` has the cells by column, the most important columns first. Columns that do not fit are
    moved to further tables below. If `left_out` is given, they are left out instead, and this note
    names them. Long names are folded, but not to less than `name_width`. Up to four names get a
    column each instead of a row, if everything then fits in one table.
    """

    def __init__(
        self, head: str, names: Sequence[Text], figures: Mapping[str, Sequence[str | Text]],
        left_out: str | None = None, name_width: int = NAME_WIDTH,
    ) -> None:  # fmt: skip
        self.head, self.names, self.figures = head, names, figures
        self.left_out, self.name_width = left_out, name_width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tables = list(self._group_columns(console, options))
        if self.left_out is None:
            transposed = self._transpose()
            needed = Measurement.get(
                console, options.update(max_width=_ANY_WIDTH), transposed
            ).minimum
            few = 1 < len(self.names) <= _MOST_BESIDE
            if len(tables) > 1 and few and needed <= options.max_width:
                yield transposed
                return
            yield from (self._make_table(columns) for columns in tables)
            return
        yield self._make_table(tables[0])
        missing = [name for columns in tables[1:] for name in columns]
        if missing:
            yield Text(f"{self.left_out}: {', '.join(missing)}", style="dim")

    def _group_columns(self, console: Console, options: ConsoleOptions) -> Iterator[list[str]]:
        columns: list[str] = []
        for name in self.figures:
            if (
                columns
                and self._minimum_width(console, options, [*columns, name]) > options.max_width
            ):
                yield columns
                columns = []
            columns.append(name)
        yield columns

    def _minimum_width(
        self, console: Console, options: ConsoleOptions, columns: Sequence[str]
    ) -> int:
        """Return the table's width when names are folded as far as possible, and cells are not."""
        wide = options.update(max_width=_ANY_WIDTH)
        whole = Measurement.get(console, wide, self._make_table(columns)).maximum
        return whole - max(self._longest_name - self.name_width, 0)

    @property
    def _longest_name(self) -> int:
        lines = [line for name in self.names for line in name.plain.splitlines()]
        return max(map(cell_len, [self.head, *lines]))

    def _make_table(self, columns: Sequence[str]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(
            self.head, overflow="fold", min_width=min(self._longest_name, self.name_width)
        )
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for place, own in enumerate(self.names):
            table.add_row(own, *(self.figures[column][place] for column in columns))
        return table

    def _transpose(self) -> Table:
        """Return the table with a column per name. Names are wrapped between words."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(
            self.head, overflow="fold", min_width=max(map(cell_len, self.figures), default=0)
        )
        for place, name in enumerate(self.names):
            widths = [Text.assemble(row[place]).cell_len for row in self.figures.values()]
            words = [cell_len(word) for word in name.plain.split()]
            table.add_column(name, justify="right", min_width=max([*widths, *words], default=0))
        for label, cells in self.figures.items():
            table.add_row(label, *cells)
        return table
