"""Bars of a terminal."""

import pytest

from outpace.reporting.terminal.bar import bar


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0.0, ""), (0.001, "▏"), (0.003, "▏"), (0.016, "▍"), (0.25, "██████"), (1.0, "█" * 24)],
)
def test_small_shares_are_told_apart_and_none_is_left_out(share, drawn):
    assert bar(share, 24) == drawn
