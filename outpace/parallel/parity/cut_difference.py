"""Difference between the loss of a batch and of its parts, caused by splitting it.

If a loss is not a mean over samples, or samples see each other (batch normalisation, in-batch
negatives), one process with the whole batch trains differently from several.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from outpace.parallel.batches import concatenate, cut, samples_in, take_first
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import (
    choose_tolerance,
    difference,
    halves_tolerance,
    largest,
    relative,
)
from outpace.parallel.parity.kept_state import Totals
from outpace.parallel.parity.module_state import preserve_state
from outpace.parallel.parity.moved_parameters import keep_values
from outpace.parallel.parity.plain_copy import model_of
from outpace.parallel.parity.read_buffers import Names, find_read_buffers
from outpace.parallel.plain import random_state, same_random_state, without_dropout
from outpace.records.plan import Plan

_SMALL = 4  # samples, of fewer than which halves may be a special case
_MeanOf = Callable[[Sequence[Batch]], float]  # returns the mean loss of several pieces
_Compare = Callable[[], float | None]  # returns a difference, if it can be computed


class _DrawsError(Exception):
    """A forward that draws numbers, apart from dropout."""


@dataclass(frozen=True)
class FirstPiece:
    """A rank's first piece: `mean` is its loss, `halves` the sum and count of each half, if known.

    `drops`: whether the module uses dropout, which is disabled for the losses of halves. `buffers`
    are the saved buffers that the piece changed. `two`: the first two pieces, each with the sum and
    the count of its loss, if there are two and no forward changes anything. `affected`: whether the
    loss of a few samples of some rank is not the mean of each one's.
    """

    piece: Batch
    mean: float | None
    halves: tuple[Totals, Totals] | None
    drops: bool
    buffers: Mapping[str, Tensor]
    two: Sequence[tuple[Batch, Totals]] = ()
    affected: bool = False


@dataclass(frozen=True)
class CountDifference:
    """Number of targets of some samples as a whole, and summed over their two halves."""

    count: float
    parts: float


@dataclass(frozen=True)
class CutDifference:
    """Differences between a batch and its parts: in the `loss`, and in `buffers` that change.

    `read`: the buffers on which the loss depends. The running statistics of BatchNorm in training
    are not among them. `counts`: those of a batch and of its halves, if the loss counts no samples.
    `by_samples`: whether the loss would be the same if parts were weighted by samples.
    """

    loss: float = 0.0
    buffers: Names = ()
    read: Names = ()
    counts: CountDifference | None = None
    by_samples: bool = False


def compare_cut(
    plain: nn.Module,
    plan: Plan,
    first: FirstPiece | None,
    passes: Sequence[Batch],
    hooks: StepHooks,
    synchronised: bool,
    tolerance: float,
) -> CutDifference:
    """Compare the loss of a batch with the loss of its two halves, if the batch is split.

    Their effects on buffers are compared if the losses agree.

    `first` is this rank's first piece. It is None on a rank that has run none or should run no
    more: ranks with the same samples examine different pieces. Errors raised by halves (BatchNorm
    with one sample) are ignored.
    """
    if not passes or (plan.data_parallel == 1 and len(passes) * plan.pp_microbatches == 1):
        return CutDifference()
    first = None if first is None else _complete(plain, hooks, first)
    if first is None:
        return CutDifference()
    counts = _compare_counts(first, tolerance)
    if counts is not None:
        return CutDifference(counts=counts)
    mean_of = partial(_mean_of, plain, hooks, first.drops, alike=False)
    ways: tuple[_Compare, ...] = (
        lambda: _compare_halves(mean_of, first),
        lambda: _compare_pair(mean_of, first, passes, plan.pp_microbatches),
        # Skipped if only some ranks may have two pieces that can be joined.
        lambda: None if synchronised else _compare_passes(mean_of, passes, plan),
    )
    apart = _run_first(ways, plain)
    if apart <= tolerance and samples_in(first.piece) < _SMALL and not synchronised:
        of_two = partial(_compare_two, mean_of, first)
        apart = _run_first((of_two, *(ways[-1:] if plan.world_size == 1 else ())), plain)
    if apart <= tolerance and first.affected and not synchronised:
        apart = _run_first((partial(_compare_other_parts, mean_of, first),), plain)
    if apart > tolerance:
        asked_alone = plain, hooks, first.drops, first.piece, tolerance
        return CutDifference(
            apart, by_samples=not synchronised and is_mean_over_samples(*asked_alone)
        )
    asked = plain, hooks, first.drops, first.buffers, first.piece
    read = find_read_buffers(*asked, later=not synchronised)
    if not read:
        return CutDifference(apart)
    return CutDifference(apart, _compare_buffers(plain, first, hooks, tolerance), read)


def _complete(plain: nn.Module, hooks: StepHooks, first: FirstPiece) -> FirstPiece | None:
    """Return a piece with its own loss, if its halves' loss is known; None if it draws."""
    if first.mean is not None or first.halves is None or first.two:
        return first
    with suppress(Exception), keep_values(model_of(plain).named_parameters()):
        try:
            whole = _total_of(plain, hooks, first.drops, [first.piece], alike=False)
        except _DrawsError:
            return None
        return replace(first, mean=_mean(whole), two=[(first.piece, whole)])
    return first


