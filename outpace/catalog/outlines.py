"""Outlines of published models that outpace can plan for but not train (outlines.json).

They match, layer by layer, what transformers builds from the source's config.json. DeepSeek-V3's
outline omits the multi-token prediction layers.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outpace.catalog.tables import read_table
from outpace.records.outline import Outline


def _make_outline(name: str, family: str, **values: Any) -> Outline:
    return Outline.parse({"name": name, "untrained": f"outpace has no {family}", **values}, name)


OUTLINES: Mapping[str, Outline] = MappingProxyType(
    {name: _make_outline(name, **values) for name, values in read_table("outlines").items()}
)
