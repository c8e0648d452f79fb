"""Parameters that are stepped as one.

Launching a step takes the host as long for few values as for many.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from outpace.planner.memory.optimizer_bytes import FEW_VALUES, JOINED_VALUES


def group_parameters(
    sizes: Sequence[int], kinds: Sequence[Hashable], device: torch.device
) -> list[list[int]]:
    """Return which parameters of `sizes` values are stepped as one, by their positions.

    Those of equal `kinds` are; one whose kind is None, and a large one, is stepped alone. Together
    they have few values, or at most half of the largest one's, whose step then takes more memory.
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
    """Return the number of steps of each parameter. Those without memory have none that differ."""
    if has_no_memory(steps_P):
        return [0.0] * len(steps_P)
    counts: list[float] = steps_P.tolist()
    return counts


def has_no_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has no values, as in a trace."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
