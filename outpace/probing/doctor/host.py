"""The doctor's checks of a host's CPUs, memory and limits."""

import math
from collections.abc import Iterator

from outpace.probing.doctor.common import UnknownFactError, join_names, make_finding, times
from outpace.records.finding import Finding
from outpace.records.inventory import Inventory, omp_threads
from outpace.records.topology import cpu_set
from outpace.records.units import show_bytes

_GIB = 2**30
_FILES_WANTED = 4096  # loader workers keep a descriptor open for each tensor that they send


def _usable_cpus(inventory: Inventory) -> frozenset[int]:
    return cpu_set(inventory.usable_cpus)


def _usable_cores(inventory: Inventory) -> float:
    cores = float(inventory.cpu.cores_of(_usable_cpus(inventory)))
    return cores if inventory.cpu_quota is None else min(cores, inventory.cpu_quota)


def quota(inventory: Inventory) -> Iterator[Finding]:
    """Find a container whose CPU quota is below its visible CPUs, so that threads are throttled."""
    name = "CPU quota"
    if not inventory.cpu_quota_known:
        raise UnknownFactError("no cgroup that limits this process's CPU time can be read")
    allowed, seen = inventory.cpu_quota, len(_usable_cpus(inventory))
    if allowed is None or allowed >= seen - 0.01:
        return
    threads = max(1, math.floor(allowed))
    yield make_finding(
        name,
        "severe" if seen >= 2 * allowed else "high",
        "the container may use fewer CPUs than it sees",
        f"{seen} CPUs are visible, but the cgroup's quota is {allowed:.3g}, so programs that "
        "start one thread per CPU are stopped for part of every period",
        f"raise the quota (docker --cpus={seen}, or limits.cpu in Kubernetes), or better "
        f"assign CPUs (--cpuset-cpus); until then OMP_NUM_THREADS={threads}",
        times(1, seen / allowed, "work on all visible CPUs", "quota against visible CPUs"),
    )


def threads(inventory: Inventory) -> Iterator[Finding]:
    """Find too many or too few threads for the cores, from OMP_NUM_THREADS and the local ranks."""
    name = "OMP_NUM_THREADS"
    text = inventory.settings.get(name)
    ranks, power = inventory.local_world_size or 1, _usable_cores(inventory)
    fair = max(1, math.floor(power / ranks))
    if text is None:
        if ranks > 1:
            yield make_finding(
                name,
                "high",
                "every rank starts as many threads as there are cores",
                f"OMP_NUM_THREADS is not set with {ranks} ranks on {power:.3g} cores",
                f"OMP_NUM_THREADS={fair}",
            )
        return
    count = omp_threads(text)
    if count is None:
        yield make_finding(name, "moderate", "not a valid number of threads", f"{name}={text}",
                    f"{name}={fair}")  # fmt: skip
        return
    if count * ranks > power + 0.01:
        who = f"{ranks} ranks × {count}" if ranks > 1 else f"{count}"
        yield make_finding(
            name,
            "high" if count * ranks >= 2 * power else "moderate",
            "more threads than cores",
            f"{name}={text}: {who} threads on {power:.3g} cores",
            f"{name}={fair}",
        )
    elif count == 1 and fair >= 2:
        why = "as torchrun sets it by default, " if ranks > 1 else ""
        yield make_finding(
            name,
            "low" if inventory.gpus else "high",
            "torch computes on only one of several cores",
            f"{name}=1, {why}with {fair} cores for each process",
            f"{name}={fair}, if the CPU computes or loads data in the training process",
            times(1, fair, "work on the CPU", f"1 thread instead of {fair}, at most"),
        )


