"""Check that all ranks have built the same module, including state that they do not synchronise.

Ranks start with rank 0's parameters and buffers, but keep their own plain attributes. There, a
random projection differs between ranks with different seeds, and the `hash` of a string differs
between processes. Comparing a module with a copy on the same rank cannot reveal this, so all ranks
compute the loss of the same samples.
"""

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from outpace.parallel.batches import pack, samples_in, take_first, unpack
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import difference
from outpace.parallel.parity.module_state import is_generator, kept_attributes
from outpace.parallel.parity.names_in_use import NamesInUse
from outpace.parallel.parity.state_messages import name_attributes
from outpace.parallel.parity.trial_forward import trial_forward
from outpace.parallel.parity.user_collectives import NoCollectives
from outpace.parallel.rank_objects import gather_objects

_FEW = 2  # samples
# Code that names these may return different values in each process.
_BY_PROCESS = ("hash", "urandom", "getpid", "gethostname", "uuid1", "uuid4", "SystemRandom")


@dataclass(frozen=True)
class BuildDifference:
    """A difference between ranks' modules.

    `apart` is the largest relative difference of a rank's loss from the first rank's, for the same
    samples. `names` are the attributes whose values differ.
    """

    apart: float = 0.0
    names: tuple[str, ...] = ()


def may_differ_by_process(in_use: NamesInUse) -> bool:
    """Return whether code that a step can reach uses a function whose result differs by process.

    Such functions are `hash` and `getpid`; they are found by name.
    """
    return any(in_use.mentions(name) for name in _BY_PROCESS)


def compare_builds(
    plain: nn.Module,
    passes: Sequence[Batch],
    hooks: StepHooks,
    drops: bool,
    strategy: str,
    suspected: bool,
) -> BuildDifference:
    """Compare attributes and losses between ranks with the same weights. Collective.

    The loss of two samples is computed only if attributes differ, or if `suspected` is set on any
    rank. If the module's random generators differ, no difference is returned, because ranks then
    draw different numbers anyway.
    """
    told = gather_objects((kept_attributes(plain), suspected))
    attributes = [one for one, _ in told]
    names = sorted(
        name
        for name in {name for one in attributes for name in one}
        if any(one.get(name) != attributes[0].get(name) for one in attributes)
    )
    own_draws = any(_holds_generator(one.get(name)) for name in names for one in attributes)
    if own_draws or not (names or any(one for _, one in told)):
        return BuildDifference()
    device = next(plain.parameters()).device
    few = take_first(passes[0], min(_FEW, samples_in(passes[0]))) if passes else None
    sent: list[Any] = gather_objects(None if few is None else pack(few))
    packed = next((one for one in sent if one is not None), None)
    losses = gather_objects(_compute_loss(plain, packed, device, hooks, drops, strategy))
    known = [loss for loss in losses if math.isfinite(loss)]
    apart = max((difference(loss, known[0]) for loss in known), default=0.0)
    return BuildDifference(apart, tuple(names))


def _holds_generator(comparable: Any) -> bool:
    inside = comparable if isinstance(comparable, tuple) else ()
    return is_generator(comparable) or any(map(_holds_generator, inside))


def _compute_loss(
    plain: nn.Module,
    packed: bytes | None,
    device: torch.device,
    hooks: StepHooks,
    drops: bool,
    strategy: str,
) -> float:
    """Return the mean loss of samples from `pack` with fixed seeds; NaN if that is impossible."""
    with suppress(Exception), trial_forward(plain, drops):  # such as too few samples for a norm
        if packed is not None:
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            with hooks.cast(), NoCollectives(strategy):
                loss_sum, count, *_ = plain(unpack(packed, device))
            return float(loss_sum.detach().double() / count.double())
    return math.nan


def explain_builds(found: BuildDifference) -> str:
    """Return a message about ranks whose modules compute different losses."""
    if found.names:
        cause = f"they have different values of {name_attributes(found.names)}, which ranks do not "
        cause += "send each other"
    else:
        cause = "its code uses a value that differs between processes (such as hash() of a string)"
    return (
        f"ranks compute losses of the same samples that differ by {100 * found.apart:.2g} %, with "
        f"the same parameters and buffers: {cause}. Keep what __init__ draws or measures in a "
        "registered buffer (self.register_buffer(name, tensor)), or seed its generators "
        "identically on all ranks (also NumPy's and Python's). Use zlib.crc32 instead of hash."
    )
