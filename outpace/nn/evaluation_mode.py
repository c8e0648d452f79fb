"""Temporary evaluation mode of a module."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put every part of `module` in evaluation mode, and restore each part's mode afterwards.

    `module.train()` would also change parts that a user keeps in evaluation mode, such as a frozen
    BatchNorm. Parts that are added in the meantime stay unchanged.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
