"""Plan: how a model is laid out on processes and computed. Strategy, axes, precision, levers."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from outpace.records.base import Record
from outpace.records.errors import BadInputError

Strategy = Literal["single", "ddp"]
Precision = Literal["fp32", "bf16", "fp16"]
Checkpointing = Literal["none", "selective", "full"]


class Plan(Record):
    """One way to train. Accumulation is derived from the global batch, not stored."""

    strategy: Strategy = "single"
    dp_replicate: PositiveInt = 1
    micro_batch: PositiveInt = 1
    precision: Precision = "fp32"
    checkpointing: Checkpointing = "none"
    compile: bool = False
    loss: Literal["auto", "plain", "chunked"] = "auto"
    compress_gradients: Literal["none", "bf16"] = "none"
    bucket_mib: PositiveInt = 25

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.strategy == "single" and self.dp_replicate != 1:
            raise ValueError(
                f"strategy single runs on one process, not {self.dp_replicate}; "
                "use strategy ddp or one process"
            )
        return self

    @property
    def world_size(self) -> int:
        """The number of processes that this plan is for."""
        return self.dp_replicate

    @property
    def data_parallel(self) -> int:
        """The number of ranks that read different samples."""
        return self.dp_replicate

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches per rank and step. Raises BadInputError when they don't divide."""
        per_pass = self.micro_batch * self.data_parallel
        if global_batch % per_pass:
            lower = global_batch // per_pass * per_pass
            nearest = " or ".join(str(n) for n in (lower, lower + per_pass) if n)
            raise BadInputError(
                f"global batch = micro-batch × accumulation × data-parallel degree, but "
                f"{global_batch} is not a multiple of {self.micro_batch} × {self.data_parallel} "
                f"= {per_pass}. Use a global batch of {nearest}, or another micro-batch."
            )
        return global_batch // per_pass

    def identity(self, global_batch: int) -> str:
        """The batch identity with its numbers, as always shown."""
        return (
            f"global batch {global_batch} = micro-batch {self.micro_batch} × accumulation "
            f"{self.accumulation(global_batch)} × data-parallel {self.data_parallel}"
        )
