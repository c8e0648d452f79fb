"""Find out why splitting a batch changes its loss, and what to do about it."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from itertools import combinations
from typing import Literal

import torch
from torch import nn

from outpace.parallel.batches import concatenate, cut, explain_lengths, samples_in, take_first
from outpace.parallel.batchnorm import batch_norms
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import difference
from outpace.parallel.parity.moved_parameters import keep_values
from outpace.parallel.parity.piece_losses import mean_loss, total_of
from outpace.parallel.parity.plain_copy import model_of
from outpace.records.errors import first_names
from outpace.records.plan import Plan

# "places": tensors refer to samples by position in the batch. "samples": the loss is a mean over
# samples, but parts of the batch are weighted by other counts. "sum": it is a sum over samples.
# "counts": it is a mean over something else. "batchnorm": BatchNorm normalises each part by itself.
# "batch": the loss depends on all samples together.
# "": unknown.
CutCause = Literal["places", "samples", "sum", "counts", "batchnorm", "batch", ""]
_MOST = 4  # samples
_HALF, _NEARLY = 0.5, 1e-3  # relative difference of a summed loss when its batch is halved
_ROUNDINGS = 16
_WIDE = 10  # a difference above this multiple of the tolerance is not rounding

_MeanOf = Callable[[Batch], float]  # returns the mean loss of a part of a batch


def find_cut_cause(
    plain: nn.Module, hooks: StepHooks, drops: bool, batch: Batch, tolerance: float
) -> CutCause:
    """Return why splitting a batch changes its loss; "" if unknown.

    Runs only forwards, of at most four samples at a time.
    """
    some = take_first(batch, min(_MOST, samples_in(batch)))

    def mean_of(piece: Batch) -> float:
        return mean_loss(total_of(plain, hooks, drops, [piece], alike=False))

    ways: tuple[Callable[[], CutCause], ...] = (
        lambda: _detect_positions(mean_of, some, tolerance),
        lambda: _detect_mean_over_samples(plain, hooks, drops, some, tolerance),
        lambda: _detect_batchnorm(plain, hooks, drops, some, tolerance),
        lambda: _detect_weighting(mean_of, some, _rounding_tolerance(plain)),
    )
    for find in ways if not _has_batch_statistics(plain) else ways[:3]:
        # torch warns of quantities that a single sample lacks, such as a standard deviation.
        quiet = warnings.catch_warnings(action="ignore")
        with suppress(Exception), quiet, keep_values(model_of(plain).named_parameters()):
            cause = find()
            if cause:
                return cause
    return ""


def _detect_positions(mean_of: _MeanOf, some: Batch, tolerance: float) -> CutCause:
    """Detect tensors that refer to samples by their position in the batch, such as lists of pairs.

    `cut` does not reorder such tensors with the samples, so the loss changes if the samples are
    reversed. A loss that mixes neighbouring samples changes, too. But it is the same for one sample
    and for a batch of its copies, and is not reported here.
    """
    if not explain_lengths(some):
        return ""
    samples = cut(some, samples_in(some))
    backwards = reduce(_join_if_possible, reversed(samples))
    if backwards is None or difference(mean_of(some), mean_of(backwards)) <= tolerance:
        return ""
    copies = reduce(_join_if_possible, samples[:1] * len(samples))
    mean = math.nan if copies is None else mean_of(copies)
    mixes = math.isfinite(mean) and difference(mean_of(samples[0]), mean) <= tolerance
    return "" if mixes else "places"


def _join_if_possible(one: Batch | None, other: Batch) -> Batch | None:
    return None if one is None else concatenate(one, other)


def _detect_mean_over_samples(
    plain: nn.Module, hooks: StepHooks, drops: bool, some: Batch, tolerance: float
) -> CutCause:
    """Detect a loss that is a mean over samples, but comes with counts of something else.

    The loss of several samples is then the unweighted mean of their losses, whatever their counts.
    """
    pieces = cut(some, samples_in(some))
    totals = [total_of(plain, hooks, drops, [piece], alike=False) for piece in pieces]
    if len({count for _, count in totals}) == 1:
        return ""
    mean = sum(mean_loss(one) for one in totals) / len(pieces)
    whole = mean_loss(total_of(plain, hooks, drops, [some], alike=False))
    return "samples" if difference(mean, whole) <= tolerance else ""


def _detect_batchnorm(
    plain: nn.Module, hooks: StepHooks, drops: bool, some: Batch, tolerance: float
) -> CutCause:
    if not _has_batch_statistics(plain) or samples_in(some) % 2:
        return ""
    with fixed_statistics(plain):
        whole = mean_loss(total_of(plain, hooks, drops, [some], alike=False))
        halves = [total_of(plain, hooks, drops, [half], alike=False) for half in cut(some, 2)]
    return "batchnorm" if difference(whole, mean_loss(*halves)) <= tolerance else ""


def _has_batch_statistics(plain: nn.Module) -> bool:
    norms = batch_norms(model_of(plain)).values()
    return any(part.training or part.running_mean is None for part in norms)


@contextmanager
def fixed_statistics(plain: nn.Module) -> Iterator[None]:
    """Make batch normalisations use their running statistics inside the context.

    Layers without running statistics use a mean of 0 and a variance of 1.
    """
    parts = list(batch_norms(plain).values())
    held = [(part.training, part.running_mean, part.running_var) for part in parts]
    like = next(plain.parameters()).detach()
    try:
        for part in parts:
            part.training = False
            if part.running_mean is None:
                part.running_mean = like.new_zeros(part.num_features)
                part.running_var = like.new_ones(part.num_features)
        yield
    finally:
        for part, (mode, mean, variance) in zip(parts, held, strict=True):
            part.training, part.running_mean, part.running_var = mode, mean, variance


def _rounding_tolerance(plain: nn.Module) -> float:
    widest = max(torch.finfo(one.dtype).bits for one in plain.parameters())
    return 1e-10 if widest == 64 else _ROUNDINGS * torch.finfo(torch.float32).eps


def _detect_weighting(mean_of: _MeanOf, some: Batch, tolerance: float) -> CutCause:
    """Determine from pairs of samples whether the loss is a sum, a weighted mean, or neither.

    A weighted mean of two losses lies between them. The ratios of the weights of three samples,
    computed from each pair, must also be consistent.
    """
    samples = cut(some, samples_in(some))[:3]
    places = list(combinations(range(len(samples)), 2))
    pairs = [concatenate(samples[i], samples[j]) for i, j in places]
    if not pairs or any(pair is None for pair in pairs):
        return ""
    singles, means = list(map(mean_of, samples)), list(map(mean_of, pairs))
    if any(map(math.isfinite, means)) and not any(map(math.isfinite, singles)):
        return "batch"  # such as a standard deviation
    if not all(map(math.isfinite, (*singles, *means))):
        return ""
    rounding = tolerance * max(map(abs, (*singles, *means)))
    ends = [(mean, singles[i], singles[j]) for mean, (i, j) in zip(means, places, strict=True)]
    if all(abs(mean - one - other) <= rounding < abs(mean) for mean, one, other in ends):
        return "sum"
    between = (
        min(one, other) - rounding <= mean <= max(one, other) + rounding
        for mean, one, other in ends
    )
    if not all(between):
        return "batch"
    apart = [(abs(mean - one), abs(mean - other)) for mean, one, other in ends]
    if len(apart) < 3 or min(map(min, apart)) <= _WIDE * rounding:
        return ""
    of_two, of_ends, of_others = (one / other for one, other in apart)
    inexact = sum(rounding / min(pair) for pair in apart)
    if all(abs(ratio - 1) <= inexact for ratio in (of_two, of_ends, of_others)):
        return ""
    return "counts" if abs(of_two * of_others / of_ends - 1) <= inexact else "batch"


WEIGHTED = (
    "the loss is a mean over samples, but outpace weights parts of a batch by their number of "
    "targets that are not -100, because each sample has several targets (in targets or labels). To "
    "train the same, return (loss * samples, samples) from the loss, where samples is the number "
    "of samples it was given"
)
PLACED = (
    "the batch has tensors without a row per sample, which stay whole in each part, and seem to "
    "refer to samples by their position in the batch (the image of each target, the graph of each "
    "node). In a part, the same positions are other samples. Pass a list with one tensor per "
    "sample, or pad the samples into one tensor and add masks, or use one process with one "
    "micro-batch per step"
)
_SUMMED = (
    "it seems to be a sum over samples, but outpace takes a scalar as their mean. To train the "
    "same, return the mean (reduction='mean'), or (sum, count)"
)
_COUNTED = (
    "the loss is a mean over something other than samples, such as targets that are not padding. "
    "To train the same, return (sum, count) from the loss"
)
_UNEQUAL = "the loss is not a mean over samples, or samples affect each other"
_TOGETHER = (
    "in-batch negatives, a statistic or a normalisation over the batch, padding to the longest "
    "sample that the module sees, or a root of a mean differ for every split. Use one micro-batch "
    "per step with a strategy that does not split the batch (single, mp), compute such a term for "
    "each sample, or accept the difference"
)


def explain_cut(apart: float, how: str, norm_cure: str = "", cause: CutCause = "") -> str:
    """Return a warning that splitting a batch changes the loss by the fraction `apart`.

    `norm_cure` and `cause` are as for `explain_cause`.
    """
    if not cause and is_halved(apart):
        cause = "sum"
    changes = f"the loss of the first batch changes by {100 * apart:.3g} % when {how}"
    return f"{changes}: {explain_cause(cause, norm_cure)}"


def is_halved(apart: float) -> bool:
    """Return whether a relative difference is about 1/2, as if the loss were a sum over samples."""
    return abs(apart - _HALF) < _NEARLY


def explain_cause(cause: CutCause, norm_cure: str = "") -> str:
    """Return why splitting a batch changes the loss, and what to do.

    `norm_cure` is the remedy for batch normalisations; empty if the module has none.
    """
    if cause == "batchnorm":
        return f"BatchNorm normalises each part by itself. To train the same, use {norm_cure}"
    known = {"places": PLACED, "samples": WEIGHTED, "sum": _SUMMED, "counts": _COUNTED}
    if cause in known:
        return known[cause]
    if cause == "batch":
        return f"{_UNEQUAL}: {_TOGETHER}"
    norms = f", or use {norm_cure} where BatchNorm is the cause" if norm_cure else ""
    return (
        f"{_UNEQUAL}. To train the same, return (sum, count) from the loss where it is a mean over "
        f"something other than samples, such as targets that are not padding{norms}. Otherwise, "
        f"{_TOGETHER}"
    )


def batchnorm_cure(plan: Plan, micro_batches: int, where: str = "") -> str:
    """Return the settings with which batch normalisations use all samples of a step.

    `micro_batches` is the number of micro-batches in a step. `where` is a phrase that says where to
    set `sync_batchnorm`.
    """
    if plan.data_parallel == 1:
        return "one micro-batch per step"
    return f"sync_batchnorm=True{where}" + " and one micro-batch per step" * (micro_batches > 1)


def synchronised_cure(names: Sequence[str], setting: str) -> str:
    """Return advice to use `setting`, because shared statistics cover only one micro-batch.

    `names` are the batch normalisations whose statistics ranks share.
    """
    return (
        f"{setting}, because with sync_batchnorm the statistics of {first_names(names)} cover one "
        "micro-batch of all ranks"
    )


def common_cause(causes: Sequence[CutCause]) -> CutCause:
    """Return the cause of a changed loss that ranks agree on.

    Returns "" if no rank has found a cause, or if ranks have found different ones.
    """
    known = {cause for cause in causes if cause}
    return known.pop() if len(known) == 1 else ""
