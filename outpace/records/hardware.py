"""Hardware as it is sold: what a chip, a link and a host can do, each figure with its source."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from outpace.records.base import Record

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]


class Peak(Record):
    """Dense peak rates of one chip by dtype, FLOP/s, and where they are published."""

    flops_per_s: dict[Dtype, PositiveFloat]
    source: str


Architecture = Literal[
    "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "cdna4"
]
LinkKind = Literal[
    "pcie", "nvlink", "infinity-fabric", "infiniband", "omni-path", "ethernet", "efa", "slingshot"
]


class Link(Record):
    """One link or port as it is used (of PCIe a ×16 slot).

    `bytes_per_s` is what it carries in one direction after line coding, before the headers of
    packets. Datasheets often print both directions together: twice as much.
    """

    name: str
    kind: LinkKind
    bytes_per_s: PositiveFloat
    source: str


class Bundle(Record):
    """A number of links of one kind. `link` is a name in the catalog."""

    link: str
    count: PositiveInt


class Accelerator(Record):
    """One kind of accelerator, as one process sees it.

    `memory_bytes` is what the datasheet prints, `usable_bytes` what the driver leaves of it to a
    process: torch's total_memory. `driver_name` is what its driver reports, without the maker.
    `power_w` is the limit of the board for which its rates are published, `power_variants_w` are
    others that it is sold with or can be set to. `multiprocessors` are NVIDIA's SMs and AMD's
    compute units. `device_link` is all that leads to other accelerators; on PCIe cards it needs a
    bridge.
    """

    name: str
    driver_name: str
    architecture: Architecture
    memory_bytes: PositiveInt
    usable_bytes: PositiveInt
    usable_source: str
    memory_bytes_per_s: PositiveFloat
    peak: Peak
    power_w: PositiveInt
    power_variants_w: tuple[PositiveInt, ...] = ()
    multiprocessors: PositiveInt | None = None
    host_link: str
    device_link: Bundle | None = None
    source: str


class ValueRange(Record):
    """A value known to lie between two others: it differs by model of processor."""

    least: PositiveInt
    most: PositiveInt


class Processor(Record):
    """Most FLOP per cycle, by dtype, of a core with a vector or matrix extension.

    `feature` is its name in Linux's /proc/cpuinfo. `vector_bits` is the width of a register, None
    where makers choose it.
    """

    feature: str
    vector_bits: PositiveInt | None
    flops_per_cycle: dict[Dtype, ValueRange]
    source: str


# How device links run: every pair through a switch, at the full rate; every pair directly, each
# by an equal share; some pairs directly, others through a third; two by two; not at all.
Topology = Literal["switch", "mesh", "cube-mesh", "pairs", "none"]


class Node(Record):
    """A machine as it is sold: one host, or a rack whose hosts share one fast domain.

    All counts are of the whole of it. `accelerator` is a name in the catalog, None without one;
    `device_link` is what one accelerator has to all others; `nics` carry the traffic of training
    to other machines, and are empty where that is up to the buyer.
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
    assumed: str | None = Field(default=None, description="what was taken for what nobody said")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.accelerator is None) != (self.devices == 0):
            raise ValueError(f"{self.devices} devices of accelerator {self.accelerator}")
        if (self.topology == "none") != (self.device_link is None):
            raise ValueError(f"topology {self.topology} with device link {self.device_link}")
        if self.processes % self.hosts:
            raise ValueError(f"{self.devices} devices on {self.hosts} hosts")
        return self

    @property
    def processes(self) -> int:
        """Ranks that it is used by: one on each accelerator, or one on the CPU."""
        return max(self.devices, 1)

    @property
    def processes_per_host(self) -> int:
        """Ranks on each of its hosts."""
        return self.processes // self.hosts
