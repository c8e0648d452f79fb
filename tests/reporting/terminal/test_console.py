"""Consoles: as wide as their terminal, not as any number that a variable holds."""

import io

import pytest
from rich.table import Table

from outpace.reporting.terminal.console import Console


@pytest.mark.parametrize(("columns", "width"), [("99999999", 1000), ("120", 120)])
def test_lines_are_no_longer_than_some_screen_has(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None)
    assert console.width == width and console.height <= 1000
    table = Table("what", expand=True)
    table.add_row("a figure")
    console.print(table)
    assert max(map(len, written.getvalue().splitlines())) <= width
    narrow = Console(file=written, width=40)
    assert narrow.width == 40
    narrow.width = 60
    assert narrow.width == 60
