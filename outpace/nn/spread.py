"""A tensor that may be spread over ranks: its part here, the whole, a part of the whole."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_spread(tensor: Tensor) -> "TypeIs[DTensor]":
    """Whether it is a DTensor. Where there is none torch's module of them stays out.

    It takes half a second to load. Plain tensors, of which a step asks many times, are told first.
    """
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return False
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def has_spread(kinds: Iterable[type]) -> bool:
    """Whether any of these types is a DTensor's."""
    spread = _dtensor()
    return spread is not None and any(issubclass(kind, spread) for kind in kinds)


def _dtensor() -> "type[DTensor] | None":
    """The class, where its module is loaded: not, or not wholly, is nowhere yet."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, sharing its memory."""
    if not is_spread(tensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole tensor. Collective over the ranks that hold a part of it."""
    if not is_spread(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = list(tensor.placements)
    # What was split last is put together first: torch would do the same, with a warning.
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def splits(placement: "Placement", dim: int) -> bool:
    """Whether a placement splits a tensor along `dim`, at one stretch or in strides.

    torch's `is_shard` does not count the latter, in which a tensor lies that was split twice.
    """
    return getattr(placement, "dim", None) == dim


@torch.no_grad()
def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, the part that this rank has of `like`. Nothing is sent."""
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    spread = DTensor.from_local(tensor, like.device_mesh, everywhere, run_check=False)
    return spread.redistribute(placements=like.placements).to_local()


def as_spread(part: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A part as that of a tensor of `shape`, spread as `like` is; itself where that is not."""
    if not is_spread(like):
        return part
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False,
        shape=torch.Size(shape), stride=stride,
    )  # fmt: skip
