"""fp32 master weights in the optimizer, for 16-bit working weights.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, §3.1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outpace.nn.spread import local
from outpace.optim.rounding import Noise
from outpace.optim.stored import OwnDtypes


class MasterWeights(OwnDtypes):
    """Any optimizer, over fp32 copies of the weights; the weights are rounded from them.

    Gradients may be fp32 (of a parameter whose `grad_dtype` says so) or of the weights' dtype.
    A copy is a part of its parameter's state, "master".
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        initial_state: Callable[[torch.optim.Optimizer, dict[str, Any], nn.Parameter], Any],
        noise: Noise,
    ) -> None:
        super().__init__(groups, {})
        self._masters = {p: _master(p) for group in groups for p in group["params"]}
        self._views = {p: master.detach() for p, master in self._masters.items()}
        for parameter, master in self._masters.items():
            noise.names[master] = noise.names.get(parameter, "")
        self._inner = build(
            [{**group, "params": [self._masters[p] for p in group["params"]]} for group in groups]
        )
        self._inner_state = initial_state
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update({name: inner[name] for name in inner if name != "params"})

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """The inner optimizer's, and the copy."""
        master = self._masters[parameter]
        return {**self._inner_state(self._inner, group, master), "master": self._views[parameter]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the copies, and round the weights from them."""
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: mine[name] for name in mine if name != "params"})
            inner["params"] = []
            for parameter in mine["params"]:
                if parameter.grad is not None:
                    inner["params"].append(self._prepared(parameter, mine))
        self._inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    master = self._masters[parameter]
                    local(parameter).copy_(local(master))
                    master.grad = None

    def _prepared(self, parameter: nn.Parameter, group: dict[str, Any]) -> nn.Parameter:
        """A parameter's copy with its gradient, its state being the parameter's."""
        master, state = self._masters[parameter], self.state[parameter]
        if not state:
            state.update(self.initial_state(parameter, group))
        if state["master"] is not self._views[parameter]:  # but loaded
            master.copy_(state["master"])
            state["master"] = self._views[parameter]
        assert parameter.grad is not None
        master.grad = parameter.grad.float()
        self._inner.state[master] = state
        return master


def _master(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))
