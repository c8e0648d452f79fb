"""Whether anything else used the machine while it was measured."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from outpace.probe.section import Section
from outpace.records.figure import Figure
from outpace.records.probed import Steadiness

# Of a core by others, or of all time by the hypervisor: more than this is said.
_OTHERS, _STOLEN = 0.15, 0.02
# Of all cores' time that others take: more than this, and figures of the processor are none. A
# product on two cores one of which is taken is no slower by half: it waits for a whole turn of the
# other program, in every call, and steadily so.
_DISTURBED = 0.10


class Used(NamedTuple):
    """Seconds of a host's cores; None where the kernel does not tell (as outside of Linux).

    `busy_s` and `stolen_s` of all cores, `own_s` of this process and of those that it started.
    """

    wall_s: float
    busy_s: float | None
    stolen_s: float | None
    own_s: float
    cores: int


class Steady:
    """Watches from its making on: reads the kernel's counters at both ends."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._begin = self._now()

    def used(self) -> Used:
        """Since it was made."""
        before, after = self._begin, self._now()
        busy_s, stolen_s = (
            None if a is None or b is None else b - a
            for a, b in zip(before[1:3], after[1:3], strict=True)
        )
        return Used(after.wall_s - before.wall_s, busy_s, stolen_s, after.own_s - before.own_s,
                    after.cores)  # fmt: skip

    def _now(self) -> Used:
        own_s = _own_s()
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
        return Used(time.monotonic(), busy_s, stolen_s, own_s, cores)


def _own_s() -> float:
    """Of this process, those that it waited for, and those that it started and that still run."""
    here = psutil.Process()
    total_s = 0.0
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
            total_s += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total_s


@contextmanager
def noted(into: list[Used]) -> Iterator[None]:
    """Put what was used meanwhile at the end of a list."""
    steady = Steady()
    yield
    into.append(steady.used())


def total(parts: Sequence[Used]) -> Used:
    """Of several spells on one host."""

    def summed(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(parts) else None

    return Used(
        sum(one.wall_s for one in parts), summed(one.busy_s for one in parts),
        summed(one.stolen_s for one in parts), sum(one.own_s for one in parts), parts[0].cores,
    )  # fmt: skip


def judged(hosts: Sequence[Sequence[Used]], throttled: Sequence[str] = ()) -> Steadiness:
    """What others used on the worst host. `hosts`: of each, what its ranks used."""
    told = [host for host in hosts if host[0].busy_s is not None and host[0].wall_s > 0]
    others = max((_others(host) for host in told), default=None)
    stolen = max((_stolen(host[0]) for host in told), default=None)
    where = "" if len(hosts) == 1 else " on one of the hosts"
    warnings = []
    if others is not None and others > _OTHERS:
        warnings.append(
            f"other programs used {others:.1f} cores{where} in the mean while this was measured: "
            "end them and probe again"
        )
    if stolen is not None and stolen > _STOLEN:
        warnings.append(f"the hypervisor gave {stolen:.0%} of the time{where} to other machines")
    return Steadiness(
        other_cores=others, stolen=stolen, throttled=tuple(throttled), warnings=tuple(warnings)
    )


def disturbed(hosts: Sequence[Sequence[Used]]) -> str | None:
    """Why what was measured on these hosts' processors is worth nothing; None where it is."""
    for host in hosts:
        if host[0].busy_s is None or host[0].wall_s <= 0:
            continue
        share = _others(host) / host[0].cores + _stolen(host[0])
        if share > _DISTURBED:
            return f"others used {share:.0%} of the processor's time while it was measured"
    return None


def withdrawn(section: Section, why: str) -> Section:
    """The section without values, and without advice and words that rest on them; samples stay."""

    def without(figure: Figure) -> Figure:
        return figure.model_copy(update={"value": None, "unstable": why})

    fits = (
        fit.model_copy(
            update={"latency": without(fit.latency), "bandwidth": without(fit.bandwidth)}
        )
        for fit in section.fits
    )
    return Section(tuple(map(without, section.figures)), (), section.notes, tuple(fits))


def _others(host: Sequence[Used]) -> float:
    busy_s = host[0].busy_s or 0.0
    return max(0.0, (busy_s - sum(rank.own_s for rank in host)) / host[0].wall_s)


def _stolen(first: Used) -> float:
    return max(0.0, (first.stolen_s or 0.0) / first.wall_s / first.cores)