def hyper_threads(inventory: Inventory) -> Iterator[Finding]:
    """Find cores that run two threads, which slow each other down in matmuls."""
    name = "hyper-threads"
    if not inventory.cpu.siblings:
        raise UnknownFactError("the kernel does not report which CPUs share a core")
    usable = _usable_cpus(inventory)
    cores = inventory.cpu.cores_of(usable)
    count = omp_threads(inventory.settings.get("OMP_NUM_THREADS", ""))
    ranks = inventory.local_world_size or 1
    if count is not None and cores < count * ranks <= len(usable):
        yield make_finding(
            name,
            "moderate",
            "each core runs two threads",
            f"{count * ranks} threads, {cores} cores with {len(usable)} hyper-threads",
            f"OMP_NUM_THREADS={max(1, cores // ranks)}: one for each core",
        )


def affinity(inventory: Inventory) -> Iterator[Finding]:
    """Find a process bound to part of the host's CPUs, a likely mistake if it is the only rank."""
    usable, online = _usable_cpus(inventory), cpu_set(inventory.cpu.cpus)
    if usable >= online or (inventory.local_world_size or 1) > 1:
        return
    yield make_finding(
        "CPU affinity",
        "moderate" if 2 * len(usable) <= len(online) else "low",
        "this process may run only on a part of the host's CPUs",
        f"{len(usable)} of {len(online)} CPUs ({inventory.usable_cpus})",
        "if that is not intended, check taskset, numactl, --cpuset-cpus or the batch system's "
        "--cpus-per-task",
    )


def numa(inventory: Inventory) -> Iterator[Finding]:
    """Find processes that are not bound to a NUMA node, whose memory may become remote."""
    name = "NUMA binding"
    if not inventory.cpu.numa:
        raise UnknownFactError("the kernel does not report NUMA nodes")
    usable = _usable_cpus(inventory)
    nodes = inventory.cpu.numa_of(usable)
    if len(nodes) < 2:
        return
    far = max((max(node.distances, default=10) for node in inventory.cpu.numa), default=10)
    ranks = inventory.local_world_size or 1
    how = "numactl --cpunodebind=N --membind=N for each rank, N the node of its GPU"
    if ranks == 1 and not inventory.gpus:
        how = f"one rank per node ({len(nodes)}), each under numactl --cpunodebind=N --membind=N"
    yield make_finding(
        name,
        "moderate" if ranks > 1 or not inventory.gpus else "low",
        "processes are not bound to a NUMA node",
        f"the {len(usable)} usable CPUs are on {len(nodes)} nodes; the farthest memory has "
        f"distance {far} (near is 10)",
        how,
    )


def governor(inventory: Inventory) -> Iterator[Finding]:
    """Find CPUs that save power instead of running at full clock."""
    name = "CPU governor"
    if inventory.governors is None:
        raise UnknownFactError("the kernel does not report it (as in most virtual machines)")
    preferences = inventory.energy_preferences or ()
    # With these drivers, the "powersave" governor reaches the full clock if the energy preference
    # allows it.
    own = inventory.scaling_driver in ("intel_pstate", "amd-pstate-epp")
    if own:
        saving = [one for one in preferences if one in ("power", "balance_power")]
    else:
        saving = [one for one in inventory.governors if one in ("powersave", "conservative")]
    if not saving:
        return
    yield make_finding(
        name,
        "moderate",
        "the processors are in a power-saving mode",
        f"{'energy preference' if own else 'governor'} {join_names(saving)} "
        f"({inventory.scaling_driver or 'unknown driver'})",
        "cpupower frequency-set -g performance, as root",
    )


def huge_pages(inventory: Inventory) -> Iterator[Finding]:
    """Find disabled huge pages, which increase TLB misses in large arrays."""
    if inventory.transparent_hugepages is None:
        raise UnknownFactError("the kernel does not report it")
    if inventory.transparent_hugepages == "never":
        yield make_finding(
            "huge pages",
            "low",
            "transparent huge pages are off",
            "never",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled as root, and "
            "THP_MEM_ALLOC_ENABLE=1 for torch",
        )


