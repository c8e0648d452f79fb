"""Losses that depend on the rank that computes them, or on the number of ranks.

With `if dist.get_rank() == 0: loss = loss + penalty`, ranks compute different losses, and with
`loss * dist.get_world_size()`, they compute another loss than one process. A copy of the module on
the same rank does the same, so comparing the two reveals nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest.mock import patch

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from outpace.parallel.batches import take_first
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import difference
from outpace.parallel.parity.names_in_use import NamesInUse
from outpace.parallel.parity.trial_forward import trial_forward
from outpace.parallel.parity.user_collectives import NoCollectives
from outpace.parallel.plain import random_state, set_random_state

_FEW = 2  # samples
_FUNCTIONS = ("get_rank", "get_world_size", "get_node_local_rank")
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def may_ask_for_rank(in_use: NamesInUse) -> bool:
    """Return whether code that a step can reach uses the rank or the number of ranks."""
    return any(in_use.mentions(name) for name in (*_FUNCTIONS, *_VARIABLES))


def compare_ranks(
    plain: nn.Module, piece: Batch, hooks: StepHooks, drops: bool, strategy: str
) -> float:
    """Return how much the loss of a few samples changes on another rank or in a single process.

    Returns 0 if the samples cannot run this way, for example because of the user's own collectives.
    """
    device = next(plain.parameters()).device
    few, begin = take_first(piece, _FEW), random_state(device)

    def loss_as(rank: int, world_size: int) -> float:
        set_random_state(begin, device)
        with (
            trial_forward(plain, drops),
            _pretend_to_be(rank, world_size),
            hooks.cast(),
            NoCollectives(strategy),
        ):
            loss_sum, count, *_ = plain(few)
        return float(loss_sum.detach().double() / count.double())

    apart = 0.0
    # such as normalisation over too few samples, or a list indexed by rank
    with suppress(Exception):
        world_size = dist.get_world_size()
        own = dist.get_rank()
        here = loss_as(own, world_size)
        others = {0, 1, world_size - 1} - {own}
        for rank, size in ((0, 1), *((one, world_size) for one in others)):
            apart = max(apart, difference(loss_as(rank, size), here))
    set_random_state(begin, device)
    return apart


@contextmanager
def _pretend_to_be(rank: int, world_size: int) -> Iterator[None]:
    """Make user code see this rank and number of ranks inside the context.

    torch's functions read both from the default group, also if imported under other names.
    """
    acted = SimpleNamespace(rank=lambda: rank, size=lambda: world_size)
    variables = {"RANK": rank, "LOCAL_RANK": rank}
    variables |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    found = {name: str(value) for name, value in variables.items() if name in os.environ}
    with (
        patch.object(distributed_c10d, "_get_default_group", lambda: acted),
        patch.dict(os.environ, found),
    ):
        yield


def explain_rank_dependence(apart: float) -> str:
    """Return a message about a loss that depends on the rank."""
    return (
        "the loss depends on the rank that computes it, or on the number of ranks "
        "(dist.get_rank(), dist.get_world_size(), RANK): on another rank, or in one process, it "
        f"differs by {100 * apart:.2g} %. Return the mean loss of the rank's samples, as one "
        "process would; outpace averages the gradients as if they came from one batch."
    )
