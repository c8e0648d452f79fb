"""What operators take and give back within themselves, which a mode around them does not see."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import linear_cross_entropy
from torch.utils._pytree import tree_map_only

from outpace.trace.tracker import Tracker

_CHUNKED_LOSS = torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default
_ALLOW_RETAIN_GRAPH = 11  # the operator's argument that its code does not take


class Inside:
    """Bytes that operators need beside what they are given and what they make.

    The chunked loss is written in Python: its code is run on tensors without memory.
    """

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def __call__(self, func: Any, args: Any) -> int:
        """For one call. 0 for operators that are not known, and with memory of their own."""
        if func is not _CHUNKED_LOSS or not isinstance(args[0], FakeTensor):
            return 0
        key = tree_map_only(Tensor, lambda tensor: (tensor.shape, tensor.dtype), tuple(args))
        if key not in self._known:
            given = (*args[:_ALLOW_RETAIN_GRAPH], *args[_ALLOW_RETAIN_GRAPH + 1 :])
            run = linear_cross_entropy._linear_cross_entropy_batch_chunked_accumulator
            self._known[key] = _taken(run, given)
        return self._known[key]


def _taken(run: Callable[..., Any], given: Iterable[Any]) -> int:
    tracker = Tracker()
    tracker.see(given)
    there = tracker.live_bytes
    with torch.no_grad(), tracker:
        made = run(*given)
    outputs: int = sum(tensor.untyped_storage().nbytes() for tensor in made)
    return tracker.peak_bytes - there - outputs
