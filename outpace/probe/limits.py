"""How much memory this process has, and how much it may have before the kernel ends it."""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from outpace.trace import resident

# Version 1 says "no limit" by a number near 2^63.
_NO_LIMIT = 2**60


def anonymous_bytes() -> int:
    """Anonymous resident memory; all that is resident, where the kernel does not tell it apart."""
    found = resident.anonymous_bytes()
    return int(psutil.Process().memory_info().rss) if found is None else found


def give_back_free() -> None:
    """Let the C library return memory that it keeps for later, where it can (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class Cgroup:
    """A control group with a limit on memory: the kernel ends a process of it beyond that."""

    folder: Path
    version: int

    @cached_property
    def limit_bytes(self) -> int | None:
        """None where it has none."""
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        text = _read(self.folder / name)
        limit = int(text) if text.isdigit() else _NO_LIMIT
        return limit if limit < _NO_LIMIT else None

    def used_bytes(self) -> int:
        """Memory of all its processes, without what is a copy of files and can be dropped."""
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        prefix = "" if self.version == 2 else "total_"
        lines = _read(self.folder / "memory.stat").splitlines()
        stat = dict(line.split(maxsplit=1) for line in lines)
        files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return int(_read(self.folder / name) or 0) - files


def find_cgroup(
    membership: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mountinfo")
) -> Cgroup | None:
    """The control group with the least limit of those that this process is in; None without."""
    limited = [group for group in _groups(membership, mounts) if group.limit_bytes is not None]
    return min(limited, key=lambda group: group.limit_bytes or 0, default=None)


def _groups(membership: Path, mounts: Path) -> Iterator[Cgroup]:
    """This process's groups that account for memory, and all that these are inside of."""
    mounted = dict(_mounted(mounts))
    for line in _read(membership).splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" else 1
        if version not in mounted or (version == 1 and "memory" not in controllers.split(",")):
            continue
        root, top = mounted[version]
        # In a container the mount shows the group itself, whatever its path outside.
        inside = path.removeprefix(root.rstrip("/")) if root != "/" else path
        folder = top / inside.strip("/")
        while not folder.is_dir() and folder != top:
            folder = folder.parent
        while True:
            yield Cgroup(folder, version)
            if folder == top:
                break
            folder = folder.parent


def _mounted(mounts: Path) -> Iterator[tuple[int, tuple[str, Path]]]:
    """By version: which group is mounted, and where (proc(5), mountinfo)."""
    for line in _read(mounts).splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup2":
            yield 2, (root, Path(place))
        elif kind == "cgroup" and "memory" in options.split(","):
            yield 1, (root, Path(place))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
