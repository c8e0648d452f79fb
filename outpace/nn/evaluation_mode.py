"""A module in evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put every part of `module` in evaluation mode; afterwards each is in its own mode again.

    `module.train()` would also switch on what a user has put in evaluation mode for good, such as
    a frozen BatchNorm. Parts that were added meanwhile stay as they are.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
