"""Training runs read from trainers' logs, and machines whose rates such runs correct."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from outpace.records.axes import ProductSchedule
from outpace.records.base import Record, entry, read_object
from outpace.records.errors import BadInputError
from outpace.records.machine import Machine
from outpace.records.outline import Outline
from outpace.records.plan import Checkpointing, Offload, Plan
from outpace.records.precisions import Precision

TrainerName = Literal["outpace", "torchtitan", "megatron", "deepspeed", "trainer", "nanotron"]

# allocated: torch's tensors; reserved: held by torch's allocator; resident: the process's memory.
MemoryKind = Literal["allocated", "reserved", "resident"]


class LoggedRun(Record):
    """A run as described by a trainer's log. Values that the log does not state are None.

    Times are averages over `steps` steps, without warm-up. Memory is the maximum over the ranks in
    the log.
    """

    trainer: TrainerName
    log: str = Field(description="name of the file or the run's folder")
    steps: PositiveInt
    step_time_s: PositiveFloat | None = None
    tokens_per_s_per_device: PositiveFloat | None = None
    clock_step_s: tuple[NonNegativeFloat, PositiveFloat] | None = entry(
        "shortest and longest step, from the timestamps of the log's lines"
    )
    samples_per_s: PositiveFloat | None = None
    peak_memory_bytes: NonNegativeInt | None = None
    memory_kind: MemoryKind = "allocated"
    seq_len: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    micro_batch: PositiveInt | None = None
    world_size: PositiveInt | None = None
    dp_replicate: PositiveInt | None = None
    dp_shard: PositiveInt | None = None
    tp: PositiveInt | None = None
    pp: PositiveInt | None = None
    cp: PositiveInt | None = None
    ep: PositiveInt | None = None
    expert_tp: PositiveInt | None = None
    zero: NonNegativeInt | None = entry("ZeRO stage; 0: none")
    sequence_parallel: bool | None = None
    pp_microbatches: PositiveInt | None = None
    pp_schedule: ProductSchedule | None = None
    virtual_stages: PositiveInt | None = None
    precision: Precision | None = None
    checkpointing: Checkpointing | None = None
    offload_parameters: Offload | None = None
    offload_optimizer: Offload | None = None
    pp_schedules_all: bool = entry("whether one pipeline pass has all micro-batches", False)
    layers: PositiveInt | None = None
    hidden: PositiveInt | None = None
    parameters: PositiveInt | None = None
    trainable_parameters: PositiveInt | None = entry("may be those of one device")
    adapters: bool = entry("whether only some of the weights were trained", False)
    plan: Plan | None = entry("set for outpace's runs")
    notes: tuple[str, ...] = entry("about what the log does not say", ())


class ObservedRun(Record):
    """A run with a known plan and a measured step time."""

    trainer: TrainerName
    log: str
    outline: Outline
    seq_len: PositiveInt
    global_batch: PositiveInt
    plan: Plan
    step_time_s: PositiveFloat
    peak_memory_bytes: NonNegativeInt | None = None
    memory_kind: MemoryKind = "allocated"

    def same_run(self, other: "ObservedRun") -> bool:
        """Return whether both were read from one log: same name, model, plan, length and batch."""
        names = ("trainer", "log", "outline", "seq_len", "global_batch", "plan")
        return all(getattr(self, name) == getattr(other, name) for name in names)


class CorrectedMachine(Record):
    """A machine from the catalog (`node`) or from a probe, and observed runs.

    The measured step times of the runs are used to correct the machine's rates.
    """

    has_checksum: ClassVar[bool] = True

    node: str | None = None
    network: str | None = None
    devices_per_node: PositiveInt | None = None
    machine: Machine | None = None
    runs: tuple[ObservedRun, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_base(self) -> Self:
        if (self.node is None) == (self.machine is None):
            raise ValueError(
                "a corrected machine is either from the catalog or probed. Give one of node and "
                "machine"
            )
        return self


def is_corrected(path: Path) -> bool:
    """Return whether a file has a CorrectedMachine, rather than the Machine of a probe."""
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        values = read_object(path)
    except BadInputError:
        return False  # Reading it as a machine will report the error.
    return "runs" in values and "host_cores" not in values
