"""State that a user's module or loss keeps from step to step but no checkpoint contains.

Running means, counters, recurrent state and generators may be in plain attributes, unsaved buffers,
globals and closures. A resumed run and an exported model start without them, and each rank has its
own. Values that every forward sets again (an auxiliary loss, a cache) or that no loss depends on
(logs) do not count. State is detected by its effect on losses, even where outpace cannot name it.
"""

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from outpace.data.seeding import seed_all_generators
from outpace.nn.extra_state import parts_with_extra_state
from outpace.parallel.batches import concatenate, copy_batch, cut, samples_in, take_first
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import difference
from outpace.parallel.parity.gradient_measure import GradientMeasure
from outpace.parallel.parity.index_bounds import require_bounds
from outpace.parallel.parity.later_attributes import change_counters, has_lists, lengthen_lists
from outpace.parallel.parity.loss_scale import note_backwards
from outpace.parallel.parity.module_state import (
    ModuleState,
    is_generator,
    restore_values,
    shapes_in,
    unsaved_kind,
)
from outpace.parallel.parity.moved_parameters import MovedParameters
from outpace.parallel.plain import (
    random_state,
    same_random_state,
    set_random_state,
    without_dropout,
)
from outpace.parallel.tensors import all_parameters

_FEW = 2  # samples
_FORWARDS = 9  # forwards in a row, for state such as a queue that is used only after a few calls
_ENTRIES = 1_000  # entries added to lists, which may be used only once they are long
_LATER = (17, 107, 709, 1_009, 10_007)  # numbers of calls that are added to counters
_MULTIPLE = 252_000  # a common multiple of 1 to 10, 100 and 1,000
_ROUNDING = 1e-4  # relative difference of losses that nondeterministic kernels cause
_CHANGE, _MOST_CHANGED = 1.125, 1_024  # factor for each parameter's first values
_SEED = 7_919  # unlikely to be the run's seed
_OF_NOISE = 10  # differences up to 10 times those between identical forwards count as noise


Totals = tuple[float, float]  # the loss's sum and count


@dataclass(frozen=True)
class KeptState:
    """State that a module or its loss keeps between forwards, named as in `kept_attributes`.

    `found`: the loss of some samples depends on which samples ran before, although everything that
    a checkpoint contains is the same. `names`: the state that the loss depends on. `generators`:
    the module's random generators. `unseen`: outpace could not restore the cause, which may be
    random numbers. `apart`: the relative change in loss if other samples run before, as they do on
    other data-parallel ranks; 0 for counters, and for recurrent state that is separate for each
    sample. `failure`: why the check failed, although a first forward succeeded. `writes`: a forward
    writes to parameters or saved buffers, or none has finished. `halves`: loss sum and count of
    each half of the batch, if known and if the first half leaves nothing that may affect the
    second. `reshaped`: saved buffers whose shape a forward changes. `backwards`: parameters that
    accumulate gradients from a backward that the forward or the loss runs. `of_gradient`: the
    gradient depends on the state, but the loss does not. `unused`: state that changes from forward
    to forward without any effect. `draws`: the loss depends on random numbers from torch's, NumPy's
    or Python's generators, not counting dropout.
    """

    found: bool = False
    names: tuple[str, ...] = ()
    generators: tuple[str, ...] = ()
    unseen: bool = False
    apart: float = 0.0
    failure: str = ""
    writes: bool = False
    halves: tuple[Totals, Totals] | None = None
    reshaped: tuple[str, ...] = ()
    backwards: tuple[str, ...] = ()
    of_gradient: bool = False
    unused: tuple[str, ...] = ()
    draws: bool = False

    @property
    def is_any(self) -> bool:
        """Return whether there is something to report."""
        return self.found or bool(self.generators or self.failure)


class _FirstForwardError(Exception):
    """An error in the first forward, which would occur in training too."""


