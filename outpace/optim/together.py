"""Parameters that are stepped as one.

A host takes as long to launch a step of few values as of many.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from outpace.planner.memory.optimizer_bytes import FEW_VALUES, JOINED_VALUES


def group_parameters(
    sizes: Sequence[int], kinds: Sequence[Hashable], device: torch.device
) -> list[list[int]]:
    """Return which parameters of `sizes` values are stepped as one, by their places.

    Those of one of the `kinds` are; one whose kind is None, and a large one, is by itself. Together
    they have at most half the values of the largest, whose step takes more memory then, or few.
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
    """Return the steps that each parameter has had. Without memory there are none that differ."""
    if has_no_memory(steps_P):
        return [0.0] * len(steps_P)
    counts: list[float] = steps_P.tolist()
    return counts


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor has no values, as in a trace."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
