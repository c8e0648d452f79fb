"""How busy devices and cores were over the time of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from outpace.records.units import show_bytes, show_seconds, show_share
from outpace.records.utilisation import DeviceSeries, HostSeries, Load, Utilisation
from outpace.report.document import Figure, Number, Table
from outpace.report.figures import Along, Line, Values, heat, lines, seconds, shares, sizes

_MOST_LINES = 6


@dataclass(frozen=True)
class _Row:
    """A device or core: shares over seconds since the run's first sample."""

    name: str
    ends_s: Sequence[float]
    shares: Values
    memory_bytes: Values
    mean: float | None


def utilisation(seen: Sequence[Utilisation]) -> list[Figure]:
    """Of each device, or of each core where there is none; and memory of devices or hosts."""
    devices = list(_devices(seen))
    rows = devices or list(_cores(seen))
    if not rows:
        return []
    what = "device" if devices else "core"
    memory = _memory(devices or list(_hosts(seen)), "device" if devices else "host")
    return [_busy(rows, what), *memory]


def _busy(rows: Sequence[_Row], what: str) -> Figure:
    title = f"Utilisation of each {what} over time"
    alt = "Mean share of time that each was busy: " + ", ".join(
        f"{row.name} {show_share(row.mean)}" for row in rows[:16]
    )
    alt += f" and {len(rows) - 16} more." if len(rows) > 16 else "."
    table = Table(title, (what, "busy, mean"), tuple(
        (row.name, Number(row.mean, show_share(row.mean))) for row in rows
    ))  # fmt: skip
    time = seconds([max(row.ends_s[-1] for row in rows)])
    one_clock = all(row.ends_s == rows[0].ends_s for row in rows)
    if len(rows) > _MOST_LINES and one_clock:
        return heat(
            title, alt, [row.name for row in rows], rows[0].ends_s, [row.shares for row in rows],
            shares(), "time", time, table,
        )  # fmt: skip
    return lines(
        title, alt, [Line(row.name, (row.ends_s,), row.shares) for row in rows],
        [Along("time", "time", time)], shares(), "busy", table,
        yaxis={"title": {"text": "busy (%)"}, "range": [0, 103], "automargin": True},
    )  # fmt: skip


def _memory(rows: Sequence[_Row], what: str) -> list[Figure]:
    known = [row for row in rows if any(value is not None for value in row.memory_bytes)]
    if not known:
        return []
    tops = [max(value for value in row.memory_bytes if value is not None) for row in known]
    unit, time = sizes(tops), seconds([max(row.ends_s[-1] for row in known)])
    title = f"Memory in use on each {what}, by everybody"
    alt = "At most " + ", ".join(
        f"{row.name} {show_bytes(top)}" for row, top in zip(known, tops, strict=True)
    )
    table = Table(title, (what, "highest"), tuple(
        (row.name, unit.cell(top)) for row, top in zip(known, tops, strict=True)
    ))  # fmt: skip
    series = [Line(row.name, (row.ends_s,), row.memory_bytes) for row in known[:16]]
    return [
        lines(
            title,
            f"{alt}.",
            series,
            [Along("time", "time", time)],
            unit,
            "memory",
            table,
            yaxis={
                "title": {"text": f"memory ({unit.name})"},
                "rangemode": "tozero",
                "automargin": True,
            },
        )
    ]


def _devices(seen: Sequence[Utilisation]) -> Iterator[_Row]:
    for one, before_s, host in _placed(seen):
        for device in one.devices:
            if any(device.run_memory_bytes) or not _known(device.run_memory_bytes):
                name = f"{host}GPU {device.index}"
                yield _row(name, one, before_s, device.utilisation, device)


def _cores(seen: Sequence[Utilisation]) -> Iterator[_Row]:
    for one, before_s, host in _placed(seen):
        for number, core in enumerate(one.host.cores):
            yield _row(f"{host}core {number}", one, before_s, core, one.host)


def _hosts(seen: Sequence[Utilisation]) -> Iterator[_Row]:
    for one, before_s, host in _placed(seen):
        yield _row(host.rstrip(": ") or "host", one, before_s, one.host.run_cores, one.host)


def _row(
    name: str, one: Utilisation, before_s: float, busy: Values, of: HostSeries | DeviceSeries
) -> _Row:
    ends_s = tuple(before_s + end_s for end_s in one.ends_s)
    lasted = [b - a for a, b in zip((0.0, *one.ends_s), one.ends_s, strict=False)]
    known = [(share, s) for share, s in zip(busy, lasted, strict=True) if share is not None]
    whole = sum(s for _, s in known)
    mean = sum(share * s for share, s in known) / whole if whole else None
    return _Row(name, ends_s, busy, of.memory_bytes, mean)


def _known(values: Values) -> bool:
    return any(value is not None for value in values)


def _placed(seen: Sequence[Utilisation]) -> Iterator[tuple[Utilisation, float, str]]:
    """Each series that has points, how long after the first it began, and its host's name."""
    with_points = [one for one in seen if one.ends_s]
    several = len({one.node for one in with_points}) > 1
    begins = [datetime.fromisoformat(one.started) for one in with_points]
    for one, began in zip(with_points, begins, strict=True):
        later_s = (began - min(begins)).total_seconds()
        part = f" from {show_seconds(later_s)}" if later_s > 1 else ""
        yield one, later_s, (f"host {one.node}{part}: " if several or part else "")


def averages_table(loads: Sequence[Load]) -> Table:
    """Means over the training, as result.json has them."""
    rows = []
    for load in loads:
        for device in load.devices:
            rows.append((
                f"host {load.node}: GPU {device.index}, {device.name}",
                Number(device.utilisation, show_share(device.utilisation)),
                Number(device.memory_bytes, show_bytes(device.memory_bytes)),
                _watts(device.power_w),
            ))  # fmt: skip
        host = load.host
        rows.append((
            f"host {load.node}: {len(host.cores)} cores",
            Number(host.utilisation, show_share(host.utilisation)),
            Number(host.memory_bytes, show_bytes(host.memory_bytes)),
            _watts(host.power_w),
        ))  # fmt: skip
    return Table("Means over the training", ("", "busy", "memory, highest", "power"), tuple(rows))


def _watts(power_w: float | None) -> Number:
    return Number(power_w, "n/a" if power_w is None else f"{power_w:.0f} W")
