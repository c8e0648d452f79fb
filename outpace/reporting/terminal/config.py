"""The settings of a run with their origins, as `--print-config` shows them."""

import re
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from outpace.records.settings import TrainSettings

_DEFAULT = re.compile(r"\(default(?::\s*|\s+)(.*)\)", re.DOTALL)


def config_table(settings: TrainSettings, origins: Mapping[str, str]) -> Table:
    """Return a table of all settings with their values and origins.

    Settings without a value show the rule for their default in parentheses.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for name, value in settings:
        given = origins.get(name, "default") != "default"
        style = "bold" if given else "dim"
        table.add_row(
            Text(name.replace("_", "-"), style=style),
            Text(_default_text(name) if value is None else _format_value(value), style=style),
            Text(origins.get(name, "default"), style="green" if given else "dim"),
        )
    table.caption, table.caption_justify = _CAPTION, "left"
    return table


_CAPTION = (
    "In parentheses: the rule for the default, which outpace train applies once it knows the "
    "model, data and machine."
)


def _default_text(name: str) -> str:
    """Return the rule for a setting's default, from its help, such as "(the model's)"."""
    found = _DEFAULT.search(TrainSettings.model_fields[name].description or "")
    return f"({found[1]})" if found else "(not set)"


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(str(part) for part in value) or "(none)"
    return f"{value:g}" if isinstance(value, float) else str(value)
