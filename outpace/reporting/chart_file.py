"""Charts as files: a page for a browser, or a picture rendered by kaleido."""

from pathlib import Path
from typing import Any

from outpace.records.errors import BadInputError
from outpace.reporting.page import page, plotly_texts
from outpace.reporting.render.document import Chart, Document

PAGE = ".html"
PICTURES = (".png", ".svg", ".pdf")
_WIDTH_PX, _SCALE = 1000, 2
_BACKGROUND = {"paper_bgcolor": "white", "plot_bgcolor": "white"}


def check_chart_path(path: Path) -> None:
    """Raise BadInputError if no chart can be written to a path. Call it before expensive work."""
    if path.suffix not in (PAGE, *PICTURES):
        raise BadInputError(
            f"--plot {path}: {path.suffix or 'no suffix'} is not a file type for charts. Use "
            f"{PAGE}, which any browser shows, or one of {', '.join(PICTURES)}."
        )
    if path.suffix in PICTURES:
        _require_kaleido(path)


def write_document(document: Document, path: Path) -> None:
    """Write a document as a page, or its first chart as a picture.

    Raises BadInputError if the suffix is unknown, or pictures cannot be drawn here.
    """
    check_chart_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == PAGE:
        path.write_text(page([document]), encoding="utf-8")
        return
    from plotly.graph_objects import Figure

    chart = next(part for section in document.sections for part in section.parts
                 if isinstance(part, Chart))  # fmt: skip
    try:
        Figure(plotly_figure(chart)).write_image(
            path, width=_WIDTH_PX, height=chart.height_px, scale=_SCALE
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise BadInputError(
            f"--plot {path}: kaleido could not draw it: {error}. Use a name that ends with {PAGE}."
        ) from None


def plotly_figure(chart: Chart) -> dict[str, Any]:
    """Return a chart as plotly's data and layout, with its title in the layout.

    Pictures need the title there; a page shows it outside of the chart.
    """
    layout = {**_BACKGROUND, "title": {"text": chart.title}, **chart.layout}
    return {"data": plotly_texts(chart.traces), "layout": plotly_texts(layout)}


def _require_kaleido(path: Path) -> None:
    try:
        import kaleido  # noqa: F401
    except ImportError:
        raise BadInputError(
            f"--plot {path}: pictures need kaleido and Chromium or Chrome: pip install "
            f"'outpace[plot]'. A name that ends with {PAGE} needs neither."
        ) from None
