"""CPUs of this host, as reported by Linux under /sys/devices/system."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from outpace.probing.hardware.procfs import MEMBERSHIP, MOUNTS, control_groups, read_text
from outpace.records.topology import Cache, CpuTopology, NumaNode, cpu_list, cpu_set

SYS = Path("/sys")
_KINDS = ("Data", "Instruction", "Unified")


def usable_cpus() -> tuple[int, ...]:
    """Return the CPUs that this process may use, which may be fewer than are visible."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota(membership: Path = MEMBERSHIP, mounts: Path = MOUNTS) -> tuple[float | None, bool]:
    """Return the smallest CPU quota of this process's cgroups, and whether any is readable."""
    quotas: list[float] = []
    known = False
    for group in control_groups("cpu", membership, mounts):
        both = group.read("cpu.max").split()  # version 2
        if not both:
            both = [group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")]
        known = known or both[0] != ""
        if len(both) == 2 and both[0].isdigit() and both[1].isdigit() and int(both[1]):
            quotas.append(int(both[0]) / int(both[1]))
    return min(quotas, default=None), known


def read_cpus(sys: Path = SYS) -> CpuTopology:
    """Read the packages, cores, NUMA nodes and caches of this host.

    Values that the kernel does not report are None or empty.
    """
    folder = sys / "devices/system/cpu"
    online = read_text(folder / "online")
    cpus = cpu_set(online) if online else frozenset(range(os.cpu_count() or 1))
    siblings, packages = set[str](), set[str]()
    for cpu in cpus:
        topology = folder / f"cpu{cpu}/topology"
        # Linux 5.5 renamed the file, and some virtual machines have only one of the two.
        shared = read_text(topology / "core_cpus_list") or read_text(
            topology / "thread_siblings_list"
        )
        package = read_text(topology / "physical_package_id")
        if shared:
            siblings.add(cpu_list(cpu_set(shared)))
        if package:
            packages.add(package)
    return CpuTopology(
        cpus=cpu_list(cpus),
        packages=len(packages) or None,
        cores=len(siblings) or None,
        siblings=tuple(sorted(siblings, key=lambda core: min(cpu_set(core)))),
        numa=tuple(_read_numa_nodes(sys / "devices/system/node")),
        caches=tuple(_read_caches(folder, cpus)),
    )


def _read_numa_nodes(folder: Path) -> list[NumaNode]:
    nodes = []
    for number in sorted(cpu_set(read_text(folder / "online") or "")):
        place = folder / f"node{number}"
        total = (read_text(place / "meminfo") or "").partition("MemTotal:")[2].split()
        nodes.append(
            NumaNode(
                number=number,
                cpus=read_text(place / "cpulist") or "",
                memory_bytes=int(total[0]) * 1024 if total else None,
                distances=tuple(map(int, (read_text(place / "distance") or "").split())),
            )
        )
    return nodes


def _read_caches(folder: Path, cpus: frozenset[int]) -> list[Cache]:
    """Return each kind of cache with its count. A cache shared by several CPUs counts once."""
    seen = set[tuple[int, Any, int, str]]()
    for cpu in cpus:
        for place in sorted((folder / f"cpu{cpu}/cache").glob("index*")):
            level, kind = read_text(place / "level"), read_text(place / "type")
            size, shared = read_text(place / "size"), read_text(place / "shared_cpu_list")
            if level and kind and kind in _KINDS and size and size.rstrip("K").isdigit() and shared:
                seen.add((int(level), kind, int(size.rstrip("K")) * 1024, shared))
    counts = Counter((level, kind, size, len(cpu_set(who))) for level, kind, size, who in seen)
    return [
        Cache(level=level, kind=kind, cache_bytes=size, count=count, shared_by=shared)
        for (level, kind, size, shared), count in sorted(counts.items())
    ]
