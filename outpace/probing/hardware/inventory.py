"""Collection of the facts that the doctor checks. Facts that cannot be read are None."""

import ctypes
import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from outpace.probing.hardware import nvml
from outpace.probing.hardware.cpus import SYS, cpu_quota, read_cpus, usable_cpus
from outpace.probing.hardware.nvidia_smi import ToolError, read_live
from outpace.probing.hardware.procfs import read_text
from outpace.records.inventory import BusyProgram, Inventory, NetworkPort
from outpace.records.topology import cpu_list

PROC, DEV = Path("/proc"), Path("/dev")
_SHARED_MEMORY = Path("/dev/shm")
# Only variables that a check reads, because others may contain private data.
SETTINGS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "TORCH_DISTRIBUTED_DEBUG",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_IB_HCA",
    "NCCL_NET",
    "NCCL_NVLS_ENABLE", "NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip
# Library that NCCL and other programs use for InfiniBand and RoCE.
VERBS_LIBRARY = "libibverbs.so.1"
_LOCAL = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
          ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
          ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))  # fmt: skip


def gather(
    environ: Mapping[str, str],
    *,
    sys: Path = SYS,
    proc: Path = PROC,
    dev: Path = DEV,
    watch_s: float = 0.5,
    timeout_s: float = 20.0,
) -> Inventory:
    """Collect the facts about this host.

    Other programs are observed for `watch_s`. Each driver tool may take up to `timeout_s`.
    """
    cpu = read_cpus(sys)
    usable = frozenset(usable_cpus())
    quota, quota_known = cpu_quota(proc / "self/cgroup", proc / "self/mountinfo")
    busy, busy_programs, swapped = _observe_other_programs(usable, watch_s)
    gpus, gpus_unknown = nvml.query(timeout_s)
    topology = topology_unknown = None
    try:
        topology = read_live(timeout_s)
    except ToolError as error:
        topology_unknown = str(error)
    shared = _shared_memory_bytes()
    files, files_hard = _resource_limit("RLIMIT_NOFILE")
    local = _local_rank_and_size(environ)
    return Inventory(
        cpu=cpu,
        usable_cpus=cpu_list(usable),
        cpu_quota=quota,
        cpu_quota_known=quota_known,
        governors=_cpufreq_values(sys, usable, "scaling_governor"),
        scaling_driver=next(iter(_cpufreq_values(sys, usable, "scaling_driver") or ()), None),
        energy_preferences=_cpufreq_values(sys, usable, "energy_performance_preference"),
        transparent_hugepages=_choice(read_text(sys / "kernel/mm/transparent_hugepage/enabled")),
        memory_bytes=psutil.virtual_memory().total,
        swap_used_bytes=_swap_used_bytes(),
        swapped_bytes_per_s=swapped,
        shared_memory_bytes=shared and shared[0],
        shared_memory_free_bytes=shared and shared[1],
        open_files_limit=files,
        open_files_hard_limit=files_hard,
        locked_memory_limit_bytes=_resource_limit("RLIMIT_MEMLOCK")[0],
        settings={name: environ[name] for name in SETTINGS if name in environ},
        local_rank=local[0],
        local_world_size=local[1],
        other_busy_cores=busy,
        busy=busy_programs,
        gpus=gpus,
        gpus_unknown=gpus_unknown,
        topology=topology,
        topology_unknown=topology_unknown,
        ports=tuple(_read_network_ports(sys / "class/infiniband")),
        verbs_devices=any((dev / "infiniband").glob("uverbs*")),
        verbs_library=_can_load(VERBS_LIBRARY),
        gpu_direct=_has_gpu_direct(sys),
    )


