"""Machines by the names under which they are rented and sold, each with its source (nodes.json).

For cards that users install in their own hosts, cores, host memory and network are unknown.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.tables import read_table
from outpace.records.hardware import Bundle, Node

_GIB = 2**30


def _make_node(name: str, values: dict[str, Any]) -> Node:
    """Make a machine from its row in the catalog.

    If the row has a topology, the accelerators have all of their advertised links to each other, or
    else none. The link to the host is the accelerator's, unless the row has another.
    """
    chip = ACCELERATORS.get(values["accelerator"])
    derived: dict[str, Any] = {}
    if chip is not None:
        linked = values.get("topology", "none") != "none"
        derived = {"host_link": chip.host_link, "device_link": chip.device_link if linked else None}
    if (memory_gib := values.pop("host_memory_gib", None)) is not None:
        derived["host_memory_bytes"] = memory_gib * _GIB
    if (nics := values.pop("nics", None)) is not None:
        derived["nics"] = (Bundle(link=nics[0], count=nics[1]),)
    return Node(name=name, **derived | values)


NODES: Mapping[str, Node] = MappingProxyType(
    {name: _make_node(name, values) for name, values in read_table("nodes").items()}
)
