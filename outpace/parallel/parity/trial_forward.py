"""A forward and backward of a module without lasting effects."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from outpace.parallel.parity.module_state import preserve_state
from outpace.parallel.parity.moved_parameters import keep_values
from outpace.parallel.parity.plain_copy import model_of
from outpace.parallel.plain import without_dropout


@contextmanager
def trial_forward(plain: nn.Module, drops: bool) -> Iterator[None]:
    """Restore parameters and state on exit, so that forwards can be tried inside the context.

    Gradients are enabled. `drops`: disable dropout. The module must have parameters, and its state
    must be on their device.
    """
    with (
        keep_values(model_of(plain).named_parameters()),
        preserve_state(plain, next(plain.parameters()).device),
        without_dropout(plain) if drops else nullcontext(),
        torch.enable_grad(),
    ):
        yield
