"""Samples of other ranks in a rank's first batch, and whether a few samples affect each other.

With them the plain pass combines samples otherwise than the plan cuts them, so that one comparison
with the layout shows that nothing depends on which samples are computed together, or before.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outpace.parallel.batches import (
    concatenate,
    cut,
    leave_out_first,
    pack,
    samples_in,
    take_first,
    unpack,
)
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import difference
from outpace.parallel.parity.module_state import (
    buffer_versions,
    hidden_parameters,
    kept_attributes,
    parameter_versions,
    preserve_state,
)
from outpace.parallel.parity.moved_parameters import MovedParameters
from outpace.parallel.parity.plain_copy import model_of
from outpace.parallel.plain import random_state, same_random_state, without_dropout
from outpace.parallel.rank_objects import gather_objects

AFFECTED = "samples affect each other"  # a reason of explain_dependence
_FEWEST = 4  # samples of a micro-batch, since a single sample may be a special case


def swap_samples(passes: Sequence[Batch], device: torch.device) -> list[Batch] | None:
    """Return this rank's passes, the first two with a sample of another rank. Collective.

    Each of the two begins with the first sample of the other rank's other pass, instead of its own;
    the first is in two halves. None if ranks have fewer than four samples in a pass, or an odd
    number, or if samples of several ranks cannot be one batch.
    """
    sent: list[bytes] = []
    with suppress(Exception):  # a batch may have no samples
        if all(_is_enough(samples_in(batch)) for batch in passes[:2]):
            packed = [pack(take_first(batch, 1)) for batch in passes[:2]]
            sent = [one for one in packed if one is not None]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = gather_objects([len(one) for one in sent])
    if any(len(some) != len(passes[:2]) for some in sizes):
        return None
    received = _send_around(sent, sizes[(rank + 1) % ranks], device)
    with suppress(Exception):  # its class may differ on this rank
        others = [unpack(one, device) for one in reversed(received)]
        mixed = [
            concatenate(other, leave_out_first(batch, 1))
            for other, batch in zip(others, passes, strict=False)
        ]
        if all(one is not None for one in mixed):
            return [*cut(mixed[0], 2), *mixed[1:], *passes[2:]]
    return None


def _send_around(sent: Sequence[bytes], sizes: Sequence[int], device: torch.device) -> list[bytes]:
    """Return what the next rank sends, of these sizes, and send to the previous one. Collective.

    No rank holds the samples of all.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    for mine, theirs in zip(sent, received, strict=True):
        message = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, message, (rank - 1) % ranks),
            dist.P2POp(dist.irecv, theirs, (rank + 1) % ranks),
        ])  # fmt: skip
        for work in works:
            work.wait()
    return [one.cpu().numpy().tobytes() for one in received]


def turn_samples(passes: Sequence[Batch], micro_batches: int) -> list[Batch] | None:
    """Return a pipeline's micro-batches, each with the one before's last sample at its begin.

    The first one begins with the last sample of all. None if micro-batches have fewer than four
    samples, or an odd number, or if samples cannot be combined.
    """
    turned = []
    for number, batch in enumerate(passes):
        before = passes[number - 1]
        if not _is_enough(samples_in(batch) // micro_batches):
            return None
        last = leave_out_first(before, samples_in(before) - 1)
        joined = concatenate(last, take_first(batch, samples_in(batch) - 1))
        if joined is None:
            return None
        turned += cut(joined, micro_batches)
    return turned


def _is_enough(samples: int) -> bool:
    """Return whether a micro-batch has samples for two halves that are no special case."""
    return samples >= _FEWEST and samples % 2 == 0


def explain_dependence(
    plain: nn.Module, few: Batch, hooks: StepHooks, tolerance: float, drops: bool
) -> str | None:
    """Return what a few samples depend on besides themselves and the weights; None if on nothing.

    They are computed together and one by one. Everything is restored afterwards. `drops`: dropout,
    which is disabled, does not count.
    """
    model, device = model_of(plain), next(plain.parameters()).device
    watch = MovedParameters(model.named_parameters())
    means = []
    try:
        with (
            watch.put_back_unless(lambda: False),
            preserve_state(plain, device),
            without_dropout(plain) as dropout,
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            # Warnings about single samples, which do not occur in training.
            warnings.simplefilter("ignore")
            drawn, before = random_state(device), _state_of(plain)
            for pieces in ([few], cut(few, samples_in(few))):
                totals = torch.zeros(2, dtype=torch.float64, device=device)
                for piece in pieces:
                    with watch, hooks.cast():
                        loss_sum, count, *_ = plain(piece)
                    totals += torch.stack((loss_sum.double(), count.double())).detach()
                means.append(float(totals[0] / totals[1]))
            draws = not same_random_state(drawn, random_state(device))
            if draws or (dropout.would_drop and not drops):
                return "a forward draws random numbers"
            writes = watch.written or watch.written_unseen() or watch.communicates
            if writes or _state_of(plain) != before:
                return "a forward changes something"
    except Exception as error:  # such as normalisation over a single sample
        return f"a few samples fail ({type(error).__name__})"
    if any(mean != mean for mean in means) or difference(*means) > tolerance:
        return AFFECTED
    return None


def find_unsaved_state(plain: nn.Module) -> tuple[Any, ...]:
    """Return what forwards may change besides parameters and saved buffers, comparable."""
    trained = [one.requires_grad for one in plain.parameters()]
    return kept_attributes(plain), trained, parameter_versions(hidden_parameters(plain))


def _state_of(plain: nn.Module) -> tuple[Any, ...]:
    return *find_unsaved_state(plain), buffer_versions(plain)