def swap(inventory: Inventory) -> Iterator[Finding]:
    """Find swapped memory, which is severe while swapping is active."""
    used, rate = inventory.swap_used_bytes, inventory.swapped_bytes_per_s
    if used is None:
        raise UnknownFactError("the kernel does not report it")
    remedy = (
        "end the programs that use the memory; then swapoff -a && swapon -a, as root, brings "
        "pages back"
    )
    if rate is not None and rate > 2**20:
        yield make_finding("swap", "severe", "memory is being swapped now",
                    f"{show_bytes(rate)}/s, {show_bytes(used)} in swap", remedy)  # fmt: skip
    elif used > max(256 * 2**20, 0.01 * (inventory.memory_bytes or 0)):
        yield make_finding("swap", "low", "part of the memory is in swap", show_bytes(used), remedy)


def shared_memory(inventory: Inventory) -> Iterator[Finding]:
    """Find a small /dev/shm, which loader workers and NCCL use to pass data (Docker: 64 MiB)."""
    size, free = inventory.shared_memory_bytes, inventory.shared_memory_free_bytes
    if size is None:
        raise UnknownFactError("there is no /dev/shm, or it cannot be read")
    remedy = (
        "docker run --ipc=host, or --shm-size=16g; in Kubernetes an emptyDir with medium: Memory"
    )
    if size < _GIB:
        yield make_finding(
            "/dev/shm",
            "severe" if size <= 64 * 2**20 else "high",
            "too small for loader workers and NCCL, which then end with a bus error",
            f"{show_bytes(size)} in all",
            remedy,
        )
    elif free is not None and free < _GIB:
        yield make_finding(
            "/dev/shm",
            "high",
            "nearly full",
            f"{show_bytes(free)} of {show_bytes(size)}",
            "remove files of ended programs there (ls -l /dev/shm)",
        )


def open_files(inventory: Inventory) -> Iterator[Finding]:
    """Find a low limit on open files, which workers need to share tensors."""
    soft, hard = inventory.open_files_limit, inventory.open_files_hard_limit
    if soft is None:
        raise UnknownFactError("this system has no such limit")
    if 0 <= soft < _FILES_WANTED:
        most = "without limit" if hard == -1 else f"at most {hard}"
        yield make_finding(
            "open files",
            "low",
            "the limit on open files is low: with many loader workers, loading fails with “Too "
            "many open files”",
            f"{soft}, {most} without root",
            f"ulimit -n {65536 if hard in (None, -1) else min(65536, hard or 0)}",
        )


def other_programs(inventory: Inventory) -> Iterator[Finding]:
    """Find other programs on the cores, which slow down steps and disturb measurements."""
    busy, count = inventory.other_busy_cores, len(_usable_cpus(inventory))
    if busy is None:
        raise UnknownFactError("outpace could not read the load of the cores")
    if busy < max(0.3, 0.05 * count):
        return
    names = join_names(
        [
            f"{one.program} ({one.cores:.1f} cores{'' if one.pid is None else f', pid {one.pid}'})"
            for one in inventory.busy
        ]
    )
    yield make_finding(
        "other programs",
        "high" if busy >= 0.5 * count else "moderate",
        "the cores are in use",
        f"{busy:.1f} of {count} cores are busy: {names or 'by programs outside this container'}",
        "wait for them, end them, or assign them other cores (taskset)",
        times(
            1,
            (count + busy) / count,
            "work on all cores",
            "from the present load, if cores are shared fairly",
        ),
    )


HOST_CHECKS = {
    "CPU quota": quota,
    "OMP_NUM_THREADS": threads,
    "other programs": other_programs,
    "/dev/shm": shared_memory,
    "swap": swap,
    "NUMA binding": numa,
    "CPU affinity": affinity,
    "hyper-threads": hyper_threads,
    "CPU governor": governor,
    "huge pages": huge_pages,
    "open files": open_files,
}
