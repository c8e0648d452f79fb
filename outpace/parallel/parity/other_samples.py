"""Check whether a sample's loss depends on other samples in its batch or in earlier batches.

The plain pass may combine samples differently from the plan, for example by swapping samples
between ranks. If its results still equal the layout's, there is no such dependence.
"""

import math
import warnings
from collections.abc import Callable, Sequence
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
from outpace.parallel.parity.kept_state import Totals
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

AFFECTED = "samples affect each other"  # one of the reasons that explain_dependence returns
FEWEST = 4  # samples of a micro-batch, since a single sample may be a special case


def swap_samples(passes: Sequence[Batch], device: torch.device) -> list[Batch] | None:
    """Return this rank's batches after ranks have swapped samples. Collective.

    `passes` are the batches of a step's forward and backward passes. Samples of the first two are
    swapped (see `mix_samples_of_ranks`), and the first is then split into two halves. Returns None
    on all ranks if samples cannot be swapped.
    """
    mixed = mix_samples_of_ranks(passes[:2], device)
    return None if mixed is None else [*cut(mixed[0], 2), *mixed[1:], *passes[2:]]


def mix_samples_of_ranks(passes: Sequence[Batch], device: torch.device) -> list[Batch] | None:
    """Replace the first sample of each batch by a sample of the next rank. Collective.

    `passes` has one or two batches. If there are two, each gets the first sample of the next rank's
    other batch. Returns None on all ranks if a batch has fewer than four samples or an odd number
    of them, or if samples of several ranks cannot form a batch.
    """
    sent: list[bytes] = []
    with suppress(Exception):  # a batch may have no samples
        if all(_allow_swap(samples_in(batch)) for batch in passes):
            packed = [pack(take_first(batch, 1)) for batch in passes]
            sent = [one for one in packed if one is not None]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = gather_objects([len(one) for one in sent])
    if any(len(some) != len(passes) for some in sizes):
        return None
    received = _ring_shift(sent, sizes[(rank + 1) % ranks], device)
    mixed: list[Batch | None] = [None]
    with suppress(Exception):  # its class may differ on this rank
        others = [unpack(one, device) for one in reversed(received)]
        mixed = [
            concatenate(other, leave_out_first(batch, 1))
            for other, batch in zip(others, passes, strict=False)
        ]
    fails = not mixed or any(one is None for one in mixed)
    return None if any(gather_objects(fails)) else mixed


def _ring_shift(sent: Sequence[bytes], sizes: Sequence[int], device: torch.device) -> list[bytes]:
    """Send bytes to the previous rank, and return those received from the next rank. Collective.

    `sizes` are the lengths of the received bytes. Unlike with a gather, no rank holds the samples
    of all ranks.
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


def rotate_samples(passes: Sequence[Batch], micro_batches: int) -> list[Batch] | None:
    """Return a pipeline's micro-batches after moving all samples by one position.

    `passes` are the batches of a step's forward and backward passes; each has `micro_batches`. The
    last sample of each batch becomes the first sample of the next one, and that of the last batch
    the first of the first. Returns None if a micro-batch has fewer than four samples or an odd
    number of them, or if samples cannot be combined.
    """
    turned = []
    for number, batch in enumerate(passes):
        before = passes[number - 1]
        if not _allow_swap(samples_in(batch) // micro_batches):
            return None
        last = leave_out_first(before, samples_in(before) - 1)
        joined = concatenate(last, take_first(batch, samples_in(batch) - 1))
        if joined is None:
            return None
        turned += cut(joined, micro_batches)
    return turned


def _allow_swap(samples: int) -> bool:
    return samples >= FEWEST and samples % 2 == 0


def explain_dependence(
    plain: nn.Module, few: Batch, hooks: StepHooks, tolerance: float, drops: bool
) -> str | None:
    """Return why a sample's loss depends on other samples or earlier forwards; None if not.

    The samples of `few` run together and one by one, with dropout disabled. Everything is restored
    afterwards. `drops`: accept a module that uses dropout.
    """

    def compare(run: _RunForward) -> bool:
        together = run(few)
        with torch.no_grad():  # which makes forwards faster
            parts = [run(one) for one in cut(few, samples_in(few))]
        return _parts_add_up(together, parts, tolerance)

    return _explain_forwards(plain, hooks, drops, compare)


def explain_batch_dependence(
    plain: nn.Module,
    sample: Batch,
    others: Sequence[tuple[Batch, Totals | None]],
    hooks: StepHooks,
    tolerance: float,
) -> str | None:
    """Return why a sample's loss depends on other samples or earlier forwards; None if not.

    `others` are other samples, each with its loss sum and count, if known. The loss of `sample`
    must be bitwise equal before and after a forward of all samples together, and that forward must
    give the mean loss of separate forwards. Dropout is disabled, and everything is restored
    afterwards.
    """

    def compare(run: _RunForward) -> bool:
        parts, joined = [run(sample)], sample
        for other, totals in others:
            joined = concatenate(joined, other)
            parts.append(run(other) if totals is None else totals)
        together = run(joined)
        return run(sample) == parts[0] and _parts_add_up(together, parts, tolerance)

    return _explain_forwards(plain, hooks, True, compare)


_RunForward = Callable[[Batch], Totals]  # a forward


def _parts_add_up(whole: Totals, parts: Sequence[Totals], tolerance: float) -> bool:
    sums = sum(one for one, _ in parts), sum(count for _, count in parts)
    if not (whole[1] and sums[1] and math.isfinite(whole[0]) and math.isfinite(sums[0])):
        return False
    apart = difference(whole[0] / whole[1], sums[0] / sums[1])
    return max(apart, difference(whole[1], sums[1])) <= tolerance


def _explain_forwards(
    plain: nn.Module, hooks: StepHooks, drops: bool, compare: Callable[[_RunForward], bool]
) -> str | None:
    """Test forwards with `compare`; return why the test failed, or None if it passed.

    `compare` gets a function that runs a forward, and returns whether the results are as expected.
    The test fails if `compare` returns False or raises an error, or if a forward draws random
    numbers or changes anything. `drops`: a module may use dropout. Dropout is disabled, and
    everything is restored afterwards.
    """
    model, device = model_of(plain), next(plain.parameters()).device
    watch = MovedParameters(model.named_parameters())

    def run(batch: Batch) -> Totals:
        with watch, hooks.cast():
            loss_sum, count, *_ = plain(batch)
        return float(loss_sum.detach().double()), float(count.double())

    try:
        with (
            watch.put_back_unless(lambda: False),
            preserve_state(plain, device),
            without_dropout(plain) as dropout,
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            # suppresses warnings about single samples, which do not occur in training
            warnings.simplefilter("ignore")
            drawn, before = random_state(device), _comparable_state(plain)
            independent = compare(run)
            draws = not same_random_state(drawn, random_state(device))
            if draws or (dropout.would_drop and not drops):
                return "a forward draws random numbers"
            writes = watch.written or watch.written_unseen() or watch.communicates
            if writes or _comparable_state(plain) != before:
                return "a forward changes something"
    except Exception as error:  # such as normalisation over a single sample
        return f"a few samples fail ({type(error).__name__})"
    return None if independent else AFFECTED


def find_unsaved_state(plain: nn.Module) -> tuple[Any, ...]:
    """Return the state that is neither in parameters nor in saved buffers, in comparable form."""
    trained = [one.requires_grad for one in plain.parameters()]
    return kept_attributes(plain), trained, parameter_versions(hidden_parameters(plain))


def _comparable_state(plain: nn.Module) -> tuple[Any, ...]:
    return *find_unsaved_state(plain), buffer_versions(plain)
