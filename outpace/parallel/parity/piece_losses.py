"""Losses of several pieces of a batch, without a backward or lasting effects."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from outpace.interop.custom_model.objective import NoGradientError
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.kept_state import Totals
from outpace.parallel.parity.module_state import preserve_state
from outpace.parallel.plain import random_state, same_random_state, without_dropout


class DrawsError(Exception):
    """A forward that draws random numbers other than for dropout."""


def total_of(
    plain: nn.Module, hooks: StepHooks, drops: bool, pieces: Sequence[Batch], alike: bool
) -> Totals:
    """Return the loss sum and the count over several pieces.

    Dropout is disabled, and all state is restored. Gradients are enabled, since the forward may
    compute some (forces, penalties) or register hooks.

    Raises DrawsError if random numbers are drawn, since different pieces draw different numbers,
    unless the pieces are `alike`.
    """
    device = next(plain.parameters()).device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    dropping = without_dropout(plain) if drops else nullcontext()
    with torch.enable_grad(), dropping, preserve_state(plain, device):
        begin = random_state(device)
        for piece in pieces:
            with hooks.cast():
                loss_sum, count = run_forward(plain, piece)
            totals += torch.stack((loss_sum.detach().double(), count.detach().double()))
            del loss_sum, count  # frees this graph before the next piece has one
        if drops and not alike and not same_random_state(begin, random_state(device)):
            raise DrawsError
    return float(totals[0]), float(totals[1])


def run_forward(plain: nn.Module, piece: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum and count of a part of a batch, which alone may have a loss without gradient.

    Only a step refuses such a loss (if all its targets are missing, say).
    """
    try:
        loss_sum, count, *_ = plain(piece)
    except NoGradientError as error:
        return error.totals
    return loss_sum, count


def mean_loss(*totals: Totals) -> float:
    """Return the mean loss of pieces with these totals; NaN without any count."""
    count = sum(one for _, one in totals)
    return sum(one for one, _ in totals) / count if count else math.nan
