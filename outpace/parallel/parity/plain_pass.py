"""The plain module's forward and backward on the first global batch, before any step.

A copy of the user's module, made before it is laid out, runs on the same samples, split as in the
plan; each rank runs some of the micro-batches. If each rank has its own samples, or in a pipeline
(stage_draws.py), the copy draws the same random numbers as the layout will; otherwise, dropout is
disabled. Afterwards, generators, buffers, and weights that the forward changes are restored.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outpace.nn.dtensor import is_spread
from outpace.nn.fingerprint import fingerprint
from outpace.nn.model_options import apply_checkpointing
from outpace.parallel.batches import (
    copy_batch,
    cut,
    samples_in,
    take_first,
    take_part,
)
from outpace.parallel.batchnorm import SynchronisedBatchNorm, batch_norms
from outpace.parallel.blocks import Blocks, flatten_blocks, named_blocks
from outpace.parallel.gradient_hooks import accumulation_hooks, add_hooks, gradient_hooks
from outpace.parallel.layout import Batch, Layout, StepHooks
from outpace.parallel.loop_settings import LoopSettings
from outpace.parallel.parity.build_difference import compare_builds, may_differ_by_process
from outpace.parallel.parity.comparison import ComparisonLimits
from outpace.parallel.parity.counted_buffers import batchnorm_state, find_counted_buffers
from outpace.parallel.parity.cut_difference import CutRequest, FirstPiece, compare_cut
from outpace.parallel.parity.kept_state import KeptState, find_kept_state
from outpace.parallel.parity.loss_scale import find_unscaled_gradients, has_user_backward
from outpace.parallel.parity.mixed_samples import MixedSamples
from outpace.parallel.parity.module_state import (
    buffer_versions,
    hidden_parameters,
    parameter_versions,
    preserve_state,
)
from outpace.parallel.parity.moved_parameters import MovedParameters
from outpace.parallel.parity.names_in_use import NamesInUse
from outpace.parallel.parity.other_samples import (
    AFFECTED,
    explain_dependence,
    find_unsaved_state,
    rotate_samples,
    swap_samples,
)
from outpace.parallel.parity.plain_copy import (
    ModuleDtypes,
    fill_copy,
    model_of,
    redirect_references,
)
from outpace.parallel.parity.plain_failure import (
    PlainFailure,
    describe_failure,
    explain_failure,
    gather_first,
)
from outpace.parallel.parity.plain_pieces import Pieces
from outpace.parallel.parity.plain_sums import PlainReport, PlainSums
from outpace.parallel.parity.rank_dependence import compare_ranks, may_ask_for_rank
from outpace.parallel.parity.read_buffers import find_read_buffers
from outpace.parallel.parity.user_collectives import NoCollectives
from outpace.parallel.plain import has_dropout, without_dropout
from outpace.parallel.rank_objects import gather_objects
from outpace.parallel.stage_draws import PlainDraws
from outpace.parallel.tensors import all_parameters, meta_copy
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks


class PlainPass:
    """The run of a copied module without a strategy, to compare the trained module with.

    The copy is made before the strategy changes the module. `blocks` names the blocks that
    recompute activations, if the user chose them.
    """

    def __init__(
        self, objective: nn.Module, plan: Plan, ranks: Ranks, blocks: Blocks | None = None
    ) -> None:
        self._plan, self._ranks, self._blocks = plan, ranks, blocks
        self.pieces = Pieces(plan, ranks)
        self.left_out: str | None = None
        norms = batch_norms(model_of(objective))
        self.has_batchnorm = bool(norms)
        # Names of the layers whose statistics ranks share.
        self.shared_norms = [n for n, m in norms.items() if isinstance(m, SynchronisedBatchNorm)]
        self.synchronised = bool(self.shared_norms)
        self._recomputes = False
        self.draws_alike = False  # whether the copy draws the same random numbers as the layout
        self._affected = False  # whether a few samples affect each other's losses
        self._copy: nn.Module | None = None
        self._trained: list[nn.Module] = []
        self._settings: LoopSettings | None = None
        self._hooks = {
            name: (gradient_hooks(parameter), accumulation_hooks(parameter))
            for name, parameter in model_of(objective).named_parameters()
        }
        in_use = NamesInUse(objective, getattr(objective, "loss", None))
        hooked = any(gradient for gradient, _ in self._hooks.values())
        self._has_hooks = hooked or in_use.mentions("register_hook")  # hooks on activations
        self._acts_in_backward = self._has_hooks or any(
            part._backward_hooks or part._backward_pre_hooks for part in objective.modules()
        )
        self._asks_for_rank = may_ask_for_rank(in_use)
        self._by_process = may_differ_by_process(in_use)
        try:
            self._copy = meta_copy(objective, _copy_loss_buffers(objective))
            self._copy.register_forward_pre_hook(_copy_batches)
            self._trained = list(objective.modules())
            self._settings = LoopSettings(objective, [self._copy])
        except Exception as error:
            self.left_out = f"the module cannot be copied ({type(error).__name__}: {error})"

    @property
    def model(self) -> nn.Module:
        """The copied user's module; available until `run` has freed the copy."""
        assert self._copy is not None
        return model_of(self._copy)

    def follow_loop(self) -> None:
        """Apply the settings that the user's loop has changed since the copy was made."""
        if self._settings is not None:
            self._settings.apply()

    def run(
        self,
        layout: Layout,
        passes: Sequence[Batch],
        hooks: StepHooks,
        holders: Sequence[ModuleDtypes],
        allowed: ComparisonLimits,
    ) -> PlainSums | PlainFailure:
        """Run the copied module; return this rank's results, or why a rank has none. Collective.

        `holders` describes which tensors each rank holds. `allowed` has the tolerances for
        differences between a batch and its parts. Call this only once, because it frees the copy.
        """
        draws = layout.plain_draws()
        self.draws_alike = self.pieces.ranks_per_share == 1 or draws is not None
        if self.pieces.share is None:
            passes = []
        state = piece = None
        asks_few = self.pieces.ranks_per_share == 1 and not self._may_recombine
        with self._fill_copy(layout, holders) as (plain, found):
            self.release()
            model = model_of(plain)
            if self.pieces.ranks_per_share > 1:  # each rank runs some of the micro-batches
                piece = _take_part(self.pieces.find_first(passes), has_dropout(plain))
                state = self._find_state(plain, piece, passes, hooks)
            # If state depends on previous micro-batches, each rank runs all of them in order.
            in_order = state is not None and any(gather_objects(state.is_any or state.writes))
            watch, hidden = MovedParameters(model.named_parameters()), hidden_parameters(model)
            versions = parameter_versions(hidden)
            pieces = self.pieces.select(passes, in_order)
            keeps = asks_few or self._acts_in_backward
            reason = self._run_pieces(plain, found, pieces, hooks, draws, watch, keeps=keeps)
            found.hidden = [n for n, v in parameter_versions(hidden).items() if versions[n] != v]
            found.take_writes(watch)
            # Collectives in user code may be of some ranks only, and all must make the same tests.
            ends = gather_objects((reason, watch.communicates))
            self.synchronised |= any(communicates for _, communicates in ends)
            reason = next((failed for failed, _ in ends if failed is not None), None)
            if reason is not None:
                return explain_failure(plain, reason, passes, hooks, self.pieces, self.synchronised)
            if not self.synchronised and not any(gather_objects(self._asks_for_rank)):
                asked = passes, hooks, found.drops, self._plan.strategy, self._by_process
                found.builds = compare_builds(plain, *asked)
            mixed = MixedSamples(
                plain, found.names, found.projection, found.divert, hooks, found.drops,
                self._plan.strategy, found.sums.device, *self.pieces.choose(passes),
            )  # fmt: skip
            first = None
            if asks_few and self._are_independent(found, mixed, allowed):
                state = KeptState()
            else:
                if state is None:
                    piece = _take_part(None if found.first is None else found.first[0], found.drops)
                    state = self._find_state(plain, piece, passes, hooks, found.drops)
                first = self._choose_first_piece(found, state, in_order, piece)
            report = self._make_report(plain, found, state, first, passes, hooks, allowed)
            found.mixed = mixed.find_difference(
                self._has_other_cause(found, report, allowed), allowed
            )
        # After the context, since inside it references to the layout's modules lead to the copy.
        named = dict(layout.named_parameters())
        spread = [name for name in found.written if name in named and is_spread(named[name])]
        found.reports = gather_objects(replace(report, spread=spread))
        return found

    def _make_report(
        self,
        plain: nn.Module,
        found: PlainSums,
        state: KeptState,
        first: FirstPiece | None,
        passes: Sequence[Batch],
        hooks: StepHooks,
        allowed: ComparisonLimits,
    ) -> PlainReport:
        """Run a few more forwards, and return this rank's report. Collective.

        The caller fills in the report's field `spread`.
        """
        asked_cut = passes, hooks, self.synchronised, allowed.cut
        apart = compare_cut(CutRequest(plain, self._plan, first, *asked_cut))
        found.backwards.update(state.backwards)
        state = replace(state, backwards=tuple(sorted(found.backwards)))
        moved_back: Sequence[str] = ()
        if found.moved_back and found.first is not None and not self.synchronised:
            asked = plain, hooks, found.drops, found.moved_back, found.first[0]
            moved_back = find_read_buffers(*asked)
        parameters = model_of(plain).named_parameters()
        made = [name for name, _ in parameters if name not in found.names]
        unscaled = self._find_unscaled(plain, found, hooks, allowed)
        by_rank = self._compare_ranks(plain, found, hooks)
        prints = {name: fingerprint(values) for name, values in found.moved.items()}
        buffer_prints = {name: fingerprint(values) for name, values in found.buffers.items()}
        samples = self.pieces.share is not None
        return PlainReport(
            apart, state, made, sorted(found.written), (), found.by_samples, found.unseen,
            prints if samples else None, buffer_prints if samples else None,
            *self._find_counted_values(plain, found, state, hooks), moved_back, unscaled, by_rank,
            found.hidden,
        )  # fmt: skip

    def _find_counted_values(
        self, plain: nn.Module, found: PlainSums, state: KeptState, hooks: StepHooks
    ) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
        """Return the names of buffers and attributes whose changes depend on samples.

        The third result has the buffers that may be among them. If the module communicates, a
        forward on only some ranks would hang, so only this third result has entries.
        """
        if self._plan.data_parallel == 1 or found.first is None:
            return (), (), ()
        counted: Sequence[str] | None = None
        if not self.synchronised:
            keeps = self._acts_in_backward and found.keeps
            asked = plain, hooks, found.drops, found.first[0]
            names = found.moved_buffers.union(found.moved_back)
            with self._guard_forwards():
                counted = find_counted_buffers(
                    *asked, names, None if keeps else state.unused, keeps or bool(found.moved_back)
                )
        known = batchnorm_state(model_of(plain))
        buffers = dict(model_of(plain).named_buffers())
        others = [n for n, b in buffers.items() if n in found.buffers and id(b) not in known]
        if counted is None:
            return (), (), others
        attributes = [name.removeprefix("model.") for name in counted if name not in buffers]
        counted = [name for name in counted if name in buffers]
        return counted, attributes, () if found.drops else others

    def _are_independent(
        self, found: PlainSums, mixed: MixedSamples, allowed: ComparisonLimits
    ) -> bool:
        """Return whether a few samples of several ranks do not affect each other. Collective.

        Returns False, without a test, if the pass changed something on any rank.
        """
        changed = any((
            found.keeps, found.written, found.unseen, found.hidden, found.buffers,
            found.moved_back, found.backwards, found.first is None, self.synchronised,
        ))  # fmt: skip
        return not any(gather_objects(changed)) and mixed.are_independent(allowed)

    def _has_other_cause(
        self, found: PlainSums, report: PlainReport, allowed: ComparisonLimits
    ) -> bool:
        """Return whether a problem with a message of its own may also make samples differ."""
        return bool(
            self.synchronised or report.state.is_any or report.made or report.unseen
            or found.written or found.moved_back or report.cut.read
            or report.cut.loss > allowed.cut
        )  # fmt: skip

    def run_recombined(
        self,
        layout: Layout,
        passes: Sequence[Batch],
        hooks: StepHooks,
        holders: Sequence[ModuleDtypes],
        allowed: ComparisonLimits,
    ) -> PlainSums | None:
        """Run the copied module on samples in other batches than the plan's. Collective.

        If the trained module computes the same sums from the plan's micro-batches, then neither
        other samples nor previous calls affect a sample. Returns None if samples cannot be combined
        differently, or if this run changes state. Also returns None if a test of a few samples
        shows that a forward draws random numbers or changes state, or that samples affect each
        other by more than `allowed`.
        """
        if not self._may_recombine:
            return None
        parts = self._recombine(passes, layout._device())
        reason = None if parts else "samples cannot be combined differently"
        if gather_first(reason) is not None or parts is None:
            return None
        with self._fill_copy(layout, holders) as (plain, found):
            model = model_of(plain)
            said = gather_objects(self._explain_dependence(plain, parts[0], hooks, allowed))
            self._affected = AFFECTED in said
            if any(said):
                return None
            watch = MovedParameters(model.named_parameters())
            pieces = [(number, part, True) for number, part in enumerate(parts)]
            reason = self._run_pieces(plain, found, pieces, hooks, None, watch, keeps=True)
            changed = any((
                watch.written_unseen(), watch.put_back(), watch.written,
                found.buffers, found.moved_back, found.keeps, found.backwards,
                self._find_unscaled(plain, found, hooks, allowed),
            ))  # fmt: skip
            made = len(all_parameters(model)) != len(found.names)
        if changed or made or watch.communicates:
            reason = reason or "the forward changes values that may matter"
        return found if gather_first(reason) is None else None

    @property
    def _may_recombine(self) -> bool:
        """Return whether the copied module may run on other batches than the plan's.

        It always may under tensor parallelism. Otherwise, it needs fp32 or fp64, because in 16 bits
        the rounding errors of parts exceed the tolerances of most strategies. Dropout forbids it,
        because masks are equal only if the batches are.
        """
        plan = self._plan
        if plan.tp > 1:
            return True
        if has_dropout(self.model) or self._asks_for_rank:
            return False
        own = self.pieces.ranks_per_share == 1 and not plan.servers and plan.data_parallel > 1
        shared = plan.pp > 1 and plan.data_parallel == 1
        return (own or shared) and not self.synchronised and plan.precision in ("fp32", "fp64")

    def _explain_dependence(
        self, plain: nn.Module, part: Batch, hooks: StepHooks, allowed: ComparisonLimits
    ) -> str | None:
        """Return why a test of a few samples makes `run_recombined` inconclusive, or None.

        Under tensor parallelism, modules with dropout are not tested, to save time: their step has
        to be computed again after the check.
        """
        splits = self._plan.tp > 1
        if splits and has_dropout(plain):
            return None
        with self._guard_forwards():
            return explain_dependence(plain, take_first(part, 2), hooks, allowed.cut, drops=splits)

    def _recombine(self, passes: Sequence[Batch], device: torch.device) -> list[Batch] | None:
        """Combine this rank's samples into other batches than the plan's. Collective.

        Returns None if that is impossible.
        """
        if self._plan.tp > 1:  # all ranks have the same samples
            return take_part(passes, self.pieces.place, self.pieces.ranks_per_share)
        if self._plan.pp == 1:
            return swap_samples(passes, device)
        turned = rotate_samples(passes, self._plan.pp_microbatches)
        if turned is None:
            return None
        mine = turned[self.pieces.place :: self.pieces.ranks_per_share]
        # The parts differ in size, because a gradient may also depend on the number of samples.
        return mine if self.pieces.place else [*cut(mine[0], 2), *mine[1:]]

    def release(self) -> None:
        self._copy, self._trained, self._settings = None, [], None

    @contextmanager
    def _fill_copy(
        self, layout: Layout, holders: Sequence[ModuleDtypes]
    ) -> Iterator[tuple[nn.Module, PlainSums]]:
        """Fill the copied module with the trained values; yield it and empty results. Collective.

        Generators and buffers of the trained module are restored afterwards.
        """
        plain, device = self._copy, layout._device()
        assert plain is not None
        with (
            preserve_state(layout.objective, device),
            fill_copy(plain, layout, self._plan, self._ranks, holders) as names,
            redirect_references(self._trained, plain),
        ):
            yield plain, PlainSums(names, model_of(plain), device)

    def _apply_checkpointing(self, model: nn.Module) -> None:
        """Apply activation checkpointing to the copy, to save memory; later calls do nothing."""
        if not self._recomputes:
            named = (
                None if self._blocks is None else named_blocks(model, flatten_blocks(self._blocks))
            )
            apply_checkpointing(model, "full", named)
            self._recomputes = True

    def _choose_first_piece(
        self, found: PlainSums, state: KeptState, in_order: bool, state_piece: Batch | None
    ) -> FirstPiece | None:
        """Return this rank's first micro-batch, to be compared with its parts.

        If the search for state used only `state_piece`, a part of the micro-batch, that part is
        compared. Of ranks with the same samples, the first compares its micro-batch with its
        halves. The others compare a half with its quarters, because halves with equal numbers of
        targets reveal nothing. `in_order`: the micro-batch's loss was computed after other
        micro-batches.
        """
        if found.first is None:
            return None
        piece, mean = found.first
        if self.pieces.place:
            if self.synchronised:  # ranks may run unequal numbers of forwards
                return None
            mean = None if in_order or samples_in(piece) % 4 == 0 else mean
        elif state_piece is not None and samples_in(state_piece) < samples_in(piece):
            piece, mean = state_piece, None
        two = [] if state.is_any or state.writes else found.two
        halves, buffers = state.halves, found.buffers
        return FirstPiece(piece, mean, halves, found.drops, buffers, two, self._affected)

    def _find_unscaled(
        self, plain: nn.Module, found: PlainSums, hooks: StepHooks, allowed: ComparisonLimits
    ) -> Sequence[str]:
        if found.first is None or not (self._has_hooks or found.user_backward):
            return ()
        return find_unscaled_gradients(
            plain, found.first[0], found.names, found.projection, found.divert, hooks,
            found.drops, self._plan.strategy, allowed,
        )  # fmt: skip

    def _compare_ranks(self, plain: nn.Module, found: PlainSums, hooks: StepHooks) -> float:
        """Return how much the loss changes with the rank; 0 if user code does not read the rank.

        Not tested if the module communicates, because a rank cannot act as another one in
        collectives.
        """
        if found.first is None or not self._asks_for_rank or self.synchronised:
            return 0.0
        return compare_ranks(plain, found.first[0], hooks, found.drops, self._plan.strategy)

    def _find_state(
        self,
        plain: nn.Module,
        piece: Batch | None,
        passes: Sequence[Batch],
        hooks: StepHooks,
        drops: bool = True,
    ) -> KeptState:
        # A forward on only some ranks would wait for the other ranks' batch statistics.
        if self.synchronised:
            return KeptState(writes=True)
        other = self.pieces.find_other(piece, passes, next(plain.parameters()).device)
        if piece is None:
            return KeptState()
        share = self.pieces.share or 0, self._plan.data_parallel
        with self._guard_forwards():
            return find_kept_state(
                plain, piece, hooks, alone=False, other=other,
                drops=drops, in_halves=self.pieces.is_cut(passes), share=share,
            )  # fmt: skip

    def _guard_forwards(self) -> AbstractContextManager[object]:
        """Return a context that refuses collectives if only some ranks run forwards in it."""
        alone = self.pieces.ranks_per_share == 1
        return nullcontext() if alone else NoCollectives(self._plan.strategy)

    def _run_pieces(
        self,
        plain: nn.Module,
        found: PlainSums,
        pieces: Iterable[tuple[int, Batch, bool]],
        hooks: StepHooks,
        draws: PlainDraws | None,
        watch: MovedParameters,
        keeps: bool = False,
    ) -> str | None:
        """Run micro-batches and add up their results; return the reason if this fails, else None.

        `pieces` is the result of `Pieces.select`. `draws` makes ranks with the same samples draw
        the same random numbers as the trained module. Dropout is disabled unless
        `self.draws_alike`. `watch` observes forwards only: in a backward, it would keep gradients
        alive, and each would be copied. `keeps`: record whether attributes change.
        """
        model, device = model_of(plain), found.sums.device
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                add_hooks(parameter, *self._hooks.get(name, ((), ())))
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: found.take(name, p)
                )
        draws = draws or PlainDraws([None], {}, device)
        try:
            if self._plan.recomputes or self._plan.offload_activations != "none":
                self._apply_checkpointing(model)
            dropping = nullcontext() if self.draws_alike else without_dropout(plain)
            follow = draws.follow(model)
            with preserve_state(plain, device), follow, dropping as nothing, torch.enable_grad():
                versions = buffer_versions(model)
                before = find_unsaved_state(plain) if keeps else None
                for number, piece, mine in pieces:
                    draws.begin(number)
                    compute = torch.set_grad_enabled(mine)
                    found.in_forward = True
                    with watch, hooks.cast(), compute, self._guard_forwards():
                        loss_sum, count, *_ = plain(piece)
                    found.in_forward = False
                    if mine:
                        _run_backward(model, found, number, piece, loss_sum, count, versions)
                draws.note()
                found.drops = draws.drew or (nothing is not None and nothing.would_drop)
                found.keeps = keeps and find_unsaved_state(plain) != before
            found.add_up()
        except Exception as error:
            return describe_failure(error)
        if draws.drew and not self.draws_alike:
            return "the module draws random numbers other than for dropout"
        if draws.drew and found.first is not None:  # its loss depends on dropout
            found.first, found.two = (found.first[0], None), []
        return None