def _run_first(ways: Sequence[_Compare], plain: nn.Module) -> float:
    """Return the result of the first comparison that has one; 0 if none has."""
    for compare in ways:
        with suppress(Exception), keep_values(model_of(plain).named_parameters()):
            try:
                apart = compare()
            except _DrawsError:
                return 0.0  # no pieces can be compared
            if apart is not None:
                return apart
    return 0.0


def compare_accumulated(
    plain: nn.Module, plan: Plan, passes: Sequence[Batch], hooks: StepHooks
) -> str | None:
    """Return a message if a single process's micro-batches have another loss than their batch.

    Also if its loss returns a pair whose second value is no count. None if nothing can be said.
    """
    narrowest = min((one.element_size() for one in plain.parameters()), default=4)
    tolerance = halves_tolerance(plan, choose_tolerance(plan, narrowest))
    counts = _compare_alone(plain, passes, hooks, tolerance)
    if counts is not None:
        return explain_counts(counts)
    first = FirstPiece(passes[0], mean=None, halves=None, drops=True, buffers={})
    found = compare_cut(plain, plan, first, passes, hooks, False, tolerance)
    if found.loss <= tolerance:
        return None
    return explain_cut(
        found.loss, "a micro-batch is split in two, so the whole batch or other micro-batches "
        "would train differently",
        "larger micro-batches where samples affect each other (BatchNorm)", found.by_samples,
    )  # fmt: skip


_HALF, _NEARLY = 0.5, 1e-3  # relative difference of a summed loss when its batch is halved


WEIGHTED = (
    "the loss is a mean over samples, but parts of a batch are weighted by their targets that are "
    "not -100, since the batch has several for each sample (in targets or labels). To train the "
    "same, return (loss * samples, samples) from the loss, with the number of samples that it gets"
)


def explain_cut(apart: float, how: str, cure: str, by_samples: bool = False) -> str:
    """Return a warning that splitting a batch changes the loss by the share `apart`.

    `cure` is the remedy if samples affect each other. `by_samples`: whether the loss is a mean over
    samples, but its parts are weighted by something else.
    """
    changes = f"the loss of the first batch changes by {100 * apart:.2g} % when {how}"
    if by_samples:
        return f"{changes}: {WEIGHTED}"
    if abs(apart - _HALF) < _NEARLY:
        return (
            f"{changes}: it seems to be a sum over samples, and outpace takes a scalar for their "
            "mean. To train the same, return the mean (reduction='mean'), or (sum, count)"
        )
    return (
        f"{changes}: the loss is not a mean over samples, or samples affect each other. To train "
        "the same, return (sum, count) from the loss where it is a mean over something other than "
        f"samples, such as targets that are not padding, or use {cure}"
    )


