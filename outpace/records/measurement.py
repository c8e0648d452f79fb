"""Measurements: one StepRecord a step, one Measurement a run."""

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from outpace.records.base import Record
from outpace.records.plan import Plan, Strategy
from outpace.records.settings import Task
from outpace.records.units import show_seconds
from outpace.records.utilisation import Load

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PARTS = ("data", "forward", "backward", "optimizer", "communication", "other")
# The first steps pay for warm-up of caches, allocator and compiler: no median has them.
WARMUP_STEPS = 3
NEAR_SHARE = 0.03  # of the expected step time: as near as this is as expected
_FEW_STEPS = 20  # a neighbour on the machine may be there for all of them
# Mean to median of step times, from which on a median says too little of how long a run takes.
_UNEVEN = 1.1


class TimeParts(Record):
    """Parts of a step's time, in seconds. Communication is what no computation hides."""

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    communication_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole step."""
        return float(sum(getattr(self, f"{part}_s") for part in PARTS))

    @property
    def computing_s(self) -> float:
        """Time in which this rank computes: forward and backward passes and the optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s


class RunInfo(Record):
    """Description of a run, shown before the first step."""

    run: str = Field(description="the run's directory")
    plan: Plan
    identity: str = Field(description="the batch identity with its numbers")
    model: str = Field(description="as it was asked for, or a short name")
    parameters: int
    device: str = Field(description="as users know it: cpu, or the GPU's name")
    total_steps: int
    start_step: int = Field(default=0, description="steps already done, when resumed")
    hosts: int = 1
    hints: tuple[str, ...] = ()


class StepRecord(Record):
    """One optimizer step of the whole job; a line of metrics.jsonl. Unknown is None."""

    step: int = Field(description="steps done, counting this one; the first is 1")
    tokens: int | None = Field(description="tokens trained on so far, all ranks; None if no text")
    samples: int = Field(description="samples trained on so far, all ranks")
    loss: float = Field(description="exact mean over the global batch's target tokens, nats")
    lr: float
    grad_norm: float = Field(description="before clipping, whole model")
    step_time_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    communication_s: float
    other_s: float
    tokens_per_s: float | None
    samples_per_s: float
    model_flops_per_s: float | None = Field(description="all ranks; None for unknown models")
    hardware_flops_per_s: float | None = Field(description="counts recomputation too")
    mfu: float | None = Field(description="share of the catalog's dense peak, None if not there")
    hfu: float | None = None
    peak_memory_bytes: int | None = Field(description="of the fullest rank, so far")
    loss_scale: float | None = Field(description="fp16 only")
    skipped_steps: int = Field(description="so far, for overflow in fp16")
    cache_freed_bytes: int | None = Field(
        default=None, description="given back between phases by --empty-cache, on rank 0"
    )


class Evaluation(Record):
    """A loss on held-out data, and what else a task is measured by."""

    step: int
    loss: float = Field(description="nats per target: a token, or a sample that is classified")
    perplexity: float
    tokens: int = Field(description="targets")
    tokens_per_s: float
    seq_len: int | None = Field(default=None, description="at most; None where it is not outpace's")
    left_over_tokens: int = Field(
        default=0, description="of the data, behind the last whole sample of each source"
    )
    sums: dict[str, float] = Field(default={}, description="over all ranks; what metrics are of")
    metrics: dict[str, float] = Field(default={}, description="by name: accuracy, f1")


