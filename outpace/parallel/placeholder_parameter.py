"""An optimizer for a rank that has no parameters of its own to step."""

import torch
from torch import nn

from outpace.optim.build import Build


class PlaceholderParameter:
    """One number, always 0, that is stepped in the place of parameters.

    So a rank whose parameters are stepped elsewhere takes part in what all ranks do in a step: the
    same optimizer class, the same fp16 steps skipped, the same hooks after a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._number = nn.Parameter(torch.zeros(1, device=device))

    def optimizer(self, build: Build) -> torch.optim.Optimizer:
        """The optimizer that the others have, over the number alone."""
        return build([{"params": [self._number]}])

    def attend(self) -> None:
        """Have a gradient, as each step's gradients are made."""
        self._number.grad = torch.zeros_like(self._number)
