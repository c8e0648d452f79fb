"""Detection of other programs' use of the machine during a measurement."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from outpace.probing.timing.section import ProbeSection
from outpace.records.figure import Figure
from outpace.records.probe_results import Steadiness

# Use by others is reported above these shares: of one core's time by other programs, and of all
# time by the hypervisor.
_OTHERS, _STOLEN = 0.15, 0.02
# Share of all cores' time used by others above which the processor's figures are invalid. If
# another program takes one of two cores, a matmul is more than twice as slow, because every call
# waits for a whole time slice of that program.
_DISTURBED = 0.10


class CoreSeconds(NamedTuple):
    """CPU seconds that were used on a host during a period of `wall_s`.

    `busy_s` are those of all programs, and `stolen_s` those that a hypervisor gave to other
    machines, both summed over all cores; None if the kernel does not report them (outside of
    Linux). `probe_s` are those of this process and its children.
    """

    wall_s: float
    busy_s: float | None
    stolen_s: float | None
    probe_s: float
    cores: int


class InterferenceWatch:
    """Reader of the kernel's CPU counters, which measures the CPU time used since its creation."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._begin = self._read_counters()

    def read_use(self) -> CoreSeconds:
        """Return the CPU time used since this object was created."""
        before, after = self._begin, self._read_counters()
        busy_s, stolen_s = (
            None if a is None or b is None else b - a
            for a, b in zip(before[1:3], after[1:3], strict=True)
        )
        wall_s, probe_s = after.wall_s - before.wall_s, after.probe_s - before.probe_s
        return CoreSeconds(wall_s, busy_s, stolen_s, probe_s, after.cores)

    def _read_counters(self) -> CoreSeconds:
        probe_s = _probe_cpu_s()
        busy_s = stolen_s = None
        try:
            first, *rest = self._stat.read_text(encoding="ascii").splitlines()
            # proc(5): user nice system idle iowait irq softirq steal guest …, in ticks.
            user, nice, system, _, _, irq, softirq, stolen = map(int, first.split()[1:9])
            tick_s = 1 / os.sysconf("SC_CLK_TCK")
            busy_s = (user + nice + system + irq + softirq) * tick_s
            stolen_s = stolen * tick_s
            cores = sum(line.startswith("cpu") for line in rest)
        except (OSError, ValueError):
            cores = os.cpu_count() or 1
        return CoreSeconds(time.monotonic(), busy_s, stolen_s, probe_s, cores)


def _probe_cpu_s() -> float:
    """Return the CPU seconds of this process and its children, running or finished."""
    here = psutil.Process()
    total_s = 0.0
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
            total_s += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total_s


@contextmanager
def record_use(into: list[CoreSeconds]) -> Iterator[None]:
    """Append the CPU time used during the context to a list."""
    steady = InterferenceWatch()
    yield
    into.append(steady.read_use())


def total(parts: Sequence[CoreSeconds]) -> CoreSeconds:
    """Return the sum of the CPU seconds of several periods on one host."""

    def sum_known(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(parts) else None

    return CoreSeconds(
        sum(one.wall_s for one in parts), sum_known(one.busy_s for one in parts),
        sum_known(one.stolen_s for one in parts), sum(one.probe_s for one in parts), parts[0].cores,
    )  # fmt: skip


def judge_use(hosts: Sequence[Sequence[CoreSeconds]], throttled: Sequence[str] = ()) -> Steadiness:
    """Assess how much other programs used the busiest host.

    `hosts` holds, for each host, what its ranks recorded.
    """
    told = [host for host in hosts if host[0].busy_s is not None and host[0].wall_s > 0]
    others = max((_other_cores(host) for host in told), default=None)
    stolen = max((_stolen_share(host[0]) for host in told), default=None)
    where = "" if len(hosts) == 1 else " on one of the hosts"
    warnings = []
    if others is not None and others > _OTHERS:
        warnings.append(
            f"other programs used {others:.1f} cores{where} on average during the measurement. "
            "End them and probe again"
        )
    if stolen is not None and stolen > _STOLEN:
        warnings.append(f"the hypervisor gave {stolen:.0%} of the time{where} to other machines")
    return Steadiness(
        other_cores=others, stolen=stolen, throttled=tuple(throttled), warnings=tuple(warnings)
    )


def disturbance(hosts: Sequence[Sequence[CoreSeconds]]) -> str | None:
    """Explain why measurements on these hosts' CPUs are invalid; None if they are valid."""
    for host in hosts:
        if host[0].busy_s is None or host[0].wall_s <= 0:
            continue
        share = _other_cores(host) / host[0].cores + _stolen_share(host[0])
        if share > _DISTURBED:
            return f"other programs used {share:.0%} of the processor time during the measurement"
    return None


def withdraw_values(section: ProbeSection, why: str) -> ProbeSection:
    """Return a copy of a section without the values of its figures, and without its advice.

    The samples are kept. `why` is the reason, and is stored with each figure.
    """

    def drop_value(figure: Figure) -> Figure:
        return figure.model_copy(update={"value": None, "unstable": why})

    fits = (
        fit.model_copy(
            update={"latency": drop_value(fit.latency), "bandwidth": drop_value(fit.bandwidth)}
        )
        for fit in section.fits
    )
    return ProbeSection(tuple(map(drop_value, section.figures)), (), section.notes, tuple(fits))


def _other_cores(host: Sequence[CoreSeconds]) -> float:
    busy_s = host[0].busy_s or 0.0
    return max(0.0, (busy_s - sum(rank.probe_s for rank in host)) / host[0].wall_s)


def _stolen_share(first: CoreSeconds) -> float:
    return max(0.0, (first.stolen_s or 0.0) / first.wall_s / first.cores)
