"""Muon for the matrices of hidden layers, AdamW for all else, as one optimizer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024: the momentum of a
matrix is made orthogonal before it is applied. Liu et al., "Muon is Scalable for LLM Training",
arXiv 2502.16982, §2.2: scaled by 0.2·√max(rows, columns), so that AdamW's learning rate and weight
decay serve both.

Of a matrix that is sharded or split the momentum stays in shares. Its update is gathered in each
step, every rank makes it orthogonal, and keeps its own share of the result: one all-gather of each
matrix, and the products of the iteration on every rank.
"""

import re
from typing import Any

import torch
from torch import nn
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from outpace.nn.spread import as_spread, local, part_like, whole

MOMENTUM = 0.95
_NUMBERED = re.compile(r"(^|\.)\d+\.")


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a numbered layer, as those of an nn.ModuleList are.

    Embeddings and heads are matrices too, but their rows are looked up one by one.
    """
    return parameter.ndim == 2 and _NUMBERED.search(name) is not None


class Muon(torch.optim.Optimizer):
    """Groups with "orthogonal" are stepped by Muon, the others by AdamW."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]
    ) -> None:
        others = [group for group in groups if not group.get("orthogonal")]
        # Fills the groups that it is given with AdamW's other settings.
        self._adamw = torch.optim.AdamW(
            others or [{"params": []}], lr=lr, betas=betas, foreach=False
        )
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "orthogonal": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective where matrices are spread."""
        for group in self.param_groups:
            if group["orthogonal"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._turn(parameter, group)
        # Loading puts others in the place of both.
        self._adamw.param_groups = [g for g in self.param_groups if not g["orthogonal"]]
        self._adamw.state = self.state
        self._adamw.step()

    def _turn(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Jordan et al., algorithm 2, with Nesterov's momentum and decoupled weight decay."""
        state, gradient = self.state[parameter], local(parameter.grad)  # type: ignore[arg-type]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = local(state["momentum_buffer"]).lerp_(gradient, 1 - MOMENTUM)
        ahead = gradient.lerp(momentum, MOMENTUM)
        matrix = whole(as_spread(ahead, tuple(parameter.shape), parameter))
        turned = _zeropower_via_newtonschulz(
            matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS
        )
        rate = _adjust_lr(group["lr"], "match_rms_adamw", parameter.shape)
        weight = local(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(part_like(turned, parameter).to(weight.dtype), alpha=-rate)
