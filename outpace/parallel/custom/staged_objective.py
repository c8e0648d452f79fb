"""This rank's stages of a custom model's objective, as one module."""

from collections.abc import Mapping, Sequence
from typing import Self

from torch import nn

from outpace.nn.fingerprint import fingerprint
from outpace.parallel.custom.stage import CustomStage
from outpace.records.errors import BadInputError, first_names


class StagedObjective(nn.Module):
    """This rank's stages of an objective.

    `model` has the stages' parameters under the names in the user's module.
    """

    def __init__(self, model: nn.Module, stages: Mapping[int, CustomStage]) -> None:
        super().__init__()
        self.model = model
        self.stages = nn.ModuleList(stages.values())

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all stages.

        Raises BadInputError if the user's module overrides `train` and changes parameters there,
        which would happen once for each stage's copy of the module.
        """
        own = any(type(part).train is not nn.Module.train for part in self.model.modules())
        before = _fingerprint_parameters(self.model) if own else {}
        super().train(mode)
        now = _fingerprint_parameters(self.model) if own else {}
        written = sorted(name for name, one in before.items() if now.get(name) != one)
        if written:
            raise BadInputError(
                f"the module's {'train' if mode else 'eval'}() changes the values of "
                f"{first_names(written)}, but each pipeline stage has a copy of the module, and "
                "each copy would change them. Compute with other values in the forward (if "
                "self.training), or use strategy ddp or zero1."
            )
        return self

    @property
    def sums(self) -> Sequence[str]:
        """Names of the objective's additional sums in an evaluation."""
        return getattr(self.stages[0].objective, "sums", ())

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Return the objective's metrics from `sums` over an evaluation and the target count."""
        found: dict[str, float] = self.stages[0].objective.metrics(sums, count)  # type: ignore[operator,union-attr]
        return found


def _fingerprint_parameters(model: nn.Module) -> dict[str, int | None]:
    return {name: fingerprint(parameter) for name, parameter in model.named_parameters()}