def find_kept_state(
    plain: nn.Module,
    piece: Batch,
    hooks: StepHooks,
    *,
    alone: bool,
    other: Batch | None = None,
    writes: bool = False,
    drops: bool = True,
    in_halves: bool = False,
    share: tuple[int, int] = (0, 1),
) -> KeptState:
    """Find state that an objective keeps between forwards and that affects later losses.

    Forwards of a few samples of a micro-batch are run. The loss of some samples is compared with
    their loss after other samples, with the same buffers, parameters and random numbers. Everything
    that outpace can reach is restored afterwards.

    `other` is another micro-batch, if any, to run before a micro-batch of one sample. `alone`:
    there is a single process, whose checkpoints contain the result of get_extra_state as well as
    buffers (of several ranks, only one rank's state would be saved). `writes`: outpace itself
    writes to parameters. `drops`: the module may use dropout, which is disabled. `in_halves`: use
    the halves of the micro-batch, because the caller needs their losses. `share`: this rank's index
    among the ranks that search, and their number; they divide the search for state that matters
    only some steps later.

    Two kinds of state are not found: state other than counters that matters only after more than
    eight calls, and counters that matter only at certain calls, such as from 200 to 500 or every
    37th.
    """
    failure: Exception | None = None
    halved = in_halves and samples_in(piece) % 2 == 0
    begin = ModuleState(plain)
    for batch, before in _choose_samples(piece, other, halved):
        try:
            found = _LossComparison(plain, begin, hooks, alone, writes, drops, share)
            state = found.run(batch, before, piece if samples_in(batch) == 1 else batch, other)
            if found.unused and not state.found:
                given = plain, begin, hooks, alone, writes, drops, share
                state = _find_by_gradient(
                    _LossComparison(*given, by_gradient=True), piece, other, state
                )
            halves = None if found.saw_writes or not halved else found.first_totals
            return replace(
                state, writes=found.saw_writes, halves=halves,
                reshaped=tuple(sorted(found.reshaped)), backwards=tuple(sorted(found.backwards)),
                unused=tuple(sorted(found.unused.difference(state.names))), draws=found.draws,
            )  # fmt: skip
        except Exception as error:  # such as normalisation over too few samples
            failure = error
        halved = False
    if failure is None or isinstance(failure, _FirstForwardError):
        return KeptState(writes=True)
    said = str(failure).strip().splitlines() or [""]
    return KeptState(failure=f"{type(failure).__name__}: {said[0][:200]}", writes=True)


