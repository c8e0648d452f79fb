"""Memory from the planner's formula, for models that outpace can plan for but not train."""

from collections.abc import Callable
from dataclasses import dataclass

from outpace.jobs.defaults import resolve_seq_len
from outpace.planner.memory import peak
from outpace.planner.memory.setup import Device, MemoryQuestion
from outpace.planner.model.outline_flops import forward_flops
from outpace.planner.plan_columns import of_plans
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator
from outpace.records.memory import MemoryAccount, Moment
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

# Maps a model reference to its name, its outline and, if outpace can build it, its spec.
FindOutline = Callable[[str], tuple[str, Outline, ModelSpec | None]]


@dataclass(frozen=True)
class FormulaQuestion:
    """Request for the memory of a model that cannot be traced, only estimated from its outline.

    It can be used like a `MemoryQuery`. The planner's formula gives the estimate.
    """

    outline: Outline
    plan: Plan
    settings: TrainSettings
    global_batch: int
    accelerator: Accelerator | None

    @property
    def seq_len(self) -> int:
        """Number of tokens per sample."""
        positions = self.outline.max_positions if self.outline.learned_positions else None
        return resolve_seq_len(self.settings, positions)

    def trace(self, rank: int) -> MemoryAccount:
        """Estimate the memory of the rank that needs the most, and return it as that of `rank`."""
        columns = of_plans([self.plan], self.global_batch, self.outline.layers)
        device: Device = "cpu" if self.accelerator is None else "cuda"
        question = MemoryQuestion(self.outline, self.seq_len, device)
        by_kind = peak.anatomy(question, columns)
        library = None if self.accelerator is None else peak.plan_library_bytes(self.plan)
        reserved = peak.reserved_bytes(question, columns)
        flops = 3 * forward_flops(self.outline, self.seq_len, self.global_batch)
        return MemoryAccount(
            source="estimated",
            device=device,
            rank=rank,
            world_size=self.plan.world_size,
            peak=Moment(
                step=1, part="other", module="", operator="",
                by_kind={kind: round(float(n[0])) for kind, n in by_kind.items() if n[0] >= 0.5},
            ),
            timeline=(),
            activations_by_module={},
            reserved_bytes=None if library is None else round(float(reserved[0])) - library,
            library_bytes=library,
            flops=round(flops / self.plan.world_size),
        )  # fmt: skip


def find_untrained(reference: str, find_outline: FindOutline) -> Outline | None:
    """Return the outline of a model that outpace plans for but cannot train; else None."""
    try:
        _, found, spec = find_outline(reference)
    except BadInputError:
        return None
    return found if spec is None and found.untrained is not None else None
