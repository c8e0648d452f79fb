"""Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024: the momentum of a
matrix is orthogonalised before it is applied. Liu et al., "Muon is Scalable for LLM Training",
arXiv 2502.16982, §2.2: the update is scaled by 0.2·√max(rows, columns), so that the learning rate
and weight decay of AdamW suit both.

The momentum of a sharded matrix stays sharded. In each step, every rank gathers the update,
orthogonalises it and keeps its shard of the result. This takes one all-gather per matrix, and every
rank computes the same matmuls.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from outpace.nn.dtensor import as_spread, local, part_like, whole
from outpace.planner.memory.optimizer_bytes import MUON_BATCH_BYTES

MOMENTUM = 0.95
_NUMBERED = re.compile(r"(^|\.)\d+\.")


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix in a numbered layer, such as one in an nn.ModuleList.

    This leaves out embeddings and heads, which are matrices too, but whose rows are used one by
    one.
    """
    return parameter.ndim == 2 and _NUMBERED.search(name) is not None


class Muon(torch.optim.Optimizer):
    """Muon for parameter groups with "orthogonal" set, and AdamW for other groups.

    `together`: matrices of one shape are orthogonalised as a batch, and AdamW uses torch's fused
    kernels. This is for GPUs. torch's foreach kernels are not used there, because they would read
    each tensor's step count from the device.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        together: bool = False,
    ) -> None:
        self._together = together
        others = [group for group in groups if not group.get("orthogonal")]
        # This adds AdamW's further settings to `others`.
        self._adamw = torch.optim.AdamW(
            others or [{"params": []}], lr=lr, betas=betas, foreach=False, fused=together
        )
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "orthogonal": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective if matrices are sharded."""
        for group in self.param_groups:
            if group["orthogonal"] and self._together:
                self._step_matrices(group)
            elif group["orthogonal"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_matrix(parameter, group)
        # These are set in each step, because loading a state dict replaces both.
        self._adamw.param_groups = [g for g in self.param_groups if not g["orthogonal"]]
        self._adamw.state = self.state
        self._adamw.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Update all matrices like `_step_matrix`, in a few batched operators."""
        stepped = [p for p in group["params"] if p.grad is not None]
        for parameter in stepped:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        alike: dict[Any, list[nn.Parameter]] = {}
        for parameter in stepped:
            alike.setdefault((parameter.shape, parameter.dtype, parameter.grad.dtype), []).append(
                parameter
            )
        for batch in (batch for same in alike.values() for batch in _split_into_batches(same)):
            self._step_batch(batch, group)

    def _step_batch(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        gradients = [local(p.grad) for p in parameters]  # type: ignore[arg-type]
        momenta = [local(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        shape = parameters[0].shape
        matrices = [
            whole(as_spread(one, tuple(shape), p)) for one, p in zip(ahead, parameters, strict=True)
        ]
        # For tall matrices the result is a transposed view, which foreach kernels do not support.
        made = orthogonalise(torch.stack(matrices)).to(parameters[0].dtype).contiguous()
        updates = [part_like(one, p) for one, p in zip(made, parameters, strict=True)]
        weights = [local(p) for p in parameters]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        rate = _adjust_lr(group["lr"], "match_rms_adamw", shape)
        torch._foreach_add_(weights, updates, alpha=-rate)

    def _step_matrix(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Update a matrix: Jordan et al., algorithm 2, Nesterov momentum and decoupled decay."""
        state, gradient = self.state[parameter], local(parameter.grad)  # type: ignore[arg-type]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = local(state["momentum_buffer"]).lerp_(gradient, 1 - MOMENTUM)
        ahead = gradient.lerp(momentum, MOMENTUM)
        matrix = whole(as_spread(ahead, tuple(parameter.shape), parameter))
        update = _zeropower_via_newtonschulz(
            matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS
        )
        rate = _adjust_lr(group["lr"], "match_rms_adamw", parameter.shape)
        weight = local(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(part_like(update, parameter).to(weight.dtype), alpha=-rate)


def _split_into_batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield matrices of one shape, at most `MUON_BATCH_BYTES` of bf16 at a time."""
    count = max(1, MUON_BATCH_BYTES // (2 * parameters[0].numel()))
    for start in range(0, len(parameters), count):
        yield parameters[start : start + count]


def orthogonalise(matrices_NRC: Tensor) -> Tensor:
    """Return approximations of the orthogonal matrices nearest to (N, R, C) matrices, in bf16.

    Jordan et al., 2024: five steps of a fifth-order Newton-Schulz iteration in bf16, as torch's
    `_zeropower_via_newtonschulz` takes for a single matrix.
    """
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.bfloat16()
    x = x.transpose(1, 2) if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(DEFAULT_NS_STEPS):
        gram = x @ x.transpose(1, 2)
        change = torch.baddbmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C)
        x = torch.baddbmm(x, change, x, beta=DEFAULT_A)
    return x.transpose(1, 2) if tall else x
