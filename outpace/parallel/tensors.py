"""A tensor that may be spread over ranks: its part here, and the whole."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole tensor. Collective over the ranks that hold a part of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hollow(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device: its structure, without memory for its weights."""
    held = [*module.parameters(), *module.buffers()]
    memo = {id(tensor): tensor.detach().to("meta") for tensor in held}
    for tensor in module.parameters():
        memo[id(tensor)] = nn.Parameter(memo[id(tensor)], tensor.requires_grad)
    return copy.deepcopy(module, memo)


@torch.no_grad()
def make_equal(module: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers. Collective."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor, 0)
