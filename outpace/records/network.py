"""Network bandwidth that a run needs, and the step time on each network."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outpace.records.base import Record, entry
from outpace.records.figure import Figure
from outpace.records.plan import Plan

Origin = Literal["measured", "catalog", "asked"]


class Network(Record):
    """Unidirectional bandwidth of all network cards of a node, or of a device's link."""

    name: str
    bytes_per_s: PositiveFloat
    origin: Origin
    source: str


class Traffic(Record):
    """Traffic for one purpose in a step.

    `node_bytes` leave the busiest node, summed over its devices; `link_bytes` cross each device's
    link within a node. `behind` names the computation that can hide the traffic, and `hide_s` is
    its time.
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

    A `slowdown` of 0.1 means 10 % longer than on an infinitely fast network.
    """

    network: Network
    step_s: PositiveFloat
    slowdown: NonNegativeFloat


class Need(Record):
    """Network bandwidth that one plan needs.

    `compute_s` is the step time on an infinitely fast network, including the pipeline bubble.

    `least_node_bytes_per_s` is the bandwidth that all network cards of a node need together, and
    `least_device_bytes_per_s` that of a device's link within the node; 0 if 1 kB/s is enough.
    Latency is ignored, so some bandwidth is always enough.
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
    """Network requirements of a model on a machine, for each plan.

    `rate` and `memory_rate` are the assumed rates of computation and memory. `share` is the assumed
    fraction of the catalog's peak, None if the rate was measured.
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
