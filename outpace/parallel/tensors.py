"""Helpers for tensors of a model on several ranks: norms, copies, broadcasts, fused messages."""

import copy
import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MethodType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Imported by name, because pipelines replace torch.nn.utils.get_total_norm to cover all stages.
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from outpace.nn.dtensor import is_spread, local, whole
from outpace.parallel.rank_objects import gather_objects
from outpace.records.errors import BadInputError, first_names

__all__ = [
    "all_parameters",
    "as_numbers",
    "by_dtype",
    "concatenate",
    "copies",
    "deep_copy",
    "drop_all_but",
    "graph_nodes",
    "has_memory",
    "is_in_python",
    "local",
    "make_equal",
    "meta_copy",
    "norm_dtype",
    "parameter_like",
    "replace_by_wider",
    "save_held_alone",
    "spread",
    "square_sum",
    "storage_id",
    "sum_gradients",
    "total_norm",
    "user_attributes",
    "whole",
    "widen_trained",
]  # fmt: skip


def copies(tensor: Tensor, ranks: int) -> int:
    """Return how many of `ranks` ranks hold the same value of a tensor."""
    if not is_spread(tensor):
        return ranks
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return ranks // math.prod(size for placement, size in sizes if not placement.is_replicate())


def square_sum(gradients: Iterable[Tensor], ranks: int, device: torch.device) -> Tensor:
    """Return this rank's contribution to the gradients' sum of squares over `ranks`, in float64.

    A tensor's squares are divided by its number of `copies`, so the sum over ranks counts it once.
    """
    alike: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(copies(gradient, ranks), []).append(local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for held_by, some in alike.items():
        total += total_norm(some).double().square() / held_by
    return total


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to compute the norm of tensors with this dtype: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over plain tensors, like `get_total_norm`, but computed in `norm_dtype`."""
    if all(norm_dtype(dtype) == dtype for dtype in {tensor.dtype for tensor in tensors}):
        return get_total_norm(tensors)
    norms = [
        norm
        for alike in by_dtype(tensors)
        for norm in torch._foreach_norm(alike, 2, dtype=norm_dtype(alike[0].dtype))
    ]
    return get_total_norm(norms)


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Sum the gradients of whole parameters over ranks and multiply them by `factor`. Collective.

    A parameter without a gradient on this rank must have none on any rank.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    for alike in by_dtype(torch.view_as_real(g) if g.is_complex() else g for g in gradients):
        message = concatenate(alike)
        dist.all_reduce(message)
        spread(message * factor, alike)


def graph_nodes(loss: Tensor) -> Iterator[Any]:
    """Yield each node of a loss's autograd graph once."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)


def is_in_python(node: Any) -> bool:
    """Return whether an autograd node is a `torch.autograd.Function` written in Python."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def all_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return all of a module's parameters, even if its class overrides `parameters`."""
    return [parameter for _, parameter in nn.Module.named_parameters(module)]


def meta_copy(module: nn.Module, real: Mapping[int, Tensor] | None = None) -> nn.Module:
    """Copy a module to the meta device: its structure, without memory for its weights.

    `real` maps the `id` of a tensor to the tensor with values that replaces it in the copy.
    """
    kept = (value for part in module.modules() for value in vars(part).values())
    # Non-leaf tensors, which each forward recomputes (`weight` under torch's old weight_norm).
    made = [leaf for leaf in tree_leaves(list(kept)) if isinstance(leaf, Tensor) and leaf.grad_fn]
    held = [*all_parameters(module), *module.buffers(), *made]
    memo = {id(tensor): tensor.detach().to("meta") for tensor in held}
    for tensor in all_parameters(module):
        memo[id(tensor)] = parameter_like(memo[id(tensor)], tensor)
    return deep_copy(module, {**memo, **(real or {})})


def parameter_like(value: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with the values of `value` and the class and attributes of `parameter`.

    A forward may need an attribute (`weight.mask`) or a class (one that overrides multiplication).
    """
    kind = type(parameter)
    wraps = is_traceable_wrapper_subclass(parameter)
    if kind is nn.Parameter or type(value) is not Tensor or wraps:
        made = nn.Parameter(value, parameter.requires_grad)
    else:  # without calling its __new__, which may need arguments
        made = Tensor._make_subclass(kind, value, parameter.requires_grad)
    vars(made).update(user_attributes(parameter))
    return made


def user_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that the user set on a parameter.

    Returns an empty dict for tensor classes that keep their state in attributes (FakeTensor).
    """
    return dict(vars(parameter)) if issubclass(type(parameter), nn.Parameter) else {}


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a module; share attributes that cannot be copied, such as locks and open files.

    Raises BadInputError if the module still cannot be copied.
    """
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:
        _add_uncopyable_to_memo(module, memo)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise BadInputError(
            f"the module cannot be copied ({type(error).__name__}: {error}). Make "
            "copy.deepcopy(module) work, or use strategy ddp or zero1."
        ) from error


def _add_uncopyable_to_memo(module: nn.Module, memo: dict[int, Any]) -> None:
    inherent = vars(nn.Module())
    for part in module.modules():
        for name, value in vars(part).items():
            if name in inherent or any(isinstance(one, nn.Module) for one in tree_leaves(value)):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                memo[id(value)] = value


# gloo and NCCL support neither 16-bit integers nor larger unsigned integers.
_SENT_AS = {
    torch.int16: torch.float16, torch.uint16: torch.float16, torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}  # fmt: skip


@torch.no_grad()
def make_equal(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks. Collective.

    Raises BadInputError if a tensor is sparse, or if ranks have built different modules.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    _require_same_module(named)
    sparse = [name.removeprefix("model.") for name, t in named if t.layout != torch.strided]
    if sparse:
        raise BadInputError(
            f"{first_names(sparse)} {'is' if len(sparse) == 1 else 'are'} sparse, but ranks send "
            "only dense tensors. Register the indices and the values as dense buffers, and build "
            "the sparse tensor from them in the forward."
        )
    for _, tensor in named:
        if tensor.numel():
            dist.broadcast(as_numbers(tensor), 0)


def as_numbers(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bits in a dtype that every backend can send."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    one_byte = tensor.itemsize == 1 and tensor.dtype not in (torch.int8, torch.uint8)
    sent_as = torch.uint8 if one_byte else _SENT_AS.get(tensor.dtype)
    return tensor if sent_as is None else tensor.view(sent_as)


def _require_same_module(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise BadInputError if ranks differ in the names, shapes, dtypes or order of tensors.

    A common cause is a loop over a set of strings, whose order differs by process. Collective.
    """
    forms = [f"{n.removeprefix('model.')} of shape {tuple(t.shape)} ({t.dtype})" for n, t in named]
    digest = hashlib.sha256("\n".join(forms).encode()).hexdigest()
    if len(set(gather_objects(digest))) == 1:
        return
    first, *others = gather_objects(forms)
    rank, theirs = next((r, some) for r, some in enumerate(others, 1) if some != first)
    pairs = zip_longest(first, theirs, fillvalue="nothing more")
    place, (known, other) = next(one for one in enumerate(pairs, 1) if one[1][0] != one[1][1])
    error = BadInputError(
        f"rank {rank} has built a different module from rank 0: parameter or buffer {place} is "
        f"{other} on rank {rank}, but {known} on rank 0. Build the same module on all ranks, with "
        "submodules in the same order. Loop over sorted(names) rather than over a set of names, "
        "whose order differs by process."
    )
    error.on_all_ranks = True
    raise error


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype, in order."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def concatenate(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype into a one-dimensional message."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@torch.no_grad()
def spread(message: Tensor, into: Iterable[Tensor]) -> None:
    """Copy the values of a concatenated message back into its tensors."""
    at = 0
    for tensor in into:
        tensor.copy_(message[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()


@torch.no_grad()
def replace_by_wider(module: nn.Module, wider: Mapping[Tensor, Tensor]) -> None:
    """Replace the values of parameters by tensors of a wider dtype.

    `wider` maps each parameter to be replaced to its new values.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter not in wider:
                continue
            if is_spread(parameter):
                part.register_parameter(name, nn.Parameter(wider[parameter]))
            else:
                parameter.grad = None
                parameter.data = wider[parameter]


def widen_trained(meta_copy: nn.Module) -> None:
    """Convert trainable parameters on the meta device to fp32."""
    for parameter in all_parameters(meta_copy):
        if parameter.requires_grad and parameter.is_meta:
            parameter.data = parameter.data.float()


def drop_all_but(kept: Iterable[Tensor], module: nn.Module) -> None:
    """Set all parameters and buffers of a module to None, except those in `kept`."""
    ids = {id(tensor) for tensor in kept}
    for part in module.modules():
        registers: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for register in registers:
            lost = {n for n, tensor in register.items() if id(tensor) not in ids}
            if any(register[name] is not None for name in lost):
                save_held_alone(part)
            register.update(dict.fromkeys(lost))


def save_held_alone(part: nn.Module) -> None:
    """Make a module save and load only the parameters and buffers that are not None.

    The module's state-dict code (`_save_to_state_dict`, hooks, extra state) may need tensors that
    only another rank has, or may save None for these tensors, as torch's FakeQuantize does.
    """
    vars(part).update(
        _save_to_state_dict=MethodType(_save_held_tensors, part),
        _load_from_state_dict=MethodType(_load_held_tensors, part),
        _state_dict_hooks=OrderedDict(), _state_dict_pre_hooks=OrderedDict(),
        _load_state_dict_pre_hooks=OrderedDict(), _load_state_dict_post_hooks=OrderedDict(),
    )  # fmt: skip


def _save_held_tensors(
    part: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None and name not in part._non_persistent_buffers_set:
            destination[prefix + name] = tensor if keep_vars else tensor.detach()


def _load_held_tensors(
    part: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
    missing: list[str], *lists: list[str],
) -> None:  # fmt: skip
    wanted: dict[str, Any] = {}
    _save_held_tensors(part, wanted, prefix, keep_vars=True)
    missing += [name for name in wanted if strict and name not in state]
    # not strict, because no extra state was saved
    nn.Module._load_from_state_dict(part, state, prefix, metadata, False, [], *lists)


def has_memory(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a dense tensor with memory: neither on meta nor a wrapper class."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_meta
        and not is_traceable_wrapper_subclass(value)
    )


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage, which a resize of the storage does not change."""
    return int(tensor.untyped_storage()._cdata)
