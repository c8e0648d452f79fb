"""Network bandwidth that a run needs, and the step time on each network."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outpace.records.base import Record, entry
from outpace.records.figure import Figure
from outpace.records.plan import Plan

Origin = Literal["measured", "catalog", "asked"]


class Network(Record):
    """Bandwidth of a node's network cards together, or of a device's link, in one direction."""

    name: str
    bytes_per_s: PositiveFloat
    origin: Origin
    source: str


class Traffic(Record):
    """Traffic for one purpose in a step.

    `node_bytes` leave the busiest node, summed over its devices; `link_bytes` use each device's
    link within a node. `hide_s` is the computation that can hide it.
    """

    part: str
    axis: str
    sent_bytes: NonNegativeInt
    link_bytes: NonNegativeInt
    node_bytes: NonNegativeInt
    behind: str
    hide_s: NonNegativeFloat


class NetworkCost(Record):
    """Step time on a network or link.

    A `slowdown` of 0.1 is 10 % more than on an infinitely fast network.
    """

    network: Network
    step_s: PositiveFloat
    slowdown: NonNegativeFloat


class Need(Record):
    """Network bandwidth that one plan needs.

    `compute_s`: the time of a step with its bubble on an infinitely fast network.

    The required bandwidths in bytes/s are for a node's network cards together, and for a device's
    link within the node; 0 if 1 kB/s is enough, for example if nothing is sent. They always exist,
    since latency is left out.
    """

    title: str
    plan: Plan
    global_batch: PositiveInt
    identity: str
    compute_s: PositiveFloat
    traffic: tuple[Traffic, ...] = Field(alias="exchanged")
    node_bytes: NonNegativeInt
    least_node_bytes_per_s: NonNegativeFloat
    least_device_bytes_per_s: NonNegativeFloat
    costs: tuple[NetworkCost, ...]
    cheapest: Network | None
    present_cost: NetworkCost | None = Field(alias="own", description="on the present network")
    device_costs: tuple[NetworkCost, ...] = entry("on a device's link", ())
    cheapest_inside: Network | None = entry("on the device's links")
    present_device_cost: NetworkCost | None = Field(
        default=None, alias="own_inside", description="on a device's present link"
    )
    states_bytes: PositiveInt
    fits: bool | None


class NetworkReport(Record):
    """Network requirements of a model on a machine, with one answer per plan.

    `rate` and `memory_rate` are the assumed rates of computation and memory; `share` of the
    catalog's peak is an assumption, None if the rate was measured.
    """

    model: str
    parameters: PositiveInt
    seq_len: PositiveInt
    machine: str
    nodes: PositiveInt
    devices_per_node: PositiveInt
    rate: Figure
    memory_rate: Figure
    share: float | None = None
    share_source: str | None = None
    tolerance: PositiveFloat
    inside: Network | None = Field(description="None if a device is alone in its node")
    present: Network | None = Field(alias="own", description="the machine's network")
    measured: tuple[Figure, ...] = ()
    needs: tuple[Need, ...]
    refused: dict[str, str] = entry("plans that are not possible, and why", {})
    notes: tuple[str, ...] = entry("differences from the request", ())