def _observe_other_programs(
    usable: frozenset[int], watch_s: float
) -> tuple[float | None, tuple[BusyProgram, ...], float | None]:
    """Return the cores that other programs use, the busiest programs, and the swapped bytes/s."""
    own = psutil.Process()
    before, swap = _process_cpu_times(), _swapped_bytes()
    # Listing all processes takes a while on a busy host, so cores are timed separately.
    cores, began_s = psutil.cpu_times(percpu=True), time.monotonic()
    time.sleep(watch_s)
    cores_after, took_s = psutil.cpu_times(percpu=True), time.monotonic() - began_s
    after, swap_after = _process_cpu_times(), _swapped_bytes()
    if took_s <= 0 or len(cores) != len(cores_after) or max(usable) >= len(cores):
        return None, (), None
    busy = sum(_busy_s(cores_after[core]) - _busy_s(cores[core]) for core in usable) / took_s
    rates = {
        pid: (name, (spent_s - before[pid][1]) / (at_s - before[pid][2]))
        for pid, (name, spent_s, at_s) in after.items()
        if pid in before and at_s > before[pid][2]
    }
    mine = rates.pop(own.pid, ("", 0.0))[1]
    programs = sorted(
        (
            BusyProgram(program=name, cores=round(rate, 2), pid=pid)
            for pid, (name, rate) in rates.items()
            if rate >= 0.1
        ),
        key=lambda one: -one.cores,
    )
    swapped = None if swap is None or swap_after is None else (swap_after - swap) / took_s
    return min(max(0.0, busy - mine), len(usable)), tuple(programs[:5]), swapped


def _busy_s(times: object) -> float:
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in names))


def _process_cpu_times() -> dict[int, tuple[str, float, float]]:
    """Return the name and CPU time of each visible process by PID, and when it was read."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            times = process.cpu_times()
            spent_s = times.user + times.system
            found[process.pid] = (process.name(), spent_s, time.monotonic())
    return found


def _swapped_bytes() -> float | None:
    with suppress(OSError, RuntimeError, ValueError):
        swap = psutil.swap_memory()
        return float(swap.sin + swap.sout)
    return None


def _swap_used_bytes() -> int | None:
    with suppress(OSError, RuntimeError, ValueError):
        return int(psutil.swap_memory().used)
    return None


def _shared_memory_bytes() -> tuple[int, int] | None:
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _resource_limit(name: str) -> tuple[int | None, int | None]:
    """Return the soft and hard limit, −1 if unlimited and None if unknown."""
    kind = getattr(resource, name, None)
    if kind is None:
        return None, None
    soft, hard = resource.getrlimit(kind)
    return tuple(-1 if one == resource.RLIM_INFINITY else one for one in (soft, hard))  # type: ignore[return-value]


def _cpufreq_values(sys: Path, cpus: frozenset[int], name: str) -> tuple[str, ...] | None:
    found = {
        text
        for cpu in cpus
        if (text := read_text(sys / f"devices/system/cpu/cpu{cpu}/cpufreq/{name}")) is not None
    }
    return tuple(sorted(found)) or None


def _choice(text: str | None) -> str | None:
    """Return the word in brackets: "madvise" for "always [madvise] never"."""
    return None if text is None or "[" not in text else text.partition("[")[2].partition("]")[0]


def _local_rank_and_size(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    for names in _LOCAL:
        given = [environ.get(name, "") for name in names]
        if all(word.isdigit() for word in given):
            return int(given[0]), int(given[1])
    return None, None


def _read_network_ports(folder: Path) -> Iterator[NetworkPort]:
    for device in sorted(folder.glob("*")):
        numa = read_text(device / "device/numa_node")
        for port in sorted((device / "ports").glob("*")):
            state = read_text(port / "state")
            yield NetworkPort(
                device=device.name,
                port=int(port.name),
                state=state and state.partition(":")[2].strip(),
                rate=read_text(port / "rate"),
                link_layer=read_text(port / "link_layer"),
                numa_node=int(numa) if numa and numa.isdigit() else None,
            )


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _has_gpu_direct(sys: Path) -> bool | None:
    modules = sys / "module"
    if not modules.is_dir():
        return None
    return any((modules / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem"))
