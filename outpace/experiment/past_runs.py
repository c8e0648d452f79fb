"""Complete and incomplete runs in folders, read without torch."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from outpace.probing.utilisation.sampler import open_files
from outpace.records.base import OnChange, Record, refuse_pipe
from outpace.records.errors import BadInputError
from outpace.records.line_checksums import ChangedLineError, strip_checksum
from outpace.records.measurement import Measurement, StepRecord
from outpace.records.past_run import PastRun
from outpace.records.plan import Plan
from outpace.records.run import RUN_FILE, Failure, RunRecord
from outpace.records.settings import TrainSettings
from outpace.training.run_dir import FAILURE_FILE, METRICS_FILE, RESULT_FILE

_TIMED = ("step_time_s", "tokens_per_s", "mfu")
_DEFAULT = "default"  # origin of a setting that the user did not set
# Bytes read from the end of a metrics file: about a hundred steps.
_TAIL_BYTES = 1 << 16
# Fields of run.json that can be queried. They have the values used, not those requested.
_OF_RECORD = (
    "outpace", "commit", "identity", "parameters", "seq_len", "device", "threads", "train_data",
)  # fmt: skip


@dataclass(frozen=True)
class PastRunFolder:
    """A run's folder, with the contents of its files; None for missing or unreadable ones.

    `row` is its line in a list of runs. `failure`: why the run ended early, if recorded.
    """

    folder: Path
    row: PastRun
    record: RunRecord | None = None
    result: Measurement | None = None
    failure: Failure | None = None

    def value(self, name: str) -> Any:
        """Return a field of the run's row, plan, result, record or settings; None if unknown."""
        kind = field_owner(name)
        record = self.record
        owners: dict[type[Record], Record | None] = {
            PastRun: self.row,
            Plan: None if record is None else record.plan,
            Measurement: self.result,
            RunRecord: record,
            TrainSettings: None if record is None else record.settings,
        }
        return None if kind is None else getattr(owners[kind], name, None)


def field_owner(name: str) -> type[Record] | None:
    """Return the class of record that has the field `name`, or None.

    If several have it, results take precedence over settings.
    """
    for kind in (PastRun, Plan, Measurement, RunRecord, TrainSettings):
        if name in kind.model_fields and (kind is not RunRecord or name in _OF_RECORD):
            return kind
    return None


def field_names() -> list[str]:
    """Return the names of all fields of runs."""
    names = [*PastRun.model_fields, *Plan.model_fields, *Measurement.model_fields, *_OF_RECORD]
    return list(dict.fromkeys([*names, *TrainSettings.model_fields]))


def is_run(folder: Path) -> bool:
    """Return whether a folder contains files of a run, even if the run is damaged."""
    return (folder / RUN_FILE).exists() or (folder / METRICS_FILE).exists()


def find_runs(folders: Iterable[Path]) -> list[PastRunFolder]:
    """Return all runs in and below these folders, newest first; unreadable ones come last."""
    # os.path.realpath, since Path.resolve raises for circular links.
    found = {
        os.path.realpath(where): read_past_run(where, trouble)
        for where, trouble in _find_run_folders(folders)
    }
    runs = mark_running(found.values())
    return sorted(runs, key=lambda one: one.row.started or "", reverse=True)


def count_runs(folders: Iterable[Path]) -> int:
    """Return the number of runs in and below these folders, without reading them."""
    return sum(trouble is None for _, trouble in _find_run_folders(folders))


def _find_run_folders(folders: Iterable[Path]) -> Iterator[tuple[Path, OSError | None]]:
    """Yield folders of runs, then unreadable folders with their errors. Runs are not nested."""
    errors: list[OSError] = []
    for folder in folders:
        for place, below, files in os.walk(folder, onerror=errors.append):
            if {RUN_FILE, METRICS_FILE} & {*below, *files}:
                below.clear()
                yield Path(place), None
    for error in errors:
        yield Path(error.filename), error


def read_past_run(folder: Path, trouble: OSError | None = None) -> PastRunFolder:
    """Read a run from its files. The result describes any damage, which is never raised.

    `trouble` is the error with which listing the folder failed.
    """
    if trouble is not None:
        return PastRunFolder(folder, _damaged_run(folder, f"cannot be read: {trouble.strerror}"))
    changed: list[str] = []
    try:
        record = RunRecord.load(folder / RUN_FILE, changed.append)
    except BadInputError as error:
        return PastRunFolder(folder, _damaged_run(folder, str(error)))
    row = PastRun(
        path=str(folder),
        state="unfinished",
        started=record.started,
        model=record.settings.model,
        strategy=record.plan.strategy,
        mesh=record.plan.mesh,
        precision=record.plan.precision,
        asked=asked_settings(record),
        processes=record.plan.world_size,
        total_steps=record.total_steps,
    )
    try:
        result = result_of(folder, record, changed.append)
        figures = {} if result is None else _figures_of_result(result)
        if result is None:
            figures = _figures_of_steps(folder, record, changed.append)
        elif record.last_untimed_step(result) != result.start_step:
            timed = _figures_of_steps(folder, record, changed.append)
            figures |= {name: timed.get(name) for name in _TIMED}
        failure = _read_failure(folder) if result is None else None
    except BadInputError as error:
        damaged = row.model_copy(update={"state": "damaged", "damage": str(error)})
        return PastRunFolder(folder, damaged, record)
    row = row.model_copy(update={**figures, "changed": tuple(changed)})
    return PastRunFolder(folder, row, record, result, failure)


