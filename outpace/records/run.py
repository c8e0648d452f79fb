"""RunRecord: everything that determined a run (run.json). Failure: why it ended early."""

import shlex
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from outpace.records.base import Record, entry, format_path
from outpace.records.errors import BadInputError, nearest_of
from outpace.records.machine import Machine
from outpace.records.measurement import WARMUP_STEPS, Measurement
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

RUN_FILE = "run.json"


def resume_command(run: Path) -> str:
    """Return the command that resumes a run."""
    return shlex.join(["outpace", "train", "--resume", str(run)])


def explain_removed_checkpoint(path: Path) -> str:
    """Return a note for the user if a path is that of a removed checkpoint, else ""."""
    if path.exists() or path.parent.name != "checkpoints" or not path.parent.is_dir():
        return ""
    kept = [one.name for one in path.parent.glob("step-*") if one.name[5:].isdecimal()]
    listed = ", ".join(sorted(kept, key=lambda name: int(name[5:]))) or "none"
    return (
        f" Older checkpoints are removed when newer ones are saved; of this run, {listed} "
        f"{'is' if len(kept) < 2 else 'are'} left. --keep N of outpace train keeps the N "
        "newest."
    )


def suggest_runs(path: Path) -> str:
    """Return a note with the runs in a folder, else with those next to it; "" if there are none."""
    for folder in (path, path.parent):
        found = sorted(one.parent.name for one in folder.glob(f"*/{RUN_FILE}"))
        if found:
            return f" Runs in {folder}: {nearest_of(path.name, found, 3)}."
    return ""


def require_run(folder: Path) -> None:
    """Raise BadInputError, with the runs nearby, if a folder holds no run."""
    if (folder / RUN_FILE).is_file():
        return
    if not folder.exists():
        fault = f"there is no folder {format_path(folder)}. Give the folder of a run."
    else:
        fault = (
            f"{format_path(folder)} holds no run (no {RUN_FILE}). Give the folder of a run, which "
            "`outpace train` prints at the end (`outpace runs` lists the runs in a folder)."
        )
    raise BadInputError(f"{fault}{suggest_runs(folder)}{explain_removed_checkpoint(folder)}")


class RunRecord(Record):
    """Inputs and environment of a run, so that it can be resumed, repeated and compared."""

    has_checksum: ClassVar[bool] = True

    outpace: str
    command: tuple[str, ...]
    settings: TrainSettings
    origins: dict[str, str]
    plan: Plan
    identity: str
    model: ModelSpec | None
    model_code: str | None = entry("hash of a custom model's file, without comments")
    parameters: int
    total_steps: int
    seq_len: int | None
    tokenizer: str | None = None
    train_data: str
    eval_data: str | None
    reading: int = entry("version of the code that turns files into samples; 0: not recorded", 0)
    base_weights: str | None = None
    versions: dict[str, str]
    commit: str | None
    uncommitted_changes: bool | None
    changes: str | None = entry("hash of the uncommitted changes; None: there are none")
    machine: Machine
    device: str
    threads: int
    environment: dict[str, str] = entry("variables that affect computation or communication", {})
    load_before: float | None = entry(
        "load average of the minute before the run: processes running or waiting for a core"
    )
    started: str
    resumes: tuple[dict[str, Any], ...] = ()

    @property
    def start_step(self) -> int:
        """Return the step of the last resume with another plan, machine or versions; 0 if none.

        Only later steps used this plan on this machine. Resumes in older records, which lack this
        fact, count as changes.
        """
        moved = [int(one.get("step", 0)) for one in self.resumes if one.get("changed", True)]
        return moved[-1] if moved else 0

    def last_untimed_step(self, result: Measurement | None) -> int:
        """Return the last step that does not count towards the run's times and rates; 0 if all do.

        For a finished run, it is the step of the last resume, as in its `result`. If all later
        steps are warm-up, or the run is unfinished, it is `start_step`.
        """
        if result is None or result.steps - result.start_step <= WARMUP_STEPS:
            return self.start_step
        return result.start_step

    def is_warm_up(self, step: int) -> bool:
        """Return whether a step is one of the first after the start or after a resume."""
        begins = (0, *(int(one.get("step", 0)) for one in self.resumes))
        return any(0 < step - begin <= WARMUP_STEPS for begin in begins)

    def changes_since(self, earlier: "RunRecord") -> tuple[str, ...]:
        """Return the names of facts that affect step time and differ from an earlier record."""
        names = ("plan", "outpace", "versions", "device", "threads", "environment")
        differ = [name for name in names if getattr(self, name) != getattr(earlier, name)]
        return *differ, *earlier.machine.differences(self.machine)


class Failure(Record):
    """Reason why a run ended before its last step (failure.json, which a resume removes)."""

    has_checksum: ClassVar[bool] = True

    reason: str
    ended: str = Field(description="UTC, ISO 8601")
    checkpoint_step: int | None = entry("the newest checkpoint at that time; None: there was none")
