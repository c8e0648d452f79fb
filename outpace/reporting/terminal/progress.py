"""Progress of a run: a live line in a terminal, and lines of text elsewhere.

Progress goes to standard error; standard output is for results.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from outpace.records.measurement import Evaluation, Measurement, RunInfo, StepRecord, TimeParts
from outpace.records.memory import MemoryUse
from outpace.records.plan import Plan
from outpace.records.units import show_bytes, show_count, show_seconds, show_share
from outpace.records.utilisation import Load
from outpace.reporting.bottleneck import BottleneckInputs, bottleneck
from outpace.reporting.terminal.console import Console
from outpace.reporting.terminal.memory import memory_table
from outpace.reporting.terminal.summary import show_whole, shown_metrics
from outpace.training.callbacks import TRAINING, Callback

# Seconds between lines outside of a terminal.
_LINE_EVERY_S = 5.0
# Maximum number of latest steps that determine the bottleneck, and the minimum to show one.
_MOST_STEPS, _LEAST_STEPS = 20, 5
# Terminal width from which the live line shows the bottleneck.
_WIDE = 110


class TrainingProgress(Callback):
    """Callback that shows phases, steps, evaluations and hints on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._stage: tuple[str, float] | None = None
        self._last_line_s = float("-inf")
        self._begun = False
        self._total_steps = 0
        self._info: RunInfo | None = None
        self._latest: deque[StepRecord] = deque(maxlen=_MOST_STEPS)
        self._load: Load | None = None
        self._hints: set[str] = set()

    def on_stage(self, message: str) -> None:
        """End the previous phase of the run, which prints its time, and start a new one."""
        self._end_stage()
        self._stage = (message, time.monotonic())
        if message == TRAINING:
            self._show_line()
        elif self.console.is_terminal:
            self._bars = self._open_bars(
                SpinnerColumn(style="cyan"), TextColumn("{task.description}", markup=False)
            )
            self._task = self._bars.add_task(message, total=None)

    def on_progress(self, what: str, done: int, total: int | None) -> None:
        """Show how much of a phase is done."""
        share = f" {100 * done / total:.0f} %" if total else ""
        counts = show_count(done) + (f" of {show_count(total)}" if total else "")
        if self._bars is not None and self._task is not None:
            if total and not isinstance(self._bars.columns[-1], BarColumn):
                self._bars.columns = (*self._bars.columns, BarColumn(bar_width=None))
            self._bars.update(
                self._task, description=f"{what}  {counts}", completed=done, total=total
            )
        elif self._line_is_due():
            self._print_line(f"{what}: {counts}{share and ',' + share}")

    def on_start(self, info: RunInfo) -> None:
        """Show what will be trained, once the run is set up."""
        self._end_stage()
        self._total_steps, self._info = info.total_steps, info
        for hint in info.hints:
            self.on_hint(hint)
        for line in _start_lines(info):
            self.console.print(line, soft_wrap=True)

    def _show_line(self) -> None:
        if self._info is None or not self.console.is_terminal:
            return
        begun, total = self._info.start_step, self._info.total_steps
        self._bars = self._open_bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}", markup=False),
        )
        self._task = self._bars.add_task(
            _format_step(begun, total), total=total, completed=begun, figures="first step …"
        )

    def on_step(self, record: StepRecord) -> None:
        """Show a finished step."""
        # Not the first step, which includes allocation and compilation.
        if self._begun:
            self._latest.append(record)
        self._begun = True
        left_s = self._remaining_s(record.step)
        record = smooth_rates(record, self._latest)
        if self._bars is not None and self._task is not None:
            self._bars.update(
                self._task,
                completed=record.step,
                description=_format_step(record.step, self._total_steps),
                figures=self._live_figures(record, left_s),
            )
        elif self._line_is_due() or record.step == self._total_steps:
            steps = _format_step(record.step, self._total_steps)
            figures = _format_figures(
                record, left_s, short=False, limited_by=self._bottleneck_words()
            )
            self._print_line(f"{steps}  {figures}")

    def _remaining_s(self, step: int) -> float | None:
        """Estimate the time of the remaining steps, in seconds; None before the first step."""
        left = max(0, self._total_steps - step)
        if not self._latest and left:
            return None
        return left * (fmean(one.step_time_s for one in self._latest) if left else 0.0)

    def on_load(self, load: Load, step: int) -> None:
        """Keep the latest load, from which the progress line tells what limits the speed."""
        self._load = load

    def on_eval(self, evaluation: Evaluation, final: bool) -> None:
        """Show the held-out loss."""
        line = Text(f"  validation after step {evaluation.step:,}: loss ")
        line.append(f"{evaluation.loss:.4f}", style="bold green" if final else "bold")
        for name, value in shown_metrics(evaluation):
            line.append(f", {name} {value}", style="dim")
        self.console.print(line, soft_wrap=True)

    def on_checkpoint(self, path: Path) -> None:
        """Show that a checkpoint is complete on disk."""
        self.console.print(Text(f"  saved {path}", style="dim"), soft_wrap=True)

    def on_memory(self, plan: Plan, use: MemoryUse) -> None:
        """Show a table of the memory at the peak by kind."""
        self._end_stage()
        if use.traced is not None:
            self.console.print(memory_table(plan, use.traced, use.measured, None))
        elif use.measured is not None:
            self.console.print(memory_table(plan, use.measured, None, None))

    def on_hint(self, sentence: str) -> None:
        """Show a hint for the user, each hint only once."""
        if sentence not in self._hints:
            self._hints.add(sentence)
            line = Text().append("  hint: ", style="yellow").append(sentence)
            self.console.print(line, soft_wrap=True)

    def on_end(self, measurement: Measurement) -> None:
        """Show that the run reached its last step."""
        self.close()

    def close(self) -> None:
        """Remove the live line; printed lines remain."""
        self._close_bars()
        self._stage = None

    def _live_figures(self, record: StepRecord, left_s: float | None) -> str:
        found = self._bottleneck_words()
        if self.console.width >= _WIDE:
            return _format_figures(record, left_s, short=True, limited_by=found)
        figures = _format_figures(record, left_s, short=True)
        return f"{figures}\n{found}" if found else figures

    def _bottleneck_words(self) -> str:
        info, load = self._info, self._load
        if info is None or len(self._latest) < _LEAST_STEPS:
            return ""
        names = TimeParts.model_fields
        seconds = {name: [getattr(one, name) for one in self._latest] for name in names}
        found = bottleneck(
            BottleneckInputs(
                TimeParts.of_steps(seconds),
                info.device,
                info.plan.strategy,
                info.plan.world_size,
                () if load is None else (load,),
                self._latest[-1].mfu,
                info.hosts,
            )
        )
        return "" if found is None else found.words

    def _open_bars(self, *columns: BarColumn | SpinnerColumn | TextColumn) -> Bars:
        bars = Bars(
            TextColumn(" "),
            *columns,
            console=self.console,
            transient=True,
            expand=True,
            redirect_stdout=False,
        )
        bars.start()
        return bars

    def _close_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._task = None

    def _end_stage(self) -> None:
        self._close_bars()
        if self._stage is not None:
            message, since_s = self._stage
            self._stage = None
            line = Text().append("  ✓ ", style="green").append(message)
            line.append(f"  {show_seconds(time.monotonic() - since_s)}", style="dim")
            self.console.print(line, soft_wrap=True)

    def _line_is_due(self) -> bool:
        return time.monotonic() - self._last_line_s >= _LINE_EVERY_S

    def _print_line(self, text: str) -> None:
        self._last_line_s = time.monotonic()
        self.console.print(Text(f"  {text}"), soft_wrap=True)


