"""Utilisation of a host and its devices during training: averages and time series."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from outpace.records.base import Record, entry

Values = tuple[int | float | None, ...]
_DISTURBING = 0.25  # share of a host's cores above which use by other processes is reported


def _check_time(text: str) -> str:
    try:
        known = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        known = False
    if not known:
        raise ValueError(
            f"{text!r} is not a time with a time zone, such as 2026-11-22T12:00:00+00:00"
        )
    return text


Time = Annotated[str, AfterValidator(_check_time)]

_UTILISATION = "share of time in which the device computed, 0 to 1"
_OF_RUN = "used by the run's processes; None if they cannot be distinguished from others"


class DeviceLoad(Record):
    """Load of an accelerator over a period. Fields not named `run_…` include all processes."""

    index: NonNegativeInt = Field(description="the driver's index, over all devices of the host")
    name: str
    memory_total_bytes: int | None = None
    utilisation: float | None = entry(_UTILISATION)
    run_utilisation: float | None = entry(_OF_RUN)
    memory_bytes: int | None = entry("maximum over the period")
    run_memory_bytes: int | None = entry(_OF_RUN)
    power_w: float | None = None
    clock_hz: float | None = entry("clock of the multiprocessors")
    pcie_rx_bytes_per_s: float | None = entry("into the device")
    pcie_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = entry("into the device, over all links")
    nvlink_tx_bytes_per_s: float | None = None


class HostLoad(Record):
    """Load of CPU and host memory over a period. Fields not named `run_…` include all processes."""

    cores: Values = entry("share of time in which each core was busy", ())
    run_cores: float | None = entry(
        "cores that the run's processes kept busy: 1.5 is one and a half"
    )
    memory_total_bytes: int | None = None
    memory_bytes: int | None = entry("maximum over the period")
    run_memory_bytes: int | None = entry(
        "maximum resident memory that is neither shared nor backed by files"
    )
    power_w: float | None = entry("power of the processors, by RAPL")
    clock_hz: float | None = entry("mean over the cores")

    @property
    def other_cores(self) -> float | None:
        """Return the number of cores that other processes kept busy; None if unknown."""
        if self.run_cores is None or not self.cores or None in self.cores:
            return None
        return max(sum(core for core in self.cores if core is not None) - self.run_cores, 0.0)

    @property
    def disturbing_cores(self) -> float | None:
        """Return how many cores other processes kept busy; None if too few to slow a run."""
        used = self.other_cores
        return used if used is not None and used > _DISTURBING * len(self.cores) else None

    @property
    def utilisation(self) -> float | None:
        """Return the mean share of busy time over the cores."""
        known = [core for core in self.cores if core is not None]
        return sum(known) / len(known) if known else None


class Load(Record):
    """Average load of a host and its devices over `duration_s`."""

    node: NonNegativeInt = entry("index of the host in the job", 0)
    duration_s: PositiveFloat
    devices: tuple[DeviceLoad, ...] = ()
    host: HostLoad


def disturbance(loads: Sequence[Load]) -> list[str]:
    """Describe how many cores of each host other programs kept busy, if enough to slow a run."""
    return [
        f"other programs kept {used:.1f} of the {len(load.host.cores)} cores"
        f"{f' of host {load.node}' if len(loads) > 1 else ''} busy meanwhile"
        for load in loads
        if (used := load.host.disturbing_cores) is not None
    ]


def device_utilisation(loads: Iterable[Load], processes: int) -> float | None:
    """Return the mean utilisation of the devices that a run used; None if unknown.

    If it is unknown which devices the run used, all devices count, but only if there are no more
    devices than processes.
    """
    used = [one for load in loads for one in load.devices if one.run_memory_bytes != 0]
    known = all(one.run_memory_bytes is not None for one in used)
    shares = [one.utilisation for one in used if one.utilisation is not None]
    if not shares or len(shares) < len(used) or not (known or len(used) <= processes):
        return None
    return sum(shares) / len(shares)


def average(loads: Sequence[Load]) -> Load:
    """Average consecutive loads of one host.

    Rates are time-weighted means over the periods in which they are known; memory is the maximum.
    Averages can therefore be averaged again, to thin a series.
    """
    if not loads:
        raise ValueError("no loads to average")
    weights = [load.duration_s for load in loads]
    devices = zip(*(load.devices for load in loads), strict=True)
    hosts = [load.host for load in loads]
    cores = tuple(_mean(core, weights) for core in zip(*(h.cores for h in hosts), strict=True))
    return Load(
        node=loads[0].node,
        duration_s=sum(weights),
        devices=tuple(
            device[0].model_copy(update=_average_fields(device, weights)) for device in devices
        ),
        host=hosts[0].model_copy(update={**_average_fields(hosts, weights), "cores": cores}),
    )


def _average_fields(loads: Sequence[Record], weights: Sequence[float]) -> dict[str, float | None]:
    found = {}
    for name in _varying_fields(type(loads[0])):
        values = [getattr(load, name) for load in loads]
        known = [value for value in values if value is not None]
        if name.endswith("memory_bytes"):
            found[name] = max(known, default=None)
        else:
            found[name] = _mean(values, weights)
    return found


def _varying_fields(kind: type[Record]) -> tuple[str, ...]:
    """Return the names of a load's fields that vary with time, except `cores`."""
    fixed = ("index", "name", "memory_total_bytes", "cores")
    return tuple(name for name in kind.model_fields if name not in fixed)


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
    return sum(v * w for v, w in known) / sum(w for _, w in known) if known else None


