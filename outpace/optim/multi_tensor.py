"""Grouping of parameters that are updated together.

This saves launches, which cost the host as much time for a few values as for many.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from outpace.planner.memory.optimizer_bytes import FEW_VALUES, JOINED_VALUES


def group_parameters(
    sizes: Sequence[int], kinds: Sequence[Hashable], device: torch.device
) -> list[list[int]]:
    """Group parameters to update together; return the positions of each group's parameters.

    Parameters share a group only if their `kinds` are equal. A parameter that is large, or whose
    kind is None, is updated alone. A group is at most half as large as the largest parameter, or
    else small, so that updating a group does not increase peak memory noticeably.
    """
    most = min(JOINED_VALUES.get(device.type, 0), max(max(sizes) // 2, FEW_VALUES))
    found: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}
    for place, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if kind is None or size > most // 2:
            found.append([place])
            continue
        if kind not in open_ or held[kind] + size > most:
            open_[kind], held[kind] = [], 0
            found.append(open_[kind])
        open_[kind].append(place)
        held[kind] += size
    return found


def step_counts(steps_P: Tensor) -> list[float]:
    """Return step counts as numbers, or zeros if the tensor has no memory."""
    if has_no_memory(steps_P):
        return [0.0] * len(steps_P)
    return steps_P.tolist()


def has_no_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has no storage: it is fake (in a trace) or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
