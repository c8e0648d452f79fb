"""A step for optimizers that update each parameter separately."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Group = dict[str, Any]
State = dict[str, Any]


def step_each(
    optimizer: torch.optim.Optimizer,
    begin: Callable[[nn.Parameter, Group], State],
    update: Callable[[nn.Parameter, State, Group], None],
) -> None:
    """Call `update` for every parameter that has a gradient, and count its steps.

    `begin` returns a parameter's initial state.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if not state:
                state.update(begin(parameter, group))
            state["step"] += 1
            update(parameter, state, group)
