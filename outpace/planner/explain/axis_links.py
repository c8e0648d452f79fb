"""Descriptions of the links that a plan's axes use, for reports and exported configurations."""

import numpy as np

from outpace.catalog.links import LINKS
from outpace.catalog.nodes import NODES
from outpace.planner.calibration.cluster import Cluster
from outpace.records.plan import AXES, Plan


def axis_links(cluster: Cluster, plan: Plan) -> dict[str, str]:
    """Describe the link between the ranks of each axis with more than one rank.

    Ranks are placed in the order of AXES, with the last axis closest together; ep is part of
    dp_shard × cp.
    """
    found: dict[str, str] = {}
    inside, stride = _inner_link_name(cluster), 1
    for axis in reversed(AXES):
        size = getattr(plan, axis)
        if size > 1:
            found[axis] = _describe_link(cluster, size, stride, inside)
        stride *= size
    if plan.ep > 1:
        found["ep"] = _describe_link(cluster, plan.ep, plan.expert_tp, inside)
    return dict(reversed(found.items()))


def _describe_link(cluster: Cluster, size: int, stride: int, inside: str) -> str:
    within, nodes, groups = (
        int(value[0]) for value in cluster.fabric.spread(np.array([size]), np.array([stride]))
    )
    if nodes == 1:
        return f"{inside}, in a node"
    each = f" with {within} ranks each" if within > 1 else ""
    shared = f", {groups} groups share a node's cards" if groups > 1 else ""
    return f"network, {nodes:,} nodes{each}{shared}"


def _inner_link_name(cluster: Cluster) -> str:
    node = NODES.get(cluster.name)
    if node is None:
        return "the node's own links"
    link = node.device_link.link if node.device_link is not None else node.host_link
    return "PCIe" if link is None else LINKS[link].name
