"""Callbacks on events of a run, for users and for outpace's own output."""

from collections.abc import Iterable
from pathlib import Path

from outpace.records.measurement import Evaluation, Measurement, RunInfo, StepRecord
from outpace.records.memory import MemoryUse
from outpace.records.plan import Plan
from outpace.records.utilisation import Load

TRAINING = "training"  # the phase in which steps run


class Callback:
    """Base class of callbacks, which are called on rank 0. Override the methods you need."""

    def on_stage(self, message: str) -> None:
        """Handle the start of a phase, such as "preparing data"."""

    def on_progress(self, what: str, done: int, total: int | None) -> None:
        """Handle progress: `done` of `total` units of `what`; `total` is None if unknown."""

    def on_start(self, info: RunInfo) -> None:
        """Handle the start of a run, before its first step."""

    def on_memory(self, plan: Plan, use: MemoryUse) -> None:
        """Handle a memory report (`--memory`): traced before step 1, measured at the end."""

    def on_hint(self, sentence: str) -> None:
        """Handle a hint for the user, such as a setting that may be slow."""

    def on_step(self, record: StepRecord) -> None:
        """Handle a finished step."""

    def on_load(self, load: Load, step: int) -> None:
        """Handle the recent load of rank 0's host and devices, at most once per second."""

    def on_eval(self, evaluation: Evaluation, final: bool) -> None:
        """Handle an evaluation on held-out data."""

    def on_checkpoint(self, path: Path) -> None:
        """Handle a new checkpoint once it is complete on disk."""

    def on_end(self, measurement: Measurement) -> None:
        """Handle the result of a run that has reached its last step."""

    def close(self) -> None:
        """Release resources. Called at the end of every run, even if it failed."""


def notify(callbacks: Iterable[Callback], event: str, *arguments: object) -> None:
    """Call the method named `event` of every callback, in order."""
    for callback in callbacks:
        getattr(callback, event)(*arguments)
