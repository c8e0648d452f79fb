"""What figures are made of: colours, dashes, and what stands beside what."""

import pytest

from outpace.reporting.charts.figures import AxisChoice, LineSeries, lines, plain, prediction_bars
from outpace.reporting.charts.palette import colour
from outpace.reporting.render.document import DataTable


def luminance(code):
    """As WCAG 2 has it."""
    shares = [int(code[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.03928 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("page", ["#ffffff", "#14181d"])
def test_every_colour_is_seen_on_light_and_dark(page):
    for place in range(8):
        one, other = sorted((luminance(colour(place)), luminance(page)))
        assert (other + 0.05) / (one + 0.05) > 2.2, colour(place)


def test_no_two_of_many_lines_look_alike():
    series = [
        LineSeries(str(n), ([0.0, 1.0],), [0.0, 1.0], {"line": {"width": 1.0}}) for n in range(32)
    ]
    unit, table = plain(""), DataTable("a", ("b",), (("c",),))
    drawn = lines("a", "b.", series, [AxisChoice("x", "x", unit)], unit, "y", table)
    styles = [(trace["line"]["color"], trace["line"]["dash"]) for trace in drawn.traces]
    assert len(set(styles)) == 32
    assert {dash for _, dash in styles[:8]} == {"solid"}


def test_what_was_measured_is_above_what_was_predicted_or_below_it():
    both = prediction_bars(
        "a",
        ["b", "c", "d"],
        [2.0, 4.0, None],
        [3.0, 3.0, 1.0],
        plain("s"),
        "time",
        [(1.0, 5.0), (3.0, 5.0), (None, None)],
    )
    columns = ("", "predicted", "predicted, from", "predicted, to", "measured", "measured is")
    assert both.table.columns == columns
    assert [row[-1].text for row in both.table.rows] == ["+50.0 %", "-25.0 %", "n/a"]
    assert both.traces[0]["error_x"]["array"] == [3.0, 1.0, None]
    assert "error_x" not in both.traces[1]
    assert both.alt.startswith("b: predicted 2, measured 3; c: ") and both.alt.endswith(".")
