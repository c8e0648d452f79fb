"""Pictures for docs, by plotly: kaleido draws them with the installed Chromium or Chrome."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GRID = {"gridcolor": "#e6e6e6", "zeroline": False, "linecolor": "#888888", "ticks": "outside"}


def write_svg(
    path: Path,
    traces: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    size: tuple[int, int],
) -> None:
    """Draw traces with a layout as an SVG of `size` px, with the same bytes for the same figure."""
    from plotly.graph_objects import Figure

    named = [{**one, "uid": f"series-{number}"} for number, one in enumerate(traces)]
    figure = Figure({"data": named, "layout": {
        "template": "none", "font": {"family": "sans-serif", "size": 12},
        "margin": {"l": 60, "r": 15, "t": 35, "b": 50}, **layout,
    }})  # fmt: skip
    drawn = figure.to_image("svg", width=size[0], height=size[1]).decode()
    # Plotly puts random numbers into the names of parts, and into those of unnamed traces.
    chosen = set(re.findall(r'id="(?:top)?defs-([0-9a-f]+)"', drawn))
    for number in chosen:
        drawn = drawn.replace(number, "figure")
    path.write_text(drawn, encoding="utf-8")
