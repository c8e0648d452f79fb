"""An optimizer for a rank that has no parameters to update."""

import torch
from torch import nn

from outpace.optim.build import Build


class PlaceholderParameter:
    """One number, always 0, that is updated in place of parameters.

    It lets a rank whose parameters are updated elsewhere take part in what all ranks do in a step:
    the same optimizer class, the same skipped fp16 steps, the same hooks after a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._number = nn.Parameter(torch.zeros(1, device=device))

    def optimizer(self, build: Build) -> torch.optim.Optimizer:
        """Return the same optimizer as on other ranks, over this number only."""
        return build([{"params": [self._number]}])

    def set_gradient(self) -> None:
        """Set a gradient, as other ranks do in each step."""
        self._number.grad = torch.zeros_like(self._number)
