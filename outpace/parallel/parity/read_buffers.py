"""Saved buffers that a module's training depends on, now or some steps later.

A bank of embeddings may be read only once it is full, and a running mean only after a warm-up that
another buffer counts; a factor may change only the gradient. One process updates such buffers once
per step with all samples; ranks and micro-batches update them with their own samples.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress

import torch
from torch import Tensor, nn

from outpace.parallel.batches import copy_batch, take_first
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import difference
from outpace.parallel.parity.counted_buffers import batchnorm_state
from outpace.parallel.parity.gradient_measure import GradientMeasure
from outpace.parallel.parity.index_bounds import require_bounds
from outpace.parallel.parity.module_state import preserve_state
from outpace.parallel.parity.moved_parameters import keep_values
from outpace.parallel.parity.plain_copy import model_of
from outpace.parallel.plain import random_state, set_random_state, without_dropout

Names = tuple[str, ...]
_Outcome = tuple[float, float]  # a mean loss, and a measure of its gradients
_FEW = 2  # samples
_MOST_NAMED = 32  # buffers that are tried one by one
_FORWARDS = 8  # in a row, for a bank that is read once it has a few rows
_CALLS = (17, 107, 709, 1_009, 10_007, 251_999, 252_000)  # after which counters are tried
_ROUNDING = 1e-4  # relative difference that nondeterministic kernels cause


def find_read_buffers(
    plain: nn.Module,
    hooks: StepHooks,
    drops: bool,
    moved: Mapping[str, Tensor],
    piece: Batch,
    later: bool = True,
) -> Names:
    """Return the buffers in `moved` that training on a few samples of a batch depends on.

    `moved` has the buffers' new values by name, and `piece` the samples. The result has the buffers
    whose new values change the loss. If there are none and `later` is set, the result has the
    buffers that change only the gradient, or the loss some steps later. With `later`, the number of
    forwards may differ by rank. Each forward draws the same random numbers. `drops`: disable
    dropout.
    """
    if not moved:
        return ()
    try:
        with keep_values(model_of(plain).named_parameters()):
            search = _BufferSearch(plain, hooks, drops, moved, take_first(piece, _FEW))
            return search.find_changing_loss() or (search.find_changing_training() if later else ())
    except Exception:  # such as normalisation over too few samples
        return ()


def find_moved_buffers(plain: nn.Module, hooks: StepHooks, drops: bool, piece: Batch) -> Names:
    """Return the saved buffers that a forward changes and that training depends on."""
    model, device = model_of(plain), next(plain.parameters()).device
    saved, some = model.state_dict(keep_vars=True), take_first(piece, _FEW)
    begin = {n: b.detach().clone() for n, b in model.named_buffers() if n in saved}
    dropping = without_dropout(plain) if drops else nullcontext()
    with suppress(Exception), keep_values(model.named_parameters()):
        with preserve_state(plain, device), dropping, torch.enable_grad(), hooks.cast():
            plain(copy_batch(some))
            now = {n: b.detach().clone() for n, b in model.named_buffers() if n in begin}
        moved = {n: b for n, b in now.items() if not torch.equal(b, begin[n])}
        return find_read_buffers(plain, hooks, drops, moved, some)
    return ()


class _BufferSearch:
    def __init__(
        self,
        plain: nn.Module,
        hooks: StepHooks,
        drops: bool,
        moved: Mapping[str, Tensor],
        few: Batch,
    ) -> None:
        self._plain, self._hooks, self._drops, self._few = plain, hooks, drops, few
        self._model = model_of(plain)
        self._held = dict(self._model.named_buffers())
        self._device = next(plain.parameters()).device
        self._moved = moved
        self._measure = GradientMeasure(self._model)

    def find_changing_loss(self) -> Names:
        """Return the buffers whose new values change the loss.

        If no buffer changes the loss by itself but all together do, returns all of them.
        """
        moved = self._moved
        before, _ = self._evaluate({}, gradient=False)
        if self._evaluate(moved, gradient=False)[0] == before:
            return ()
        some = list(moved)[:_MOST_NAMED]
        alone = (n for n in some if self._evaluate({n: moved[n]}, gradient=False)[0] != before)
        return tuple(alone) or tuple(moved)

    def find_changing_training(self) -> Names:
        """Return the buffers that change the gradient now, or training some steps later."""
        names = list(self._list_candidates())
        if not names:
            return ()
        begin = {name: self._held[name].detach().clone() for name in names}
        moved = {name: self._moved[name] for name in names}
        fresh = self._evaluate({})
        found = self._select_effective(moved, begin, fresh)
        for number, calls in enumerate(() if found else _CALLS):
            with suppress(Exception):  # such as a row index out of bounds
                later = {
                    name: _extrapolate(begin[name], moved[name], calls, alike=number % 2 == 0)
                    for name in names
                }
                if all(later[name] is moved[name] for name in names):
                    break  # none of them is a counter
                found = found or self._select_effective(later, begin, fresh)
        if found:
            return found
        after = self._values_after_forwards()
        return self._select_effective(
            after, {n: self._held[n].detach().clone() for n in after}, fresh
        )

    def _list_candidates(self) -> Iterable[str]:
        """Return the moved buffers, except BatchNorm's, which training never reads."""
        known = batchnorm_state(self._model)
        return [name for name in self._moved if id(self._held[name]) not in known]

    def _select_effective(
        self, values: Mapping[str, Tensor], begin: Mapping[str, Tensor], fresh: _Outcome
    ) -> Names:
        """Return the buffers whose new `values` change the outcome; empty if the outcome is equal.

        The outcome is compared with `fresh`, the outcome for the values `begin`. A buffer counts if
        the outcome changes once this buffer alone is set back to its value in `begin`. If no buffer
        counts, all are returned.
        """
        outcome = self._evaluate(values)
        if not _differ(outcome, fresh):
            return ()
        some = list(values)[:_MOST_NAMED]
        without = {name: self._evaluate({**values, name: begin[name]}) for name in some}
        return tuple(n for n in some if _differ(without[n], outcome)) or tuple(values)

    def _evaluate(self, values: Mapping[str, Tensor], gradient: bool = True) -> _Outcome:
        """Return the mean loss and the gradient's measure for these buffer values.

        Everything is restored afterwards. Without `gradient`, the second result is 0.
        """
        dropping = without_dropout(self._plain) if self._drops else nullcontext()
        with preserve_state(self._plain, self._device), dropping:
            with torch.no_grad():
                for name, value in values.items():
                    self._held[name].copy_(value)
            bounds = require_bounds(self._device)
            with torch.enable_grad(), self._hooks.cast(), bounds:
                loss_sum, count, *_ = self._plain(copy_batch(self._few))
            mean = float(loss_sum.detach().double() / count.double())
            return mean, self._measure.take(loss_sum) if gradient else 0.0

    def _values_after_forwards(self) -> dict[str, Tensor]:
        """Return the values of saved buffers after several forwards of the same few samples."""
        dropping = without_dropout(self._plain) if self._drops else nullcontext()
        with preserve_state(self._plain, self._device), dropping, torch.enable_grad():
            begin = {name: buffer.detach().clone() for name, buffer in self._held.items()}
            drawn = random_state(self._device)
            for _ in range(_FORWARDS):
                set_random_state(drawn, self._device)
                with self._hooks.cast(), require_bounds(self._device):
                    self._plain(copy_batch(self._few))
            now = dict(self._model.named_buffers())
            return {
                name: now[name].detach().clone()
                for name in self._model.state_dict().keys() & now.keys()
                if name in self._moved or not torch.equal(now[name], begin[name])
            }


def _differ(one: _Outcome, other: _Outcome) -> bool:
    return any(difference(*pair) > _ROUNDING for pair in zip(one, other, strict=True))


def _extrapolate(begin: Tensor, moved: Tensor, calls: int, alike: bool) -> Tensor:
    """Return the value that a counter has after `calls` forwards.

    `begin` and `moved` are the values before and after the first forward. A counter is a buffer of
    whole numbers or with a single number, such as the progress as a fraction. For other buffers,
    returns `moved`. `alike`: entries that the first forward does not change (classes without a
    sample) increase as fast as the fastest entry.
    """
    if moved.dtype == torch.bool or moved.is_complex():
        return moved
    wide = begin.double(), moved.double()
    if moved.numel() > 1 and any(bool((one != one.round()).any()) for one in wide):
        return moved
    step = wide[1] - wide[0]
    if alike and step.numel():
        step = torch.where(step == 0, step.max(), step)
    return (wide[0] + calls * step).to(moved.dtype)
