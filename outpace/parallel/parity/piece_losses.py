"""Losses of parts of a batch, without a backward or lasting effects."""

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
    """Return the loss sum and the number of targets over several parts of a batch (`pieces`).

    `drops`: disable dropout. All state is restored. Gradients are enabled, because the forward may
    compute some (forces, penalties) or register hooks.

    Raises DrawsError if `drops` is set and random numbers are still drawn, because different parts
    then draw different numbers. With `alike`, no error is raised, because the parts that the
    caller compares draw the same numbers.
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
            del loss_sum, count  # frees this graph before the next one is built
        if drops and not alike and not same_random_state(begin, random_state(device)):
            raise DrawsError
    return float(totals[0]), float(totals[1])


def run_forward(plain: nn.Module, piece: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss sum and count of a part of a batch, even if its loss has no gradient.

    A part may have no targets. A loss without a gradient is an error only in a training step.
    """
    try:
        loss_sum, count, *_ = plain(piece)
    except NoGradientError as error:
        return error.totals
    return loss_sum, count


def mean_loss(*totals: Totals) -> float:
    """Return the mean loss over parts with these totals; NaN if the count is 0."""
    count = sum(one for _, one in totals)
    return sum(one for one, _ in totals) / count if count else math.nan
