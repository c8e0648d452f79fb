"""Callbacks that follow a run, for the user's logging and for outpace's own."""

from collections.abc import Iterable
from pathlib import Path

from outpace.records.measurement import Evaluation, Measurement, RunInfo, StepRecord
from outpace.records.memory import MemoryUse
from outpace.records.plan import Plan
from outpace.records.utilisation import Load

TRAINING = "training"  # the phase in which steps run


class Callback:
    """Base class of callbacks, called on rank 0 during the run. Override what you need."""

    def on_stage(self, message: str) -> None:
        """Handle the start of a phase, such as "preparing data"."""

    def on_progress(self, what: str, done: int, total: int | None) -> None:
        """Handle progress within a phase; `total` is None if unknown."""

    def on_start(self, info: RunInfo) -> None:
        """Handle the start of a run, before its first step."""

    def on_memory(self, plan: Plan, use: MemoryUse) -> None:
        """Handle a memory report: traced before the first step, measured at the end."""

    def on_hint(self, sentence: str) -> None:
        """Handle a hint about something that the user may want to know or change."""

    def on_step(self, record: StepRecord) -> None:
        """Handle a finished step."""

    def on_load(self, load: Load, step: int) -> None:
        """Handle rank 0's recent host and device load, at most once per second."""

    def on_eval(self, evaluation: Evaluation, final: bool) -> None:
        """Handle an evaluation on held-out data."""

    def on_checkpoint(self, path: Path) -> None:
        """Handle a checkpoint that is complete on disk."""

    def on_end(self, measurement: Measurement) -> None:
        """Handle the end of the last step."""

    def close(self) -> None:
        """Handle the end of the run, whether it succeeded or failed."""


def notify(callbacks: Iterable[Callback], event: str, *arguments: object) -> None:
    """Call the method named `event` of every callback, in order."""
    for callback in callbacks:
        getattr(callback, event)(*arguments)
