"""Refusal of tensors in a user's module that share memory with a trained parameter.

In one process, an optimizer that steps a parameter also changes every parameter, buffer or
attribute that is a view of it (`b.weight = nn.Parameter(a.weight.t())`,
`register_buffer("old", a.weight.data)`). If ranks hold parts of parameters, each of these tensors
gets separate memory, and the first batch does not show the difference. There is a similar problem
if a forward or a loss reads parameters from plain lists (`self.decayed = [...]`), dict keys or
arguments bound to functions: these are the original parameters, which ranks do not train.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from outpace.parallel.parity.module_state import is_user_object
from outpace.parallel.parity.names_in_use import NamesInUse
from outpace.parallel.parity.outer_state import find_places
from outpace.parallel.tensors import has_memory, storage_id
from outpace.records.errors import BadInputError
from outpace.records.strategies import TRAITS, Strategy

Loss = Callable[[nn.Module, Any], Any]

_MOST_OBJECTS = 100_000
_INHERENT = frozenset(vars(nn.Module()))
_OF_RECURRENT = frozenset({"_flat_weights"})


def find_shared_memory(module: nn.Module) -> tuple[str, str, str] | None:
    """Find the first tensor that shares memory with a trained parameter.

    Returns (tensor's name, kind of tensor, parameter's name), or None. A parameter with two names
    does not count, because it is one tensor under all strategies.
    """
    memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, trained in module.named_parameters():
        if trained.requires_grad and has_memory(trained):
            memory.setdefault(storage_id(trained), []).append((name, trained))
    for name, kind, tensor in _list_tensors(module):
        for owner, parameter in memory.get(storage_id(tensor), ()):
            if tensor is not parameter and _share_bytes(tensor.detach(), parameter.detach()):
                return name, kind, owner
    return None


def refuse_shared_memory(module: nn.Module, strategy: Strategy, loss: Loss | None = None) -> None:
    """Raise BadInputError if a strategy would separate tensors that share memory.

    This also refuses trained parameters that a step may reach in lists, dict keys or functions,
    because a strategy replaces only the parameters in modules.
    """
    traits = TRAITS[strategy]
    if not traits.whole_model:
        _refuse_held_parameters(module, strategy, loss)
    if traits.whole_model and not traits.zero:
        return
    found = find_shared_memory(module)
    if found is not None:
        name, kind, owner = found
        raise BadInputError(
            f"{name}, {kind}, shares memory with {owner}, which is trained: in one process both "
            f"change together, but under strategy {strategy} each would have separate memory. "
            f"Make them one parameter (self.b.weight = self.a.weight), or make {name} a copy "
            "(tensor.detach().clone()), or use strategy ddp."
        )


def _refuse_held_parameters(module: nn.Module, strategy: Strategy, loss: Loss | None) -> None:
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    in_use = NamesInUse(module, loss)
    for path, where, leaf in _list_reachable_objects(module, loss):
        if id(leaf) in names and (path == "state" or in_use.may_read(path.rpartition(".")[2])):
            raise BadInputError(
                f"{path}, {where}, holds the parameter {names[id(leaf)]}, but under strategy "
                f"{strategy} ranks train other tensors in its place. Use a method that iterates "
                "over self.named_parameters() when called (in a loss, over the parameters of its "
                "module argument), or use strategy ddp or zero1."
            )


def _list_reachable_objects(
    module: nn.Module, loss: Loss | None
) -> Iterator[tuple[str, str, object]]:
    """Yield (name, kind, object) for objects that a step may reach outside of the parameters.

    These are in attributes of modules and of the loss, in globals, and in closure variables. The
    module and its submodules are left out, because strategies replace their parameters.
    """
    seen: dict[int, object] = {id(part): part for part in module.modules()}
    for path, value in _list_attributes(module):
        yield from ((path, "a plain attribute", leaf) for leaf in _walk_objects(value, seen))
    for place in find_places(module, loss):
        yield from ((place.name, place.kind, leaf) for leaf in _walk_objects(place.get(), seen))
    if isinstance(loss, partial):
        bound = loss.args, loss.keywords
        yield from (
            ("state", "an argument bound to the loss", leaf) for leaf in _walk_objects(bound, seen)
        )
    holder = loss.__self__ if isinstance(loss, MethodType) else loss
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        where = "an attribute of the loss"
        yield from ((f"loss.{name}", where, leaf) for leaf in _walk_objects(value, seen))


def _list_tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in module.named_parameters():
        if has_memory(parameter):
            yield name, "a parameter", parameter
    for name, buffer in module.named_buffers():
        if has_memory(buffer):
            yield name, "a buffer", buffer
    for path, value in _list_attributes(module):
        for leaf in tree_leaves(value):
            if has_memory(leaf) and not isinstance(leaf, nn.Parameter):
                yield path, "an attribute", leaf


def _list_attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield (name, value) for plain attributes of submodules whose classes are not torch's.

    The list of parameters that torch keeps in recurrent networks is left out, even in subclasses.
    """
    for prefix, part in module.named_modules():
        if type(part).__module__.partition(".")[0] == "torch":
            continue
        own = _INHERENT | _OF_RECURRENT if isinstance(part, nn.RNNBase) else _INHERENT
        for attribute, value in vars(part).items():
            # torch's weight norm and pruning compute `weight` from `weight_orig` in each forward.
            if attribute not in own and f"{attribute}_orig" not in part._parameters:
                yield f"{prefix}.{attribute}" if prefix else attribute, value


def _walk_objects(value: object, seen: dict[int, object]) -> Iterator[object]:
    """Yield a value and all objects in it, except those in `seen`, to which they are added.

    These include the entries and keys of containers, arguments bound to a function, variables in a
    function's closure, and attributes of instances of the user's classes.
    """
    waiting = [value]
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        yield one
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            waiting += one
        elif isinstance(one, partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            waiting.append(one.__self__)
        elif isinstance(one, FunctionType):
            waiting += [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
        elif isinstance(one, nn.Module | torch.optim.Optimizer) or is_user_object(one):
            waiting += vars(one).values()


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # an empty cell
        return False
    return True


def _share_bytes(one: Tensor, other: Tensor) -> bool:
    begin, end = _byte_range(one)
    other_begin, other_end = _byte_range(other)
    if end <= other_begin or other_end <= begin:
        return False
    taken = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    _view_bytes(other, taken).fill_(True)
    return bool(_view_bytes(one, taken).any())


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    begin = int(tensor.itemsize * tensor.storage_offset())
    if not tensor.numel():
        return begin, begin
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + int(tensor.itemsize * (last + 1))


def _view_bytes(tensor: Tensor, storage: Tensor) -> Tensor:
    """Return the bytes of a tensor as a view of `storage`, which has one element per byte."""
    size = tensor.itemsize
    shape, strides = (*tensor.shape, size), (*(size * one for one in tensor.stride()), 1)
    # An expanded tensor has each byte only once.
    once = tuple(1 if not stride else length for length, stride in zip(shape, strides, strict=True))
    return storage.as_strided(once, strides, size * tensor.storage_offset())
