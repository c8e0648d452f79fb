"""Utilisation of devices and cores: a live view or lines, and a table at the end."""

import time
from collections import deque
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outpace.records.units import show_bytes, show_seconds, show_share
from outpace.records.utilisation import DeviceLoad, HostLoad, Load, Utilisation, average

_LEVELS = "▁▂▃▄▅▆▇█"
_COURSE_CELLS = 60  # maximum number of cells, in a wide terminal
# Maximum number of cores with a line each; with more, each has one character.
_CORES_SHOWN = 8
_CORES_A_LINE = 64
# Seconds between lines outside of a terminal.
_LINE_EVERY_S = 5.0
_GIB = 2**30


def sparkline(values: Sequence[float | None], cells: int) -> str:
    """Draw shares as one character each. More than `cells` values are averaged in equal groups.

    Unknown values are spaces.
    """
    count = min(cells, len(values))
    shown = []
    for cell in range(count):
        part = values[cell * len(values) // count : (cell + 1) * len(values) // count]
        known = [value for value in part if value is not None]
        share = sum(known) / len(known) if known else None
        shown.append(" " if share is None else _LEVELS[round(min(1.0, max(0.0, share)) * 7)])
    return "".join(shown)


def averages_table(
    loads: Sequence[Load], history: Sequence[Utilisation] = (), width: int = 80
) -> RenderableType:
    """Return a table with a line per device and host, and their `history` in the rest of `width`.

    Devices that the run did not use are counted, not listed.
    """
    table, course_cells = _empty_table("How busy"), _history_cells(width - 78)
    if history:
        table.add_column("course", no_wrap=True)
    _add_figures(table, "busy")
    notes = []
    for place, load in enumerate(loads):
        host = f"host {load.node}: " if len(loads) > 1 else ""
        course = history[place].loads if history else ()
        for device in load.devices:
            if device.run_memory_bytes == 0:
                continue
            at = load.devices.index(device)
            spark = [sparkline([x.devices[at].utilisation for x in course], course_cells)]
            label = f"{host}GPU {device.index}"
            table.add_row(label, *(spark if history else []), *_device_cells(device))
            notes.append(_traffic_line(label, device))
        others = sum(device.run_memory_bytes == 0 for device in load.devices)
        if others:
            more = f"{others} more device{'s' if others > 1 else ''}, not used by the run"
            notes.append(Text(f"{host}{more}", style="dim"))
        spark = [sparkline([x.host.utilisation for x in course], course_cells)]
        cells = _host_cells(load.host)
        table.add_row(f"{host}{_count_cores(load.host)}", *(spark if history else []), *cells)
    return Group(table, *notes)


def closing_text(utilisation: Utilisation, width: int) -> RenderableType:
    """Return the final output of `outpace watch`: averages, and the cost of watching."""
    load = utilisation.average()
    if load is None:
        return Text("nothing was recorded")
    share = utilisation.sampler_cpu_s / utilisation.duration_s
    took = Text(
        f"over {show_seconds(utilisation.duration_s)}, a sample every "
        f"{show_seconds(utilisation.period_s)}; "
        f"watching took {100 * share:.2f} % of one core",
        style="dim",
    )
    missing = [] if load.devices else [Text("no NVIDIA driver: devices n/a", style="dim")]
    return Group(averages_table([load], [utilisation], width), *missing, took)


class View:
    """Live view of loads as they arrive, `every_s` apart."""

    def __init__(self, console: Console, every_s: float) -> None:
        self.console = console
        self._every_s = every_s
        self._recent: deque[Load] = deque(maxlen=_COURSE_CELLS)
        self._began_s = time.monotonic()
        self._last_line_s = float("-inf")
        self._live: Live | None = None

    def show(self, load: Load, progress: str = "", output: str = "") -> None:
        """Show a load, and below it a line about the run, and its unfinished line of output."""
        self._recent.append(load)
        if not self.console.is_terminal:
            now_s = time.monotonic()
            if now_s - self._last_line_s >= _LINE_EVERY_S:
                self._last_line_s = now_s
                self.console.print(Text(self._format_line(load, progress)), soft_wrap=True)
            return
        if self._live is None:
            self._live = Live(
                console=self.console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
        self._live.update(self._render(load, progress, output), refresh=True)

    def close(self) -> None:
        """Remove the live view."""
        if self._live is not None:
            self._live.stop()
        self._live = None

    @property
    def _elapsed_time(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._began_s), 60)
        return f"{minutes}:{seconds:02d}"

    def _format_line(self, load: Load, progress: str) -> str:
        parts = [self._elapsed_time]
        for device in load.devices:
            parts.append(f"GPU {device.index} " + " ".join(_known_cells(_device_cells(device))))
        parts.append(f"{_count_cores(load.host)} " + " ".join(_known_cells(_host_cells(load.host))))
        return "  ".join([*parts, *([progress] if progress else [])])

    def _render(self, load: Load, progress: str, output: str) -> RenderableType:
        cells_wide = _history_cells(self.console.width - 86)
        loads = list(self._recent)[-cells_wide:]
        mean = average(loads)
        table = _empty_table(f"After {self._elapsed_time}")
        table.add_column(f"last {cells_wide * self._every_s:.0f} s", width=cells_wide)
        _add_figures(table, "now", "mean")
        notes = []
        for at, device in enumerate(load.devices):
            course = sparkline([x.devices[at].utilisation for x in loads], cells_wide)
            cells = _device_cells(device)
            over = show_share(mean.devices[at].utilisation)
            table.add_row(f"GPU {device.index}", course, cells[0], over, *cells[1:])
            notes.append(_traffic_line(f"GPU {device.index}", device))
        cells = _host_cells(load.host)
        course = sparkline([x.host.utilisation for x in loads], cells_wide)
        over = show_share(mean.host.utilisation)
        table.add_row(_count_cores(load.host), course, cells[0], over, *cells[1:])
        if 1 < len(load.host.cores) <= _CORES_SHOWN:
            for core, share in enumerate(load.host.cores):
                row = sparkline([x.host.cores[core] for x in loads], cells_wide)
                over = show_share(mean.host.cores[core])
                table.add_row(Text(f"  core {core}", style="dim"), row, show_share(share), over)
        else:
            notes += _core_strips(load.host)
        if not load.devices:
            notes.append(Text("no NVIDIA driver: devices n/a", style="dim"))
        lines = [
            Text(line, no_wrap=True, overflow="ellipsis") for line in (progress, output) if line
        ]
        return Group(table, *notes, *lines, Text("Ctrl-C ends it", style="dim"))


def _history_cells(room: int) -> int:
    return max(8, min(_COURSE_CELLS, room))


def _empty_table(title: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold"
    )
    table.add_column(Text(title), no_wrap=True)
    return table


def _add_figures(table: Table, *busy: str) -> None:
    for name in (*busy, "of the run", "memory", "of the run", "power"):
        table.add_column(name, justify="right", no_wrap=True)


def _device_cells(device: DeviceLoad) -> list[str]:
    return [
        show_share(device.utilisation),
        show_share(device.run_utilisation),
        _format_memory(device.memory_bytes, device.memory_total_bytes),
        _format_memory(device.run_memory_bytes),
        _format_power(device.power_w),
    ]


def _host_cells(host: HostLoad) -> list[str]:
    return [
        show_share(host.utilisation),
        "n/a" if host.run_cores is None else f"{host.run_cores:.2f} cores",
        _format_memory(host.memory_bytes, host.memory_total_bytes),
        _format_memory(host.run_memory_bytes),
        _format_power(host.power_w),
    ]


def _known_cells(cells: Sequence[str]) -> Iterator[str]:
    """Yield a line's known cells; what the run itself uses is in parentheses."""
    yield cells[0]
    if cells[1] != "n/a":
        yield f"(run {cells[1]})"
    yield cells[2]
    if cells[3] != "n/a":
        yield f"(run {cells[3]})"
    if cells[4] != "n/a":
        yield cells[4]


def _count_cores(host: HostLoad) -> str:
    return f"{len(host.cores)} core{'s' if len(host.cores) != 1 else ''}"


def _core_strips(host: HostLoad) -> list[Text]:
    """Draw the load of each core as a character, 64 cores per line."""
    count = len(host.cores)
    if count <= 1:
        return []
    starts = range(0, count, _CORES_A_LINE)
    rows = [host.cores[at : at + _CORES_A_LINE] for at in starts]
    return [
        Text(f"cores {at:>3}-{at + len(row) - 1:<3} ").append(sparkline(row, len(row)), "cyan")
        for at, row in zip(starts, rows, strict=True)
    ]


def _format_memory(used: float | None, total: float | None = None) -> str:
    if used is None:
        return "n/a"
    if total is None:
        return show_bytes(used)
    return f"{used / _GIB:.1f} / {total / _GIB:.1f} GiB"


def _format_power(watts: float | None) -> str:
    return "n/a" if watts is None else f"{watts:.0f} W"


def _traffic_line(label: str, device: DeviceLoad) -> Text:
    parts = []
    for name, rx, tx in (
        ("PCIe", device.pcie_rx_bytes_per_s, device.pcie_tx_bytes_per_s),
        ("NVLink", device.nvlink_rx_bytes_per_s, device.nvlink_tx_bytes_per_s),
    ):
        known = rx is not None or tx is not None
        parts.append(f"{name} in {_gigabytes(rx)}, out {_gigabytes(tx)} GB/s" if known
                     else f"{name} n/a")  # fmt: skip
    line = f"{label}: {'; '.join(parts)}; {device.name}"
    return Text(line, style="dim", no_wrap=True, overflow="ellipsis")


def _gigabytes(per_s: float | None) -> str:
    return "n/a" if per_s is None else f"{per_s / 1e9:.2f}"