def _start_lines(info: RunInfo) -> tuple[Text, ...]:
    plan = info.plan
    how: list[str] = [plan.precision, *([plan.strategy] if plan.strategy != "single" else [])]
    if plan.world_size > 1:
        how.append(f"{plan.world_size} processes")
    if plan.recomputes:
        how.append(_describe_recomputation(plan))
    if plan.compile:
        how.append("compiled")
    title = Text("  ").append(info.model, style="bold")
    title.append(f", {show_count(info.parameters)} parameters, on {info.device}")
    title.append(f" ({', '.join(how)})")
    went_on = f", from step {info.start_step:,}" if info.start_step else ""
    return (
        title,
        Text(f"  {info.identity}", style="dim"),
        Text(f"  {info.total_steps:,} steps{went_on}, into {info.run}", style="dim"),
    )


def _describe_recomputation(plan: Plan) -> str:
    if not plan.checkpoint_layers:
        every = f" of 1 block in {plan.checkpoint_every}" if plan.checkpoint_every > 1 else ""
        return f"{plan.checkpointing} activation checkpointing{every}"
    counts = Counter(mode for mode in plan.checkpoint_layers if mode != "none")
    modes = " and ".join(f"{mode} of {number}" for mode, number in counts.items())
    return f"activation checkpointing: {modes} of {len(plan.checkpoint_layers)} blocks"


def _format_step(done: int, total: int) -> str:
    return f"step {done:>{len(str(total))}}/{total}"


def smooth_rates(record: StepRecord, latest: Sequence[StepRecord]) -> StepRecord:
    """Return the record with rates averaged over the latest steps."""
    seconds = sum(one.step_time_s for one in latest)
    rates: dict[str, float] = {}
    for name in ("tokens_per_s", "samples_per_s", "mfu", "hfu"):
        values = [getattr(one, name) for one in latest]
        if seconds and None not in values:
            done = (value * one.step_time_s for value, one in zip(values, latest, strict=True))
            rates[name] = sum(done) / seconds
    return record.model_copy(update=rates)


def _format_figures(
    record: StepRecord, left_s: float | None, short: bool, limited_by: str = ""
) -> str:
    """Format the figures of a progress line; `short` fits 80 columns together with a bar."""
    if record.tokens_per_s is None:
        rate = show_whole(record.samples_per_s, "samples/s")
    else:
        rate = show_whole(record.tokens_per_s, "tok/s" if short else "tokens/s")
    words = [f"loss {record.loss:.3f}", rate]
    if record.mfu is not None:
        words.append(f"MFU {show_share(record.mfu)}")
    if record.peak_memory_bytes is not None:
        words.append(show_bytes(record.peak_memory_bytes))
    if record.loss_scale is not None and not short:
        words.append(f"loss scale {record.loss_scale:g}")
    if limited_by:
        words.append(limited_by)
    if left_s is not None:
        words.append(f"{_format_clock(left_s)} left")
    return "  ".join(words)


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
