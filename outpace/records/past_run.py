"""PastRun: model, plan, progress and speed of a run, for the list of runs."""

from typing import Any, Literal

from pydantic import Field

from outpace.records.base import Record, entry
from outpace.records.plan import Strategy
from outpace.records.precisions import Precision

State = Literal["done", "going on", "unfinished", "damaged"]


class PastRun(Record):
    """A run in the list of past runs. Fields are None if unknown.

    An unfinished run has its latest figures.
    """

    path: str
    state: State
    changed: tuple[str, ...] = entry(
        "sentences about files that changed since they were written", ()
    )
    damage: str | None = entry("what cannot be read, and why")
    started: str | None = entry("UTC, ISO 8601")
    model: str | None = entry("as the user gave it")
    strategy: Strategy | None = None
    mesh: str | None = entry("the axes that are split")
    precision: Precision | None = None
    asked: dict[str, Any] = Field(
        default_factory=dict,
        description="settings that the user gave and that differ from the default",
    )
    processes: int | None = None
    steps: int = entry("steps done", 0)
    total_steps: int | None = None
    step_time_s: float | None = entry("median")
    tokens_per_s: float | None = None
    mfu: float | None = None
    final_loss: float | None = entry("at the last completed step")
    peak_memory_bytes: int | None = None
