"""Device and links of a machine: of the catalog, or as it was probed."""

import math
from dataclasses import dataclass

from outpace.catalog import efficiency
from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.links import LINKS
from outpace.planner.device import Device, of_accelerator
from outpace.planner.fabric import Fabric, Protocol
from outpace.planner.networks import of_node
from outpace.records.errors import BadInputError
from outpace.records.hardware import Bundle, Node
from outpace.records.network import Network


@dataclass(frozen=True)
class Cluster:
    """So many nodes, and what is known of them. `probed`: its rates were measured."""

    name: str
    nodes: int
    device: Device
    fabric: Fabric
    probed: bool
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.fabric.per_node


# A direct link between each two of n devices is an equal share of what each has.
_DIRECT = ("mesh", "cube-mesh", "pairs")


def of_catalog(node: Node, nodes: int, network: Network | None = None) -> Cluster:
    """A machine of the catalog. `network` is all network cards' of a node, where it is another's.

    Raises BadInputError where it has no accelerator, or several nodes and no network.
    """
    chip = ACCELERATORS.get(node.accelerator or "")
    if chip is None:
        raise BadInputError(
            f"machine {node.name} has no accelerator of the catalog, so its rates are not known. "
            "Measure it: outpace probe --out machine.json, and give --machine machine.json."
        )
    across = network or of_node(node)
    notes: tuple[str, ...] = ()
    if nodes > 1 and across is None:
        across = default_network(node)
        notes = (
            f"{node.name} is sold without network cards: {across.name} is assumed. Say another "
            "with --network, as in --network 8xinfiniband-ndr.",
        )
    hosts_each = node.processes
    return Cluster(
        name=node.name,
        nodes=nodes,
        device=of_accelerator(chip),
        fabric=_fabric(node, hosts_each, across),
        probed=False,
        notes=notes,
    )


def default_network(node: Node) -> Network:
    """A card for each device, as machines with these links are sold with: NDR, HDR or EDR."""
    chip = ACCELERATORS[node.accelerator or ""]
    kinds = {"hopper": "InfiniBand NDR", "blackwell": "InfiniBand NDR", "cdna3": "InfiniBand NDR",
             "ampere": "InfiniBand HDR", "cdna2": "Slingshot 11"}  # fmt: skip
    link = LINKS[kinds.get(chip.architecture, "InfiniBand EDR")]
    return Network(
        name=f"{node.processes} × {link.name}",
        bytes_per_s=link.bytes_per_s * node.processes,
        origin="catalog",
        source=link.source,
    )


def _fabric(node: Node, per_node: int, network: Network | None) -> Fabric:
    link = node.device_link or Bundle(link=node.host_link or "PCIe 4 x16", count=1)
    kind = LINKS[link.link].kind
    whole = LINKS[link.link].bytes_per_s * link.count
    share = efficiency.LINK_SHARE[kind]
    if node.topology == "none" and per_node > 1:
        # Through the host: to it and from it, over the same bridge as the others.
        share = efficiency.HOST_BRIDGE_SHARE
    direct = node.topology in _DIRECT and per_node > 2
    pair = whole / (per_node - 1) if direct else whole
    slow = kind == "pcie" or node.topology == "none"
    across = 0.0 if network is None else network.bytes_per_s * _network_share(network)
    protocols = [
        Protocol(one.base_s, one.pcie_s if slow else one.nvlink_s, one.network_s, one.bandwidth)
        for one in efficiency.NCCL.values()
    ]
    return Fabric(
        per_node=per_node,
        inside_bytes_per_s=whole * share if per_node > 1 else math.inf,
        across_bytes_per_s=across or math.inf,
        pair_bytes_per_s=pair * share if per_node > 1 else math.inf,
        protocols=tuple(protocols),
        sources=(efficiency.LINK_SOURCE, efficiency.NCCL_SOURCE),
    )


def _network_share(network: Network) -> float:
    """Of what a network carries, by the kind of link that its name has; measured: all of it."""
    if network.origin == "measured":
        return 1.0
    for link in LINKS.values():
        if link.name in network.name:
            return efficiency.LINK_SHARE[link.kind]
    return efficiency.LINK_SHARE["ethernet"]