class StepTimeCheck(Record):
    """Expected step time, and the median of the run's first steps after warm-up."""

    expected_s: float
    step_time_s: float = Field(description="median of the first steps")
    mean_s: float | None = Field(default=None, gt=0, description="mean of the same steps")
    steps: int = Field(description="that this is of, at most 100")
    kept: bool = Field(description="the median is within 3 %")

    @property
    def ratio(self) -> float:
        """Measured to expected: below 1 where steps were faster."""
        return self.compared_s / self.expected_s

    @property
    def uneven(self) -> bool:
        """Whether some steps took so long that the mean is much above the median."""
        return self.mean_s is not None and self.mean_s > _UNEVEN * self.step_time_s

    @property
    def compared_s(self) -> float:
        """Measured step time: the median, or the mean where that is much larger."""
        return self.mean_s if self.mean_s is not None and self.uneven else self.step_time_s

    @property
    def slower(self) -> bool:
        """Whether steps took longer than expected, by more than what is within it."""
        return not self.as_expected and self.ratio > 1

    @property
    def as_expected(self) -> bool:
        """Whether what a step took is within 3 % of what was expected."""
        return abs(self.ratio - 1) <= NEAR_SHARE if self.uneven else self.kept

    @property
    def verdict(self) -> str:
        """Whether it is as expected, in three words."""
        if self.as_expected:
            return "As expected"
        return "Slower than expected" if self.slower else "Faster than expected"

    @property
    def words(self) -> str:
        """Return the comparison as a sentence."""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        expected = f"{show_seconds(self.expected_s)} was expected ({self.ratio - 1:+.1%})"
        few = ", and so few tell little: 100 are compared where there are as many"
        few *= self.steps < _FEW_STEPS
        if not self.uneven:
            which = "" if self.steps == 1 else " (median)"
            took = f"{show_seconds(self.step_time_s)}{which}"
            return f"the first {steps} took {took} where {expected}{few}"
        return (
            f"the first {steps} took {show_seconds(self.compared_s)} in the mean where {expected}, "
            f"though half of them took no more than {show_seconds(self.step_time_s)} (median): "
            f"others were held up, as by another program on this machine{few}"
        )


class Measurement(Record):
    """The outcome of a run; result.json. Medians leave out the first steps (warm-up)."""

    has_checksum: ClassVar[bool] = True

    run: str = Field(description="the run's directory")
    task: Task = "pretrain"
    steps: PositiveInt
    tokens: NonNegativeInt | None
    samples: NonNegativeInt
    parameters: NonNegativeInt
    world_size: PositiveInt
    strategy: Strategy | None = None
    device: str | None = Field(default=None, description="cpu, cuda or mps")
    first_step_s: float | None = Field(
        default=None, description="from the start of the job to the end of its first step"
    )
    compile_s: float = Field(default=0.0, description="of that, in torch.compile's compiler")
    step_time_s: float | None = Field(gt=0, allow_inf_nan=False, description="median")
    tokens_per_s: Rate | None
    samples_per_s: Rate | None
    model_flops_per_s: Rate | None
    hardware_flops_per_s: Rate | None
    mfu: Rate | None
    hfu: Rate | None
    peak_memory_bytes: int | None
    peak_memory_by_rank: tuple[int, ...] = Field(
        default=(), description="bytes, of which the largest is above; empty: not known"
    )
    parts: TimeParts = Field(description="median of each part")
    parts_by_rank: tuple[TimeParts, ...] = Field(
        default=(), description="the same by each rank's own clock; `parts` is rank 0's"
    )
    first_loss: float | None
    final_loss: float | None
    initial_eval: Evaluation | None = None
    final_eval: Evaluation | None = None
    unigram_entropy: float | None = Field(
        default=None, description="nats, of the validation tokens: what counting alone achieves"
    )
    sample: str | None = Field(default=None, description="text generated at the end")
    skipped_steps: int = 0
    cache_freed_bytes: int | None = Field(default=None, description="median of a step's")
    utilisation: tuple[Load, ...] = Field(
        default=(), description="average of each host and its devices over the training"
    )
    step_time_check: StepTimeCheck | None = Field(
        default=None, alias="promise", description="where a step time was expected"
    )
    # Of runs with --measure-only.
    sent_bytes: int | None = Field(
        default=None, description="by all ranks in one step, counted in the last of the warm-up"
    )
    idle_share: float | None = Field(
        default=None,
        description="of the time after the warm-up, in which ranks' main threads waited; their "
        "mean, where these compute (cpu)",
    )
    start_step: NonNegativeInt = Field(
        default=0, description="steps that were done before this part of a resumed run"
    )
    # Hugging Face Trainer's names, so that results stand side by side. Times and rates of a resumed
    # run are of its last part.
    train_runtime: float
    train_samples_per_second: float
    train_steps_per_second: float
    train_loss: float | None = Field(description="mean over the run's steps")
