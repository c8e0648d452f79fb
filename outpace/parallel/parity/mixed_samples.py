"""The difference between running samples of several ranks as one batch and running them separately.

A decision that a module makes for the whole batch (a branch or a detach by the first sample, a mask
over all samples, a gradient that is clipped or centred) depends on how the batch is split, and
often affects only gradients. All parts of one micro-batch may lead to the same decision, so samples
of different ranks and micro-batches are combined here.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.parallel.batches import (
    concatenate,
    leave_out_first,
    pack,
    samples_in,
    take_first,
    unpack,
)
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import (
    ComparisonLimits,
    Projection,
    Taker,
    difference,
    square,
)
from outpace.parallel.parity.cut_cause import CutCause
from outpace.parallel.parity.kept_state import Totals
from outpace.parallel.parity.module_state import preserve_state
from outpace.parallel.parity.moved_parameters import MovedParameters
from outpace.parallel.parity.other_samples import FEWEST, explain_batch_dependence
from outpace.parallel.parity.plain_copy import model_of
from outpace.parallel.parity.user_collectives import NoCollectives
from outpace.parallel.plain import random_state, same_random_state, without_dropout
from outpace.parallel.rank_objects import gather_objects

_FEW = 2  # at most this many samples of a rank
_MOST_RANKS = 8
# Positions in the sums: losses and counts, and means of parts; products and squares follow.
_FAILED, _LOSSES, _MEANS = 0, slice(1, 5), slice(5, 7)
_FIRST = 7


@dataclass(frozen=True)
class MixedDifference:
    """The difference between running two ranks' samples together and separately.

    `loss` is the difference in the loss. If it is 0, `gradient` is the difference in the gradients
    of the parameters in `names`. `cause` says why the loss differs; empty if unknown.
    """

    loss: float = 0.0
    cause: CutCause = ""
    gradient: float = 0.0
    names: tuple[str, ...] = ()


class MixedSamples:
    """A test of whether samples of different ranks affect each other.

    The test takes a few samples from each of two ranks. One rank runs all of them in one batch, and
    the other runs those of each rank separately. The sums of the results must agree. At first, the
    test has one sample of each rank, and then two if necessary.

    `plain` is a copy of the user's model with its loss. `divert` passes its gradients to a function
    instead of storing them; `divert(None)` undoes this. `strategy` is named in the error about a
    collective in the user's code. `piece` is this rank's micro-batch, or None if its samples are
    not needed. `order` is the rank's index among those with a micro-batch.
    """

    def __init__(
        self,
        plain: nn.Module,
        names: Sequence[str],
        projection: Projection,
        divert: Callable[[Taker | None], None],
        hooks: StepHooks,
        drops: bool,
        strategy: str,
        device: torch.device,
        piece: Batch | None,
        order: int,
    ) -> None:
        self._plain, self._names, self._projection = plain, names, projection
        self._divert, self._hooks, self._drops = divert, hooks, drops
        self._strategy = strategy
        self._device = device
        self._piece, self._order = piece, order
        self._found: MixedDifference | None = None
        self._ran: list[tuple[Batch, Totals]] = []  # last samples run, with sum and count

    def are_independent(self, allowed: ComparisonLimits) -> bool:
        """Return whether samples change neither each other's losses nor later losses. Collective.

        Besides the comparison of ranks, this runs one more sample by itself, then in a batch with
        samples that this rank has already run, then by itself again. Returns False if micro-batches
        have too few samples for the test.
        """
        piece = self._piece
        few = piece is None or samples_in(piece) < FEWEST
        if any(gather_objects(few)) or piece is None:
            return False
        self._found = self._compare_first_samples(False, allowed)
        reason = None
        if not self._found.loss:
            sample = leave_out_first(take_first(piece, 3), 2)
            others: Sequence[tuple[Batch, Totals | None]] = self._ran
            others = others or [(take_first(piece, 2), None)]
            reason = explain_batch_dependence(self._plain, sample, others, self._hooks, allowed.cut)
        return not (self._found.loss or any(gather_objects(reason)))

    def find_difference(self, other_cause: bool, allowed: ComparisonLimits) -> MixedDifference:
        """Return how samples run together differ from samples run separately. Collective.

        If any rank has set `other_cause`, another problem may explain a difference, so an empty
        difference is returned.
        """
        if self._found is None:
            return self._compare_first_samples(other_cause, allowed)
        return MixedDifference() if any(gather_objects(other_cause)) else self._found

    def _compare_first_samples(self, leave_out: bool, allowed: ComparisonLimits) -> MixedDifference:
        """Compare running first samples of two ranks together and separately. Collective.

        Returns an empty difference, without a comparison, if any rank sets `leave_out`.

        A single sample may be a special case, so a difference is confirmed with two samples of each
        rank if micro-batches have at least four. If single samples have no loss (as with a standard
        deviation over the batch), two samples of each rank are compared.
        """
        piece, order = self._piece, self._order
        samples = 0 if piece is None else samples_in(piece)
        sends = samples > 1 and order < _MOST_RANKS and not leave_out
        packed = pack(take_first(piece, _FEW)) if sends else None
        sent = None if packed is None else (order, samples, packed)
        said: list[Any] = gather_objects((leave_out, sent))
        senders = [rank for rank, (_, one) in enumerate(said) if one is not None]
        senders = sorted(senders, key=lambda rank: said[rank][1][0])
        if len(senders) < 2 or any(left_out for left_out, _ in said):
            return MixedDifference()
        found, fails = MixedDifference(), False
        fewest = min(said[rank][1][1] for rank in senders)
        for count in range(1, _FEW + 1):
            if count > 1 and 2 * count > fewest and not fails:
                break
            sums = torch.zeros(_FIRST + 2 * len(self._names), dtype=torch.float64)
            sums = sums.to(self._device)
            rank = dist.get_rank()
            place = senders.index(rank) if rank in senders else len(senders)
            if place < len(senders) // 2 * 2:
                pair = [said[senders[place // 2 * 2 + one]][1][2] for one in range(2)]
                try:
                    self._run_pair(sums, pair, count, together=place % 2 == 0)
                except Exception:  # such as normalisation over a single sample
                    sums[_FAILED] = 1
            dist.all_reduce(sums)
            fails = bool(sums[_FAILED]) or not bool(sums.isfinite().all())
            if fails:
                found = MixedDifference()
                continue
            found = self._compare_sums(sums, allowed)
            if not found.loss and not found.gradient:
                break
        return found

    def _run_pair(self, sums: Tensor, pair: Sequence[bytes], count: int, together: bool) -> None:
        """Run the samples of two ranks, together or separately, and add the results to `sums`."""
        self._ran.clear()
        parts = [take_first(unpack(one, self._device), count) for one in pair]
        if together:
            joined = concatenate(*parts)
            if joined is None:
                sums[_FAILED] = 1
                return
            parts = [joined]
        products, squares = sums[_FIRST:].view(2, -1)
        places = {name: number for number, name in enumerate(self._names)}
        losses = sums[_LOSSES][:2] if together else sums[_LOSSES][2:]
        sign = 1 if together else -1

        def take(name: str, gradient: Tensor) -> None:
            products[places[name]] += sign * self._projection.project(gradient)
            squares[places[name]] += square(gradient)

        self._divert(take)
        try:
            for part in parts:
                dropping = without_dropout(self._plain) if self._drops else nullcontext()
                watch = MovedParameters(model_of(self._plain).named_parameters())
                with (
                    watch.put_back_unless(lambda: False),
                    preserve_state(self._plain, self._device),
                    dropping,
                    torch.enable_grad(),
                ):
                    begin = random_state(self._device)
                    with watch, self._hooks.cast(), NoCollectives(self._strategy):
                        loss_sum, targets, *_ = self._plain(part)
                    loss_sum.backward()
                    totals = torch.stack((loss_sum.detach().double(), targets.double()))
                    losses += totals
                    mean = (totals[0] / totals[1]).nan_to_num(0.0)  # 0 for a part without targets
                    sums[_MEANS][0 if together else 1] += mean / len(parts)
                    self._ran.append((part, (float(totals[0]), float(totals[1]))))
                    if not same_random_state(begin, random_state(self._device)):
                        sums[_FAILED] = 1  # it draws random numbers
        finally:
            self._divert(None)

    def _compare_sums(self, sums: Tensor, allowed: ComparisonLimits) -> MixedDifference:
        loss, count, loss_apart, count_apart = sums[_LOSSES].tolist()
        if not count or not count_apart:
            return MixedDifference()
        apart = difference(loss / count, loss_apart / count_apart)
        if apart > allowed.cut:
            over_samples = difference(*sums[_MEANS].tolist()) <= allowed.cut
            return MixedDifference(loss=apart, cause="samples" if over_samples else "")
        products, squares = sums[_FIRST:].view(2, -1).tolist()
        sizes = [math.sqrt(one) for one in squares]
        largest = max(sizes, default=0.0)
        off = {
            name: abs(product) / size
            for name, product, size in zip(self._names, products, sizes, strict=True)
            if abs(product) > allowed.projection * max(size, allowed.floor * largest)
        }
        return MixedDifference(gradient=max(off.values(), default=0.0), names=tuple(off))
