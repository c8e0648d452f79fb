"""Hardware as sold: the capabilities of chips, links and hosts, with sources."""

from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from outpace.records.base import Record, entry

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]


class Peak(Record):
    """Published dense peak rates of one chip by dtype, in FLOP/s."""

    flops_per_s: dict[Dtype, PositiveFloat]
    source: str


Architecture = Literal[
    "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "cdna4",
    "apple",
]  # fmt: skip
LinkKind = Literal[
    "pcie", "nvlink", "infinity-fabric", "infiniband", "omni-path", "ethernet", "efa", "slingshot",
    "memory",
]  # fmt: skip


class Link(Record):
    """A kind of link or port in the catalog. Of PCIe, it is a slot with 16 lanes.

    `bytes_per_s` is the rate in one direction after line coding, before packet headers. Datasheets
    often state twice as much, the sum of both directions.
    """

    name: str
    kind: LinkKind
    bytes_per_s: PositiveFloat
    source: str


class Bundle(Record):
    """Several links of one kind. `link` is a name in the catalog."""

    link: str
    count: PositiveInt


class Accelerator(Record):
    """A model of accelerator, as one process sees it.

    `memory_bytes` is the memory in the datasheet, and `usable_bytes` what the driver leaves to a
    process (torch's total_memory). `driver_name` is the name that the driver reports, without the
    maker. `power_w` is the board's power limit at the published rates, if known;
    `power_variants_w` are other limits at which it is sold or that can be set. `multiprocessors`
    counts NVIDIA's SMs or AMD's compute units. `device_link` has all links to other accelerators;
    PCIe cards need a bridge for them.

    `has_collectives`: torch supports collectives between these accelerators. `compiles`: outpace
    compiles for them. `shares_host_memory`: their memory is host memory.
    """

    name: str
    driver_name: str
    architecture: Architecture
    memory_bytes: PositiveInt
    usable_bytes: PositiveInt
    usable_source: str
    memory_bytes_per_s: PositiveFloat
    peak: Peak
    power_w: PositiveInt | None
    power_variants_w: tuple[PositiveInt, ...] = ()
    multiprocessors: PositiveInt | None = None
    host_link: str
    device_link: Bundle | None = None
    has_collectives: bool = True
    compiles: bool = True
    shares_host_memory: bool = False
    source: str


class ValueRange(Record):
    """The range of a value that differs by processor model."""

    least: PositiveInt
    most: PositiveInt


class Processor(Record):
    """Peak FLOPs per cycle and core, by dtype, of a CPU's vector or matrix extension.

    `feature` is the extension's name in Linux's /proc/cpuinfo. `vector_bits` is the width of a
    register, None if the CPU's maker chooses it.
    """

    feature: str
    vector_bits: PositiveInt | None
    flops_per_cycle: dict[Dtype, ValueRange]
    source: str


# How devices are linked: all through a switch, at the full rate; every pair directly, with an equal
# share of the links; some pairs directly, others through a third device; only in pairs; not at all.
Topology = Literal["switch", "mesh", "cube-mesh", "pairs", "none"]


class Node(Record):
    """A machine as sold: one host, or a rack whose hosts share one fast interconnect.

    All counts are for the whole machine. `accelerator` is a name in the catalog, None if there is
    none. `device_link` has one accelerator's links to all others. `nics` carry training traffic to
    other machines; they are empty if the buyer chooses them.
    """

    name: str
    accelerator: str | None
    devices: NonNegativeInt
    hosts: PositiveInt = 1
    topology: Topology = "none"
    device_link: Bundle | None = None
    host_link: str | None = None
    nics: tuple[Bundle, ...] = ()
    host_cores: PositiveInt | None = None
    host_memory_bytes: PositiveInt | None = None
    cpu_features: tuple[str, ...] = ()
    source: str
    assumed: str | None = entry("assumptions about facts that are not published")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.accelerator is None) != (self.devices == 0):
            raise ValueError(f"{self.devices} devices of accelerator {self.accelerator}")
        if (self.topology == "none") != (self.device_link is None):
            raise ValueError(f"topology {self.topology} with device link {self.device_link}")
        if self.processes % self.hosts:
            raise ValueError(
                f"hosts {self.hosts} does not divide the number of ranks, {self.processes} (one "
                "per device, or 1 on a CPU)"
            )
        return self

    @property
    def processes(self) -> int:
        """Return the number of ranks: one per accelerator, or one on the CPU."""
        return max(self.devices, 1)

    @property
    def processes_per_host(self) -> int:
        """Return the number of ranks per host."""
        return self.processes // self.hosts
