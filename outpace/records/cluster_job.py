"""Resources to request from a cluster's scheduler."""

import re
from pathlib import Path
from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from outpace.records.base import Record, entry

# A valid name for a Kubernetes Service (RFC 1035), which also needs no quoting anywhere.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


class ClusterJob(Record):
    """Nodes, ranks per node, and the outpace command that every rank runs."""

    name: str
    nodes: PositiveInt
    ranks_per_node: PositiveInt
    gpus_per_node: NonNegativeInt = 0
    cpus_per_rank: PositiveInt | None = None
    command: tuple[str, ...] = Field(min_length=1)
    folder: Path = Field(description="the command's working directory, the same on all nodes")
    out: Path | None = entry("the run's folder, if it is known")

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a valid name: use at most 40 lower-case letters, digits and "
                "hyphens, starting with a letter and ending with a letter or digit"
            )
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpus_per_node and self.ranks_per_node > self.gpus_per_node:
            raise ValueError(
                f"{self.ranks_per_node} ranks for {self.gpus_per_node} GPUs on a node: each "
                f"rank needs its own GPU. Use at most {self.gpus_per_node} ranks per node"
            )
        unsafe = [word for word in (*self.command, str(self.folder)) if _has_unprintable(word)]
        if unsafe:
            raise ValueError(f"{unsafe[0]!r} contains a line break or an unprintable character")
        return self


def _has_unprintable(word: str) -> bool:
    return any(not character.isprintable() for character in word)
