"""HangReport: what each rank was doing when a job hung (standstill.json in the run's folder)."""

from typing import ClassVar, Literal

from pydantic import Field

from outpace.records.base import Record, entry

State = Literal["waits", "works", "silent"]


class CollectiveEvent(Record):
    """A collective in torch's flight recorder. `number` counts its group's collectives from 1."""

    group: str
    number: int
    name: str
    state: str


class RankSnapshot(Record):
    """State of a rank when it was queried; `silent` if it did not answer."""

    rank: int
    host: str
    pid: int
    doing: str = entry("what the rank was doing, such as 'step 12'", "")
    state: State
    place: str = Field(
        description="the call in which the rank waits, its Python line, or why it is silent"
    )
    processes: dict[int, str] = entry(
        "kernel state of each rank's process on this host, by rank", {}
    )
    stacks: str = entry("stacks of all Python threads", "")
    collectives: tuple[CollectiveEvent, ...] = Field(
        default=(), alias="exchanges", description="oldest first"
    )


class HangReport(Record):
    """Report of a hang: which ranks delayed the others, and the state of every rank."""

    has_checksum: ClassVar[bool] = True

    sentence: str
    when: str = Field(description="UTC, ISO 8601")
    ranks: tuple[RankSnapshot, ...]
