"""Placement of communication on nodes: traffic within each node, and traffic that leaves it.

Ranks are assigned to nodes in the order of `records.plan.AXES`, with tensor-parallel ranks closest
together. A collective over several nodes uses a ring that enters and leaves each node once, like
NCCL's rings and trees. Each node therefore sends the traffic of one link, regardless of how many of
its devices take part.
"""

from collections import Counter
from dataclasses import dataclass

from outpace.planner.communication.flows import Flow, Part, Where, neighbours
from outpace.records.plan import Plan


@dataclass(frozen=True)
class Crossing:
    """A flow placed on nodes.

    `link_bytes`: bytes over a device's link within its node; 0 if the axis has one rank per node.
    `node_bytes`: bytes that leave the busiest node.
    """

    flow: Flow
    link_bytes: int
    node_bytes: int


def place_flow(plan: Plan, flow: Flow, per_node: int) -> Crossing:
    """Return the placement of a flow on nodes of `per_node` devices."""
    if flow.axis == "pp":
        return _place_stage_flow(plan, flow, per_node)
    size, stride = _group_size_and_stride(plan, flow.part, flow.axis)
    spans, shared = set(), False
    groups: Counter[int] = Counter()  # number of groups that leave each node
    for start in range(0, plan.world_size, size * stride):
        for offset in range(start, start + stride):
            nodes = [rank // per_node for rank in range(offset, offset + size * stride, stride)]
            spans = set(nodes)
            shared |= len(spans) < len(nodes)
            if len(spans) > 1:
                groups.update(spans)
    busiest = max(groups.values(), default=0)
    return Crossing(flow, flow.link_bytes if shared else 0, busiest * flow.link_bytes)


def _group_size_and_stride(plan: Plan, part: Part, axis: Where) -> tuple[int, int]:
    sequences = plan.cp * plan.tp
    if axis == "world":
        return plan.world_size, 1
    if axis == "tp":
        return plan.tp, 1
    if axis == "dp_replicate":
        return plan.dp_replicate, plan.dp_shard * sequences
    if part == "ring":
        return plan.cp, plan.tp
    return plan.dp_shard * plan.cp, plan.tp  # for gradients, cp ranks are shards too


def _place_stage_flow(plan: Plan, flow: Flow, per_node: int) -> Crossing:
    """Place a flow between neighbouring stages on nodes.

    A tied embedding's flow is between the first and the last pipeline rank.
    """
    stage_ranks = plan.world_size // plan.pp
    pairs = [(0, plan.pp - 1)] if flow.part == "tied" else neighbours(plan)
    leaving: Counter[int] = Counter()
    staying: Counter[int] = Counter()
    for first, second in pairs:
        for rank in range(stage_ranks):
            ranks = first * stage_ranks + rank, second * stage_ranks + rank
            nodes = [each // per_node for each in ranks]
            if nodes[0] != nodes[1]:  # in both directions
                leaving.update(nodes)
            else:
                staying.update(ranks)
    most_leaving, most_staying = (max(ways.values(), default=0) for ways in (leaving, staying))
    return Crossing(flow, most_staying * flow.link_bytes, most_leaving * flow.link_bytes)
