"""AdamW with the usual groups: matrices decay, vectors (biases, norms) do not."""

from collections.abc import Iterable

import torch
from torch import nn

from outpace.records.settings import TrainSettings


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], settings: TrainSettings
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) in the implementation asked for."""
    assert settings.lr is not None  # settled before the first step
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {
            "params": [p for p in trainable if p.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        fused=settings.optimizer == "adamw-fused",
        foreach=settings.optimizer == "adamw-foreach",
    )