class DeviceSeries(Record):
    """Time series of a device's load, with the fields of DeviceLoad."""

    index: NonNegativeInt
    name: str
    memory_total_bytes: int | None = None
    utilisation: Values
    run_utilisation: Values
    memory_bytes: Values
    run_memory_bytes: Values
    power_w: Values
    clock_hz: Values = ()  # missing in older runs
    pcie_rx_bytes_per_s: Values
    pcie_tx_bytes_per_s: Values
    nvlink_rx_bytes_per_s: Values
    nvlink_tx_bytes_per_s: Values


class HostSeries(Record):
    """Time series of a host's load, with the fields of HostLoad; `cores` has a series per core."""

    cores: tuple[Values, ...]
    run_cores: Values
    memory_total_bytes: int | None = None
    memory_bytes: Values
    run_memory_bytes: Values
    power_w: Values
    clock_hz: Values = ()


class Utilisation(Record):
    """Time series of one host and its devices, saved in the run's folder."""

    has_checksum: ClassVar[bool] = True
    is_compact: ClassVar[bool] = True

    node: NonNegativeInt = entry("index of the host in the job", 0)
    started: Time = Field(description="UTC, ISO 8601")
    period_s: PositiveFloat = Field(description="intended time between points")
    ends_s: tuple[PositiveFloat, ...] = Field(description="end of each point, since the start")
    sampler_cpu_s: NonNegativeFloat = Field(description="processor time of the recording itself")
    devices: tuple[DeviceSeries, ...]
    host: HostSeries

    @model_validator(mode="after")
    def _check(self) -> Self:
        points = len(self.ends_s)
        series: list[HostSeries | DeviceSeries] = [self.host, *self.devices]
        lengths = {len(values) for one in series for values in _list_series(one)}
        if lengths - {points}:
            raise ValueError(f"series of {sorted(lengths)} values for {points} points")
        if any(b <= a for a, b in zip(self.ends_s, self.ends_s[1:], strict=False)):
            raise ValueError("ends_s is not increasing")
        return self

    @property
    def duration_s(self) -> float:
        """Time from the start to the last point."""
        return self.ends_s[-1] if self.ends_s else 0.0

    @property
    def loads(self) -> tuple[Load, ...]:
        """Return the load at each point, in order of time."""
        begins_s = (0.0, *self.ends_s)
        return tuple(
            Load(
                node=self.node,
                duration_s=end_s - begin_s,
                devices=tuple(_load_of_point(DeviceLoad, one, point) for one in self.devices),
                host=_load_of_point(HostLoad, self.host, point).model_copy(
                    update={"cores": tuple(core[point] for core in self.host.cores)}
                ),
            )
            for point, (begin_s, end_s) in enumerate(zip(begins_s, self.ends_s, strict=False))
        )

    def average(self) -> Load | None:
        """Return the average load over the whole time; None if nothing was recorded."""
        return average(self.loads) if self.ends_s else None


