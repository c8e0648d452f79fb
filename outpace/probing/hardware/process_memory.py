"""Memory that this process uses, and how much is left before the kernel kills it."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from outpace.probing.hardware.procfs import MEMBERSHIP, MOUNTS, ControlGroup, control_groups
from outpace.trace import resident

# cgroup version 1 represents "no limit" by a number near 2^63.
_NO_LIMIT = 2**60


def anonymous_bytes() -> int:
    """Return the bytes of this process's anonymous resident memory.

    Where the kernel does not report them separately, file-backed memory is included.
    """
    found = resident.anonymous_bytes()
    return int(psutil.Process().memory_info().rss) if found is None else found


def give_back_free() -> None:
    """Ask the C library to return free memory to the system (glibc only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class Cgroup(ControlGroup):
    """A control group with a memory limit, above which the kernel kills one of its processes."""

    @cached_property
    def limit_bytes(self) -> int | None:
        """Memory limit in bytes, or None."""
        text = self.read("memory.max" if self.version == 2 else "memory.limit_in_bytes")
        limit = int(text) if text.isdigit() else _NO_LIMIT
        return limit if limit < _NO_LIMIT else None

    def used_bytes(self) -> int:
        """Return the memory that the group uses, without file caches that can be dropped."""
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        prefix = "" if self.version == 2 else "total_"
        stat = dict(line.split(maxsplit=1) for line in self.read("memory.stat").splitlines())
        files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return int(self.read(name) or 0) - files


def find_cgroup(membership: Path = MEMBERSHIP, mounts: Path = MOUNTS) -> Cgroup | None:
    """Return this process's control group with the lowest memory limit, or None."""
    groups = control_groups("memory", membership, mounts)
    memory = [Cgroup(group.folder, group.version) for group in groups]
    limited = [group for group in memory if group.limit_bytes is not None]
    return min(limited, key=lambda group: group.limit_bytes or 0, default=None)


def free_bytes() -> int:
    """Return the host's available memory, or what the control group still allows if less."""
    available, group = int(psutil.virtual_memory().available), find_cgroup()
    if group is None:
        return available
    return min(available, max(0, (group.limit_bytes or 0) - group.used_bytes()))
