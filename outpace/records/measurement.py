"""Measurements: one StepRecord per step, one Measurement per run."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt

from outpace.records.base import Record, entry
from outpace.records.plan import Plan, Strategy
from outpace.records.settings import Task
from outpace.records.units import show_seconds
from outpace.records.utilisation import Load

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PARTS = ("data", "forward", "backward", "optimizer", "communication", "other")
# Medians exclude the first steps, which warm up caches, allocator and compiler.
WARMUP_STEPS = 3
NEAR_SHARE = 0.03  # relative difference from the expected step time that counts as equal
_FEW_STEPS = 20  # another program may disturb all of fewer steps
# Ratio of mean to median step time above which the median is misleading.
_UNEVEN = 1.1


class TimeParts(Record):
    """Parts of a step's time, in seconds. Communication hidden by computation is not counted."""

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    communication_s: float = 0.0
    other_s: float = 0.0

    @classmethod
    def of_steps(cls, seconds: Mapping[str, Sequence[float]]) -> Self:
        """Return the parts of a step of median length, which add up to that length.

        Each is the part's mean over the half of the steps closest to the median, scaled to the
        median. (Medians of the parts would not add up to a step.)
        """
        columns = [seconds[name] for name in cls.model_fields]
        lengths = [sum(step) for step in zip(*columns, strict=True)]
        if not lengths:
            return cls()
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        middle = order[len(order) // 4 : len(order) - len(order) // 4]
        scale = statistics.median(lengths) / (sum(lengths[step] for step in middle) or 1.0)
        sums = [sum(column[step] for step in middle) for column in columns]
        return cls(**{name: scale * s for name, s in zip(cls.model_fields, sums, strict=True)})

    @property
    def total_s(self) -> float:
        """Return the time of the whole step in seconds."""
        return float(sum(getattr(self, f"{part}_s") for part in PARTS))

    @property
    def computing_s(self) -> float:
        """Return the time that this rank computes: forward, backward and optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s


class RunInfo(Record):
    """Description of a run, shown before the first step."""

    run: str = Field(description="the run's directory")
    plan: Plan
    identity: str = Field(description="the batch equation with its numbers")
    model: str = Field(description="as the user gave it, or a short name")
    parameters: int
    device: str = Field(description="name to show: cpu, or the GPU's name")
    total_steps: int
    start_step: int = entry("steps already done, if resumed", 0)
    hosts: int = 1
    hints: tuple[str, ...] = ()


class StepRecord(Record):
    """One optimizer step of the whole job; a line of metrics.jsonl. None means unknown."""

    step: int = Field(description="steps done, counting this one; the first is 1")
    tokens: int | None = Field(description="tokens trained on so far, all ranks; None without text")
    samples: int = Field(description="samples trained on so far, all ranks")
    loss: float = Field(description="exact mean over the global batch's target tokens, nats")
    lr: float
    grad_norm: float = Field(description="before clipping, of the whole model")
    step_time_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    communication_s: float
    other_s: float
    tokens_per_s: float | None
    samples_per_s: float
    model_flops_per_s: float | None = Field(
        description="rate of all ranks; None for unknown models"
    )
    hardware_flops_per_s: float | None = Field(description="including recomputation")
    mfu: float | None = Field(description="share of the catalog's dense peak, None if it has none")
    hfu: float | None = None
    peak_memory_bytes: int | None = Field(description="maximum over ranks so far")
    loss_scale: float | None = Field(description="fp16 only")
    skipped_steps: int = Field(description="steps skipped so far because of an fp16 overflow")
    cache_freed_bytes: int | None = entry(
        "bytes released between phases by --empty-cache, on rank 0"
    )


class Evaluation(Record):
    """The loss on held-out data, and the task's other metrics."""

    step: int
    loss: float = Field(
        description="nats per target: a token, or a sample that is classified; for a custom model "
        "with its own data, what its loss computes"
    )
    perplexity: float | None = Field(description="of tokens; None for a custom model's own data")
    tokens: int = Field(description="number of targets")
    tokens_per_s: float
    seq_len: int | None = entry("upper bound; None if outpace did not train the model")
    left_over_tokens: int = entry("unused tokens after the last whole sample of each source", 0)
    sums: dict[str, float] = entry("sums over all ranks, from which metrics are computed", {})
    metrics: dict[str, float] = entry("by name: accuracy, f1", {})


class StepTimeCheck(Record):
    """Comparison of the expected step time with the first steps after warm-up."""

    expected_s: float
    step_time_s: float = Field(description="median of the first steps")
    mean_s: float | None = Field(default=None, gt=0, description="mean of the same steps")
    steps: int = Field(description="number of steps compared, at most 100")
    kept: bool = Field(description="whether the median is within 3 %")

    @property
    def ratio(self) -> float:
        """Return measured / expected step time; below 1 if steps were faster."""
        return self.compared_s / self.expected_s

    @property
    def uneven(self) -> bool:
        """Return whether some steps were so slow that the mean is far above the median."""
        return self.mean_s is not None and self.mean_s > _UNEVEN * self.step_time_s

    @property
    def compared_s(self) -> float:
        """Return the measured step time: the median, or the mean if that is much larger."""
        return self.mean_s if self.mean_s is not None and self.uneven else self.step_time_s

    @property
    def slower(self) -> bool:
        """Return whether steps took longer than expected by more than the tolerance."""
        return not self.as_expected and self.ratio > 1

    @property
    def as_expected(self) -> bool:
        """Return whether the measured step time is within 3 % of the expected one."""
        return abs(self.ratio - 1) <= NEAR_SHARE if self.uneven else self.kept

    @property
    def verdict(self) -> str:
        """Return in two or three words whether steps are as fast as expected."""
        if self.as_expected:
            return "As expected"
        return "Slower than expected" if self.slower else "Faster than expected"

    @property
    def words(self) -> str:
        """Return a sentence that compares the measured step time with the expected one."""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        expected = f"{show_seconds(self.expected_s)} was expected ({self.ratio - 1:+.1%})"
        few = ", which is weak evidence: up to 100 steps are compared"
        few *= self.steps < _FEW_STEPS
        if not self.uneven:
            which = "" if self.steps == 1 else " (median)"
            took = f"{show_seconds(self.step_time_s)}{which}"
            return f"the first {steps} took {took}; {expected}{few}"
        return (
            f"the first {steps} took {show_seconds(self.compared_s)} on average; {expected}. Half "
            f"of them took at most {show_seconds(self.step_time_s)} (median), so the others were "
            f"delayed, for example by another program on this machine{few}"
        )


class Measurement(Record):
    """Result of a run, saved as result.json. Medians leave out the warm-up steps."""

    has_checksum: ClassVar[bool] = True

    run: str = Field(description="the run's directory")
    task: Task = "pretrain"
    steps: PositiveInt
    tokens: NonNegativeInt | None
    samples: NonNegativeInt
    parameters: NonNegativeInt
    world_size: PositiveInt
    strategy: Strategy | None = None
    device: str | None = entry("cpu, cuda or mps")
    first_step_s: float | None = entry("from the start of the job to the end of the first step")
    compile_s: float = entry("time in torch.compile, a part of first_step_s", 0.0)
    step_time_s: float | None = Field(gt=0, allow_inf_nan=False, description="median")
    tokens_per_s: Rate | None
    samples_per_s: Rate | None
    model_flops_per_s: Rate | None
    hardware_flops_per_s: Rate | None
    mfu: Rate | None
    hfu: Rate | None
    peak_memory_bytes: int | None
    peak_memory_by_rank: tuple[int, ...] = entry(
        "peak_memory_bytes of each rank; empty: unknown", ()
    )
    parts: TimeParts = Field(description="of a step of median length")
    parts_by_rank: tuple[TimeParts, ...] = entry(
        "`parts` of each rank, by its own clock; `parts` is rank 0's", ()
    )
    first_loss: float | None
    final_loss: float | None
    initial_eval: Evaluation | None = None
    final_eval: Evaluation | None = None
    unigram_entropy: float | None = entry("entropy of the validation tokens' frequencies, nats")
    sample: str | None = entry("text generated at the end")
    skipped_steps: int = 0
    cache_freed_bytes: int | None = entry("median over steps")
    utilisation: tuple[Load, ...] = entry(
        "averages over the training, for each host and its devices", ()
    )
    step_time_check: StepTimeCheck | None = Field(
        default=None, alias="promise", description="if a step time was expected"
    )
    # For runs with --measure-only.
    sent_bytes: int | None = entry(
        "bytes that all ranks send in a step, counted in the last warm-up step"
    )
    idle_share: float | None = entry(
        "share of time after warm-up in which main threads waited, mean over ranks; only on CPUs, "
        "where they compute"
    )
    start_step: NonNegativeInt = entry("steps done before the last resume", 0)
    # Names as in Hugging Face's Trainer, to compare results. In a resumed run, times and rates
    # cover the steps since the last resume.
    train_runtime: float
    train_samples_per_second: float
    train_steps_per_second: float
    train_loss: float | None = Field(description="mean over the run's steps")

    @property
    def worse_than_unigrams(self) -> str | None:
        """Return a warning if token frequencies alone would give a lower validation loss."""
        last, entropy = self.final_eval, self.unigram_entropy
        if last is None or entropy is None or not last.loss > entropy:
            return None
        return (
            f"The validation loss of {last.loss:.4f} is above the unigram entropy of "
            f"{entropy:.4f}: token frequencies alone predict the text better. Train for more "
            "steps, or with another learning rate"
        )
