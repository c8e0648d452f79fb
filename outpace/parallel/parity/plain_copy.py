"""A plain copy of a user's module, filled with the values of a layout."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from outpace.nn.dtensor import gather_rows, is_spread, split_rows, whole
from outpace.parallel.layout import Layout
from outpace.parallel.tensors import all_parameters, concatenate, parameter_like, spread
from outpace.records.errors import first_names
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.units import show_bytes

_REGISTERS = frozenset(vars(nn.Module()))
_MESSAGE_BYTES = 32 << 20  # a message ends with the tensor that reaches this size
_MOST_OF_FREE = 0.8


def model_of(objective: nn.Module) -> nn.Module:
    """Return the user's module from an objective, which is a module with its loss."""
    model: nn.Module = objective.model  # type: ignore[assignment]
    return model


@dataclass(frozen=True)
class ModuleDtypes:
    """The dtypes of the parameters and buffers that a rank holds, by name.

    `narrowest`: bytes per element of the rank's narrowest floating-point parameter. `has_sums`: the
    rank ends a step with the global batch's gradients. `frozen`: names of parameters that do not
    require gradients at the moment.
    """

    dtypes: Mapping[str, torch.dtype]
    narrowest: int
    has_sums: bool
    frozen: frozenset[str] = frozenset()


@contextmanager
def fill_copy(
    plain: nn.Module, layout: Layout, plan: Plan, ranks: Ranks, holders: Sequence[ModuleDtypes]
) -> Iterator[list[str]]:
    """Fill a copy of the user's module with the trained weights and buffers. Collective.

    `plain` is that copy with its loss, on the meta device, and `layout` is the module as it is
    trained. Yields parameter names. The copy shares tensors that this rank holds whole, gathers
    shards, and receives the rest from other ranks. `holders` describes what each rank holds.
    Parameter servers run no samples, so their copies stay without values.
    """
    model = model_of(plain)
    names = [name for name, _ in model.named_parameters()]
    # The loop may have frozen parameters since the copy was made.
    frozen = frozenset().union(*(one.frozen for one in holders))
    for name in frozen.intersection(names):
        model.get_parameter(name).requires_grad_(False)
    values = _collect_values(model, layout, plan, ranks, holders)
    if plan.data_rank(ranks.rank) is None:
        yield names
        return
    with _swap_parameters(model, values) as unswapped:
        before = _replace_registered(plain, unswapped, values)
        try:
            yield names
        finally:
            for register, name, value in before:
                register[name] = value


_ReplacedAttributes = list[tuple[dict[str, Any], str, Any]]


def _replace_registered(
    plain: nn.Module, parameters: Mapping[int, nn.Parameter], values: Mapping[int, Tensor]
) -> _ReplacedAttributes:
    """Replace registered parameters and buffers, given new tensors by the `id` of the old ones.

    Also replaces parameters in plain attributes. Returns each replaced attribute and its old value.
    """
    before: _ReplacedAttributes = []
    for part in plain.modules():
        registers: tuple[tuple[dict[str, Any], Any], ...] = (
            (part._parameters, parameters), (part._buffers, values),
        )  # fmt: skip
        for register, found in registers:
            for name, tensor in list(register.items()):
                if tensor is not None and id(tensor) in found:
                    before.append((register, name, tensor))
                    register[name] = found[id(tensor)]
        for name, value in list(vars(part).items()):
            held = set() if name in _REGISTERS else {id(leaf) for leaf in tree_leaves(value)}
            if held & parameters.keys():
                before.append((vars(part), name, value))
                vars(part)[name] = tree_map(lambda leaf: parameters.get(id(leaf), leaf), value)
    return before


@contextmanager
def _swap_parameters(
    model: nn.Module, values: Mapping[int, Tensor]
) -> Iterator[dict[int, nn.Parameter]]:
    """Give the parameters of a copied module new values inside the context.

    `values` maps the `id` of a parameter to a tensor with its new values. The parameters stay the
    same objects, so references to them, such as dict keys, remain valid. Where torch cannot swap
    tensors, a new parameter is needed; these are yielded by the `id` of the old one.
    """
    made = {p: parameter_like(values[id(p)], p) for p in all_parameters(model)}
    swapped = [p for p, parameter in made.items() if _try_swap(p, parameter)]
    done = set(swapped)
    try:
        yield {id(p): parameter for p, parameter in made.items() if p not in done}
    finally:
        for p in swapped:
            # Hooks move with the values, and would count as registered on the layout's tensors.
            p._post_accumulate_grad_hooks = None  # type: ignore[assignment]
            p._backward_hooks = None
            _try_swap(p, made[p])  # otherwise it would stay in memory as long as the copy


def _try_swap(one: Tensor, other: Tensor) -> bool:
    """Swap two tensors; return False if torch cannot, for example because of weak references."""
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        return False
    return True


@contextmanager
def redirect_references(trained: Sequence[nn.Module], plain: nn.Module) -> Iterator[None]:
    """Make references to the trained module's submodules refer to its copy inside the context.

    A loss may have such references in its closure. `plain` is the copy, and `trained` has the
    modules that it was copied from, in the order of `modules()`.
    """
    before = [vars(part) for part in trained]
    try:
        for part, copied in zip(trained, plain.modules(), strict=True):
            object.__setattr__(part, "__dict__", vars(copied))
        yield
    finally:
        for part, attributes in zip(trained, before, strict=True):
            object.__setattr__(part, "__dict__", attributes)


