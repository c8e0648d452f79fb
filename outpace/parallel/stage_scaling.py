"""Detection of loops that scale the gradients of pipeline stages by different factors.

If a loop computes the norm for clipping itself, it gets the norm of this rank's stages only, so
each rank scales by a different factor.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST = 64  # values compared in a gradient
_TOLERANCE = 1e-5  # relative; several operations may have scaled a gradient, each with rounding

_SAME = 1e-2  # relative difference of factors that is ignored, because bf16 norms are rounded
_STEPS = 20  # number of steps to measure, limited because a measurement waits for the device


class StageScaling:
    """Measurement of the factor by which a loop scales this rank's gradients in the first steps.

    `factor` is NaN while it is unknown.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, int, Tensor]] = []
        self.factor = math.nan
        self._steps, self._told = 0, False

    @property
    def is_done(self) -> bool:
        """Return whether all steps to measure are over."""
        return self._steps > _STEPS

    def note(self, gradients: Sequence[Tensor]) -> None:
        """Record a few values of the first and the last gradient, before the loop scales them."""
        self._steps += 1
        some = [gradients[0], gradients[-1]] if gradients else []
        self._noted = [(one, one._version, _first_values(one).clone()) for one in some]
        self.factor = math.nan

    def drop_gradients(self) -> None:
        """Drop references to noted gradients that no optimizer has used."""
        self._noted = []

    def measure(self, gradients: Sequence[Tensor]) -> None:
        """Set `factor` if `gradients` are those given to `note`, all multiplied by one number."""
        noted, self._noted = self._noted, []
        held = set(map(id, gradients))
        if not noted or any(id(one) not in held for one, _, _ in noted):
            return
        if all(one._version == version for one, version, _ in noted):
            self.factor = 1.0
            return
        before = torch.cat([values.double() for _, _, values in noted])
        after = torch.cat([_first_values(one).double() for one, _, _ in noted])
        factor = float((before * after).sum() / before.square().sum())  # NaN if all are zero
        rounding = max(torch.finfo(one.dtype).eps for one, _, _ in noted)
        allowed = max(_TOLERANCE, 2 * rounding) * abs(factor) * before.norm()
        if bool((after - factor * before).norm() <= allowed):  # not if a value is not finite
            self.factor = factor

    def explain(self, factors: Tensor) -> str | None:
        """Return a warning if ranks have different known factors and this rank's factor is not 1.

        Returns None otherwise, and after the first warning.
        """
        if self.factor == 1 or math.isnan(self.factor) or self._told:
            return None
        lowest, highest = map(float, factors[~factors.isnan()].aminmax())
        if highest - lowest <= _SAME * max(abs(lowest), abs(highest)):
            return None
        self._told = True
        return (
            "your loop scaled the gradients of the pipeline's ranks by different factors, from "
            f"{lowest:.3g} to {highest:.3g}, as if each were clipped by the norm of its own "
            "stages. Use clip_grad_norm of what parallelize returned, or "
            "torch.nn.utils.clip_grad_norm_ over its named_parameters() on all ranks, which use "
            "the norm of all stages. If you scale parts of the model differently on purpose, "
            "ignore this warning"
        )


def _first_values(gradient: Tensor) -> Tensor:
    return gradient.detach().flatten()[:_MOST]
