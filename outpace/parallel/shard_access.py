"""Reads and writes of shards by a user's loop, between steps.

Elementwise operations on DTensors compute what one process does. But `item()` and `float()` return
a number of this rank's part where a sum or a maximum over ranks is pending, copies between whole
tensors and shards raise an error, and `p.data = …` has no effect.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from outpace.nn.spread import is_spread, local, part_like, whole
from outpace.parallel.refusals import CommonPlace, refuse_between_steps
from outpace.parallel.tensors import storage_id
from outpace.records.errors import BadInputError, first_names


def read_whole_values(place: CommonPlace) -> None:
    """Make `item()` and `copy_` of DTensors use whole values in this process."""
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = partial(_read_number, place)
    handlers[torch.ops.aten.copy_.default] = partial(_copy, place)


def refuse_copies(sharded: Iterable[nn.Module]) -> None:
    """Refuse copies of sharded modules with what to do instead; torch refuses them, too."""
    for part in sharded:
        vars(part)["__deepcopy__"] = _refuse_copy


def _refuse_copy(memo: dict[int, Any]) -> NoReturn:
    raise refuse_between_steps(
        "the module or one of its blocks is copied (copy.deepcopy) after it was laid out, when "
        "this rank holds only shards of its parameters. Copy it before outpace.parallelize, and "
        "call load_state_dict of the copy with the module's state_dict() on all ranks, compute "
        "with other values by torch.func.functional_call, or use strategy ddp or zero1."
    )


def _gather(tensor: Tensor, place: CommonPlace, what: str) -> Tensor:
    """Return a whole tensor. Collective, which all ranks begin, if ranks have parts of it."""
    if is_spread(tensor) and not all(one.is_replicate() for one in tensor.placements):
        place.wait_for_all(what)
    return whole(tensor)


def _read_number(
    place: CommonPlace, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return a tensor's only value. Collective if ranks have parts of it."""
    return operator(_gather(args[0], place, "reads a number of a parameter or gradient (item())"))


def _copy(
    place: CommonPlace, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Copy between DTensors and whole tensors. Collective if the source is in parts."""
    target: Tensor = args[0]
    source: Tensor = args[1]
    mixed = is_spread(target) != is_spread(source) and source.numel() > 1
    if mixed and torch.is_grad_enabled() and source.requires_grad:
        raise RuntimeError(f"{operator}: got mixed torch.Tensor and DTensor")
    if not is_spread(target):
        gathered = _gather(source, place, "copies a parameter or gradient")
        return target.copy_(gathered, *args[2:], **kwargs)
    if not is_spread(source):
        source = part_like(source.expand(target.shape), target)
    elif (source.shape, source.placements) != (target.shape, target.placements):
        expanded: Any = source.expand(target.shape)
        source = expanded.redistribute(placements=target.placements)
    local(target).copy_(local(source), *args[2:], **kwargs)
    return target


class ShardStorages:
    """The memory of shards, which an assignment `p.data = …` replaces without any effect."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._shards = {name: shard for name, shard in named if is_spread(shard)}
        self.note()

    def note(self) -> None:
        """Take the current memory as right."""
        self._known = [storage_id(shard) for shard in self._shards.values()]

    def require_unchanged(self) -> None:
        """Raise BadInputError if a shard's memory was replaced."""
        now = map(storage_id, self._shards.values())
        lost = [n for n, a, b in zip(self._shards, self._known, now, strict=True) if a != b]
        if lost:
            raise BadInputError(
                f"the values of {first_names(lost)} were replaced between steps (p.data = …), but "
                "this rank holds a shard, which keeps its values. Write to it in place "
                "(p.data.copy_(…), p.data.mul_(…), p.data.clamp_(…)), or use strategy ddp or zero1."
            )
