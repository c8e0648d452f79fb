"""`outpace models`."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outpace.cli.parser import Parser, number_type

if TYPE_CHECKING:
    from rich.table import Table

    from outpace.records.outline import Outline

_ABOUT = (
    "List the models that outpace knows by name, with their sizes; --model accepts these names."
)
_EPILOG = (
    "--model also accepts a Hugging Face folder, a run, a spec file and file.py:build. Parameter "
    "counts include embeddings."
)
_DEFAULT = "outpace-small"  # default of outpace train


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """List the models, smallest first; returns 0.

    Raises BadInputError if an argument is invalid.
    """
    arguments = _parser().read(argv)
    rows = _list_models()
    if arguments.word is not None:
        rows = [row for row in rows if arguments.word.lower() in str(row["name"]).lower()]
    if arguments.near is not None:
        rows.sort(key=lambda row: abs(_parameter_count(row) - arguments.near))
        rows = sorted(rows[:5], key=_parameter_count)
    if arguments.json:
        print(json.dumps(rows, indent=2), flush=True)
        return 0
    from rich.text import Text

    from outpace.reporting.terminal.console import Console

    Console().print(_format_table(rows))
    if any(not row["trained"] for row in rows):
        Console().print(Text("† can be planned; outpace does not train it."))
    return 0


def _format_table(rows: Sequence[Mapping[str, Any]]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from outpace.records.units import show_count

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1),
                  header_style="bold")  # fmt: skip
    table.add_column("model", no_wrap=True)
    for name in ("size", "layers", "width", "heads", "vocab", "context"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        mark = " (default)" if row["name"] == _DEFAULT else "" if row["trained"] else " †"
        figures = (row[name] for name in ("layers", "hidden", "heads", "vocab", "max_positions"))
        shown = ("–" if figure is None else f"{figure:,}" for figure in figures)
        table.add_row(Text(f"{row['name']}{mark}"), show_count(row["parameters"]), *shown)
    return table


def _parameter_count(row: Mapping[str, Any]) -> int:
    size: int = row["parameters"]
    return size


def _list_models() -> list[dict[str, Any]]:
    from outpace.catalog.models import PRESETS
    from outpace.catalog.outlines import OUTLINES
    from outpace.planner.model.outline import outline

    rows = [_model_row(name, outline(one.spec, name), True) for name, one in PRESETS.items()]
    rows += [_model_row(name, one, one.untrained is None) for name, one in OUTLINES.items()
             if name not in PRESETS]  # fmt: skip
    return sorted(rows, key=_parameter_count)


def _model_row(name: str, outline: "Outline", trained: bool) -> dict[str, Any]:
    from outpace.planner.model.outline import parameters

    return {
        "name": name,
        "parameters": parameters(outline),
        "layers": outline.layers,
        "hidden": outline.hidden,
        "heads": next((s.attention.heads for s in outline.stacks if s.attention is not None), None),
        "vocab": outline.vocab,
        "max_positions": outline.max_positions,
        "trained": trained,
    }


def _parser() -> Parser:
    parser = Parser("models", _ABOUT, _EPILOG, usage="[WORD] [options]")
    parser.add_json()
    add = parser.option
    add("word", "WORD", str, "show only names that contain this word", nargs="?")
    add("--near", "N", number_type(int, 1),
        "show the five models closest to this number of parameters: 10M, 7B")  # fmt: skip
    return parser