def _choose_samples(
    piece: Batch, other: Batch | None, halved: bool
) -> Iterator[tuple[Batch, Batch]]:
    """Yield pairs of samples to compare and samples to run before them, in the order to try.

    The first pairs are the smallest, which a module may not support. `halved`: yield the two halves
    first.
    """
    samples = samples_in(piece)
    if halved:
        half, other_half = cut(piece, 2)
        yield half, other_half
    if samples % _FEW == 0 and samples >= 2 * _FEW:
        few = cut(piece, samples // _FEW)
        yield few[0], few[1]
    if samples % 2 == 0:
        half, other_half = cut(piece, 2)
        yield half, other_half
    elif samples > 1:
        one, another, *_ = cut(piece, samples)
        yield one, another
    if other is not None:
        yield piece, other
    yield piece, piece


def _find_by_gradient(
    search: "_LossComparison", piece: Batch, other: Batch | None, state: KeptState
) -> KeptState:
    """Search for state that affects only gradients, with a few samples; `state` if none does."""
    batch, before = next(_choose_samples(piece, other, halved=False))
    with suppress(Exception):  # such as normalisation over too few samples
        found = search.run(batch, before, piece if samples_in(batch) == 1 else batch, other)
        if found.found and not found.unseen:
            return replace(found, of_gradient=True)
    return state


class _LossComparison:
    """A comparison of an objective's losses with and without running other samples first.

    `by_gradient`: compare a measure of the loss's gradients instead of the loss.
    """

    def __init__(
        self,
        plain: nn.Module,
        begin: ModuleState,
        hooks: StepHooks,
        alone: bool,
        writes: bool,
        drops: bool,
        share: tuple[int, int],
        by_gradient: bool = False,
    ) -> None:
        self._plain, self._begin, self._given, self._alone = plain, begin, hooks, alone
        self._drops, self._share = drops, share
        self._totals: list[Totals] = []
        # Totals of the samples, and of the other samples.
        self.first_totals: tuple[Totals, Totals] | None = None
        self._model: nn.Module = plain.model  # type: ignore[assignment]
        self._watch = None if writes else MovedParameters(self._model.named_parameters())
        self._measure = GradientMeasure(self._model) if by_gradient else None
        self._is_exact = not by_gradient  # backward kernels round differently each time
        self._measures = True  # whether to measure the gradients of the next forwards
        self.unused: set[str] = set()  # state that changes, but that no loss depends on
        self._drew = False  # whether the last forward drew random numbers
        self.draws = False  # whether a loss depends on random numbers that a forward draws
        self.saw_writes = False  # whether forwards wrote to parameters or saved buffers
        self.reshaped: set[str] = set()
        self.backwards: set[str] = set()
        self._left: dict[str, torch.Tensor] = {}  # saved buffers that the last forward wrote to
        self._trained: set[str] = set()  # parameters that require gradients after the last forward
        self._trained_first: set[str] = set()  # the same, after the first forward
        self._device = next(plain.parameters()).device
        self._is_first = False
        self._made_first: dict[str, Any] = {}  # state that the other samples' forward changed

    def run(self, batch: Batch, other: Batch, whole: Batch, more: Batch | None) -> KeptState:
        """Search for state that a forward of `other` leaves and that affects the loss of `batch`.

        `KeptState.apart` is measured with the samples of `whole` and of `more`, another micro-batch
        (if any).
        """
        with without_dropout(self._plain) if self._drops else nullcontext():
            begin = self._begin.attributes()
        fresh, kept = self._loss_after(None, batch)
        drew = self._drew
        left, self._trained_first = self._left, self._trained
        after, kept_after = self._loss_after(other, batch, begin)
        alike = _are_equal_buffers(left, self._left) and self._trained == self._trained_first
        self.first_totals = self._totals[0], self._totals[1]
        drawn = [n for n, v in kept.items() if n in begin and is_generator(v) and v != begin[n]]
        generators = tuple(sorted(drawn))
        changed = {n for n in {*kept, *kept_after} if kept.get(n) != kept_after.get(n)}
        changed -= set(generators)
        if not (math.isfinite(fresh) and math.isfinite(after)):
            return KeptState(generators=generators)
        self.draws = drew and self._depends_on_draws(batch, fresh)
        if not self._is_exact and difference(after, fresh) <= _ROUNDING:
            after = fresh
        if fresh == after and changed and not alike:
            return KeptState(True, tuple(sorted(changed)), generators)
        if fresh == after:
            later = self._find_later_effects_in_few(changed, batch, fresh) if changed else None
            made = {n for n, v in self._made_first.items() if v == kept.get(n)}
            made -= {*changed, *generators}
            self.unused = changed
            if later is None and made and self._caches_weights(batch):
                later = tuple(sorted(made))
            return KeptState(later is not None, later or (), generators)
        noise, moved = self._measure_noise(other, batch, fresh, after), difference(after, fresh)
        unseen = noise > 0 and moved <= _OF_NOISE * noise
        if unseen and max(noise, moved) <= _ROUNDING:
            return KeptState(generators=generators)
        idle = {name for name in changed if self._is_idle_counter(name, 1, batch, fresh)}
        if changed <= idle:
            changed = self._find_changed_state(other, begin) - set(generators)
        changed -= idle
        apart = 0.0 if self._alone or unseen else self._compare_after_others(whole, more)
        return KeptState(True, tuple(sorted(changed)), generators, unseen, apart)

    def _measure_noise(self, other: Batch, batch: Batch, fresh: float, after: float) -> float:
        """Return the relative difference between the losses of identical forwards.

        If the first repetition gives the same loss, but other samples change it by no more than
        rounding, the forwards with and without them are both repeated once more.
        """
        noise = difference(self._loss_after(None, batch)[0], fresh)
        if noise or difference(after, fresh) > _ROUNDING:
            return noise
        noise = difference(self._loss_after(None, batch)[0], fresh)
        return max(noise, difference(self._loss_after(other, batch)[0], after))

    def _find_changed_state(self, other: Batch, begin: dict[str, Any]) -> set[str]:
        with self._without_side_effects():
            self._run_forward(other)
            left = self._begin.attributes()
        return {n for n in {*begin, *left} if begin.get(n) != left.get(n)}

    def _loss_after(
        self, other: Batch | None, batch: Batch, begin: dict[str, Any] | None = None
    ) -> tuple[float, dict[str, Any]]:
        """Run `other` and then `batch`; return the mean loss of `batch`, and the state afterwards.

        If `begin`, the state before both, is given, record what `other` changes.
        """
        with self._without_side_effects():
            drawn = random_state(self._device)
            if other is not None:
                self._measures = False
                self._run_forward(other)
                self._measures = True
                if begin is not None:
                    now = self._begin.attributes()
                    self._made_first = {n: v for n, v in now.items() if v != begin.get(n)}
                set_random_state(drawn, self._device)
                self._begin.restore_draws()
            mean = self._run_forward(batch)
            self._drew = not same_random_state(drawn, random_state(self._device))
            return mean, self._begin.attributes()

    def _depends_on_draws(self, batch: Batch, fresh: float) -> bool:
        """Return whether another seed changes a batch's loss by more than the same seed twice does.

        On a GPU, sums whose order varies change the loss without a draw. `fresh`: the loss with
        the run's own random numbers.
        """
        losses = []
        for _ in range(2):
            with self._without_side_effects():
                seed_all_generators(self._device, _SEED)
                losses.append(self._run_forward(batch))
        noise = difference(losses[1], losses[0])
        least = 0.0 if self._device.type == "cpu" else _ROUNDING
        return difference(losses[0], fresh) > max(_OF_NOISE * noise, least)

    def _caches_weights(self, batch: Batch) -> bool:
        """Return whether the loss of a later forward depends on the weights of the first one.

        This detects values that are computed from weights once and then cached. A cached table that
        does not depend on weights does not count.
        """
        few = take_first(batch, _FEW)
        with suppress(Exception):  # such as normalisation over too few samples
            with self._without_side_effects(), _perturb_weights(self._model):
                fresh = self._run_forward(few)
            with self._without_side_effects():
                self._run_forward(few)
                with _perturb_weights(self._model):
                    return difference(self._run_forward(few), fresh) > _ROUNDING
        return False

    def _find_later_effects_in_few(
        self, changed: set[str], batch: Batch, fresh: float
    ) -> tuple[str, ...] | None:
        if samples_in(batch) > _FEW:
            few = take_first(batch, _FEW)
            with suppress(Exception):  # such as normalisation over too few samples
                return self._find_later_effects(changed, few, self._loss_after(None, few)[0])
        return self._find_later_effects(changed, batch, fresh)

    def _find_later_effects(
        self, changed: set[str], batch: Batch, fresh: float
    ) -> tuple[str, ...] | None:
        """Return the changed state that affects losses only some steps later; None if none does.

        For this, several forwards run in a row. Others run with counters set to much later values,
        or with longer lists. Of several ranks, the first runs the forwards in a row and those with
        longer lists, and the others divide the values of counters among them.
        """
        number, ranks = self._share
        calls = 0 if number else self._count_calls_until_change(batch, fresh)
        if calls:
            counters = self._select_effective(changed, partial(add, calls), batch, fresh)
            if counters:
                return counters
            idle = {name for name in changed if self._is_idle_counter(name, calls, batch, fresh)}
            return tuple(sorted(changed - idle))
        changes = (
            _CHANGES if ranks == 1 else () if not number else _CHANGES[number - 1 :: ranks - 1]
        )
        for change in changes:
            if self._affects_forward(sorted(changed), change, batch, fresh):
                alone = self._select_effective(changed, change, batch, fresh)
                return alone or tuple(sorted(changed))
        if not number and self._depends_on_list_lengths(sorted(changed), batch, fresh):
            alone = tuple(n for n in changed if self._depends_on_list_lengths([n], batch, fresh))
            return tuple(sorted(alone)) or tuple(sorted(changed))
        return None

    def _depends_on_list_lengths(self, names: Sequence[str], batch: Batch, fresh: float) -> bool:
        names = [name for name in names if has_lists(self._plain, name)]
        if not names:
            return False
        with self._without_side_effects():
            drawn = random_state(self._device)
            self._measures = False
            self._run_forward(batch)
            self._measures = True
            if not sum(lengthen_lists(self._plain, name, _ENTRIES) for name in names):
                return False
            set_random_state(drawn, self._device)
            self._begin.restore_draws()
            try:
                with require_bounds(self._device):
                    return difference(self._run_forward(batch), fresh) > _ROUNDING
            except Exception:  # such as a list that must be as long as another
                return False

    def _count_calls_until_change(self, batch: Batch, fresh: float) -> int:
        """Return the number of forwards after which a batch's loss changes; 0 if it never does.

        A change in which parameters require gradients counts as well.
        """
        forwards = self._run_in_a_row(batch)
        for calls, (loss, trained) in enumerate(forwards):
            if difference(loss, fresh) > _ROUNDING or trained != self._trained_first:
                return calls
            if self._is_exact and loss != fresh and self._run_in_a_row(batch) == forwards:
                return calls
        return 0

    def _run_in_a_row(self, batch: Batch) -> list[tuple[float, set[str]]]:
        """Run several forwards; return each loss and the parameters that then require gradients."""
        forwards: list[tuple[float, set[str]]] = []
        with self._without_side_effects():
            drawn = random_state(self._device)
            for call in range(_FORWARDS):
                self._measures = call in (0, 1, _FORWARDS - 1)
                loss = self._run_forward(batch)
                forwards.append((loss if self._measures else forwards[0][0], self._trained))
                set_random_state(drawn, self._device)
                self._begin.restore_draws()
        return forwards

    def _affects_forward(
        self, names: Sequence[str], change: Callable[[Any], Any], batch: Batch, fresh: float
    ) -> bool:
        """Return whether changing the counters in these attributes affects a forward of the batch.

        It does if the forward fails, or if the loss or the set of parameters that require gradients
        changes.
        """
        with self._without_side_effects():
            if not sum(change_counters(self._plain, name, change) for name in names):
                return False
            try:
                with require_bounds(self._device):
                    loss = self._run_forward(batch)
            except Exception:  # such as an index past the end of a list
                return True
        if difference(loss, fresh) > _ROUNDING or self._trained != self._trained_first:
            return True
        changes = self._is_exact and loss != fresh
        return changes and self._loss_after(None, batch)[0] == fresh

    def _select_effective(
        self, names: set[str], change: Callable[[Any], Any], batch: Batch, fresh: float
    ) -> tuple[str, ...]:
        return tuple(n for n in sorted(names) if self._affects_forward([n], change, batch, fresh))

    def _is_idle_counter(self, name: str, calls: int, batch: Batch, fresh: float) -> bool:
        with self._without_side_effects():
            counts = change_counters(self._plain, name, partial(add, calls))
        return counts and not self._affects_forward([name], partial(add, calls), batch, fresh)

    def _compare_after_others(self, batch: Batch, more: Batch | None) -> float:
        """Return how much a batch's loss changes if other samples run before it.

        The loss is compared with that of the batch after a forward of the same batch. The other
        samples are half of the batch or, for a single sample, `more` twice. Their number differs
        from the batch's. So if state has another shape after them, it is separate for each sample,
        and the result is 0.
        """
        samples = samples_in(batch)
        if samples == 1 and more is None:
            return 0.0
        others = take_first(batch, (samples + 1) // 2) if samples > 1 else concatenate(more, more)
        try:
            shapes, second = self._shapes_and_loss(batch, batch)
            other_shapes, after_others = self._shapes_and_loss(others, batch)
        except Exception:  # such as state of single samples
            return 0.0
        return 0.0 if shapes != other_shapes else difference(after_others, second)

    def _shapes_and_loss(self, other: Batch, batch: Batch) -> tuple[Any, float]:
        """Run `other` and then `batch`; return the shapes of the state in between, and the loss."""
        with self._without_side_effects():
            drawn = random_state(self._device)
            self._run_forward(other)
            shapes = shapes_in(self._begin.attributes())
            set_random_state(drawn, self._device)
            return shapes, self._run_forward(batch)

    @contextmanager
    def _without_side_effects(self) -> Iterator[None]:
        """Disable dropout and observe writes inside the context; restore everything on exit."""
        self._is_first = True
        with ExitStack() as stack:
            if self._drops:
                stack.enter_context(without_dropout(self._plain))
            stack.enter_context(self._begin.preserve(self._device))
            if self._watch is not None:
                stack.callback(self._watch.put_back)
                stack.enter_context(self._watch)
            yield

    def _run_forward(self, batch: Batch) -> float:
        """Return a forward's mean loss (or gradient measure); restore what checkpoints contain."""
        put_back = self._make_saved_undo()
        is_first, self._is_first = self._is_first, False
        noted = note_backwards(self._model, self.backwards)
        with torch.enable_grad(), self._given.cast(), noted:
            try:
                loss_sum, count, *_ = self._plain(copy_batch(batch))
            except Exception as error:
                raise (_FirstForwardError(error) if is_first else error) from error
        measured = None
        if self._measure is not None:
            measured = self._measure.take(loss_sum) if self._measures else math.nan
        totals = float(loss_sum.detach().double()), float(count.double())
        self._totals.append(totals)
        self._trained = {n for n, p in self._model.named_parameters() if p.requires_grad}
        if self._watch is not None:
            self._watch.put_back()
            self.saw_writes |= bool(self._watch.written)
        put_back()
        if measured is not None:
            return measured
        return totals[0] / totals[1] if totals[1] else math.nan

    def _make_saved_undo(self) -> Callable[[], None]:
        """Return a function that restores the buffers and extra state that checkpoints contain."""
        held = [
            (
                f"{name}.{buffer}".removeprefix("model.").removeprefix("."),
                part._buffers,
                buffer,
                tensor,
                None if tensor is None else tensor.detach().clone(),
            )
            for name, part in self._plain.named_modules()
            if part._buffers
            for buffer, tensor in part._buffers.items()
            if unsaved_kind(self._plain, name, part, buffer) is None
        ]
        versions = [0 if t is None or t.is_inference() else t._version for *_, t, _ in held]
        shared_too = self._plain.named_buffers(remove_duplicate=False)
        names = {path for path, *_ in held} | dict(shared_too).keys()
        extra = []
        for _, part in parts_with_extra_state(self._model) if self._alone else ():
            with suppress(TypeError, pickle.PicklingError):  # no checkpoint can contain it
                extra.append((part, copy.deepcopy(part.get_extra_state())))

        def put_back() -> None:
            self._left = {}
            with torch.no_grad():
                for (path, register, name, tensor, values), version in zip(
                    held, versions, strict=True
                ):
                    now = register.get(name)
                    replaced = now is not tensor
                    register[name] = tensor
                    if tensor is None or values is None:
                        self.saw_writes |= replaced
                        if now is not None:
                            self.reshaped.add(path)
                        continue
                    known = tensor.layout == torch.strided and not tensor.is_inference()
                    same = known and not replaced and tensor._version == version
                    if not (same and torch.equal(tensor, values)):
                        self.saw_writes = True
                        if now is not None:
                            self._left[path] = now.detach().clone()
                            if now.shape != values.shape:
                                self.reshaped.add(path)
                        restore_values(tensor, values)
            self.reshaped |= self._find_new_buffers(names)
            for part, state in extra:
                part.set_extra_state(state)

        return put_back

    def _find_new_buffers(self, known: set[str]) -> set[str]:
        """Return the names of saved buffers that forwards have registered: those not in `known`."""
        found = set()
        for name, part in self._model.named_modules():
            for buffer in part._buffers.keys() - part._non_persistent_buffers_set:
                path = f"{name}.{buffer}".removeprefix(".")
                if part._buffers[buffer] is not None and not {path, f"model.{path}"} & known:
                    found.add(path)
        return found


@contextmanager
def _perturb_weights(model: nn.Module) -> Iterator[None]:
    """Change the first values of each parameter inside the context.

    Dispatch modes do not see these changes.
    """
    some = [p.detach().view(-1)[:_MOST_CHANGED] for p in all_parameters(model) if p.is_contiguous()]
    some = [one for one in some if one.is_floating_point()]
    with _disable_current_modes():
        before = [one.clone() for one in some]
        for one in some:
            one.mul_(_CHANGE)
    try:
        yield
    finally:
        with _disable_current_modes():
            for one, values in zip(some, before, strict=True):
                one.copy_(values)


def _are_equal_buffers(left: dict[str, torch.Tensor], left_after: dict[str, torch.Tensor]) -> bool:
    return left.keys() == left_after.keys() and all(
        one.shape == left_after[name].shape
        and torch.allclose(one, left_after[name], rtol=_ROUNDING, equal_nan=True)
        for name, one in left.items()
        if one.layout == torch.strided
    )


def _later_multiple(number: Any, calls: int) -> Any:
    """Return a much later value for a counter, `calls` before a multiple of many numbers."""
    return number - number % _MULTIPLE + _MULTIPLE - calls


# 0 and 1 are for counters that are read before and after they are increased.
_CHANGES: tuple[Callable[[Any], Any], ...] = (
    *(partial(add, calls) for calls in _LATER),
    *(partial(_later_multiple, calls=calls) for calls in (0, 1)),
)
