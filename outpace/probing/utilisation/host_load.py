"""Load of this host, and the part that a run causes: cores, memory, processes, power."""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import psutil

from outpace.probing.hardware.cpus import usable_cpus
from outpace.probing.hardware.procfs import read_text
from outpace.records.utilisation import HostLoad

RAPL = Path("/sys/class/powercap")
# Maximum fraction of a core's time for finding new processes of a run, which lists all processes.
_SEARCH_SHARE = 1 / 1000


class Rate:
    """Rate per second of a counter, which may wrap around after `wraps_at`."""

    def __init__(self, wraps_at: float | None = None) -> None:
        self._wraps_at = wraps_at
        self._last: tuple[float, float] | None = None

    def per_s(self, count: float | None, now_s: float) -> float | None:
        """Return the rate since the previous call; None on the first call, or if unknown."""
        last, self._last = self._last, None if count is None else (count, now_s)
        if last is None or count is None or now_s <= last[1]:
            return None
        risen = count - last[0]
        if risen < 0:
            if self._wraps_at is None:
                return None  # the counter was reset
            risen += self._wraps_at
        return risen / (now_s - last[1])


class Processes:
    """The processes of a run on this host: the living `roots` and their descendants.

    Once a root has exited, its descendants are no longer known to belong to the run.
    """

    def __init__(self, roots: Collection[int]) -> None:
        self._roots = {pid: process for pid in roots if (process := _open_process(pid)) is not None}
        self._known: dict[int, psutil.Process] = {}
        self._running: set[int] = set()
        self._search_after_s = 0.0
        self._find_descendants()

    @property
    def pids(self) -> frozenset[int]:
        """PIDs that were running at the last call of `read_usage`."""
        return frozenset(self._running)

    def read_usage(self) -> tuple[float, int] | None:
        """Return CPU seconds and resident bytes; None if all processes have exited.

        The time of an exited process counts once its parent has waited for it. The bytes exclude
        shared and file-backed memory.
        """
        if time.monotonic() >= self._search_after_s:
            self._find_descendants()
        spent_s, resident_bytes, self._running = 0.0, 0, set()
        for pid, process in list(self._known.items()):
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
                    if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                        self._running.add(pid)
            except (psutil.Error, OSError):
                del self._known[pid]
                continue
            spent_s += times.user + times.system + times.children_user + times.children_system
            resident_bytes += max(0, memory.rss - getattr(memory, "shared", 0))
        return (spent_s, resident_bytes) if self._running else None

    def _find_descendants(self) -> None:
        began_s = time.thread_time()
        for root in self._roots.values():
            with suppress(psutil.Error, OSError):
                found = [root, *root.children(recursive=True)]
                self._known |= {p.pid: p for p in found if p.pid not in self._known}
        cost_s = time.thread_time() - began_s
        self._search_after_s = time.monotonic() + cost_s / _SEARCH_SHARE


def _open_process(pid: int) -> psutil.Process | None:
    with suppress(psutil.Error):
        return psutil.Process(pid)
    return None


class HostReader:
    """Reader of a host's load. Each reading covers the time since the previous one.

    `rapl` is the kernel's folder of energy counters, which only root can read on many systems.
    """

    def __init__(self, processes: Processes | None = None, rapl: Path = RAPL) -> None:
        self._processes = processes
        self._cores = usable_cpus()
        self._core_times = _core_times()
        self._run_cores = Rate()
        self._energy_counters = [(Rate(wraps), read) for read, wraps in _energy_counters(rapl)]
        self._read_usage(time.monotonic())
        self._read_power_w(time.monotonic())

    def read(self, now_s: float) -> HostLoad:
        """Return the load since the last call; `now_s` is a value of time.monotonic()."""
        before, self._core_times = self._core_times, _core_times()
        run_cores, run_memory_bytes = self._read_usage(now_s)
        memory = psutil.virtual_memory()
        return HostLoad(
            cores=tuple(
                _busy_share(before[core], self._core_times[core])
                for core in self._cores
                if core < min(len(before), len(self._core_times))
            ),
            run_cores=run_cores,
            memory_total_bytes=memory.total,
            memory_bytes=memory.total - memory.available,
            run_memory_bytes=run_memory_bytes,
            power_w=self._read_power_w(now_s),
            clock_hz=_clock_hz(),
        )

    def _read_usage(self, now_s: float) -> tuple[float | None, int | None]:
        seen = self._processes.read_usage() if self._processes else None
        if seen is None:
            return None, None
        return self._run_cores.per_s(seen[0], now_s), seen[1]

    def _read_power_w(self, now_s: float) -> float | None:
        rates = [rate.per_s(read(), now_s) for rate, read in self._energy_counters]
        known = [joules for joules in rates if joules is not None]
        return sum(known) / 1e6 if known and len(known) == len(rates) else None


def _core_times() -> list[tuple[float, float]]:
    """Return the idle seconds (including I/O waits) and the total seconds of each core."""
    found = []
    for times in psutil.cpu_times(percpu=True):
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        found.append((times.idle + getattr(times, "iowait", 0.0), sum(times) - guests))
    return found


def _clock_hz() -> float | None:
    with suppress(Exception):  # psutil's errors depend on the system
        found = psutil.cpu_freq()
        return found.current * 1e6 if found is not None and found.current > 0 else None
    return None


def _busy_share(before: tuple[float, float], now: tuple[float, float]) -> float | None:
    """Return the busy fraction between two readings; None if they are within one kernel tick."""
    passed_s = now[1] - before[1]
    if passed_s <= 0:
        return None
    return min(1.0, max(0.0, 1 - (now[0] - before[0]) / passed_s))


def _energy_counters(rapl: Path) -> list[tuple[Callable[[], float | None], float | None]]:
    """Return, for each CPU package, a reader of its energy (µJ) and the wrap-around value."""

    def reader(path: Path) -> Callable[[], float | None]:
        return lambda: _read_number(path)

    return [
        (reader(zone / "energy_uj"), _read_number(zone / "max_energy_range_uj"))
        for zone in sorted(rapl.glob("intel-rapl:*"))
        if zone.name.count(":") == 1  # deeper folders are parts of these
    ]


def _read_number(path: Path) -> float | None:
    with suppress(ValueError):
        return float(read_text(path) or "")
    return None
