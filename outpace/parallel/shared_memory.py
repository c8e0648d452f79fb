"""Tensors of a user's module that share memory with a trained parameter, so that both change.

In a single process, an optimizer that steps `a` also changes a parameter, a buffer or an attribute
that is a view of `a` (`b.weight = nn.Parameter(a.weight.t())`, `register_buffer("old",
a.weight.data)`). If ranks hold parts of parameters, each tensor gets separate memory, and no first
batch shows the difference. The same applies to parameters in plain lists (`self.decayed = [...]`):
ranks train others in their place.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from outpace.parallel.tensors import has_memory, storage_id
from outpace.records.errors import BadInputError
from outpace.records.strategies import TRAITS, Strategy

_INHERENT = frozenset(vars(nn.Module()))
_OF_RECURRENT = frozenset({"_flat_weights"})


def find_shared_memory(module: nn.Module) -> tuple[str, str, str] | None:
    """Return the first tensor in the memory of a trained parameter, or None.

    The result has its name, what it is, and the parameter's name. A parameter with two names does
    not count: it is one tensor for all strategies.
    """
    memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, trained in module.named_parameters():
        if trained.requires_grad and has_memory(trained):
            memory.setdefault(storage_id(trained), []).append((name, trained))
    for name, kind, tensor in _list_tensors(module):
        for owner, parameter in memory.get(storage_id(tensor), ()):
            if tensor is not parameter and _overlap(tensor.detach(), parameter.detach()):
                return name, kind, owner
    return None


def refuse_shared_memory(module: nn.Module, strategy: Strategy) -> None:
    """Raise BadInputError if a strategy's ranks would separate tensors that share memory.

    The same applies to parameters in lists, if the lists would hold others than those that are
    trained.
    """
    traits = TRAITS[strategy]
    if not traits.whole_model:
        _refuse_held_parameters(module, strategy)
    if traits.whole_model and not traits.zero:
        return
    found = find_shared_memory(module)
    if found is not None:
        name, kind, owner = found
        raise BadInputError(
            f"{name}, {kind}, is in the memory of {owner}, which is trained: in one process each "
            f"moves with the other, and under strategy {strategy} each would have memory of its "
            "own. Make one parameter of them (self.b.weight = self.a.weight), or give it a copy "
            "(tensor.detach().clone()), or use strategy ddp."
        )


def _refuse_held_parameters(module: nn.Module, strategy: Strategy) -> None:
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    for path, leaf in _list_attributes(module):
        if id(leaf) in names:
            raise BadInputError(
                f"{path}, a plain attribute, holds the parameter {names[id(leaf)]}, and under "
                f"strategy {strategy} ranks train others in its place. Make it a method that goes "
                "through self.named_parameters() when it is called, or use strategy ddp or zero1."
            )


def _list_tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield a module's parameters, buffers and the tensors in its parts' attributes."""
    for name, parameter in module.named_parameters():
        if has_memory(parameter):
            yield name, "a parameter", parameter
    for name, buffer in module.named_buffers():
        if has_memory(buffer):
            yield name, "a buffer", buffer
    for path, leaf in _list_attributes(module):
        if has_memory(leaf) and not isinstance(leaf, nn.Parameter):
            yield path, "an attribute", leaf


def _list_attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the values of plain attributes of a module's parts, except of torch's own classes.

    The list of a recurrent net's parameters, which torch renews, is left out in subclasses too.
    """
    for prefix, part in module.named_modules():
        if type(part).__module__.partition(".")[0] == "torch":
            continue
        own = _INHERENT | _OF_RECURRENT if isinstance(part, nn.RNNBase) else _INHERENT
        for attribute, value in vars(part).items():
            # torch's own norms and prunings make `weight` of `weight_orig` in each forward.
            if attribute not in own and f"{attribute}_orig" not in part._parameters:
                path = f"{prefix}.{attribute}" if prefix else attribute
                yield from ((path, leaf) for leaf in tree_leaves(value))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage overlap in it."""
    begin, end = _extent(one)
    other_begin, other_end = _extent(other)
    if end <= other_begin or other_end <= begin:
        return False
    taken = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes_of(other, taken).fill_(True)
    return bool(_bytes_of(one, taken).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    begin = int(tensor.itemsize * tensor.storage_offset())
    if not tensor.numel():
        return begin, begin
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + int(tensor.itemsize * (last + 1))


def _bytes_of(tensor: Tensor, storage: Tensor) -> Tensor:
    """Return which of a storage's bytes belong to a tensor, as bools on the CPU."""
    size = tensor.itemsize
    shape, strides = (*tensor.shape, size), (*(size * one for one in tensor.stride()), 1)
    # What is expanded has each byte once.
    once = tuple(1 if not stride else length for length, stride in zip(shape, strides, strict=True))
    return storage.as_strided(once, strides, size * tensor.storage_offset())