def is_mean_over_samples(
    plain: nn.Module, hooks: StepHooks, drops: bool, batch: Batch, tolerance: float
) -> bool:
    """Return whether a loss is a mean over samples, but counts something else.

    Then the loss of a few samples is the mean of each one's, whatever their counts.
    """
    found = False
    # torch warns of what a single sample does not have, such as a deviation.
    quiet = warnings.catch_warnings(action="ignore")
    with suppress(Exception), quiet, keep_values(model_of(plain).named_parameters()):
        samples = min(_SMALL, samples_in(batch))
        some = take_first(batch, samples)
        totals = [
            _total_of(plain, hooks, drops, [piece], alike=False) for piece in cut(some, samples)
        ]
        if len({count for _, count in totals}) > 1:
            mean = sum(_mean(one) for one in totals) / samples
            whole = _mean(_total_of(plain, hooks, drops, [some], alike=False))
            found = math.isfinite(mean) and difference(mean, whole) <= tolerance
    return found


def _compare_buffers(
    plain: nn.Module, first: FirstPiece, hooks: StepHooks, tolerance: float
) -> Names:
    """Return the floating-point buffers that the first piece changes differently from its halves.

    Counters of calls, which each half alone changes as the piece does, are left out.
    """
    if first.drops or samples_in(first.piece) % 2:
        return ()
    device = next(plain.parameters()).device
    floating = {n: b for n, b in first.buffers.items() if b.is_floating_point()}

    def differ_after(pieces: Sequence[Batch]) -> set[str]:
        with preserve_state(plain, device):
            for piece in pieces:
                plain(piece)
            now = dict(model_of(plain).named_buffers())
            off = {n: relative(now[n], whole, largest(whole)) for n, whole in floating.items()}
        return {name for name, one in off.items() if one is None or one > tolerance}

    kept = keep_values(model_of(plain).named_parameters())
    with kept, torch.no_grad(), suppress(Exception), hooks.cast():
        halves = cut(first.piece, 2)
        apart = differ_after(halves)
        by_samples = {n for half in halves if apart for n in differ_after([half])}
        return tuple(name for name in floating if name in apart & by_samples)
    return ()


def _compare_counts(first: FirstPiece, tolerance: float) -> CountDifference | None:
    """Compare the counts of the first piece and of its halves together, if known."""
    if not first.two or first.halves is None or first.two[0][0] is not first.piece:
        return None
    return _find_count_difference(first.two[0][1], first.halves, tolerance)


def _compare_alone(
    plain: nn.Module, passes: Sequence[Batch], hooks: StepHooks, tolerance: float
) -> CountDifference | None:
    """Compare a single process's number of targets with the sum over the batch's halves.

    This is done with a few samples, which may be a special case, and then with the first pass.
    """
    found = None
    with suppress(Exception), keep_values(model_of(plain).named_parameters()):
        batch = passes[0]
        if samples_in(batch) == 1 and len(passes) > 1:
            batch = concatenate(batch, passes[1])
        samples = samples_in(batch) // 2 * 2
        for count in sorted({min(_SMALL, samples), samples} - {0}):
            some = take_first(batch, count)
            whole, *halves = (
                _total_of(plain, hooks, True, [piece], alike=False)
                for piece in (some, *cut(some, 2))
            )
            found = _find_count_difference(whole, halves, tolerance)
            if found is None:
                break
    return found


def _find_count_difference(
    whole: Totals, halves: Sequence[Totals], tolerance: float
) -> CountDifference | None:
    """Return counts that do not add up over samples, or that are 0 for samples with a loss."""
    loss_sum, count = whole
    parts = sum(one for _, one in halves)
    lacks = count == parts == 0 and loss_sum != 0 and math.isfinite(loss_sum)
    return CountDifference(count, parts) if lacks or difference(count, parts) > tolerance else None


def explain_counts(found: CountDifference) -> str:
    """Return a message about a loss whose second value is no count."""
    said = f"of the first samples it is {found.count:.6g}"
    if found.count or found.parts:
        said += f", of their two halves {found.parts:.6g} together"
    return (
        "the loss returns a pair, which outpace takes for (sum of losses, count) and divides, but "
        f"the second is no count: {said}. Return the loss alone if it is a mean (and log an "
        "accuracy elsewhere), or (sum, count), such as (targets != -100).sum()."
    )


