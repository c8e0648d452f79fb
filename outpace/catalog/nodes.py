"""Machines by the names under which they are rented and sold, each with its source.

For cards that you plug into a host yourself, the host's cores, memory and network stay unknown.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outpace.catalog.accelerators import ACCELERATORS
from outpace.records.hardware import Bundle, Node, Topology

_GIB = 2**30


def _node(
    name: str, devices: int, accelerator: str, topology: Topology, source: str, **host: Any
) -> Node:
    """Create a node whose accelerators are connected by all their advertised links, or by none."""
    chip = ACCELERATORS[accelerator]
    nics = host.pop("nics", None)
    return Node(
        name=name,
        accelerator=accelerator,
        devices=devices,
        topology=topology,
        device_link=None if topology == "none" else chip.device_link,
        host_link=host.pop("host_link", chip.host_link),
        nics=() if nics is None else (Bundle(link=nics[0], count=nics[1]),),
        source=source,
        **host,
    )


def _host(cores: int, memory_gib: int, link: str, count: int) -> dict[str, Any]:
    return {"host_cores": cores, "host_memory_bytes": memory_gib * _GIB, "nics": (link, count)}


_DGX, _HGX = "NVIDIA {} datasheet", "NVIDIA {} 8-GPU datasheet"
_EC2 = "Amazon EC2 accelerated computing instances: {}"
_CARDS = "{} cards, each in a ×16 slot; links: the card's own source"
_TWO = (
    "{} cards in a desktop, whose processor has 16 lanes for cards, 8 each for two (Intel Core "
    "desktop processors' datasheets, PCI Express: 1×16 or 2×8); links: the card's own source"
)
_DGX_A100_HOST = {"host_cores": 128, "nics": ("InfiniBand HDR", 8)}

_NODES = (
    _node("dgx1-v100", 8, "V100 SXM2 32 GB", "cube-mesh", _DGX.format("DGX-1 with V100"),
          **_host(40, 512, "InfiniBand EDR", 4)),
    _node("dgx-a100-40gb", 8, "A100 SXM 40 GB", "switch",
          _DGX.format("DGX A100") + " (320 GB system)",
          **_DGX_A100_HOST, host_memory_bytes=1024 * _GIB),
    _node("dgx-a100", 8, "A100 SXM 80 GB", "switch", _DGX.format("DGX A100") + " (640 GB system)",
          **_DGX_A100_HOST, host_memory_bytes=2048 * _GIB),
    _node("hgx-a100", 8, "A100 SXM 80 GB", "switch", _HGX.format("HGX A100")),
    _node("dgx-h100", 8, "H100 SXM", "switch", _DGX.format("DGX H100"),
          **_host(112, 2048, "InfiniBand NDR", 8)),
    _node("hgx-h100", 8, "H100 SXM", "switch", _HGX.format("HGX H100")),
    _node("dgx-h200", 8, "H200 SXM", "switch", _DGX.format("DGX H200"),
          **_host(112, 2048, "InfiniBand NDR", 8)),
    _node("hgx-h200", 8, "H200 SXM", "switch", _HGX.format("HGX H200")),
    _node("dgx-b200", 8, "B200", "switch", _DGX.format("DGX B200"),
          **_host(112, 2048, "InfiniBand NDR", 8)),
    _node("hgx-b200", 8, "B200", "switch", _HGX.format("HGX B200")),
    _node("gb200-nvl72", 72, "GB200", "switch",
          _DGX.format("GB200 NVL72") + ": a rack of 18 trays; network: DGX GB200 datasheet",
          hosts=18, host_cores=2592, host_memory_bytes=17 * 10**12, nics=("InfiniBand NDR", 72)),
    _node("mi300x-platform", 8, "MI300X", "mesh", "AMD Instinct MI300X Platform datasheet"),
    _node("aws-p3dn", 8, "V100 SXM2 32 GB", "cube-mesh", _EC2.format("p3dn.24xlarge"),
          **_host(48, 768, "EFA 100", 1)),
    _node("aws-p4d", 8, "A100 SXM 40 GB", "switch", _EC2.format("p4d.24xlarge"),
          **_host(48, 1152, "EFA 100", 4)),
    _node("aws-p4de", 8, "A100 SXM 80 GB", "switch", _EC2.format("p4de.24xlarge"),
          **_host(48, 1152, "EFA 100", 4)),
    _node("aws-p5", 8, "H100 SXM", "switch", _EC2.format("p5.48xlarge"),
          **_host(96, 2048, "EFA 100", 32)),
    _node("aws-p5en", 8, "H200 SXM", "switch", _EC2.format("p5en.48xlarge"),
          **_host(96, 2048, "EFA 200", 16)),
    _node("aws-g5-48xlarge", 8, "A10G", "none", _EC2.format("g5.48xlarge"),
          **_host(96, 768, "EFA 100", 1)),
    _node("4x-v100", 4, "V100 SXM2 32 GB", "mesh",
          "IDRIS, Jean Zay's four-GPU nodes; two NVLinks between each pair, as nvidia-smi topo -m "
          "shows on hosts of four V100 SXM2", **_host(40, 192, "Omni-Path 100", 4)),
    _node("4x-a100-slingshot", 4, "A100 SXM 40 GB", "mesh",
          "NERSC, architecture of Perlmutter's GPU nodes; four NVLinks between each pair",
          **_host(64, 256, "Slingshot 11", 4)),
    _node("4x-gtx-1080-ti", 4, "GTX 1080 Ti", "none", _CARDS.format("four GTX 1080 Ti")),
    _node("2x-titan-rtx", 2, "TITAN RTX", "none", _TWO.format("two TITAN RTX"),
          host_link="PCIe 3 x8"),
    _node("2x-titan-rtx-nv2", 2, "TITAN RTX", "pairs",
          _CARDS.format("two TITAN RTX with an NVLink bridge (NV2 in nvidia-smi topo -m):")),
    _node("2x-rtx-3090-nvlink", 2, "RTX 3090", "pairs",
          _CARDS.format("two RTX 3090 with an NVLink bridge:")),
    _node("2x-rtx-4090", 2, "RTX 4090", "none", _TWO.format("two RTX 4090"),
          host_link="PCIe 4 x8"),
    _node("2x-rtx-5090", 2, "RTX 5090", "none", _TWO.format("two RTX 5090"),
          host_link="PCIe 5 x8"),
    Node(name="dgx-spark", accelerator="GB10", devices=1, host_link="NVLink-C2C",
         nics=(Bundle(link="Ethernet 200", count=1),), host_cores=20,
         source=_DGX.format("DGX Spark") + ": processor and accelerator share one memory"),
    Node(name="laptop", accelerator=None, devices=0, host_cores=4, host_memory_bytes=16 * _GIB,
         cpu_features=("avx2", "avx512f", "avx512_vnni"),
         source="Intel Core i7-1165G7 specifications; 16 GiB: outpace's own choice"),
)  # fmt: skip

NODES: Mapping[str, Node] = MappingProxyType({node.name: node for node in _NODES})