def _damaged_run(folder: Path, why: str) -> PastRun:
    return PastRun(path=str(folder), state="damaged", damage=why)


def result_of(
    folder: Path, record: RunRecord, on_change: OnChange | None = None
) -> Measurement | None:
    """Return a run's result; None if the run is unfinished, or was resumed with more steps."""
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    result = Measurement.load(path, on_change)
    return result if result.steps == record.total_steps else None


def _read_failure(folder: Path) -> Failure | None:
    path = folder / FAILURE_FILE
    return Failure.load(path) if path.exists() else None


def _figures_of_result(result: Measurement) -> dict[str, Any]:
    names = ("steps", "step_time_s", "tokens_per_s", "mfu", "final_loss", "peak_memory_bytes")
    return {"state": "done", **{name: getattr(result, name) for name in names}}


def _figures_of_steps(folder: Path, record: RunRecord, on_change: OnChange) -> dict[str, Any]:
    """Return an unfinished run's throughput, loss and memory, by field name.

    Times and rates are medians over its latest steps without warm-up. Steps before a resume with
    another layout do not count.
    """
    steps = latest_steps(folder / METRICS_FILE, on_change)
    if not steps:
        return {}
    since = [step for step in steps if step.step > record.start_step]
    timed = [step for step in since if not record.is_warm_up(step.step)] or since
    rates = {
        name: [value for step in timed if (value := getattr(step, name)) is not None]
        for name in _TIMED
    }
    return {
        **{name: median(values) if values else None for name, values in rates.items()},
        "steps": steps[-1].step,
        "final_loss": steps[-1].loss,
        "peak_memory_bytes": steps[-1].peak_memory_bytes,
    }


def latest_steps(path: Path, on_change: OnChange | None = None) -> list[StepRecord]:
    """Return the newest steps of a metrics file, without an incomplete last line.

    Raises BadInputError for lines that are not steps, and for lines edited after they were written.
    With `on_change`, edited lines are left out and reported instead.
    """
    steps: list[StepRecord] = []
    try:
        refuse_pipe(path)
        with path.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            lines = file.read(_TAIL_BYTES).split(b"\n")[bool(begin) : -1]
        for line in lines:
            try:
                steps.append(StepRecord.parse(json.loads(strip_checksum(line)), str(path)))
            except ChangedLineError as error:
                if on_change is None:
                    raise
                on_change(f"{path}: of a line, {error}")
        return steps
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is damaged: {error}") from None


def mark_running(runs: Iterable[PastRunFolder]) -> list[PastRunFolder]:
    """Return the runs; `state` is set for those that a process on this host is training."""
    known = list(runs)
    if all(one.row.state != "unfinished" for one in known):
        return known
    open_now = open_files()
    return [_mark_if_running(one, open_now) for one in known]


def _mark_if_running(one: PastRunFolder, open_now: set[Path]) -> PastRunFolder:
    metrics = Path(os.path.realpath(one.folder / METRICS_FILE))
    if one.row.state != "unfinished" or metrics not in open_now:
        return one
    return replace(one, row=one.row.model_copy(update={"state": "going on"}))


def asked_settings(record: RunRecord) -> dict[str, Any]:
    """Return the settings that the user, a file or a plan gave and that are not defaults."""
    fields = TrainSettings.model_fields
    return {
        name: value
        for name, value in record.settings
        if value != fields[name].default and record.origins.get(name, _DEFAULT) != _DEFAULT
    }


def checkpoints(folder: Path) -> Sequence[Path]:
    """Return the folders of a run's complete checkpoints, newest first."""
    whole = (folder / "checkpoints").glob("step-*/complete.json")
    steps = [path.parent for path in whole if path.parent.name[5:].isdecimal()]
    return sorted(steps, key=lambda path: int(path.name[5:]), reverse=True)


def sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file and folder in a run's folder, by name."""
    try:
        return {path.name: _total_bytes(path) for path in sorted(folder.iterdir())}
    except OSError:
        return {}


def _total_bytes(path: Path) -> int:
    """Return the size of a file or folder in bytes, without files that disappear meanwhile."""
    total = 0
    with suppress(OSError):
        for one in path.rglob("*") if path.is_dir() else (path,):
            with suppress(OSError):
                total += one.stat().st_size if one.is_file() else 0
    return total
