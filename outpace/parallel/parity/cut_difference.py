"""The difference between the loss of a batch and the loss of its parts.

If a loss is not a mean over samples, or samples affect each other (batch normalisation, in-batch
negatives), one process with the whole batch trains differently from processes that split it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from outpace.parallel.batches import concatenate, cut, samples_in, take_first
from outpace.parallel.batchnorm import SynchronisedBatchNorm, batch_norms
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import (
    choose_tolerance,
    difference,
    halves_tolerance,
    largest,
    relative,
)
from outpace.parallel.parity.counted_buffers import batchnorm_state
from outpace.parallel.parity.cut_cause import (
    CutCause,
    batchnorm_cure,
    explain_cut,
    find_cut_cause,
    fixed_statistics,
    is_halved,
)
from outpace.parallel.parity.kept_state import Totals
from outpace.parallel.parity.module_state import preserve_state
from outpace.parallel.parity.moved_parameters import MovedParameters, keep_values
from outpace.parallel.parity.other_samples import mix_samples_of_ranks
from outpace.parallel.parity.piece_losses import (
    DrawsError,
    mean_loss,
    run_forward,
    total_of,
)
from outpace.parallel.parity.plain_copy import model_of
from outpace.parallel.parity.read_buffers import Names, find_read_buffers
from outpace.parallel.rank_objects import gather_objects
from outpace.records.plan import Plan

_SMALL = 4  # samples; halves of fewer may be a special case
_MeanOf = Callable[[Sequence[Batch]], float]  # returns the mean loss of some batches
_Comparison = Callable[[], float | None]  # returns a difference, if it can be computed


@dataclass(frozen=True)
class FirstPiece:
    """A rank's first micro-batch, `piece`, and what is known of its loss.

    `mean` is its mean loss, and `halves` has the loss sum and count of each half, if known.
    `drops`: the module uses dropout, which is disabled when the losses of halves are computed.
    `buffers` are the saved buffers that the micro-batch changed. `two` has up to two of the rank's
    micro-batches, each with its loss sum and count; it is empty if forwards change state.
    `affected`: samples affect each other's losses on some rank: the loss of a few samples is not
    the mean of their separate losses.
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
    """Numbers of targets of some samples, counted together (`count`) and in halves (`parts`)."""

    count: float
    parts: float


@dataclass(frozen=True)
class CutDifference:
    """Differences between a batch and its parts.

    `loss` is the relative difference of their losses. `buffers` names those that have other values
    after a forward of the batch than after forwards of its parts. `read` names those of them on
    which training depends, so not BatchNorm's running statistics. `counts` is set if the halves'
    numbers of targets do not add up to the batch's. `cause`: why the losses differ, if known.
    `swapped`: `loss` compares the losses before and after ranks swapped some samples.
    """

    loss: float = 0.0
    buffers: Names = ()
    read: Names = ()
    counts: CountDifference | None = None
    cause: CutCause = ""
    swapped: bool = False


