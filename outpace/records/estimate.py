"""Estimate of a plan: time and memory, their parts, and their uncertainty."""

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outpace.records.base import Record, entry
from outpace.records.errors import join_and
from outpace.records.plan import Plan

Depth = Literal["estimate", "trace", "measure"]
Role = Literal["recommended", "fastest", "leanest", "with headroom"]
RateSource = Literal["probed", "catalog", "guessed"]


class OffloadingPart(Record):
    """A part of the time that offloading takes in a step on one rank.

    `nbytes` cross the host's link or go to and from the disk; 0 means that nothing is copied.
    `exposed_s` is the time that computation does not hide, which lengthens the step.
    """

    what: Literal["weights", "activations", "optimizer", "host step", "disk"]
    nbytes: NonNegativeInt = 0
    exposed_s: NonNegativeFloat


class Estimate(Record):
    """Time and memory of a plan's step on a machine.

    `step_time_s` lies between `low_s` and `high_s` with probability `level`, according to the
    errors for published or measured steps. `parts_s` add up to the step; `memory` adds up to
    `peak_memory_bytes`, on the device of the rank that needs the most. Offloaded memory is counted
    separately, per node, in host memory or on disk: that rank's bytes times the ranks per node. MFU
    counts the FLOPs that the model needs, and HFU also the FLOPs of recomputation, both relative to
    the dense peak; None if no peak is known.
    """

    depth: Depth
    step_time_s: PositiveFloat
    low_s: PositiveFloat
    high_s: PositiveFloat
    level: PositiveFloat
    tokens_per_s: PositiveFloat
    samples_per_s: PositiveFloat | None = entry(
        "samples per second of a model without tokens; None for one with tokens"
    )
    mfu: NonNegativeFloat | None
    hfu: NonNegativeFloat | None
    peak_memory_bytes: NonNegativeInt
    memory_bytes: NonNegativeInt | None = Field(
        description="memory of a device that its driver leaves free; None: unknown"
    )
    memory: dict[str, NonNegativeInt]
    host_offloaded_bytes: NonNegativeInt = entry("memory on a node's host", 0)
    host_memory_bytes: NonNegativeInt | None = entry("memory of a node's host; None: unknown")
    disk_offloaded_bytes: NonNegativeInt = entry("memory on a node's disks", 0)
    parts_s: dict[str, NonNegativeFloat]
    offloading: tuple[OffloadingPart, ...] = entry(
        "the parts of offloading's time; empty: none, or unknown", ()
    )
    ranks: PositiveInt
    tokens: PositiveInt | None = entry("tokens to train on")
    time_s: PositiveFloat | None = entry("time to train on all tokens")
    cost: NonNegativeFloat | None = entry("cost of all devices' hours")

    @property
    def rate(self) -> tuple[float, str]:
        """Return the units of training data per second, and the name of the unit."""
        if self.samples_per_s is None:
            return self.tokens_per_s, "tokens/s"
        return self.samples_per_s, "samples/s"

    @property
    def fits(self) -> bool:
        """Return whether the plan fits into those memories whose sizes are known."""
        device = self.memory_bytes is None or self.peak_memory_bytes <= self.memory_bytes
        host = self.host_memory_bytes is None or self.host_offloaded_bytes <= self.host_memory_bytes
        return device and host


class MeasuredCase(Record):
    """A published step, with the planner's prediction for it."""

    model: str
    chip: str
    devices: PositiveInt
    seq_len: PositiveInt
    global_batch: PositiveInt | None = entry("samples per step", None)
    stack: str = Field(description="the trainer")
    layout: str
    precision: str | None = entry('of matmuls; "16 bits" if only this was published', None)
    parameters: PositiveFloat | None = entry("billions", None)
    measured_s: PositiveFloat
    predicted_s: PositiveFloat
    source: str

    @property
    def error(self) -> float:
        """Return the relative error; 0.1 means predicted 10 % longer than measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def tokens_per_device_s(self) -> float | None:
        """Return the measured tokens per second of each device; None if the batch is unknown."""
        if self.global_batch is None:
            return None
        return self.global_batch * self.seq_len / self.measured_s / self.devices


class RankedPlan(Record):
    """A plan, its cost, and the reason for its rank.

    `roles` say why it is listed: `recommended`, the simplest with the most free memory among those
    about as fast as the fastest; `fastest`; `leanest`, the plan with the least memory among those
    that are nearly as fast; `with headroom`, if all of these fill a device's memory, the fastest
    plan that does not. A plan without a role is the fastest of another kind.
    """

    summary_fields: ClassVar[tuple[str, ...]] = (
        "title", "roles", "estimate.step_time_s", "estimate.tokens_per_s",
        "estimate.peak_memory_bytes", "why",
    )  # fmt: skip

    title: str
    plan: Plan
    identity: str = Field(description="the batch equation with its numbers")
    estimate: Estimate
    why: str
    untrained: str | None = entry("why outpace cannot train it")
    roles: tuple[Role, ...] = ()
    cases: tuple[MeasuredCase, ...] = entry(
        "published steps that are nearest to it, nearest first", ()
    )
    extrapolated: tuple[str, ...] = entry("features of it that no measured step has", ())
    placement: dict[str, str] = Field(
        default_factory=dict, description="the link that each split axis uses"
    )

    @property
    def listed_title(self) -> str:
        """Return the title, after the plan's roles."""
        return f"{join_and(self.roles).capitalize()}: {self.title}" if self.roles else self.title


class RejectedFamily(Record):
    """A family of plans that is not listed, and why, with its best or smallest plan."""

    family: str
    reason: str
    plan: Plan | None = None


class KeptOption(Record):
    """An option that the user requires, and its cost relative to the best plan without it."""

    setting: str
    slowdown: float = Field(description="0.1: 10 % more time; never below 0")


class Plans(Record):
    """The planner's answer: the recommended plan, other plans (fastest first), and rejections."""

    model: str
    parameters: PositiveInt
    machine: str
    nodes: PositiveInt
    idle_nodes: NonNegativeInt = entry("nodes that no plan uses", 0)
    devices_per_node: PositiveInt
    nominal_memory_bytes: NonNegativeInt | None = entry(
        "memory of a device according to its maker; None: unknown"
    )
    seq_len: PositiveInt
    global_batch: PositiveInt
    plans: tuple[RankedPlan, ...] = Field(min_length=1)
    rejected: tuple[RejectedFamily, ...] = ()
    insistences: tuple[KeptOption, ...] = ()
    considered: NonNegativeInt
    took_s: NonNegativeFloat
    source: RateSource = Field(description="sources of the rates")
    notes: tuple[str, ...] = ()
    defaults: dict[str, str] = entry("options that were not given, with the values used", {})

    def plan_for(self, role: Role) -> RankedPlan | None:
        """Return the plan that is listed with this role; None if there is none."""
        return next((planned for planned in self.plans if role in planned.roles), None)

    @property
    def reads_tokens(self) -> bool:
        """Return whether samples are sequences of tokens."""
        return self.plans[0].estimate.samples_per_s is None
