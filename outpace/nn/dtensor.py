"""Tensors that may be DTensors: local shards, whole tensors, and gathering of rows."""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import TypeIs

from outpace.nn.torch_versions import all_gather_single

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_ALONE_BYTES = 1 << 19  # from this size on, copying takes longer than a separate message


def is_spread(tensor: Tensor) -> "TypeIs[DTensor]":
    """Return whether a tensor is a DTensor, without loading torch's module of DTensors.

    Loading that module takes half a second. Plain tensors, which a step checks often, are
    recognised first.
    """
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return False
    kind = _loaded_dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def has_spread(kinds: Iterable[type]) -> bool:
    """Return whether any of these types is DTensor."""
    spread = _loaded_dtensor_class()
    return spread is not None and any(issubclass(kind, spread) for kind in kinds)


def _loaded_dtensor_class() -> "type[DTensor] | None":
    # None if torch's module has not been loaded, so no tensor can be a DTensor.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, which shares its memory."""
    if not is_spread(tensor):
        return tensor
    return tensor.to_local()


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Collective over the ranks that hold its shards."""
    if not is_spread(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = list(tensor.placements)
    # For a tensor with a graph, torch 2.11 would detach the result in place, which DTensor cannot.
    gathered: Any = tensor.detach()
    # Gather axis by axis: torch would do the same, with a warning.
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        gathered = gathered.redistribute(placements=placements)
    found: Tensor = gathered.to_local()
    return found


def splits(placement: "Placement", dim: int) -> bool:
    """Return whether a placement shards a tensor along `dim`, contiguously or strided.

    torch's `is_shard` ignores strided shards, which result from sharding a tensor twice.
    """
    return getattr(placement, "dim", None) == dim


class RowSplit(NamedTuple):
    """Sharding of a tensor's rows over one axis of its mesh, `rows` per rank.

    This rank's rows start at `begin`. The last ranks may have fewer rows, or none.
    """

    group: dist.ProcessGroup
    begin: int
    rows: int


def split_rows(tensor: Tensor) -> RowSplit | None:
    """Return how a tensor's rows are sharded; None if it is whole or sharded in another way."""
    if not is_spread(tensor) or not tensor.dim():
        return None
    from torch.distributed.tensor import Shard

    axes = [axis for axis, one in enumerate(tensor.placements) if not one.is_replicate()]
    if len(axes) != 1 or tensor.placements[axes[0]] != Shard(0):
        return None
    mesh, [axis] = tensor.device_mesh, axes
    rows = -(-tensor.shape[0] // mesh.size(axis))
    begin = min(mesh.get_local_rank(axis) * rows, tensor.shape[0])
    return RowSplit(mesh.get_group(axis), begin, rows)


@torch.no_grad()
def gather_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gather tensors of one dtype whose rows are sharded over the same ranks (`split_rows`).

    Each large, evenly sharded tensor has a separate collective, without copies; all others share
    one. Each result has its own memory. Collective.
    """
    whole = [_gather_large_tensor(tensor) for tensor in tensors]
    rest = [tensor for tensor, one in zip(tensors, whole, strict=True) if one is None]
    others = iter(_gather_in_one_message(rest) if rest else ())
    return [next(others) if one is None else one for one in whole]


def _gather_large_tensor(tensor: Tensor) -> Tensor | None:
    """Gather a large, evenly sharded tensor; return None for any other. Collective."""
    rows, part = split_rows(tensor), local(tensor)
    assert rows is not None
    ranks = rows.group.size()
    if tensor.numel() * part.itemsize < _ALONE_BYTES or tensor.shape[0] != rows.rows * ranks:
        return None
    gathered = part.new_empty(tensor.shape)
    all_gather_single(gathered.view(-1), part.contiguous().view(-1), rows.group)
    return gathered


def _gather_in_one_message(tensors: Sequence[Tensor]) -> list[Tensor]:
    split = [rows for tensor in tensors if (rows := split_rows(tensor)) is not None]
    group, ranks = split[0].group, split[0].group.size()
    sizes = [one.rows * math.prod(t.shape[1:]) for one, t in zip(split, tensors, strict=True)]
    mine = local(tensors[0]).new_zeros(sum(sizes))
    for tensor, place in zip(tensors, mine.split(sizes), strict=True):
        part = local(tensor)
        place[: part.numel()] = part.flatten()
    gathered = mine.new_empty(ranks * len(mine))
    all_gather_single(gathered, mine, group)
    places = gathered.view(ranks, -1).split(sizes, dim=1)
    return [
        place.clone(memory_format=torch.contiguous_format)
        .view(-1)[: tensor.numel()]
        .view(tensor.shape)
        for tensor, place in zip(tensors, places, strict=True)
    ]


@torch.no_grad()
def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor, sharded as `like` is, without communication.

    If `like` is not sharded, returns the whole tensor.
    """
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    spread = DTensor.from_local(tensor, like.device_mesh, everywhere, run_check=False)
    return spread.redistribute(placements=like.placements).to_local()


def as_spread(part: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Wrap a shard as a DTensor of `shape`, placed like `like`; unchanged if `like` is plain."""
    if not is_spread(like):
        return part
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False,
        shape=torch.Size(shape), stride=stride,
    )  # fmt: skip