@dataclass(frozen=True)
class CutRequest:
    """A request to compare the loss of a batch with the loss of its parts, in a single process.

    `plain` is the user's module with its loss. `passes` are this rank's batches, which the `plan`
    splits into micro-batches. `first` is the first micro-batch that this rank has run; it is None
    if the rank has run none, or should run no more. Ranks with the same samples examine different
    micro-batches. `synchronised`: forwards communicate, so all ranks must run the same number of
    them.
    """

    plain: nn.Module
    plan: Plan
    first: FirstPiece | None
    passes: Sequence[Batch]
    hooks: StepHooks
    synchronised: bool
    tolerance: float

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of this rank in a step."""
        return len(self.passes) * self.plan.pp_microbatches


def compare_cut(request: CutRequest) -> CutDifference:
    """Compare the loss of a batch with the loss of its two halves, if the plan splits the batch.

    If the losses agree, the effects on buffers are compared as well. Errors raised for parts of the
    batch (by BatchNorm with one sample) are ignored.
    """
    if not request.passes or (request.plan.data_parallel == 1 and request.micro_batches == 1):
        return CutDifference()
    first = (
        None
        if request.first is None
        else _add_mean_loss(request.plain, request.hooks, request.first)
    )
    if first is None:
        return CutDifference()
    shared = any(isinstance(part, SynchronisedBatchNorm) for part in request.plain.modules())
    compare = _compare_with_shared_norms if shared else _compare_with_parts
    return compare(replace(request, first=first), first)


def _compare_with_shared_norms(request: CutRequest, first: FirstPiece) -> CutDifference:
    """Compare a batch with its halves if ranks share the statistics of batch normalisations.

    Statistics of all ranks do not depend on how ranks split the batch. So they are fixed while the
    comparison looks for other effects between samples. But they do depend on the split into
    micro-batches, which is compared without fixing them.
    """
    plain, hooks, by_norms = request.plain, request.hooks, 0.0
    if request.micro_batches > 1:
        mean_of = partial(_compute_mean_loss, plain, hooks, first.drops, alike=False)
        by_norms = _run_first_possible([lambda: _compare_halves(mean_of, first)], plain)
    norms = batchnorm_state(model_of(plain))
    held = dict(model_of(plain).named_buffers())
    buffers = {n: b for n, b in first.buffers.items() if id(held[n]) not in norms}
    beside = replace(first, mean=None, halves=None, two=(), buffers=buffers)
    watch = MovedParameters(())  # for collectives of the user's code
    with fixed_statistics(plain):
        with suppress(Exception), keep_values(model_of(plain).named_parameters()), watch:
            total_of(plain, hooks, first.drops, [take_first(first.piece, 2)], alike=True)
        found = _compare_with_parts(replace(request, synchronised=watch.communicates), beside)
    if found.loss <= request.tolerance < by_norms:
        return replace(found, loss=by_norms, cause="batchnorm")
    return found


def _compare_with_parts(request: CutRequest, first: FirstPiece) -> CutDifference:
    plain, plan, hooks, tolerance = request.plain, request.plan, request.hooks, request.tolerance
    passes, synchronised = request.passes, request.synchronised
    counts = _compare_counts(first, tolerance)
    if counts is not None:
        return CutDifference(counts=counts)
    mean_of = partial(_compute_mean_loss, plain, hooks, first.drops, alike=False)
    if synchronised and request.micro_batches == 1:
        return _compare_swapped(request, first, mean_of)
    ways: tuple[_Comparison, ...] = (
        lambda: _compare_halves(mean_of, first),
        lambda: _compare_first_pair(mean_of, first, passes, plan.pp_microbatches),
        # Skipped if ranks communicate, because only some may have two passes that can be joined.
        lambda: None if synchronised else _compare_passes(mean_of, passes, plan),
    )
    apart = _run_first_possible(ways, plain)
    if apart <= tolerance and samples_in(first.piece) < _SMALL and not synchronised:
        of_two = partial(_compare_two_small, mean_of, first)
        apart = _run_first_possible((of_two, *(ways[-1:] if plan.world_size == 1 else ())), plain)
    if apart <= tolerance and first.affected and not synchronised:
        apart = _run_first_possible((partial(_compare_other_parts, mean_of, first),), plain)
    asked_buffers = plain, hooks, first.drops, first.buffers, first.piece
    if apart > tolerance:
        if synchronised:
            return CutDifference(apart)
        some = first.piece
        if samples_in(some) == 1 and len(first.two) > 1:
            some = concatenate(*(piece for piece, _ in first.two)) or some
        cause = find_cut_cause(plain, hooks, first.drops, some, tolerance)
        read = () if cause else find_read_buffers(*asked_buffers)
        return CutDifference(apart, read=read, cause=cause)
    read = find_read_buffers(*asked_buffers, later=not synchronised)
    if not read:
        return CutDifference(apart)
    return CutDifference(apart, _compare_buffers(plain, first, hooks, tolerance), read)


def _compare_swapped(request: CutRequest, first: FirstPiece, mean_of: _MeanOf) -> CutDifference:
    """Compare the loss of all ranks' samples before and after a swap of samples. Collective.

    This is for forwards that communicate between ranks. If they gather values of all ranks'
    samples, they see whole batches in training, so a comparison with halves would not show what
    training does. But it still reveals a loss that is a sum over samples: the loss of a half is
    half as large.
    """
    totals = torch.zeros(2, 2, dtype=torch.float64)
    mixed = mix_samples_of_ranks([first.piece], next(request.plain.parameters()).device)
    if mixed is None:
        return CutDifference()

    def compare() -> float | None:
        for row, piece in zip(totals, (first.piece, mixed[0]), strict=True):
            sums = total_of(request.plain, request.hooks, first.drops, [piece], alike=False)
            row.copy_(torch.tensor(sums))
        return 0.0

    fails = math.isnan(_run_first_possible((compare, lambda: math.nan), request.plain))
    told = gather_objects((fails, totals))
    if any(failed for failed, _ in told):
        return CutDifference()
    (loss, count), (mixed_loss, mixed_count) = torch.stack([one for _, one in told]).sum(0).tolist()
    apart = difference(loss / count, mixed_loss / mixed_count) if count and mixed_count else 0.0
    if apart > request.tolerance:
        return CutDifference(apart, swapped=True)
    apart = _run_first_possible([lambda: _compare_halves(mean_of, first)], request.plain)
    return CutDifference(apart, cause="sum") if is_halved(apart) else CutDifference()


def _add_mean_loss(plain: nn.Module, hooks: StepHooks, first: FirstPiece) -> FirstPiece | None:
    """Return `first` with its mean loss, computed here if only its halves' losses are known.

    Returns None if the forward draws random numbers.
    """
    if first.mean is not None or first.halves is None or first.two:
        return first
    with suppress(Exception), keep_values(model_of(plain).named_parameters()):
        try:
            whole = total_of(plain, hooks, first.drops, [first.piece], alike=False)
        except DrawsError:
            return None
        return replace(first, mean=mean_loss(whole), two=[(first.piece, whole)])
    return first


def _run_first_possible(ways: Sequence[_Comparison], plain: nn.Module) -> float:
    for compare in ways:
        with suppress(Exception), keep_values(model_of(plain).named_parameters()):
            try:
                apart = compare()
            except DrawsError:
                return 0.0  # nothing can be compared
            if apart is not None:
                return apart
    return 0.0


def compare_accumulated(
    plain: nn.Module, plan: Plan, passes: Sequence[Batch], hooks: StepHooks
) -> str | None:
    """Return a warning if splitting a single process's batch changes its loss; None if not.

    If the loss returns a pair whose second value is not a count, the warning is about that value.
    """
    narrowest = min((one.element_size() for one in plain.parameters()), default=4)
    tolerance = halves_tolerance(plan, choose_tolerance(plan, narrowest))
    counts = _compare_counts_alone(plain, passes, hooks, tolerance)
    if counts is not None:
        return explain_counts(counts)
    first = FirstPiece(passes[0], mean=None, halves=None, drops=True, buffers={})
    found = compare_cut(CutRequest(plain, plan, first, passes, hooks, False, tolerance))
    if found.loss <= tolerance:
        return None
    how = (
        "a micro-batch is split in two, so the whole batch or other micro-batches would train "
        "differently"
    )
    cure = batchnorm_cure(plan, len(passes)) if batch_norms(model_of(plain)) else ""
    return explain_cut(found.loss, how, cure, found.cause)


def _compare_buffers(
    plain: nn.Module, first: FirstPiece, hooks: StepHooks, tolerance: float
) -> Names:
    """Return the floating-point buffers that `first` changes differently from its halves.

    Counters of calls are left out: a single half changes them just as the whole does.
    """
    if first.drops or samples_in(first.piece) % 2:
        return ()
    device = next(plain.parameters()).device
    floating = {n: b for n, b in first.buffers.items() if b.is_floating_point()}

    def differ_after(pieces: Sequence[Batch]) -> set[str]:
        with preserve_state(plain, device):
            for piece in pieces:
                run_forward(plain, piece)
            now = dict(model_of(plain).named_buffers())
            off = {n: relative(now[n], whole, largest(whole)) for n, whole in floating.items()}
        return {name for name, one in off.items() if one is None or one > tolerance}

    kept = keep_values(model_of(plain).named_parameters())
    with kept, torch.enable_grad(), suppress(Exception), hooks.cast():
        halves = cut(first.piece, 2)
        apart = differ_after(halves)
        by_samples = {n for half in halves if apart for n in differ_after([half])}
        return tuple(name for name in floating if name in apart & by_samples)
    return ()


def _compare_counts(first: FirstPiece, tolerance: float) -> CountDifference | None:
    if not first.two or first.halves is None or first.two[0][0] is not first.piece:
        return None
    return _find_count_difference(first.two[0][1], first.halves, tolerance)


def _compare_counts_alone(
    plain: nn.Module, passes: Sequence[Batch], hooks: StepHooks, tolerance: float
) -> CountDifference | None:
    """Compare the number of targets of a batch with the sum over its halves, in a single process.

    A few samples are compared first. As they may be a special case, a difference is confirmed with
    all samples of the batch.
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
                total_of(plain, hooks, True, [piece], alike=False)
                for piece in (some, *cut(some, 2))
            )
            found = _find_count_difference(whole, halves, tolerance)
            if found is None:
                break
    return found


