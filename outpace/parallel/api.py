"""What every strategy gives back."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn


def _nothing() -> float:
    return 0.0


@dataclass(frozen=True)
class Applied:
    """An objective laid out on the ranks of a plan.

    `module` is called in place of the objective. `no_sync()` is entered around the micro-batches
    that are not the last of a step. Gradients are the mean over `data_parallel` ranks, so the loss
    is scaled by that degree over the global number of targets. `exposed_communication_s()` is the
    part of the last backward in which only communication was going on.
    """

    module: nn.Module
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    exposed_communication_s: Callable[[], float] = _nothing
