"""Activation checkpointing in the forward of a custom model's pipeline stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor


class _NonReentrantCheckpoint:
    """Replacement of torch's CheckpointFunction, which implements `use_reentrant=True`.

    CheckpointFunction runs the checkpointed code without a graph, runs a backward within the
    backward, and passes on only the gradients of its inputs. A stage that ends inside this code
    would get no gradient, and a split backward could not use it. Values and gradients are the same
    with this replacement. `always`: checkpoint with gradients even if no input requires them.
    """

    def __init__(self, reentrant: Any, always: bool) -> None:
        self._reentrant, self._always = reentrant, always

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Checkpoint without reentry if gradients are needed, otherwise call CheckpointFunction."""
        needed = (isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if not (self._always or any(needed)):
            return self._reentrant.apply(function, preserve_rng_state, *args)
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


@contextmanager
def without_reentry(always: bool) -> Iterator[None]:
    """Make all activation checkpointing inside the context non-reentrant.

    `always`: compute gradients even if no input requires them, such as outputs of absent blocks.
    """
    kept = torch_checkpoint.CheckpointFunction
    torch_checkpoint.CheckpointFunction = _NonReentrantCheckpoint(kept, always)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch_checkpoint.CheckpointFunction = kept  # type: ignore[misc]
