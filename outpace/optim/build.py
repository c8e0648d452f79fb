"""AdamW with the usual groups: matrices decay, vectors (biases, norms) do not."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from outpace.records.plan import OptimizerName
from outpace.records.settings import TrainSettings

Groups = list[dict[str, Any]]
# Makes an optimizer of parameter groups, as torch.optim's classes do.
Build = Callable[[Groups], torch.optim.Optimizer]


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    name: OptimizerName,
    settings: TrainSettings,
    place: Callable[[Groups, Build], torch.optim.Optimizer] = lambda groups, build: build(groups),
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) in the implementation asked for.

    `place` is a layout's `make_optimizer`, which decides where parameters are stepped.
    """
    assert settings.lr is not None  # settled before the first step
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {
            "params": [p for p in trainable if p.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]

    def build(groups: Groups) -> torch.optim.Optimizer:
        assert settings.lr is not None
        return torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            fused=name == "adamw-fused",
            foreach=name == "adamw-foreach",
        )

    return place([group for group in groups if group["params"]], build)


@torch.no_grad()
def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that have not been updated yet the state from which AdamW begins.

    So that a checkpoint has the state of all. torch's own way is a step with lr 0, which counts.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                device = parameter.device if group.get("fused") else "cpu"
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
