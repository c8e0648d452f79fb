"""Tables of the catalog: JSON files next to its modules."""

import json
from importlib.resources import files
from typing import Any


def read_table(name: str) -> dict[str, Any]:
    """Read a table of the catalog, such as "nodes", from its JSON file."""
    text = files("outpace.catalog").joinpath(f"{name}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def read_rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a table's rows as dictionaries by column name."""
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