def _compare_halves(mean_of: _MeanOf, first: FirstPiece) -> float | None:
    """Compare the first piece with its halves; None if it cannot be halved.

    If no losses are known, compare half of it with its quarters, which takes no longer.
    """
    piece, mean, halves = first.piece, first.mean, first.halves
    if samples_in(piece) % 2:
        return None
    if mean is None and halves is None and samples_in(piece) % 4 == 0:
        piece = cut(piece, 2)[0]
    if mean is None:
        mean = mean_of([piece])
    return _difference(mean, _mean(*halves) if halves else mean_of(cut(piece, 2)))


def _compare_other_parts(mean_of: _MeanOf, first: FirstPiece) -> float | None:
    """Compare the first piece with parts that were not compared; None if there are none.

    A loss that is limited per batch may be below its limit in this piece and in two of its parts.
    """
    piece, samples = first.piece, samples_in(first.piece)
    if samples % 4:
        return None
    parts = cut(piece, 2)
    if first.mean is not None or first.halves is not None:  # and not half of it with quarters
        one, two, three, four = cut(piece, 4)
        others = concatenate(one, three), concatenate(two, four)
        parts = [part for part in others if part is not None]
        if len(parts) < len(others):
            return None
    mean = mean_of([piece]) if first.mean is None else first.mean
    return _difference(mean, mean_of(parts))


def _compare_two(mean_of: _MeanOf, first: FirstPiece) -> float | None:
    """Compare two small pieces, whose losses are known, with both combined; None if not known.

    In a piece of two samples with a label each, no class is rarer than another.
    """
    if len(first.two) < 2:
        return None
    (one, totals), (other, more) = first.two
    both = concatenate(one, other)
    return None if both is None else _difference(mean_of([both]), _mean(totals, more))


def _mean(*totals: Totals) -> float:
    count = sum(one for _, one in totals)
    return sum(one for one, _ in totals) / count if count else math.nan


def _compare_pair(
    mean_of: _MeanOf, first: FirstPiece, passes: Sequence[Batch], micro_batches: int
) -> float | None:
    """Compare a pipeline's first two pieces with both combined; None if there are none."""
    samples, size = samples_in(passes[0]), 2 * samples_in(first.piece)
    if micro_batches == 1 or samples % size:
        return None
    pair = cut(passes[0], samples // size)[0]
    means = [mean_of(pieces) for pieces in ([pair], cut(pair, 2))]
    return _difference(*means)


def _compare_passes(mean_of: _MeanOf, passes: Sequence[Batch], plan: Plan) -> float | None:
    """Compare the first two of several passes with both combined; None if there are none.

    This is for passes with one sample, or an odd number of samples, which have no halves.
    """
    if plan.pp_microbatches > 1 or len(passes) == 1:
        return None
    both = concatenate(passes[0], passes[1])
    if both is None:
        return None
    return _difference(*[mean_of(one) for one in ([both], passes[:2])])


def _mean_of(
    plain: nn.Module,
    hooks: StepHooks,
    drops: bool,
    pieces: Sequence[Batch],
    alike: bool = True,
) -> float:
    """Return the mean loss of several pieces, as by `_total_of`."""
    loss_sum, count = _total_of(plain, hooks, drops, pieces, alike)
    return loss_sum / count if count else loss_sum * math.inf


def _total_of(
    plain: nn.Module, hooks: StepHooks, drops: bool, pieces: Sequence[Batch], alike: bool
) -> Totals:
    """Return sum and count of the loss of several pieces.

    Dropout is disabled, and everything is restored.

    Raises _DrawsError if numbers are drawn, unless the pieces are `alike`, since other pieces draw
    other numbers.
    """
    device = next(plain.parameters()).device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    dropping = without_dropout(plain) if drops else nullcontext()
    with torch.no_grad(), dropping, preserve_state(plain, device):
        begin = random_state(device)
        for piece in pieces:
            with hooks.cast():
                loss_sum, count, *_ = plain(piece)
            totals += torch.stack((loss_sum.double(), count.double()))
        if drops and not alike and not same_random_state(begin, random_state(device)):
            raise _DrawsError
    return float(totals[0]), float(totals[1])


def _difference(whole_mean: float, parts_mean: float) -> float | None:
    """Return the difference; None if a loss is not finite (a single sample's deviation)."""
    finite = math.isfinite(whole_mean) and math.isfinite(parts_mean)
    return difference(whole_mean, parts_mean) if finite else None
