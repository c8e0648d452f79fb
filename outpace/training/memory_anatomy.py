"""Tensors of a rank that outlive a step: weights, gradients, optimizer state."""

from collections.abc import Iterator

import torch
from torch import Tensor

from outpace.parallel import Layout
from outpace.parallel.tensors import local

Holder = tuple[str, str, int]  # kind, name, bytes


def holders(layout: Layout, optimizer: torch.optim.Optimizer | None) -> list[Holder]:
    """Return kind, name and bytes of each weight, gradient and optimizer state on this rank.

    Tensors that share memory count once, and states on another device do not count. Any thread may
    call this.
    """
    seen: set[int] = set()
    found: list[Holder] = []
    for kind, name, tensor in _lasting_tensors(layout, optimizer):
        own = local(tensor)
        storage = own.untyped_storage()
        key = storage.data_ptr()
        if key and key not in seen:
            seen.add(key)
            found.append((kind, name, storage.nbytes()))
    return found


def _lasting_tensors(
    layout: Layout, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in list(layout.named_parameters()):
        yield "weights", name, parameter.detach()
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.device == parameter.device:
                yield "optimizer state", f"{name} {key}", value
