"""Charts of the utilisation of devices and cores over a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from outpace.records.units import show_bytes, show_seconds, show_share
from outpace.records.utilisation import DeviceSeries, HostSeries, Load, Utilisation
from outpace.reporting.charts.downsample import Floats
from outpace.reporting.charts.figures import (
    AxisChoice,
    LineSeries,
    Values,
    axis,
    heat,
    join_items,
    lines,
    seconds,
    shares,
    sizes,
)
from outpace.reporting.render.document import Chart, DataTable, Number

_MOST_LINES = 6
_MOST_ROWS = 256  # with more rows, draw the means of hosts
_COLUMNS = 400
_MOST_CURVES = 16  # maximum number of memory curves


@dataclass(frozen=True)
class _Row:
    """Samples of a device or core over time; NaN if unknown.

    Each sample covers the time from `begins_s` to `ends_s`, in seconds since the start of the first
    one. `shares` is the busy share of that time (0 to 1). Samples leave out the time between a
    run's end and its resumption.
    """

    host: str
    name: str
    begins_s: Floats
    ends_s: Floats
    shares: Floats
    memory_bytes: Floats

    @property
    def mean(self) -> float | None:
        known = ~np.isnan(self.shares)
        lasted_s = (self.ends_s - self.begins_s)[known]
        whole_s = float(lasted_s.sum())
        return float((self.shares[known] * lasted_s).sum()) / whole_s if whole_s else None

    def prepend(self, earlier: "_Row") -> "_Row":
        """Return this row after an earlier one of the same name, with a gap between the two."""
        gap = np.array([np.nan])
        begin_s = self.begins_s[:1]
        return _Row(
            self.host, self.name,
            np.concatenate([earlier.begins_s, begin_s, self.begins_s]),
            np.concatenate([earlier.ends_s, begin_s, self.ends_s]),
            np.concatenate([earlier.shares, gap, self.shares]),
            np.concatenate([earlier.memory_bytes, gap, self.memory_bytes]),
        )  # fmt: skip

    def resample(self, edges_s: Floats) -> Floats:
        """Return the mean share in each interval between edges, weighted by time; NaN if none."""
        known = ~np.isnan(self.shares)
        lasted_s = np.where(known, self.ends_s - self.begins_s, 0.0)
        known_s = self._sums_between(edges_s, lasted_s)
        busy_s = self._sums_between(edges_s, lasted_s * np.where(known, self.shares, 0.0))
        enough = known_s > 1e-6 * np.diff(edges_s)
        return np.where(enough, busy_s / np.where(enough, known_s, 1.0), np.nan)

    def _sums_between(self, edges_s: Floats, each: Floats) -> Floats:
        """Return the total amount in each interval between edges. `each` has the samples' amounts.

        A sample's amount is spread evenly over its time.
        """
        sums = np.cumsum(each)
        times_s = np.column_stack([self.begins_s, self.ends_s]).ravel()
        found = np.interp(edges_s, times_s, np.column_stack([sums - each, sums]).ravel())
        return np.diff(found)


def utilisation(series: Sequence[Utilisation]) -> list[Chart]:
    """Draw how busy the devices were over time, and their memory.

    If no devices were recorded, draw the CPU's cores and the hosts' memory.
    """
    devices = _merge_rows(_device_rows(series))
    rows = devices or _merge_rows(_core_rows(series))
    if not rows:
        return []
    what = "device" if devices else "core"
    memory = _memory_charts(
        devices or _merge_rows(_host_rows(series)), "device" if devices else "host"
    )
    return [_busy_chart(rows, what), *memory]


def _merge_rows(rows: Iterator[_Row]) -> list[_Row]:
    """Merge rows with equal names, whose times must be in order."""
    found: dict[str, _Row] = {}
    for row in rows:
        found[row.name] = row.prepend(found[row.name]) if row.name in found else row
    return list(found.values())


def _busy_chart(rows: Sequence[_Row], what: str) -> Chart:
    title = f"Utilisation of each {what} over time"
    means = {row.name: row.mean for row in rows}
    table = DataTable(title, (what, "busy, mean"), tuple(
        (name, Number(mean, show_share(mean))) for name, mean in means.items()
    ))  # fmt: skip
    text = join_items([f"{name} {show_share(mean)}" for name, mean in means.items()], 16)
    alt = f"Mean share of time that each was busy: {text}"
    end_s = max(float(row.ends_s[-1]) for row in rows)
    if len(rows) > _MOST_LINES:
        return _heat_map(title, alt, rows, what, end_s, table)
    return lines(
        title, alt,
        [LineSeries(row.name, (_to_list(row.ends_s),), _to_list(row.shares)) for row in rows],
        [AxisChoice("time", "time", seconds([end_s]))], shares(), "busy", table,
        yaxis=axis("busy", shares(), range=[0, 103]),
    )  # fmt: skip


def _heat_map(
    title: str, alt: str, rows: Sequence[_Row], what: str, end_s: float, table: DataTable
) -> Chart:
    """Draw a heat map. Rows are resampled to common times, since each was sampled at its own."""
    columns = min(_COLUMNS, max(len(row.ends_s) for row in rows))
    edges_s = np.linspace(0.0, end_s, columns + 1)
    drawn = {row.name: row.resample(edges_s) for row in rows}
    if len(rows) > _MOST_ROWS:
        title = f"Utilisation over time: the mean of each host's {what}s"
        drawn = _average_hosts(rows, drawn)
    alt += (
        f"Each point is the mean of {show_seconds(end_s / columns)}, so shorter peaks are "
        "smoothed out."
    )
    return heat(
        title, alt, list(drawn), _to_list((edges_s[1:] + edges_s[:-1]) / 2),
        [_to_list(row.round(3)) for row in drawn.values()], shares(), "time", seconds([end_s]),
        table,
    )  # fmt: skip


def _average_hosts(rows: Sequence[_Row], drawn: dict[str, Floats]) -> dict[str, Floats]:
    found = {}
    for host in dict.fromkeys(row.host for row in rows):
        own = np.stack([drawn[row.name] for row in rows if row.host == host])
        known = (~np.isnan(own)).sum(0)
        found[host] = np.where(known, np.nansum(own, 0) / np.maximum(known, 1), np.nan)
    return found


def _to_list(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


def _memory_charts(rows: Sequence[_Row], what: str) -> list[Chart]:
    known = [row for row in rows if not np.isnan(row.memory_bytes).all()]
    if not known:
        return []
    tops = [float(np.nanmax(row.memory_bytes)) for row in known]
    unit, time = sizes(tops), seconds([max(float(row.ends_s[-1]) for row in known)])
    title = f"Memory in use on each {what}, by all processes"
    each = list(zip((row.name for row in known), tops, strict=True))
    text = join_items([f"{name} {show_bytes(top)}" for name, top in each], _MOST_CURVES)
    table = DataTable(title, (what, "highest"), tuple((name, unit.cell(top)) for name, top in each))
    series = [
        LineSeries(row.name, (_to_list(row.ends_s),), _to_list(row.memory_bytes))
        for row in known[:_MOST_CURVES]
    ]
    if len(known) > _MOST_CURVES:
        title += f": {_MOST_CURVES} of {len(known)}"
    return [
        lines(
            title, f"At most {text}", series, [AxisChoice("time", "time", time)], unit, "memory",
            table,            yaxis=axis("memory", unit, rangemode="tozero"),
        )
    ]  # fmt: skip


def _device_rows(series: Sequence[Utilisation]) -> Iterator[_Row]:
    for one, before_s, host in _align_series(series):
        for device in one.devices:
            memory = device.run_memory_bytes
            if any(memory) or all(one is None for one in memory):
                name = f"GPU {device.index}"
                yield _make_row(host, name, one, before_s, device.utilisation, device)


def _core_rows(series: Sequence[Utilisation]) -> Iterator[_Row]:
    for one, before_s, host in _align_series(series):
        for number, core in enumerate(one.host.cores):
            yield _make_row(host, f"core {number}", one, before_s, core, one.host)


def _host_rows(series: Sequence[Utilisation]) -> Iterator[_Row]:
    for one, before_s, host in _align_series(series):
        yield _make_row(host, "", one, before_s, one.host.run_cores, one.host)


def _make_row(
    host: str, name: str, series: Utilisation, begin_s: float, busy: Values,
    memory_source: HostSeries | DeviceSeries,
) -> _Row:  # fmt: skip
    ends_s = begin_s + np.array(series.ends_s)
    return _Row(
        host or "host", ": ".join(filter(None, (host, name))) or "host",
        np.concatenate([[begin_s], ends_s[:-1]]), ends_s, _to_array(busy),
        _to_array(memory_source.memory_bytes),
    )  # fmt: skip


def _to_array(values: Values) -> Floats:
    return np.array(values, np.float64)  # None becomes NaN


def _align_series(series: Sequence[Utilisation]) -> Iterator[tuple[Utilisation, float, str]]:
    """Yield each series that has samples, the time when it begins, and its host's name.

    Series are in order of host and time. The time is in seconds since the start of the earliest
    series. The name is '' if all series are of one host.
    """
    with_points = sorted(
        (one for one in series if one.ends_s), key=lambda one: (one.node, _start_time(one))
    )
    several = len({one.node for one in with_points}) > 1
    first = min(map(_start_time, with_points), default=None)
    for one in with_points:
        later_s = (_start_time(one) - (first or _start_time(one))).total_seconds()
        yield one, later_s, f"host {one.node}" if several else ""


def _start_time(series: Utilisation) -> datetime:
    return datetime.fromisoformat(series.started)


def averages_table(loads: Sequence[Load]) -> DataTable:
    """Return a table of the mean loads of devices and hosts over the training (result.json)."""
    rows = []
    for load in loads:
        for device in load.devices:
            rows.append((
                f"host {load.node}: GPU {device.index}, {device.name}",
                Number(device.utilisation, show_share(device.utilisation)),
                Number(device.memory_bytes, show_bytes(device.memory_bytes)),
                _watts_cell(device.power_w),
                _clock_cell(device.clock_hz),
            ))  # fmt: skip
        host = load.host
        rows.append((
            f"host {load.node}: {len(host.cores)} cores",
            Number(host.utilisation, show_share(host.utilisation)),
            Number(host.memory_bytes, show_bytes(host.memory_bytes)),
            _watts_cell(host.power_w),
            _clock_cell(host.clock_hz),
        ))  # fmt: skip
    return DataTable("Means over the training", ("", "busy", "memory, highest", "power", "clock"),
                 tuple(rows))  # fmt: skip


def _watts_cell(power_w: float | None) -> Number:
    return Number(power_w, "n/a" if power_w is None else f"{power_w:.0f} W")


def _clock_cell(hz: float | None) -> Number:
    return Number(hz, "n/a" if hz is None else f"{hz / 1e9:.2f} GHz")