def _copy_loss_buffers(objective: nn.Module) -> dict[int, Tensor]:
    """Return copies of the buffers that belong to the loss and not to the model, by `id`.

    Ranks do not send these buffers to each other.
    """
    of_model = {id(buffer) for buffer in model_of(objective).buffers()}
    own = (buffer for buffer in objective.buffers() if id(buffer) not in of_model)
    return {id(buffer): buffer.detach().clone() for buffer in own}


def _run_backward(
    model: nn.Module,
    found: PlainSums,
    number: int,
    piece: Batch,
    loss_sum: Tensor,
    count: Tensor,
    versions: Mapping[str, Any],
) -> None:
    """Run a micro-batch's backward, and add its results to `found`.

    Also record the buffers that the first micro-batch changes. `versions`: the buffers' versions
    before the first micro-batch.
    """
    first, moved = found.first is None, _find_changed_buffers(model, versions)
    if not number:
        found.buffers = moved
        now = buffer_versions(model)
        found.moved_buffers = {name for name in now if versions.get(name) != now[name]}
    begun = buffer_versions(model)
    found.user_backward |= first and has_user_backward(loss_sum)
    loss_sum.backward()
    found.count(number, piece, loss_sum.detach(), count)
    if first:
        back = _find_changed_buffers(model, begun)
        found.moved_back = {name: b for name, b in back.items() if name not in moved}


def _copy_batches(plain: nn.Module, batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
    return tuple(map(copy_batch, batches))


def _take_part(piece: Batch | None, drops: bool) -> Batch | None:
    """Return a part of a micro-batch for a comparison without dropout.

    `drops`: the module uses dropout. Then the loss of the whole micro-batch without dropout is not
    known, so a part is enough: a half or a quarter of at least four samples. Without dropout, or if
    the number of samples is not a multiple of 8, the micro-batch is returned unchanged.
    """
    if piece is None or not drops or samples_in(piece) % 8:
        return piece
    return cut(piece, 2 if samples_in(piece) % 16 else 4)[0]


def _find_changed_buffers(model: nn.Module, versions: Mapping[str, Any]) -> dict[str, Tensor]:
    now = buffer_versions(model)
    moved = {n: b for n, b in model.named_buffers() if versions.get(n) != now[n]}
    saved = model.state_dict(keep_vars=True) if moved else {}
    return {name: buffer.detach().clone() for name, buffer in moved.items() if name in saved}
