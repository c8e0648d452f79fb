"""A probed machine in a terminal: its figures, and advice."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from outpace.records.machine import Machine
from outpace.records.probe_results import ProbeRecord, ProgressDisplay, Steadiness
from outpace.records.units import show_bytes, show_seconds
from outpace.reporting.terminal.console import Console
from outpace.reporting.terminal.probe_tables import figure_tables, links_table


class _LineProgress:
    """Progress of a probe as one line per finished section."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: set[str] = set()

    def __call__(self, section: str, share: float) -> None:
        if share >= 1.0 and section not in self._printed:
            self._printed.add(section)
            self._console.print(f"probed {section}")

    def show_stopping(self) -> None:
        """Print that the probe is stopping. A signal handler calls this.

        If the signal interrupts another print, Python raises RuntimeError, and nothing is printed.
        """
        with suppress(RuntimeError):
            self._console.print("stopping…")


class _BarProgress(_LineProgress):
    """Progress of a probe as one bar per section."""

    def __init__(self, console: Console, bars: Progress, sections: Sequence[str]) -> None:
        super().__init__(console)
        self._bars = bars
        self._tasks = {name: bars.add_task(name, total=1.0, start=False) for name in sections}

    def __call__(self, section: str, share: float) -> None:
        if section in self._tasks:
            self._bars.start_task(self._tasks[section])
            # Other processes do not report their progress.
            self._bars.update(self._tasks[section], completed=share, total=1.0 if share else None)


@contextmanager
def progress_of(sections: Sequence[str], quiet: bool) -> Iterator[ProgressDisplay]:
    """Yield a progress bar per section on standard error, or lines if it is not a terminal."""
    console = Console(stderr=True, highlight=False, quiet=quiet)
    if not console.is_terminal:
        yield _LineProgress(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield _BarProgress(console, bars, sections)


def show_machine(machine: Machine, out: Path | None, width: int | None = None) -> None:
    """Print a probed machine on standard output, in `width` columns (None: the terminal's)."""
    console = Console(highlight=False, width=width)
    assert machine.probed is not None
    for part in parts_of(machine, machine.probed, kept=out is not None):
        console.print(part)
        console.print()
    where = f"saved in {out}" if out else "not saved: give --out machine.json for the planner"
    console.print(Text(where, style="dim"))


def parts_of(machine: Machine, probed: ProbeRecord, kept: bool = True) -> Iterator[RenderableType]:
    """Yield everything that a probe shows: the machine, its figures, advice and notes.

    `kept`: whether the record is saved to a file.
    """
    yield _head_lines(machine, probed)
    yield from figure_tables(probed)
    if probed.fits:
        yield links_table(probed.fits)
    reasons = Counter(
        _strip_numbers(f.unstable) for f in probed.all_figures() if f.unstable is not None
    )
    if reasons:
        where = "in the record" if kept else "in the record that --out machine.json writes"
        (why, count), *_ = reasons.most_common(1)
        yield Text(f"unstable: the machine was not steady enough. Of {count} figures: {why}. The "
                   f"reasons and all samples are {where}",
                   style="yellow")  # fmt: skip
    if probed.advice:
        yield _advice_table(probed)
    if probed.notes:
        yield Group(Text("Notes", style="bold"), *(Text(f"  {note}") for note in probed.notes))


def _strip_numbers(unstable: str) -> str:
    """Return why a figure is unstable, without numbers, so that equal reasons can be counted."""
    if unstable.startswith("a repeat may"):  # older records: "may lie"
        limit = "15 points" if "points" in unstable else "a quarter"
        return f"a repeat may differ by more than {limit}"
    return "they drifted by more than a tenth" if "drifted" in unstable else unstable


def _head_lines(machine: Machine, probed: ProbeRecord) -> RenderableType:
    devices = ", ".join(device.name for device in machine.devices) or "no GPU"
    kind = "quick probe" if probed.quick else "full probe"
    level = next((f.level for f in probed.figures if f.level), 0.95)
    lines = [
        Text(f"{machine.cpu}, {machine.host_cores} cores, "
             f"{show_bytes(machine.host_memory_bytes)}; {devices}", style="bold"),
        Text(f"{kind} of {', '.join(probed.sections)} in {show_seconds(probed.took_s)}",
             style="dim"),
        Text("everything is measured unless marked catalog; ± is the range of a repeat's figure "
             f"with {100 * level:.0f} % probability", style="dim"),
    ]  # fmt: skip
    return Group(*lines, *_steadiness_warnings(probed.steadiness))


def _steadiness_warnings(steadiness: Steadiness) -> Iterable[Text]:
    for warning in steadiness.warnings:
        yield Text(f"! {warning}", style="yellow")
    for device in steadiness.throttled:
        yield Text(f"! {device}", style="yellow")


def _advice_table(probed: ProbeRecord) -> RenderableType:
    table = Table(title="Advice", title_justify="left", title_style="bold", box=None,
                  pad_edge=False, show_header=False)  # fmt: skip
    table.add_column("about", style="cyan", no_wrap=True)
    table.add_column("text")
    for one in probed.advice:
        table.add_row(one.about, one.text)
    return table