def _find_count_difference(
    whole: Totals, halves: Sequence[Totals], tolerance: float
) -> CountDifference | None:
    """Return the counts of a batch and of its halves if they are inconsistent, otherwise None.

    They are inconsistent if they do not add up, or if they are 0 although the loss is not.
    """
    loss_sum, count = whole
    parts = sum(one for _, one in halves)
    lacks = count == parts == 0 and loss_sum != 0 and math.isfinite(loss_sum)
    return CountDifference(count, parts) if lacks or difference(count, parts) > tolerance else None


def explain_counts(found: CountDifference) -> str:
    """Return a message about a loss whose second value is not a count."""
    said = f"for the first samples it is {found.count:.6g}"
    if found.count or found.parts:
        said += f", and for their two halves together {found.parts:.6g}"
    return (
        "the loss returns a pair, which outpace takes as (sum of losses, count) and divides, but "
        f"the second value is not a count: {said}. Return only the loss if it is a mean (and log "
        "accuracy elsewhere), or (sum, count) with a count such as (targets != -100).sum()."
    )


def _compare_halves(mean_of: _MeanOf, first: FirstPiece) -> float | None:
    """Compare the first micro-batch with its halves; None if it cannot be halved.

    If neither its loss nor its halves' losses are known, one half is compared with its quarters
    instead, which takes half the time.
    """
    piece, mean, halves = first.piece, first.mean, first.halves
    if samples_in(piece) % 2:
        return None
    if mean is None and halves is None and samples_in(piece) % 4 == 0:
        piece = cut(piece, 2)[0]
    if mean is None:
        mean = mean_of([piece])
    return _difference_if_finite(mean, mean_loss(*halves) if halves else mean_of(cut(piece, 2)))


