"""A run that lies in a folder, in a row: what it is, how far it came, how fast it was."""

from typing import Any, Literal

from pydantic import Field

from outpace.records.base import Record
from outpace.records.plan import Strategy
from outpace.records.precisions import Precision

State = Literal["done", "going on", "unfinished", "damaged"]


class PastRun(Record):
    """A row of the list of runs. Unknown is None; figures of an unfinished run are of its end."""

    path: str
    state: State
    changed: tuple[str, ...] = Field(
        default=(), description="sentences on its files that are not as they were written"
    )
    damage: str | None = Field(default=None, description="what of it cannot be read, and why")
    started: str | None = Field(default=None, description="UTC, ISO 8601")
    model: str | None = Field(default=None, description="as it was asked for")
    strategy: Strategy | None = None
    mesh: str | None = Field(default=None, description="the axes that are split")
    precision: Precision | None = None
    asked: dict[str, Any] = Field(
        default_factory=dict, description="settings that were given and are not the default"
    )
    processes: int | None = None
    steps: int = Field(default=0, description="done")
    total_steps: int | None = None
    step_time_s: float | None = Field(default=None, description="median")
    tokens_per_s: float | None = None
    mfu: float | None = None
    final_loss: float | None = Field(default=None, description="of the last step that was done")
    peak_memory_bytes: int | None = None
