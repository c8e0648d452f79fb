"""Topology: how a host's devices are connected, and its processors."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from outpace.records.base import Record, entry

# Terms of `nvidia-smi topo -m`, from the NVML documentation (nvmlGpuTopologyLevel_t) and the tool's
# legend. Drivers before 384 call SYS SOC.
LEGEND = {
    "X": "the device itself",
    "NV#": "a bond of # NVLinks",
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges, not the CPU's",
    "PHB": "a PCIe host bridge, which is usually the CPU",
    "NODE": "between PCIe host bridges of one NUMA node",
    "SYS": "between NUMA nodes, through the link between CPUs",
    "SOC": "between CPU sockets, the name for SYS in old drivers",
}
# Best first. NVLinks are better than all of these.
_ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")

Link = Annotated[str, Field(pattern=r"^(X|SYS|SOC|NODE|PHB|PXB|PIX|NV[1-9][0-9]{0,2})$")]


def meaning(link: str | None) -> str:
    """Describe a link in words."""
    count = nvlinks(link)
    if count:
        return f"a bond of {count} NVLinks" if count > 1 else "one NVLink"
    return "could not be read" if link is None else LEGEND[link]


def nvlinks(link: str | None) -> int:
    """Return the number of NVLinks in a link: "NV12" -> 12, "PHB" -> 0."""
    return int(link[2:]) if link is not None and link.startswith("NV") else 0


def goodness(link: str | None) -> int:
    """Return a link's score: higher for more NVLinks, then for fewer bridges; 0 for None."""
    if link is None:
        return 0
    if nvlinks(link):
        return len(_ORDER) + nvlinks(link)
    return 10**6 if link == "X" else len(_ORDER) - min(_ORDER.index(link), _ORDER.index("SYS"))


def cpu_set(text: str) -> frozenset[int]:
    """Parse the kernel's format of CPU lists: "0-3,8" -> {0, 1, 2, 3, 8}. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpu_list(cpus: frozenset[int] | set[int]) -> str:
    """Format a set of CPUs as the kernel does: {0, 1, 2, 3, 8} -> "0-3,8"."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


class Endpoint(Record):
    """A GPU or network card, with its nearest CPUs and NUMA node."""

    name: str
    kind: Literal["gpu", "nic"]
    label: str | None = entry("a card's name in the NIC legend")
    cpu_affinity: str | None = entry("CPUs, such as 0-31,64-95")
    numa_affinity: str | None = None
    gpu_numa_id: str | None = None