def _compare_other_parts(mean_of: _MeanOf, first: FirstPiece) -> float | None:
    """Compare the first micro-batch with other parts than `_compare_halves` does.

    This may reveal a loss that is capped for each batch, if the cap applies only in these parts.
    Returns None if there are no such parts.
    """
    piece, samples = first.piece, samples_in(first.piece)
    if samples % 4:
        return None
    parts = cut(piece, 2)
    if first.mean is not None or first.halves is not None:  # otherwise, a half and its quarters
        one, two, three, four = cut(piece, 4)
        others = concatenate(one, three), concatenate(two, four)
        parts = [part for part in others if part is not None]
        if len(parts) < len(others):
            return None
    mean = mean_of([piece]) if first.mean is None else first.mean
    return _difference_if_finite(mean, mean_of(parts))


def _compare_two_small(mean_of: _MeanOf, first: FirstPiece) -> float | None:
    """Compare two small micro-batches, whose losses are known, with their concatenation.

    Returns None if no losses are known. One small micro-batch would not be enough to notice class
    weights: if it has two samples with different labels, both classes are equally frequent.
    """
    if len(first.two) < 2:
        return None
    (one, totals), (other, more) = first.two
    both = concatenate(one, other)
    return None if both is None else _difference_if_finite(mean_of([both]), mean_loss(totals, more))


def _compare_first_pair(
    mean_of: _MeanOf, first: FirstPiece, passes: Sequence[Batch], micro_batches: int
) -> float | None:
    """Compare the first two micro-batches of a pipeline with their concatenation.

    Returns None without a pipeline, or if the micro-batches do not form pairs.
    """
    samples, size = samples_in(passes[0]), 2 * samples_in(first.piece)
    if micro_batches == 1 or samples % size:
        return None
    pair = cut(passes[0], samples // size)[0]
    means = [mean_of(pieces) for pieces in ([pair], cut(pair, 2))]
    return _difference_if_finite(*means)


def _compare_passes(mean_of: _MeanOf, passes: Sequence[Batch], plan: Plan) -> float | None:
    """Compare the first two of several passes with their concatenation; None if not possible.

    This is for passes with an odd number of samples, which cannot be halved.
    """
    if plan.pp_microbatches > 1 or len(passes) == 1:
        return None
    both = concatenate(passes[0], passes[1])
    if both is None:
        return None
    return _difference_if_finite(*[mean_of(one) for one in ([both], passes[:2])])


def _compute_mean_loss(
    plain: nn.Module,
    hooks: StepHooks,
    drops: bool,
    pieces: Sequence[Batch],
    alike: bool = True,
) -> float:
    loss_sum, count = total_of(plain, hooks, drops, pieces, alike)
    return loss_sum / count if count else loss_sum * math.inf


def _difference_if_finite(whole_mean: float, parts_mean: float) -> float | None:
    finite = math.isfinite(whole_mean) and math.isfinite(parts_mean)
    return difference(whole_mean, parts_mean) if finite else None
