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
    """One contribution of offloading to a rank's step time.

    `nbytes` cross the host link, or are read from and written to disk; 0 if nothing is copied.
    `exposed_s` is the time that computation does not hide.
    """

    what: Literal["weights", "activations", "optimizer", "host step", "disk"]
    nbytes: NonNegativeInt = 0
    exposed_s: NonNegativeFloat


class Estimate(Record):
    """Predicted time and memory of one step of a plan on a machine.

    `step_time_s` lies between `low_s` and `high_s` with probability `level`, estimated from the
    errors of predictions for published or measured steps. `parts_s` add up to the step time, and
    `memory` to `peak_memory_bytes`, the peak of the device that needs the most. Offloaded memory is
    not part of it, and is counted per node, in host memory or on disk: the bytes of that device's
    rank times the ranks per node. MFU counts the model's FLOPs, and HFU also those of
    recomputation, relative to the dense peak; None if no peak is known.
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
        description="device memory that the driver leaves free; None: unknown"
    )
    memory: dict[str, NonNegativeInt]
    host_offloaded_bytes: NonNegativeInt = entry("offloaded bytes in a node's host memory", 0)
    host_memory_bytes: NonNegativeInt | None = entry("a node's host memory; None: unknown")
    disk_offloaded_bytes: NonNegativeInt = entry("offloaded bytes on a node's disks", 0)
    parts_s: dict[str, NonNegativeFloat]
    offloading: tuple[OffloadingPart, ...] = entry(
        "contributions of offloading to the step time; empty: none, or unknown", ()
    )
    ranks: PositiveInt
    tokens: PositiveInt | None = entry("tokens to train on")
    time_s: PositiveFloat | None = entry("time to train on all tokens")
    cost: NonNegativeFloat | None = entry("cost of all device-hours")

    @property
    def rate(self) -> tuple[float, str]:
        """Return the throughput and its unit: tokens/s, or samples/s for data without tokens."""
        if self.samples_per_s is None:
            return self.tokens_per_s, "tokens/s"
        return self.samples_per_s, "samples/s"

    @property
    def fits(self) -> bool:
        """Return whether the plan fits into device and host memory, if their sizes are known."""
        device = self.memory_bytes is None or self.peak_memory_bytes <= self.memory_bytes
        host = self.host_memory_bytes is None or self.host_offloaded_bytes <= self.host_memory_bytes
        return device and host


class MeasuredCase(Record):
    """A training step whose time was published, with the planner's prediction for it."""

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
        """Return the relative error; 0.1: the prediction is 10 % longer than the measurement."""
        return self.predicted_s / self.measured_s - 1

    @property
    def tokens_per_device_s(self) -> float | None:
        """Return the measured tokens per second of each device; None if the batch is unknown."""
        if self.global_batch is None:
            return None
        return self.global_batch * self.seq_len / self.measured_s / self.devices


class RankedPlan(Record):
    """A plan, its estimate, and the reason for its rank.

    `roles` say why the plan is listed. `fastest` has the shortest step. `recommended` is chosen
    from the plans that are about as fast: the simplest, and of these the one with the most free
    memory. `leanest` uses the least memory of the plans that are nearly as fast. `with headroom` is
    the fastest plan that does not fill a device's memory, listed if all the others do. A plan
    without a role is the fastest of its family.
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
    untrained: str | None = entry("why outpace cannot train with the plan")
    roles: tuple[Role, ...] = ()
    cases: tuple[MeasuredCase, ...] = entry(
        "published steps most similar to the plan, most similar first", ()
    )
    extrapolated: tuple[str, ...] = entry("features of the plan that no measured step has", ())
    placement: dict[str, str] = Field(
        default_factory=dict, description="the link that each split axis uses"
    )

    @property
    def listed_title(self) -> str:
        """Return the title, preceded by the plan's roles, as in "Recommended: …"."""
        return f"{join_and(self.roles).capitalize()}: {self.title}" if self.roles else self.title


class RejectedFamily(Record):
    """A family of plans that is not listed, with the reason.

    `plan` is its fastest plan or, if none fits into memory, the one that needs the least.
    """

    family: str
    reason: str
    plan: Plan | None = None


class KeptOption(Record):
    """An option that the user requires, and how much slower it makes the best plan."""

    setting: str
    slowdown: float = Field(description="0.1: 10 % more time; never below 0")


class Plans(Record):
    """The planner's answer: the recommended plan, others (fastest first), and rejected families."""

    model: str
    parameters: PositiveInt
    machine: str
    nodes: PositiveInt
    idle_nodes: NonNegativeInt = entry("nodes that no plan uses", 0)
    devices_per_node: PositiveInt
    nominal_memory_bytes: NonNegativeInt | None = entry(
        "a device's memory according to its maker; None: unknown"
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
        """Return the plan with this role; None if there is none."""
        return next((planned for planned in self.plans if role in planned.roles), None)

    @property
    def reads_tokens(self) -> bool:
        """Return whether samples are sequences of tokens."""
        return self.plans[0].estimate.samples_per_s is None
