"""Certificate: what `outpace verify` proved, and to what accuracy."""

from typing import Any, ClassVar

from pydantic import Field

from outpace.records.base import Record
from outpace.records.machine import Machine
from outpace.records.model import ModelSpec


class TensorDifference(Record):
    """A tensor that differs from that of a single process.

    `kind` is loss, gradient, norm, parameter or buffer. The words "after resuming" follow
    if the tensors were compared after a resume. `relative` is the difference divided by the
    tensor's scale; None if the tensor is missing.
    """

    kind: str
    name: str
    step: int
    relative: float | None


class ParityVerdict(Record):
    """Comparison of one plan with a single process.

    `worst_relative_difference` is the largest |difference| / scale over all tensors, and
    `worst_tensor` names the tensor. In fp64, a tensor's scale is its largest magnitude, but at
    least 1e-6 of the largest magnitude of its kind; for other precisions see
    `experiment.tolerance`. `differences` are the tensors that differ, in order of computation, and
    `cause` is the likely cause. Tensors that differ only because the batch is split are left out if
    others differ, too. A difference that is not finite is None.

    `bytes_on_wire` is what the busiest rank sends in a step, computed from the collectives that it
    called (see `planner.communication.volume`); for custom models, it is not counted. `collectives`
    and `bytes_by_kind` have the counts and bytes of each kind of collective. Fields with "formula"
    in their name have the values that the strategy's formula predicts for the same rank; None if it
    has no formula.

    `refused` means that outpace does not train the model with this plan, for the given `reason`.
    """

    strategy: str
    mesh: str
    precision: str
    passed: bool
    worst_relative_difference: float | None
    worst_tensor: str | None
    tolerance: float
    bytes_on_wire: int | None = None
    bytes_formula: int | None = None
    collectives: dict[str, int] = Field(default={}, alias="exchanges")
    collectives_formula: dict[str, int] | None = Field(default=None, alias="exchanges_formula")
    bytes_by_kind: dict[str, int] = Field(default={})
    bytes_by_kind_formula: dict[str, int] | None = None
    reason: str | None = None
    refused: bool = False
    differences: tuple[TensorDifference, ...] = ()
    cause: str | None = None

    def __str__(self) -> str:
        if self.refused:
            return f"{self.strategy}: refused: {self.reason}"
        worst = self.worst_relative_difference
        difference = "not finite" if worst is None else f"{worst:.1e}"
        found = f"largest relative difference {difference}, tolerance {self.tolerance:.1e}"
        if self.passed:
            return f"{self.strategy}: equal ({found})"
        explanation = self.cause or self.reason
        return f"{self.strategy}: differs in {self.worst_tensor} ({found})" + (
            f": {explanation}" if explanation else ""
        )


WITHOUT_DROPOUT = "without dropout, so the ranks' dropout masks are not verified"


class Certificate(Record):
    """All verdicts of `outpace verify`, and the conditions under which they hold.

    `skipped` has the strategies that could not be tried when all were requested, each with the
    reason. `model` is None for a custom `module`. `notes` say how the conditions differ from
    training. `seq_len` is None if samples are not sequences of tokens.
    """

    has_checksum: ClassVar[bool] = True

    verdicts: tuple[ParityVerdict, ...]
    model: ModelSpec | None
    module: str | None = None
    notes: tuple[str, ...] = ()
    processes: int
    steps: int
    global_batch: int
    seq_len: int | None
    versions: dict[str, Any]
    commit: str | None
    uncommitted_changes: bool
    machine: Machine
    date: str
    skipped: dict[str, str] = Field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Return whether every plan passed or was refused."""
        return all(verdict.passed or verdict.refused for verdict in self.verdicts)

    def __str__(self) -> str:
        return "\n".join(map(str, self.verdicts))
