"""Past runs in a terminal: a table of runs, or one run in full."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outpace.experiment.past_runs import PastRunFolder, asked_settings, checkpoints
from outpace.records.axes import layout_words
from outpace.records.past_run import PastRun
from outpace.records.plan import Plan
from outpace.records.run import RunRecord, resume_command
from outpace.records.units import show_bytes, show_count, show_number, show_seconds, show_share
from outpace.reporting.render.document import in_words
from outpace.reporting.terminal.summary import summary
from outpace.reporting.terminal.table import NarrowTable

_STYLES = {"done": "green", "going on": "cyan", "unfinished": "yellow", "damaged": "red"}
_NOTES = {
    "run.json": "everything that determined the run",
    "metrics.jsonl": "one line per step",
    "evals.jsonl": "one line per evaluation",
    "result.json": "the result",
    "failure.json": "why it ended early",
    "checkpoints": "to resume from",
    "model": "for generate, eval and --model",
    "utilisation": "the load of hosts and devices",
    "memory.json": "memory by kind",
    "certificate.json": "of outpace verify",
    "tensorboard": "tensorboard --logdir reads it",
}


# Settings that a row shows in other words, or that do not affect training.
_SHOWN = {
    "model", "strategy", "precision", "steps", "nproc", "device", "out", "resume", "plan",
    "dp_replicate", "dp_shard", "cp", "tp", "pp", "log", "expect_step_time_s", "save_every", "keep",
}  # fmt: skip
_LONGEST_VALUE = 28


def runs_table(rows: Sequence[PastRun]) -> RenderableType:
    """Return a table of runs with two lines each.

    The first line has the run's path and start time. Below them are its description and state.
    """
    steps = [f"{row.steps:,}" + (f"/{row.total_steps:,}" if row.total_steps else "")
             for row in rows]  # fmt: skip
    states = [Text(utc_minute(row.started)).append(Text(f"\n{row.state}", style=_STYLES[row.state]))
              for row in rows]  # fmt: skip
    whats = [
        ", ".join([_describe_run(row), *own])
        for row, own in zip(rows, _differing_settings(rows), strict=True)
    ]
    names = [Text(row.path, style="bold").append(f"\n{what}", style="not bold dim")
             for row, what in zip(rows, whats, strict=True)]  # fmt: skip
    figures: dict[str, Sequence[str | Text]] = {
        "when (UTC)": states, "steps": steps, **_figure_columns(rows)
    }  # fmt: skip
    return NarrowTable(
        "run", names, figures, "Hidden because the terminal is too narrow (--json shows all)"
    )


def _figure_columns(rows: Sequence[PastRun]) -> dict[str, list[str]]:
    found = {
        "loss": [_cell_text(row.final_loss, f"{row.final_loss or 0:.4f}") for row in rows],
        "step": [_cell_text(row.step_time_s, show_seconds(row.step_time_s)) for row in rows],
        "tokens/s": [_cell_text(row.tokens_per_s, f"{row.tokens_per_s or 0:,.0f}") for row in rows],
        "MFU": [_cell_text(row.mfu, show_share(row.mfu)) for row in rows],
        "memory": [_cell_text(row.peak_memory_bytes, show_bytes(row.peak_memory_bytes))
                   for row in rows],
    }  # fmt: skip
    return {name: column for name, column in found.items() if set(column) != {"–"}}


def _cell_text(value: Any, shown: str) -> str:
    return "–" if value is None else shown


def _describe_run(row: PastRun) -> str:
    if row.model is None or row.strategy is None:
        return row.damage or ""
    layout = layout_words(row.strategy, row.mesh or "", row.processes or 1)
    words = f"{Path(row.model).name}, {layout}, {row.precision}"
    wrong = "; ".join([*([row.damage] if row.damage else []), *row.changed])
    return f"{words}: {wrong}" if wrong else words


def _differing_settings(rows: Sequence[PastRun]) -> list[list[str]]:
    """Return the settings of each run that were given and are not the same in all runs."""
    known = [row.asked for row in rows if row.model is not None]
    names = {name for asked in known for name in asked} - _SHOWN
    alike = {
        name for name in names if all(asked.get(name) == known[0].get(name) for asked in known)
    }
    return [
        [
            f"{name} {_format_value(value)}"
            for name, value in row.asked.items()
            if name in names - alike
        ]
        for row in rows
    ]


def _format_value(value: Any) -> str:
    words = in_words(value)
    return words if len(words) <= _LONGEST_VALUE else f"…{words[1 - _LONGEST_VALUE :]}"


def utc_minute(started: str | None) -> str:
    """Format a time in UTC to the minute."""
    return "–" if started is None else started[:16].replace("T", " ")


def run_text(past: PastRunFolder, files: Mapping[str, int]) -> RenderableType:
    """Show everything about a run: settings, progress, result and files."""
    row, record = past.row, past.record
    head = Text(row.path, style="bold").append(f"  {row.state}", style=_STYLES[row.state])
    parts: list[RenderableType] = [Text(), head.append(_describe_progress(past), style="not bold")]
    if row.damage:
        parts.append(Text(row.damage, style="red"))
    parts += [Text(sentence, style="red") for sentence in row.changed]
    if past.failure is not None:
        parts.append(Text(f"It ended early: {past.failure.reason}", style="yellow"))
    if record is not None:
        parts += [Text(), _pairs_table("run", _record_facts(record).items())]
        parts += [
            Text(),
            _settings_table(record),
            Text(),
            _pairs_table("plan", _plan_facts(record.plan).items()),
        ]
    if past.result is not None:
        parts.append(summary(past.result))
    elif row.steps:
        parts += [Text(), _pairs_table("latest steps", _latest_figures(row).items())]
    parts += [Text(), _files_table(past, files), Text()]
    return Padding(Group(*parts), (0, 1))


def _describe_progress(past: PastRunFolder) -> str:
    row = past.row
    if row.total_steps is None:
        return ""
    steps = f", {row.steps:,} of {show_number(row.total_steps, 'step')}"
    if row.state != "unfinished":
        return steps
    metrics = past.folder / "metrics.jsonl"
    wrote = f"; last written {_modified_minute(metrics)} (UTC)" if metrics.is_file() else ""
    saved = checkpoints(past.folder)
    again = f". Resume it with {resume_command(Path(row.path))}" if saved else ""
    return f"{steps}{wrote}; no process of this host trains it{again}"


def _modified_minute(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M")


def _record_facts(record: RunRecord) -> dict[str, str]:
    machine = record.machine
    devices = ", ".join(device.name for device in machine.devices)
    host = f"{machine.host_cores} cores of {machine.cpu}, {show_bytes(machine.host_memory_bytes)}"
    dirty = " with uncommitted changes" if record.uncommitted_changes else ""
    resumed = [
        f"{utc_minute(one.get('at'))} on {show_number(ranks, 'process', 'processes')}"
        for one in record.resumes
        if isinstance(ranks := one.get("ranks"), int)
    ]
    return {
        "started (UTC)": utc_minute(record.started),
        **({"resumed": "; ".join(resumed)} if resumed else {}),
        "command": shlex.join(record.command),
        "model": f"{record.settings.model}, {show_count(record.parameters)} parameters",
        "batch": record.identity,
        "machine": f"{devices}; {host}" if devices else host,
        "computed on": f"{record.device}, {record.threads} threads per process",
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
        "commit": f"{record.commit}{dirty}" if record.commit else "n/a",
    }


def _plan_facts(plan: Plan) -> dict[str, str]:
    fields = Plan.model_fields
    asked = {name: value for name, value in plan if value != fields[name].default}
    return {"layout": plan.layout, **{name: in_words(value) for name, value in asked.items()}}


def _latest_figures(row: PastRun) -> dict[str, str]:
    return {name: column[0] for name, column in _figure_columns([row]).items()}


def _settings_table(record: RunRecord) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name in ("setting", "value", "from"):
        table.add_column(name, overflow="fold")
    for name, value in asked_settings(record).items():
        table.add_row(
            Text(name.replace("_", "-")),
            Text(in_words(value), style="bold"),
            Text(record.origins[name], style="dim"),
        )
    if not table.row_count:
        table.add_row(Text("all have their defaults", style="dim"), "", "")
    return table


def _pairs_table(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column(title, style="dim", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text(value))
    return table


def _files_table(past: PastRunFolder, files: Mapping[str, int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column(Text(f"in {past.row.path}"), overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    saved = ", ".join(path.name for path in checkpoints(past.folder))
    for name, size in files.items():
        note = f"{_NOTES[name]}: {saved}" if name == "checkpoints" and saved else _NOTES.get(name)
        table.add_row(Text(name), show_bytes(size), Text(note or ""))
    return table
