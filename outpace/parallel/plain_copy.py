"""The plain copy of a user's module that was laid out: its structure, with the layout's values."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.spread import is_spread, whole
from outpace.parallel.api import Layout
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks


def model_of(objective: nn.Module) -> nn.Module:
    """The user's module in its objective."""
    model: nn.Module = objective.model  # type: ignore[assignment]
    return model


@contextmanager
def filled(plain: nn.Module, layout: Layout, plan: Plan, ranks: Ranks) -> Iterator[list[str]]:
    """Meanwhile a hollow copy has the layout's weights and buffers; yields the parameters' names.

    Whole tensors are shared with the layout, parts are gathered, and what other ranks have they
    send. Ranks without samples (servers) have no use for them. Collective.
    """
    model = model_of(plain)
    names = [name for name, _ in model.named_parameters()]
    values = _values(model, layout, plan, ranks)
    if plan.data_rank(ranks.rank) is None:
        yield names
        return
    parameters = {id(p): nn.Parameter(values[id(p)], p.requires_grad) for p in model.parameters()}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in plain.modules():
        registers: tuple[tuple[dict[str, Any], Any], ...] = (
            (part._parameters, parameters), (part._buffers, values),
        )  # fmt: skip
        for register, found in registers:
            for name, tensor in list(register.items()):
                if tensor is not None and id(tensor) in found:
                    before.append((register, name, tensor))
                    register[name] = found[id(tensor)]
    try:
        yield names
    finally:
        for register, name, tensor in before:
            register[name] = tensor


@contextmanager
def standing_for(trained: Sequence[nn.Module], plain: nn.Module) -> Iterator[None]:
    """Meanwhile who refers to a part of the trained module, as a loss's closure, finds the copy's.

    `trained` are the modules of which `plain` was copied, in order.
    """
    before = [vars(part) for part in trained]
    try:
        for part, copied in zip(trained, plain.modules(), strict=True):
            object.__setattr__(part, "__dict__", vars(copied))
        yield
    finally:
        for part, attributes in zip(trained, before, strict=True):
            object.__setattr__(part, "__dict__", attributes)


def _values(model: nn.Module, layout: Layout, plan: Plan, ranks: Ranks) -> dict[int, Tensor]:
    """Whole values for each parameter and buffer of a hollow model, by `id`. Collective."""
    device = layout._device()
    held = held_by(layout)
    said = holders_of(held, ranks)
    readers = [rank for rank in range(ranks.world_size) if plan.data_rank(rank) is not None]
    values = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owners = [rank for rank, has in enumerate(said) if name in has]
        everywhere = all(name in said[rank] for rank in readers)
        if ranks.rank not in readers and everywhere:
            continue
        owner = owners[0] if owners else None
        values[id(tensor)] = _whole_of(tensor, held.get(name), owner, everywhere, device)
    return values


def held_by(layout: Layout) -> dict[str, Tensor]:
    """This rank's parameters and buffers."""
    held: dict[str, Tensor] = {n: p.detach() for n, p in layout.named_parameters()}
    return held | {n: b.detach() for n, b in layout.model.named_buffers()}


def holders_of(held: Iterable[str], ranks: Ranks) -> list[set[str]]:
    """The names that each rank has. Collective."""
    said: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(said, set(held))
    return said


def _whole_of(
    hollow_tensor: Tensor,
    mine: Tensor | None,
    owner: int | None,
    everywhere: bool,
    device: torch.device,
) -> Tensor:
    if mine is not None and is_spread(mine):
        return whole(mine).to(device)
    if everywhere and mine is not None:
        return mine.to(device)
    assert owner is not None  # a look is left out else
    values = mine.to(device) if mine is not None else torch.empty_like(hollow_tensor, device=device)
    values = values.contiguous()
    dist.broadcast(values, owner)
    return values
