"""Reads and writes of sharded parameters by a user's loop, between steps.

Elementwise operations on DTensors give the values of a single process, even if they combine
DTensors with whole tensors that are equal on all ranks. But `item()` and `float()` return only this
rank's part of a pending sum or maximum, DTensors cannot be written to whole tensors, and
`p.data = …` has no effect.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.dtensor import is_spread, whole
from outpace.parallel.refusals import LoopPosition, refuse_between_steps
from outpace.parallel.tensors import storage_id
from outpace.records.errors import BadInputError, first_names

_aten = torch.ops.aten
_WRITES = (
    _aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor,
    _aten.lerp_.Scalar, _aten.lerp_.Tensor, _aten.addcmul_.default, _aten.addcdiv_.default,
)  # fmt: skip


def read_whole_values(place: LoopPosition) -> None:
    """Make `item()` on DTensors, and writes of DTensors to plain tensors, gather whole values.

    Ranks compare `place`, their position in the user's loop, before they gather.
    """
    handlers = _dispatcher()._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = partial(_read_number, place)
    for operator in _WRITES:
        handlers[operator] = partial(_write_whole_values, place)


def combine_with_whole(allowed: bool) -> None:
    """Allow or forbid operations that combine whole tensors and DTensors.

    They are forbidden in a step, because a whole tensor may depend on this rank's samples alone.
    """
    _dispatcher()._allow_implicit_replication = allowed


def wait_before_communication(place: LoopPosition | None, once: bool = False) -> None:
    """Make operations on DTensors wait for all ranks before they communicate.

    A `place` of None undoes this. Without the wait, an operation on a single rank would hang in a
    collective, or take part in a different collective of other ranks. `once`: only the next
    operation that communicates waits.
    """
    plain = _redistribute_function()
    plain = getattr(plain, "_outpace_plain", plain)
    _set_redistribute_function(plain if place is None else _add_wait(place, plain, once))


def _redistribute_function() -> Any:
    """Return torch's function that redistributes DTensors, or its replacement by `_add_wait`."""
    from torch.distributed.tensor import _redistribute

    return _redistribute.redistribute_local_tensor


def _set_redistribute_function(function: Any) -> None:
    from torch.distributed.tensor import _dispatch, _redistribute

    users: list[Any] = [_dispatch, _redistribute]  # operators; DTensor.redistribute, full_tensor
    for user in users:
        user.redistribute_local_tensor = function


def _add_wait(place: LoopPosition, plain: Any, once: bool) -> Any:
    """Wrap `plain`, torch's redistribution, to wait for all ranks before it communicates."""

    def redistribute(tensor: Tensor, now: Any, wanted: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = zip(now.placements, wanted.placements, strict=True)
        changes = any(one != other and not one.is_replicate() for one, other in pairs)
        if changes and _is_over_all_ranks(now.mesh):
            place.wait_for_all("computes with whole values, such as a norm of gradients")
            if once:
                wait_before_communication(None)
        return plain(tensor, now, wanted, *args, **kwargs)

    vars(redistribute)["_outpace_plain"] = plain
    return redistribute


def _is_over_all_ranks(mesh: Any) -> bool:
    """Return whether a mesh has all ranks, so that all of them would take part in a wait."""
    return bool(mesh.size() == dist.get_world_size())


@contextmanager
def _without_wait() -> Iterator[None]:
    used = _redistribute_function()
    wait_before_communication(None)
    try:
        yield
    finally:
        _set_redistribute_function(used)


def _dispatcher() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher


def refuse_copies(sharded: Iterable[nn.Module]) -> None:
    """Make `copy.deepcopy` of sharded modules raise an error that says what to do instead."""
    for part in sharded:
        vars(part)["__deepcopy__"] = _refuse_copy


def _refuse_copy(memo: dict[int, Any]) -> NoReturn:
    raise refuse_between_steps(
        "the module or one of its blocks is copied (copy.deepcopy) after outpace.parallelize, when "
        "this rank holds only shards of its parameters. Copy the module before "
        "outpace.parallelize, and load the module's state_dict() into the copy on all ranks. Or "
        "use torch.func.functional_call to compute with other values, or strategy ddp or zero1."
    )


def _gather_whole(tensor: Tensor, place: LoopPosition, what: str) -> Tensor:
    """Return the whole tensor, after waiting for all ranks if they hold parts. Collective."""
    if not is_spread(tensor) or all(one.is_replicate() for one in tensor.placements):
        return whole(tensor)
    if _is_over_all_ranks(tensor.device_mesh):
        place.wait_for_all(what)
    with _without_wait():
        return whole(tensor)


def _read_number(
    place: LoopPosition, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return operator(
        _gather_whole(args[0], place, "reads a number of a parameter or gradient (item())")
    )


def _write_whole_values(
    place: LoopPosition, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Run an in-place operator. Collective if it writes a sharded tensor to a whole one."""
    written: Tensor = args[0]
    if is_spread(written):
        parts = _replace_by_shards(args)
        if parts is not None:
            operator(*parts, **kwargs)
        else:
            _run_without_handler(operator, args, kwargs)
        return written
    tensors = [one for one in args if isinstance(one, Tensor)]
    in_graph = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    if in_graph and not _dispatcher()._allow_implicit_replication:  # in a step
        raise RuntimeError(f"{operator}: got mixed torch.Tensor and DTensor")
    what = "writes a parameter or gradient to another tensor"
    found = [_gather_whole(one, place, what) if isinstance(one, Tensor) else one for one in args]
    result: Tensor = operator(*found, **kwargs)
    return result


def _replace_by_shards(args: Sequence[Any]) -> list[Any] | None:
    """Replace the DTensors in `args` by their local shards; return None if placements differ.

    Optimizers run in-place operators on every parameter. On local shards, an operator takes half as
    long as on DTensors.
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


def _run_without_handler(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    handlers = _dispatcher()._custom_op_handlers
    this = handlers.pop(operator)
    try:
        operator(*args, **kwargs)
    finally:
        handlers[operator] = this


class ShardStorages:
    """A record of shards' storages, to detect assignments `p.data = …`, which have no effect."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._shards = {name: shard for name, shard in named if is_spread(shard)}
        self.note()

    def note(self) -> None:
        """Record the current storages, for `require_unchanged` to compare."""
        self._known = [storage_id(shard) for shard in self._shards.values()]

    def require_unchanged(self) -> None:
        """Raise BadInputError if the storage of a shard was replaced."""
        now = map(storage_id, self._shards.values())
        lost = [n for n, a, b in zip(self._shards, self._known, now, strict=True) if a != b]
        if lost:
            raise BadInputError(
                f"the values of {first_names(lost)} were replaced between steps (p.data = …), "
                "which has no effect on the shards that ranks hold. Write in place instead "
                "(p.data.copy_(…), p.data.mul_(…), p.data.clamp_(…)), or use strategy ddp or zero1."
            )
