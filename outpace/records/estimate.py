"""Estimate of a plan: time, memory, where both go, and how sure it is."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outpace.records.base import Record
from outpace.records.plan import Plan

Depth = Literal["estimate", "trace", "measure"]
Role = Literal["recommended", "fastest", "leanest"]
RateSource = Literal["probed", "catalog", "guessed"]


def join_roles(roles: Sequence[str]) -> str:
    """ "recommended, fastest and leanest"."""
    *first, last = roles
    return f"{', '.join(first)} and {last}" if first else last


class OffloadingPart(Record):
    """A part of the time that offloading takes in a step, of one rank.

    `nbytes` go over the host's link or to and from the disk; 0: no copy. `exposed_s` of it is not
    hidden by computing, and is in the step.
    """

    what: Literal["weights", "activations", "optimizer", "host step", "disk"]
    nbytes: NonNegativeInt = 0
    exposed_s: NonNegativeFloat


class Estimate(Record):
    """A step of a plan on a machine.

    `step_time_s` lies between `low_s` and `high_s` with probability `level`, as errors on published
    or measured steps say. `parts_s` add up to the step; `memory` to `peak_memory_bytes`, of the
    fullest rank's device. What is offloaded lies beside it, on a node's host or its disks: as much
    as the fullest rank's, times the ranks of a node. MFU counts what the model needs, HFU
    recomputation too, both over the dense peak; None where no peak is known.
    """

    depth: Depth
    step_time_s: PositiveFloat
    low_s: PositiveFloat
    high_s: PositiveFloat
    level: PositiveFloat
    tokens_per_s: PositiveFloat
    samples_per_s: PositiveFloat | None = Field(
        default=None, description="of a model that reads no tokens; None: of one that does"
    )
    mfu: NonNegativeFloat | None
    hfu: NonNegativeFloat | None
    peak_memory_bytes: NonNegativeInt
    memory_bytes: NonNegativeInt | None = Field(
        description="of a device, as its driver leaves it; None: not known"
    )
    memory: dict[str, NonNegativeInt]
    host_offloaded_bytes: NonNegativeInt = Field(default=0, description="on a node's host")
    host_memory_bytes: NonNegativeInt | None = Field(
        default=None, description="of a node's host; None: not known"
    )
    disk_offloaded_bytes: NonNegativeInt = Field(default=0, description="on a node's disks")
    parts_s: dict[str, NonNegativeFloat]
    offloading: tuple[OffloadingPart, ...] = Field(
        default=(), description="what the time of offloading is made of; nothing: none, or unknown"
    )
    ranks: PositiveInt
    tokens: PositiveInt | None = Field(default=None, description="the budget to train for")
    time_s: PositiveFloat | None = Field(default=None, description="to the budget of tokens")
    cost: NonNegativeFloat | None = Field(default=None, description="of all devices' hours")

    @property
    def rate(self) -> tuple[float, str]:
        """Units of training data in a second, and the name of the unit."""
        if self.samples_per_s is None:
            return self.tokens_per_s, "tokens/s"
        return self.samples_per_s, "samples/s"

    @property
    def fits(self) -> bool:
        """Whether the plan fits into the memory of device and host, as far as it is known."""
        device = self.memory_bytes is None or self.peak_memory_bytes <= self.memory_bytes
        host = self.host_memory_bytes is None or self.host_offloaded_bytes <= self.host_memory_bytes
        return device and host


class MeasuredCase(Record):
    """A step that somebody published, with what the planner says of it."""

    model: str
    chip: str
    devices: PositiveInt
    seq_len: PositiveInt
    stack: str = Field(description="the software that trained")
    layout: str
    measured_s: PositiveFloat
    predicted_s: PositiveFloat
    source: str

    @property
    def error(self) -> float:
        """0.1: predicted 10 % longer than measured."""
        return self.predicted_s / self.measured_s - 1


class Planned(Record):
    """A plan, what it takes, and why it is where it is.

    `roles` are what it is listed for: `recommended`, the simplest with the most memory left of
    those that are as fast as the fastest; `fastest`; `leanest`, of the least memory of those that
    are nearly as fast. Without one it is the fastest of another kind.
    """

    title: str
    plan: Plan
    identity: str = Field(description="the batch as a product")
    estimate: Estimate
    why: str
    untrained: str | None = Field(default=None, description="why outpace does not train it")
    roles: tuple[Role, ...] = ()
    cases: tuple[MeasuredCase, ...] = Field(
        default=(), description="published steps that are nearest to it, the nearest first"
    )
    extrapolated: tuple[str, ...] = Field(
        default=(), description="what of it nothing that was measured resembles"
    )
    placement: dict[str, str] = Field(
        default_factory=dict, description="of each axis that is split, the link that it crosses"
    )

    @property
    def listed_title(self) -> str:
        """The title, behind what the plan is listed for."""
        return f"{join_roles(self.roles).capitalize()}: {self.title}" if self.roles else self.title


class Rejected(Record):
    """A family of plans of which none was taken, and the reason, with its best or smallest."""

    family: str
    reason: str
    plan: Plan | None = None


class Insistence(Record):
    """An option that the user insists on, and what it costs against the free optimum."""

    setting: str
    slowdown: float = Field(description="0.1: 10 % more time; below 0 never")


class Plans(Record):
    """An answer of the planner: the recommended plan, others, fastest first, and the rejected."""

    model: str
    parameters: PositiveInt
    machine: str
    nodes: PositiveInt
    idle_nodes: NonNegativeInt = Field(default=0, description="of these, that no plan uses")
    devices_per_node: PositiveInt
    nominal_memory_bytes: NonNegativeInt | None = Field(
        default=None, description="of a device, as its maker prints it; None: not known"
    )
    seq_len: PositiveInt
    global_batch: PositiveInt
    plans: tuple[Planned, ...] = Field(min_length=1)
    rejected: tuple[Rejected, ...] = ()
    insistences: tuple[Insistence, ...] = ()
    considered: NonNegativeInt
    took_s: NonNegativeFloat
    source: RateSource = Field(description="of the rates")
    notes: tuple[str, ...] = ()
    defaults: dict[str, str] = Field(
        default={}, description="options that were not given, and the values taken for them"
    )

    def plan_for(self, role: Role) -> Planned | None:
        """The plan that is listed as the recommended, fastest or leanest; None: not listed."""
        return next((planned for planned in self.plans if role in planned.roles), None)

    @property
    def reads_tokens(self) -> bool:
        """Whether samples are sequences of tokens."""
        return self.plans[0].estimate.samples_per_s is None