class Topology(Record):
    """The matrix of links: `links[a][b]` connects devices a and b; None if it could not be read."""

    devices: tuple[Endpoint, ...]
    links: tuple[tuple[Link | None, ...], ...]
    source: str
    notes: tuple[str, ...] = entry("damage to the source", ())
    pcie_only: bool = entry("whether the source is topo -mp, which leaves out NVLinks", False)

    @model_validator(mode="after")
    def _check_matrix(self) -> Self:
        count = len(self.devices)
        if len(self.links) != count or any(len(row) != count for row in self.links):
            sizes = sorted({len(row) for row in self.links})
            raise ValueError(f"{count} devices, but {len(self.links)} rows of {sizes} links")
        names = [device.name for device in self.devices]
        if len(set(names)) != count:
            raise ValueError(f"a device is listed twice: {', '.join(names)}")
        for a in range(count):
            for b in range(count):
                if (self.links[a][b] == "X") != (a == b):
                    raise ValueError(
                        f"{names[a]} to {names[b]} is {self.links[a][b]}, but X must mark exactly "
                        "each device's link to itself"
                    )
                if self.links[a][b] != self.links[b][a]:
                    raise ValueError(
                        f"{names[a]} to {names[b]} is {self.links[a][b]}, but {names[b]} to "
                        f"{names[a]} is {self.links[b][a]}"
                    )
        return self

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs, in order."""
        return tuple(device.name for device in self.devices if device.kind == "gpu")

    @property
    def nics(self) -> tuple[str, ...]:
        """Names of the network cards, in order."""
        return tuple(device.name for device in self.devices if device.kind == "nic")

    def device(self, name: str) -> Endpoint:
        """Return the device with this name. Raises KeyError."""
        for device in self.devices:
            if device.name == name:
                return device
        raise KeyError(name)

    def link_between(self, one: str, other: str) -> str | None:
        """Return the link between two devices by name. Raises KeyError."""
        names = [device.name for device in self.devices]
        for name in (one, other):
            if name not in names:
                raise KeyError(name)
        return self.links[names.index(one)][names.index(other)]


class Grouping(Record):
    """GPUs in groups of equal size, chosen to maximise the worst link within a group."""

    size: PositiveInt
    groups: tuple[tuple[str, ...], ...]
    worst_link: str | None
    left_out: tuple[str, ...] = entry("GPUs that are in no group", ())
    link_bytes_per_s: float | None = entry(
        "unidirectional rate of the worst link; only for NVLinks with a known rate"
    )


class MissingNvlinks(Record):
    """GPUs and pairs with fewer NVLinks than nearly all others on the host, usually by a fault.

    `gpus` lack links to all other GPUs; `pairs` lack links only between the two GPUs.
    """

    usual: str = Field(description="the link of the other pairs")
    links: tuple[str, ...] = Field(description="the links of `gpus` and `pairs`, best first")
    gpus: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()


class SlowPairs(Record):
    """Pairs of GPUs that are connected only by `link`.

    `times_slower`: communication between them takes at least this many times as long as over the
    host's best NVLinks, since their rate is at most that of a PCIe slot; None if the difference is
    small.
    """

    link: str
    pairs: tuple[tuple[str, str], ...]
    times_slower: float | None = entry("None unless both rates are known")


class NearNics(Record):
    """The network cards nearest to a GPU."""

    gpu: str
    nics: tuple[str, ...]
    link: str | None


class Placement(Record):
    """Consequences of a topology for parallelism; see `outpace.probing.hardware.gpu_placement`."""

    groupings: tuple[Grouping, ...] = Field(description="by size of tensor parallelism")
    tensor_parallel: Grouping | None = Field(description="the largest useful size")
    missing: MissingNvlinks | None = None
    bottleneck: str | None = Field(
        description="link that communication over all GPUs crosses; None if NVLinks are unknown"
    )
    slow: tuple[SlowPairs, ...]
    nics: tuple[NearNics, ...]


class NumaNode(Record):
    """A NUMA node: its CPUs, its memory, and the distances to other nodes (10 is itself)."""

    number: NonNegativeInt
    cpus: str
    memory_bytes: NonNegativeInt | None = None
    distances: tuple[int, ...] = ()


class Cache(Record):
    """One kind of CPU cache: its size, its count, and how many CPUs share each."""

    level: PositiveInt
    kind: Literal["Data", "Instruction", "Unified"]
    cache_bytes: PositiveInt
    count: PositiveInt
    shared_by: PositiveInt


class CpuTopology(Record):
    """A host's processors. CPUs are logical: two per core with SMT."""

    cpus: str = Field(description="online")
    packages: PositiveInt | None = None
    cores: PositiveInt | None = None
    siblings: tuple[str, ...] = entry("CPUs of each core", ())
    numa: tuple[NumaNode, ...] = ()
    caches: tuple[Cache, ...] = ()

    @property
    def cpu_count(self) -> int:
        """Return the number of CPUs online."""
        return len(cpu_set(self.cpus))

    def cores_of(self, cpus: frozenset[int]) -> int:
        """Return the number of cores with any of these CPUs or, if unknown, the number of CPUs."""
        if not self.siblings:
            return len(cpus)
        return sum(1 for core in self.siblings if cpu_set(core) & cpus)

    def numa_of(self, cpus: frozenset[int]) -> tuple[int, ...]:
        """Return the NUMA nodes of these CPUs."""
        return tuple(node.number for node in self.numa if cpu_set(node.cpus) & cpus)
