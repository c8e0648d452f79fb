"""Hosts with accelerators by the names that people rent and buy them under."""

from collections.abc import Mapping
from types import MappingProxyType

from outpace.records.errors import BadInputError, nearest
from outpace.records.machine import Node

_HGX = "NVIDIA {} datasheet"

# Name, accelerator in the catalog, how many of them, source.
_TABLE: tuple[tuple[str, str, int, str], ...] = (
    ("dgx1-v100", "V100 SXM2 32 GB", 8, "NVIDIA DGX-1 with V100 datasheet"),
    ("dgx-a100-40gb", "A100 SXM 40 GB", 8, "NVIDIA DGX A100 datasheet (320 GB system)"),
    ("dgx-a100", "A100 SXM 80 GB", 8, "NVIDIA DGX A100 datasheet (640 GB system)"),
    ("hgx-a100", "A100 SXM 80 GB", 8, _HGX.format("HGX A100 8-GPU")),
    ("dgx-h100", "H100 SXM", 8, "NVIDIA DGX H100 datasheet"),
    ("hgx-h100", "H100 SXM", 8, _HGX.format("HGX H100 8-GPU")),
    ("hgx-h200", "H200 SXM", 8, _HGX.format("HGX H200 8-GPU")),
)

NODES: Mapping[str, Node] = MappingProxyType(
    {
        name: Node(name=name, accelerator=accelerator, devices=devices, source=source)
        for name, accelerator, devices, source in _TABLE
    }
)


def find_node(name: str, accelerators: Mapping[str, object]) -> Node:
    """A host of the catalog, or one accelerator by its name ("RTX 4090", "rtx-4090").

    Raises BadInputError, naming the nearest, if there is none.
    """
    wanted = name.casefold().replace(" ", "-")
    if wanted in NODES:
        return NODES[wanted]
    plain = {known.casefold().replace(" ", "-"): known for known in accelerators}
    if wanted in plain:
        return Node(
            name=wanted, accelerator=plain[wanted], devices=1, source="one accelerator of its kind"
        )
    known = [*NODES, *plain]
    raise BadInputError(
        f"machine {name!r} is not in the catalog.{nearest(wanted, known)} "
        f"It has {', '.join(known)}."
    )