def series(
    loads: Sequence[Load], *, started: str, period_s: float, sampler_cpu_s: float
) -> Utilisation:
    """Create the time series of consecutive loads. Raises ValueError if there are none."""
    if not loads:
        raise ValueError("no loads to make a series of")
    ends_s, end_s = [], 0.0
    for load in loads:
        end_s = round(end_s + load.duration_s, 6)
        ends_s.append(end_s)
    first, hosts = loads[0], [load.host for load in loads]
    each = list(zip(*(load.devices for load in loads), strict=True))
    return Utilisation(
        node=first.node,
        started=started,
        period_s=period_s,
        ends_s=tuple(ends_s),
        sampler_cpu_s=round(sampler_cpu_s, 6),
        devices=tuple(
            DeviceSeries(
                index=device[0].index,
                name=device[0].name,
                memory_total_bytes=device[0].memory_total_bytes,
                **_transpose_loads(device),
            )
            for device in each
        ),
        host=HostSeries(
            memory_total_bytes=hosts[0].memory_total_bytes,
            cores=tuple(
                tuple(_round_digits(value, "cores") for value in core)
                for core in zip(*(host.cores for host in hosts), strict=True)
            ),
            **_transpose_loads(hosts),
        ),
    )


def _transpose_loads(loads: Sequence[Record]) -> dict[str, Any]:
    return {
        name: tuple(_round_digits(getattr(load, name), name) for load in loads)
        for name in _varying_fields(type(loads[0]))
    }


def _round_digits(value: float | None, name: str) -> float | None:
    if value is None:
        return None
    if "bytes" in name or name == "clock_hz":
        return round(value)
    return round(value, 1 if name == "power_w" else 4)


def _load_of_point(kind: type[Any], series_record: Record, point: int) -> Any:
    columns = {name: getattr(series_record, name) for name in _varying_fields(kind)}
    values = {name: series[point] for name, series in columns.items() if series}
    fixed = {"index", "name", "memory_total_bytes"} & set(kind.model_fields)
    return kind(**values, **{name: getattr(series_record, name) for name in fixed})


def _list_series(record: HostSeries | DeviceSeries) -> Iterable[Values]:
    kind = DeviceLoad if isinstance(record, DeviceSeries) else HostLoad
    yield from filter(None, (getattr(record, name) for name in _varying_fields(kind)))
    if isinstance(record, HostSeries):
        yield from record.cores


class ThinnedLoads:
    """Series of at most `most` loads. Once it is full, it averages pairs and doubles its period."""

    def __init__(self, period_s: float, most: int = 1000) -> None:
        self.base_period_s = period_s
        self._most = max(2, most // 2 * 2)  # an even number
        self._each = 1  # loads per point
        self._points: list[Load] = []
        self._waiting: list[Load] = []

    @property
    def period_s(self) -> float:
        """Current time between points, in seconds."""
        return self.base_period_s * self._each

    @property
    def loads(self) -> tuple[Load, ...]:
        """Return all points; the last one may be shorter than the others."""
        rest = [average(self._waiting)] if self._waiting else []
        return (*self._points, *rest)

    def add(self, load: Load) -> None:
        """Add the next load."""
        self._waiting.append(load)
        if len(self._waiting) < self._each:
            return
        self._points.append(average(self._waiting))
        self._waiting = []
        if len(self._points) >= self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [average(pair) for pair in pairs]
            self._each *= 2
