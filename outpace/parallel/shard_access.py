"""Reads and writes of shards by a user's loop, between steps.

Elementwise operations on DTensors compute what one process does, also together with whole tensors,
which all ranks have. But `item()` and `float()` return a number computed from this rank's part if a
sum or a maximum over ranks is pending, shards cannot be written to whole tensors, and `p.data = …`
has no effect.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from outpace.nn.dtensor import is_spread, whole
from outpace.parallel.refusals import CommonPlace, refuse_between_steps
from outpace.parallel.tensors import storage_id
from outpace.records.errors import BadInputError, first_names

_aten = torch.ops.aten
_WRITES = (
    _aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor,
    _aten.lerp_.Scalar, _aten.lerp_.Tensor, _aten.addcmul_.default, _aten.addcdiv_.default,
)  # fmt: skip


def read_whole_values(place: CommonPlace) -> None:
    """Make `item()` of DTensors, and writes of DTensors to whole tensors, use whole values."""
    handlers = _dispatcher()._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = partial(_read_number, place)
    for operator in _WRITES:
        handlers[operator] = partial(_write, place)


def combine_with_whole(allowed: bool) -> None:
    """Allow or forbid operations (such as those on lists) on whole tensors together with DTensors.

    In a step, a user's module that does so is refused, since it may have only a part of its input.
    """
    _dispatcher()._allow_implicit_replication = allowed


def _dispatcher() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher


def refuse_copies(sharded: Iterable[nn.Module]) -> None:
    """Refuse copies of sharded modules, as torch does, and say what to do instead."""
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
    """Return a whole tensor. If ranks have parts of it, this is collective, and all ranks must
    begin it.
    """
    if is_spread(tensor) and not all(one.is_replicate() for one in tensor.placements):
        place.wait_for_all(what)
    return whole(tensor)


def _read_number(
    place: CommonPlace, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return a tensor's only value. Collective if ranks have parts of it."""
    return operator(_gather(args[0], place, "reads a number of a parameter or gradient (item())"))


def _write(
    place: CommonPlace, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Write to a tensor in place. Collective if it is whole and a source is in parts."""
    written: Tensor = args[0]
    if is_spread(written):
        parts = _parts_of_alike(args)
        if parts is not None:
            operator(*parts, **kwargs)
        else:
            _write_by_torch(operator, args, kwargs)
        return written
    tensors = [one for one in args if isinstance(one, Tensor)]
    in_graph = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    if in_graph and not _dispatcher()._allow_implicit_replication:  # in a step
        raise RuntimeError(f"{operator}: got mixed torch.Tensor and DTensor")
    what = "writes a parameter or gradient to another tensor"
    found = [_gather(one, place, what) if isinstance(one, Tensor) else one for one in args]
    result: Tensor = operator(*found, **kwargs)
    return result


def _parts_of_alike(args: Sequence[Any]) -> list[Any] | None:
    """Return the arguments with each DTensor's part on this rank; None unless all are placed alike.

    An optimizer writes so in each operation on each parameter, which takes half as long as torch's
    dispatch of DTensors.
    """
    first = args[0]
    where = first.placements, first.device_mesh, first.shape
    for placement in where[0]:
        if placement.is_partial():
            return None
    parts = [first._local_tensor]
    for one in args[1:]:
        if type(one) is type(first):
            if (one.placements, one.device_mesh, one.shape) != where:
                return None
            parts.append(one._local_tensor)
        elif isinstance(one, Tensor) and one.dim():
            return None
        else:
            parts.append(one)
    return parts


def _write_by_torch(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Write to a DTensor as without this handler."""
    handlers = _dispatcher()._custom_op_handlers
    this = handlers.pop(operator)
    try:
        operator(*args, **kwargs)
    finally:
        handlers[operator] = this


class ShardStorages:
    """The memory of shards, which an assignment `p.data = …` replaces without any effect."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._shards = {name: shard for name, shard in named if is_spread(shard)}
        self.note()

    def note(self) -> None:
        """Record the current memory as the right one."""
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
