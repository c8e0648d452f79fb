"""What a training asks of the network, and what each network would cost it."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outpace.records.base import Record
from outpace.records.figure import Figure
from outpace.records.plan import Plan

Origin = Literal["measured", "catalog", "asked"]


class Network(Record):
    """What a node's network cards together, or a device's link, carry in one direction."""

    name: str
    bytes_per_s: PositiveFloat
    origin: Origin
    source: str


class Exchanged(Record):
    """What is exchanged for one purpose in a step.

    `node_bytes` leave the busiest node, all its devices together; `link_bytes` go over each
    device's link within a node. `hide_s` is the computing that it can go on behind.
    """

    part: str
    axis: str
    sent_bytes: NonNegativeInt
    link_bytes: NonNegativeInt
    node_bytes: NonNegativeInt
    behind: str
    hide_s: NonNegativeFloat


class Cost(Record):
    """A step on a network or link. `slowdown` 0.1: 10 % longer than with one that takes no time."""

    network: Network
    step_s: PositiveFloat
    slowdown: NonNegativeFloat


class Need(Record):
    """What one plan needs. `compute_s` is a step with a network that takes no time, bubble and all.

    Least bandwidths, bytes/s: of a node's network cards together, and of a device's link within
    the node; 0 where 1 kB/s is enough, as where nothing crosses. There always is one: latency is
    not reckoned with.
    """

    title: str
    plan: Plan
    global_batch: PositiveInt
    identity: str
    compute_s: PositiveFloat
    exchanged: tuple[Exchanged, ...]
    node_bytes: NonNegativeInt
    least_node_bytes_per_s: NonNegativeFloat
    least_device_bytes_per_s: NonNegativeFloat
    costs: tuple[Cost, ...]
    cheapest: Network | None
    own: Cost | None
    device_costs: tuple[Cost, ...] = Field(default=(), description="by a device's link")
    cheapest_inside: Network | None = Field(default=None, description="of the device's links")
    own_inside: Cost | None = Field(default=None, description="by the device's link that is there")
    states_bytes: PositiveInt
    fits: bool | None


class Answer(Record):
    """The network question for a model on a machine, answered for one plan or several.

    `rate` and `memory_rate` are what computing was reckoned with; `share` of the catalog's peak
    is an assumption, None where the rate was measured.
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
    own: Network | None
    measured: tuple[Figure, ...] = ()
    needs: tuple[Need, ...]
    refused: dict[str, str] = Field(default={}, description="plans that cannot be, and why")
    notes: tuple[str, ...] = Field(default=(), description="what was taken otherwise than asked")
