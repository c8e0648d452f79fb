"""A training script on one process, in plain PyTorch.

python examples/plain.py
"""

import torch
from torch import nn
from torch.nn import functional as F


def build() -> nn.Module:
    """Any module will do; this one is a sequence of blocks."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 4))


def batches(steps: int):
    """Points in 16 dimensions, of four classes by their first two signs."""
    drawn = torch.Generator().manual_seed(1)
    for _ in range(steps):
        points = torch.randn(32, 16, generator=drawn)
        yield points, (points[:, 0] > 0) * 2 + (points[:, 1] > 0)


def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean over the batch's samples."""
    points, classes = batch
    return F.cross_entropy(model(points), classes)


def main() -> None:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, batch in enumerate(batches(20), 1):
        loss = mean_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss:.5f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
