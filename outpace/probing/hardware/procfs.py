"""Linux files that describe a host, and the control groups of this process."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMBERSHIP, MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")


def read_text(path: Path) -> str | None:
    """Return the stripped text of a small kernel file; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


@dataclass(frozen=True)
class ControlGroup:
    """A control group (cgroup) in version 1 or 2 of the kernel's interface."""

    folder: Path
    version: int

    def read(self, name: str) -> str:
        """Read one of the group's files; return '' if it cannot be read."""
        return read_text(self.folder / name) or ""


def control_groups(
    controller: str, membership: Path = MEMBERSHIP, mounts: Path = MOUNTS
) -> Iterator[ControlGroup]:
    """Yield this process's control groups for a controller ("memory", "cpu"), and their parents."""
    mounted = dict(_find_mounts(controller, mounts))
    for line in (read_text(membership) or "").splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" else 1
        if version not in mounted or (version == 1 and controller not in controllers.split(",")):
            continue
        root, top = mounted[version]
        # In a container, the mount shows the group itself, regardless of its path outside.
        inside = path.removeprefix(root.rstrip("/")) if root != "/" else path
        folder = top / inside.strip("/")
        while not folder.is_dir() and folder != top:
            folder = folder.parent
        for one in (folder, *folder.parents):
            yield ControlGroup(one, version)
            if one == top:
                break


def _find_mounts(controller: str, mounts: Path) -> Iterator[tuple[int, tuple[str, Path]]]:
    """Yield the cgroup version, the root and the mount point of each cgroup mount.

    Mounts of version 1 are left out unless they have the `controller`. The file `mounts` has the
    format of mountinfo, described in proc(5).
    """
    for line in (read_text(mounts) or "").splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup2":
            yield 2, (root, Path(place))
        elif kind == "cgroup" and controller in options.split()[-1].split(","):
            yield 1, (root, Path(place))
