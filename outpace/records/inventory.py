"""Inventory: the facts about a host that determine whether it runs as fast as it can."""

from pydantic import Field, NonNegativeInt

from outpace.records.base import Record, entry
from outpace.records.topology import CpuTopology, Placement, Topology


class GpuState(Record):
    """A GPU's current state as its driver reports it. None: not supported or not permitted."""

    index: NonNegativeInt
    name: str | None = None
    bus: str | None = entry("PCI address")
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilisation: float | None = entry("share of time, 0 to 1")
    performance_state: int | None = entry("0 is the fastest")
    sm_clock_hz: float | None = None
    sm_clock_max_hz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    power_limit_max_w: float | None = None
    throttled_by: tuple[str, ...] | None = None
    ecc: bool | None = None
    ecc_pending: bool | None = None
    ecc_uncorrected: int | None = entry("errors since the driver's start")
    remap_pending: bool | None = entry("whether the next reset will remap memory rows")
    pcie_generation: int | None = None
    pcie_generation_max: int | None = entry("maximum of card and slot together")
    pcie_generation_card: int | None = entry("maximum of the card alone")
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = entry("number of NVLinks")
    nvlinks_active: int | None = None
    nvlink_version: int | None = None
    cpu_affinity: str | None = None
    mig: bool | None = None
    persistence: bool | None = None
    other_processes: int | None = entry("number of other processes that compute on the GPU now")
    not_told: dict[str, str] = entry("queries that the driver refused, and why", {})


class NetworkPort(Record):
    """A port of an InfiniBand or RoCE card, as the kernel lists it."""

    device: str
    port: int
    state: str | None = None
    rate: str | None = None
    link_layer: str | None = None
    numa_node: int | None = None

    @property
    def active(self) -> bool | None:
        """Return whether the port is up and can carry data; None if the kernel does not say."""
        return None if self.state is None else self.state.endswith("ACTIVE")


class BusyProgram(Record):
    """Another program that is using the CPU now."""

    program: str
    cores: float
    pid: int | None = None


class Inventory(Record):
    """Facts that the doctor checks, without names of users, hosts or paths. None: unreadable."""

    cpu: CpuTopology
    usable_cpus: str = Field(description="CPUs that this process may run on")
    cpu_quota: float | None = entry("CPU time that the cgroup allows, in cores")
    cpu_quota_known: bool = True
    governors: tuple[str, ...] | None = None
    scaling_driver: str | None = None
    energy_preferences: tuple[str, ...] | None = None
    transparent_hugepages: str | None = None
    memory_bytes: int | None = None
    swap_used_bytes: int | None = None
    swapped_bytes_per_s: float | None = None
    shared_memory_bytes: int | None = entry("size of /dev/shm")
    shared_memory_free_bytes: int | None = None
    open_files_limit: int | None = entry("soft limit; -1 is none")
    open_files_hard_limit: int | None = None
    locked_memory_limit_bytes: int | None = entry("soft limit; -1 is none")
    settings: dict[str, str] = entry("environment variables that matter", {})
    local_rank: int | None = None
    local_world_size: int | None = None
    other_busy_cores: float | None = None
    busy: tuple[BusyProgram, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    gpus_unknown: str | None = entry("why no GPUs can be seen")
    topology: Topology | None = None
    topology_unknown: str | None = None
    ports: tuple[NetworkPort, ...] = ()
    gpu_direct: bool | None = entry("whether nvidia_peermem is loaded")
    verbs_devices: bool | None = entry(
        "whether programs may open the ports (/dev/infiniband exists)"
    )
    verbs_library: bool | None = entry("whether libibverbs can be loaded")


def omp_threads(text: str) -> int | None:
    """Return the number of threads in a value of OMP_NUM_THREADS, or None if the value is invalid.

    Of a list, the first number counts. OpenMP 5.2, §21.2.2.
    """
    first = text.partition(",")[0].strip()
    return int(first) or None if first.isascii() and first.isdigit() else None


class HostTopology(Record):
    """Links between a host's devices, the best groups of GPUs, and the state of the GPUs."""

    topology: Topology | None = None
    placement: Placement | None = None
    cpu: CpuTopology | None = entry("None if read from a file")
    gpus: tuple[GpuState, ...] = ()
    gpus_unknown: str | None = entry("why the topology is unknown")
    state_unknown: str | None = entry("why the GPUs' state is unknown")
