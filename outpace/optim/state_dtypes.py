"""Base class of optimizers whose states differ in dtype from the parameters."""

from typing import Any

import torch
from torch import nn


class KeepsDtypes(torch.optim.Optimizer):
    """An optimizer whose states keep their dtypes when they are loaded.

    torch's optimizers cast loaded states to the parameters' dtypes.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict without casting states to the parameters' dtypes."""
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        held = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, held, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and name != "step":
                    self.state[parameter][name] = value.to(parameter.device)

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state before its first step."""
        raise NotImplementedError
