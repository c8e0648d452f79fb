"""Ranks: the position of this process among the processes that train together."""

from typing import Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from outpace.records.base import Record

RANK_NAME = "outpace rank "  # prefix of a rank's process name, which `top` shows


class Ranks(Record):
    """Position of a process: rank of world_size, and local_rank of local_world_size on its host."""

    rank: NonNegativeInt = 0
    local_rank: NonNegativeInt = 0
    world_size: PositiveInt = 1
    local_world_size: PositiveInt = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.world_size or self.local_rank >= self.local_world_size:
            raise ValueError(
                f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
                f"{self.local_world_size}: ranks count from 0 and stay below the size"
            )
        return self
