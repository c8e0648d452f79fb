"""Requirements of a run on the network, and what each network would cost it."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outpace.records.base import Record
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
    """Traffic of one purpose in a step.

    `node_bytes` leave the busiest node, all its devices together; `link_bytes` go over each
    device's link within a node. `hide_s` is the computation that can hide it.
    """

    part: str
    axis: str
    sent_bytes: NonNegativeInt
    link_bytes: NonNegativeInt
    node_bytes: NonNegativeInt
    behind: str
    hide_s: NonNegativeFloat


class NetworkCost(Record):
    """A step on a network or link. `slowdown` 0.1: 10 % longer than with one that takes no time."""

    network: Network
    step_s: PositiveFloat
    slowdown: NonNegativeFloat


class Need(Record):
    """Requirements of one plan. `compute_s`: a step, bubble and all, if the network took no time.

    Least bandwidths, bytes/s: of a node's network cards together, and of a device's link within the
    node; 0 where 1 kB/s is enough, as where nothing crosses. There always is one: latency is left
    out.
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
    present_cost: NetworkCost | None = Field(alias="own", description="by the present network")
    device_costs: tuple[NetworkCost, ...] = Field(default=(), description="by a device's link")
    cheapest_inside: Network | None = Field(default=None, description="of the device's links")
    present_device_cost: NetworkCost | None = Field(
        default=None, alias="own_inside", description="by the present link of a device"
    )
    states_bytes: PositiveInt
    fits: bool | None


class NetworkReport(Record):
    """The network question for a model on a machine, answered for one plan or several.

    `rate` and `memory_rate` are the assumed rates of computation and memory; `share` of the
    catalog's peak is an assumption, None where the rate was measured.
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
    inside: Network | None = Field(description="None where a device is alone in its node")
    present: Network | None = Field(alias="own", description="the machine's network")
    measured: tuple[Figure, ...] = ()
    needs: tuple[Need, ...]
    refused: dict[str, str] = Field(default={}, description="plans that cannot be, and why")
    notes: tuple[str, ...] = Field(default=(), description="what was taken otherwise than asked")
