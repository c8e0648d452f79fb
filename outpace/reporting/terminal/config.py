"""The settings of a run with their origins, as `--print-config` shows them."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from outpace.records.settings import TrainSettings


def config_table(settings: TrainSettings, origins: Mapping[str, str]) -> Table:
    """Return a row per setting: its name, its value, and the value's origin."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for name, value in settings:
        given = origins.get(name, "default") != "default"
        style = "bold" if given else "dim"
        table.add_row(
            Text(name.replace("_", "-"), style=style),
            Text(_show(value), style=style),
            Text(origins.get(name, "default"), style="green" if given else "dim"),
        )
    return table


def _show(value: Any) -> str:
    if value is None:
        return "(chosen for you)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(str(part) for part in value) or "(none)"
    return f"{value:g}" if isinstance(value, float) else str(value)