def _collect_values(
    model: nn.Module, layout: Layout, plan: Plan, ranks: Ranks, holders: Sequence[ModuleDtypes]
) -> dict[int, Tensor]:
    """Return whole tensors for the parameters and buffers of a meta model, by `id`. Collective."""
    device = layout._device()
    held = _held_by_name(layout)
    readers = [rank for rank in range(ranks.world_size) if plan.data_rank(rank) is not None]
    values: dict[int, Tensor] = {}
    split: _TensorGroups = {}
    sent: _TensorGroups = {}
    for name, meta_tensor in [*model.named_parameters(), *model.named_buffers()]:
        everywhere = all(name in holders[rank].dtypes for rank in readers)
        if ranks.rank not in readers and everywhere:
            continue
        key, mine = id(meta_tensor), held.get(name)
        rows = None if mine is None else split_rows(mine)
        if mine is not None and rows is not None:
            split.setdefault((rows.group, mine.dtype), []).append((key, mine))
        elif mine is not None and (everywhere or is_spread(mine)):
            values[key] = whole(mine).to(device)
        else:
            # Some rank has the tensor: otherwise, the check is skipped (`explain_lost_tensors`).
            owner = next(rank for rank, has in enumerate(holders) if name in has.dtypes)
            dtype = holders[owner].dtypes[name]
            if mine is None:
                mine = torch.empty_like(meta_tensor, device=device, dtype=dtype)
            values[key] = mine.to(device)
            sent.setdefault((owner, dtype), []).append((key, values[key]))
    values |= {key: found.to(device) for key, found in _gather_split(split)}
    _broadcast_from_owners(sent, ranks.rank)
    return values


# Tensors, each with the `id` of its parameter, grouped by ranks and dtype.
_TensorGroups = dict[Any, list[tuple[int, Tensor]]]


def _gather_split(split: _TensorGroups) -> Iterator[tuple[int, Tensor]]:
    for alike in split.values():
        for some in _group_into_messages(alike):
            wholes = gather_rows([one for _, one in some])
            yield from zip([key for key, _ in some], wholes, strict=True)


def _broadcast_from_owners(sent: _TensorGroups, rank: int) -> None:
    for (owner, dtype), alike in sent.items():
        for some in _group_into_messages(alike):
            into = [one for _, one in some]
            if rank == owner:
                dist.broadcast(concatenate(into), owner)
            else:
                count = sum(one.numel() for one in into)
                message = torch.empty(count, dtype=dtype, device=into[0].device)
                dist.broadcast(message, owner)
                spread(message, into)


def _group_into_messages(alike: Sequence[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    some: list[tuple[int, Tensor]] = []
    for one in alike:
        some.append(one)
        if sum(tensor.nbytes for _, tensor in some) >= _MESSAGE_BYTES:
            yield some
            some = []
    if some:
        yield some


def held_tensors(layout: Layout) -> ModuleDtypes:
    """Return a description of the tensors that this rank holds."""
    parameters = [p for _, p in layout.named_parameters() if p.is_floating_point()]
    return ModuleDtypes(
        {name: tensor.dtype for name, tensor in _held_by_name(layout).items()},
        min((p.itemsize for p in parameters), default=8),
        layout.has_sums,
        frozenset(name for name, p in layout.named_parameters() if not p.requires_grad),
    )


def _held_by_name(layout: Layout) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {n: p.detach() for n, p in layout.named_parameters()}
    return held | {n: b.detach() for n, b in layout.model.named_buffers()}


def explain_lost_tensors(model: nn.Module, holders: Sequence[ModuleDtypes]) -> str | None:
    """Return a message that names the module's tensors that no rank has; None if there are none."""
    held = set().union(*(one.dtypes for one in holders))
    named = (*model.named_parameters(), *model.named_buffers())
    lost = [name for name, _ in named if name not in held]
    return f"no rank has {first_names(lost)} of the module" if lost else None


def explain_size(model: nn.Module, layout: Layout, plan: Plan, ranks: Ranks) -> str | None:
    """Return a message if weights that this rank lacks do not fit in memory; None if they do.

    Gradients are not counted: they need hardly any memory, because only one exists at a time.
    """
    if plan.data_rank(ranks.rank) is None:
        return None  # this rank has no samples to run the copy on
    device = layout._device()
    held = {n for n, p in layout.named_parameters() if not is_spread(p)}
    if plan.offload_parameters != "none":
        held = set()  # offloaded parameters are copied back, or read from disk
    lacking = [p for n, p in model.named_parameters() if n not in held]
    needed = sum(p.nbytes for p in lacking)
    free = _free_bytes(device) / (1 if device.type == "cuda" else ranks.local_world_size)
    if needed <= _MOST_OF_FREE * free:
        return None
    return (
        f"one process would need {show_bytes(needed)} for the weights that this rank does not "
        f"hold, but only {show_bytes(int(free))} are free"
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
