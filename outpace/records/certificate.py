"""Certificate: what `outpace verify` proved, and how closely."""

from typing import Any, ClassVar

from pydantic import Field

from outpace.records.base import Record
from outpace.records.machine import Machine
from outpace.records.model import ModelSpec


class TensorDifference(Record):
    """A tensor that is off by `relative` of its scale; None where one of the two is missing.

    `kind` is loss, gradient, norm, parameter or buffer, and the same "after resuming".
    """

    kind: str
    name: str
    step: int
    relative: float | None


class ParityVerdict(Record):
    """One plan against a single process.

    `worst_relative_difference` is the largest |difference| of any tensor over its scale, which in
    fp64 is the largest value in it (at least 1e-6 of the largest of all tensors of its kind; for
    other precisions see `experiment.tolerance`); `worst_tensor` names it. `bytes_on_wire` is what
    one rank sends in a step, the busiest one: computed from the collectives that it called, as
    `planner.communication.volume` says. `collectives` and `bytes_by_kind` are by kind of
    collective; beside each is what the strategy's formula gives for that rank, None where none is.

    For custom models: `refused` says that outpace does not train the model so, for the `reason`;
    `differences` are the tensors that differ, what went wrong first at the beginning, and `cause`
    is the likely one. Bytes on the wire are not counted there.
    """

    strategy: str
    mesh: str
    precision: str
    passed: bool
    worst_relative_difference: float | None
    worst_tensor: str | None
    tolerance: float
    bytes_on_wire: int | None
    bytes_formula: int | None
    collectives: dict[str, int] = Field(alias="exchanges")
    collectives_formula: dict[str, int] | None = Field(alias="exchanges_formula")
    bytes_by_kind: dict[str, int]
    bytes_by_kind_formula: dict[str, int] | None
    reason: str | None = None
    refused: bool = False
    differences: tuple[TensorDifference, ...] = ()
    cause: str | None = None


class Certificate(Record):
    """All verdicts, with what they were reached on.

    `skipped` says of strategies that were not asked for by name why they could not be tried.
    `model` is None for a user's own `module`, of which `notes` say how it was tried; samples that
    are no sequences of tokens have no `seq_len`.
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
        """Whether every plan did, but for those that are refused."""
        return all(verdict.passed or verdict.refused for verdict in self.verdicts)
