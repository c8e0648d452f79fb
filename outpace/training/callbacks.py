"""Callbacks by which the user's own logging, and outpace's, follow a run."""

from collections.abc import Iterable
from pathlib import Path

from outpace.records.measurement import Evaluation, Measurement, RunInfo, StepRecord
from outpace.records.memory import MemoryUse
from outpace.records.plan import Plan
from outpace.records.utilisation import Load

TRAINING = "training"  # the phase of steps


class Callback:
    """Called on rank 0 during the run. Override what you need; the rest does nothing."""

    def on_stage(self, message: str) -> None:
        """A phase begins: "preparing data"."""

    def on_progress(self, what: str, done: int, total: int | None) -> None:
        """Part of a phase is done; `total` is None when it is not known."""

    def on_start(self, info: RunInfo) -> None:
        """The first step is about to begin."""

    def on_memory(self, plan: Plan, use: MemoryUse) -> None:
        """Report the use of memory: traced, before the first step; at the end measured, too."""

    def on_hint(self, sentence: str) -> None:
        """Report something that the user may want to change, or know."""

    def on_step(self, record: StepRecord) -> None:
        """A step is done."""

    def on_load(self, load: Load, step: int) -> None:
        """Report how busy rank 0's host was of late, after `step`; every second or more rarely."""

    def on_eval(self, evaluation: Evaluation, final: bool) -> None:
        """The held-out loss was measured."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is whole on disk."""

    def on_end(self, measurement: Measurement) -> None:
        """The run reached its last step."""

    def close(self) -> None:
        """The run ends, however it ends."""


def tell(callbacks: Iterable[Callback], event: str, *arguments: object) -> None:
    """Call the method named `event` of every callback, in order."""
    for callback in callbacks:
        getattr(callback, event)(*arguments)
