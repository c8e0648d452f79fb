"""Documents as one self-contained HTML page, which needs no network and no server."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from outpace.records.errors import BadInputError
from outpace.records.version import __version__
from outpace.reporting.render.document import Chart, Document, cell_text

_HERE = Path(__file__).parent
# Keys of texts in plotly's template language, which contain no text from users (document.Chart).
_TEMPLATES = ("hovertemplate", "texttemplate")
_MOST_ROWS = 30  # maximum number of rows of a table that is not collapsed


def page(documents: Sequence[Document]) -> str:
    """Render documents as a page. Their texts are shown literally, never interpreted as markup."""
    figures = [
        part
        for document in documents
        for section in document.sections
        for part in section.parts
        if isinstance(part, Chart)
    ]
    scripts = [_plotly_script(), _asset("page.js")] if figures else [_asset("page.js")]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    numbers = {id(figure): number for number, figure in enumerate(figures)}
    return environment.from_string(_asset("page.html")).render(
        documents=documents,
        title=documents[0].title,
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=[_script_hash(script) for script in scripts],
        figures=Markup(_encode_json([_to_plotly(figure) for figure in figures])),
        number_of=lambda figure: numbers[id(figure)],
        svg=lambda picture: Markup(picture.svg),
        text_of=cell_text,
        version=__version__,
        most_rows=_MOST_ROWS,
    )


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _plotly_script() -> str:
    """Return plotly's script, without importing plotly, which is slow."""
    found = find_spec("plotly")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise BadInputError("a page's figures need plotly. Install it with pip install plotly.")


def _script_hash(script: str) -> str:
    """Return the hash by which the page's content security policy allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _to_plotly(chart: Chart) -> dict[str, Any]:
    return {
        "traces": plotly_texts(chart.traces),
        "layout": {**plotly_texts(chart.layout), "height": chart.height_px},
        "choices": [
            {"title": plotly_texts(one.title), "values": one.values} for one in chart.choices
        ],
    }  # fmt: skip


def plotly_texts(value: Any) -> Any:
    """Escape the texts of traces or a layout, since plotly interprets some markup."""
    if isinstance(value, str):
        return html.escape(value, quote=False).replace("\n", "<br>")
    if isinstance(value, Mapping):
        return {
            name: one if name in _TEMPLATES else plotly_texts(one) for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [plotly_texts(one) for one in value]
    return value


def _encode_json(value: Any) -> str:
    """Encode a value as JSON without characters that could end the script element around it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
