"""An optimizer for a rank that has no parameters to update."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outpace.optim.build import Build


class PlaceholderParameter:
    """A parameter with a single 0, which an optimizer updates instead of the model's parameters.

    It lets a rank take part in steps even if its parameters are updated elsewhere: the rank has the
    same optimizer class, skips the same fp16 steps, and runs the same hooks after a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._number = nn.Parameter(torch.zeros(1, device=device))

    def optimizer(
        self, build: Build, groups: Sequence[Mapping[str, Any]] = ({},)
    ) -> torch.optim.Optimizer:
        """Build an optimizer of this parameter with the settings of other ranks' groups.

        The first group gets the parameter, and the others are empty. If `groups` is empty, there is
        one group with default settings.
        """
        first, *others = groups or ({},)
        empty: list[dict[str, Any]] = [{**group, "params": []} for group in others]
        return build([{**first, "params": [self._number]}, *empty])

    def set_gradient(self) -> None:
        """Set a zero gradient, so that the optimizer does not skip the parameter."""
        self._number.grad = torch.zeros_like(self._number)
