"""The plain module's forward and backward of a first global batch, before any step.

A copy of the user's module, taken before it is laid out, runs on the same samples, cut as the plan
cuts them; every rank takes a part of the pieces. What it draws at random is what the layout will
draw, where each rank has samples of its own, and of a pipeline's stages (stage_draws.py); else
nothing is dropped. Generators, buffers, and weights that the forward changes are as they were
afterwards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from outpace.nn.fingerprint import fingerprint
from outpace.nn.model_options import apply_checkpointing
from outpace.nn.spread import is_spread
from outpace.parallel.batches import (
    concatenate,
    copy_batch,
    cut,
    explain_lengths,
    move_batch,
    pack,
    samples_in,
    take_apart,
    take_first,
    unpack,
)
from outpace.parallel.batchnorm import SynchronisedBatchNorm
from outpace.parallel.blocks import Blocks, flat, named_blocks
from outpace.parallel.gradient_hooks import accumulation_hooks, add_hooks, gradient_hooks
from outpace.parallel.layout import Batch, Layout, StepHooks
from outpace.parallel.parity.comparison import ComparisonLimits, Projection, Taker
from outpace.parallel.parity.cut_difference import (
    CutDifference,
    FirstPiece,
    compare_cut,
    find_read_buffers,
)
from outpace.parallel.parity.kept_state import KeptState, Totals, find_kept_state
from outpace.parallel.parity.loss_scale import find_unscaled_gradients, has_user_backward
from outpace.parallel.parity.mixed_samples import MixedDifference, MixedSamples
from outpace.parallel.parity.module_state import (
    buffer_versions,
    hidden_parameters,
    parameter_versions,
    preserve_state,
)
from outpace.parallel.parity.moved_parameters import MovedParameters, keep_values
from outpace.parallel.parity.names_in_use import NamesInUse
from outpace.parallel.parity.other_samples import (
    explain_dependence,
    find_unsaved_state,
    swap_samples,
    turn_samples,
)
from outpace.parallel.parity.plain_copy import (
    ModuleDtypes,
    fill_copy,
    model_of,
    redirect_references,
)
from outpace.parallel.parity.rank_dependence import compare_ranks, may_ask_for_rank
from outpace.parallel.parity.user_collectives import COLLECTIVE, CollectiveError, NoCollectives
from outpace.parallel.plain import has_dropout, without_dropout
from outpace.parallel.stage_draws import PlainDraws
from outpace.parallel.tensors import all_parameters, meta_copy
from outpace.records.errors import BadInputError, first_names
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks

_FAILS = "a copy of the module fails"


@dataclass(frozen=True)
class PlainFailure:
    """Reason why there are no sums.

    `by_cut`: the module works where the batch is not cut. Training may not start then.
    """

    reason: str
    by_cut: bool = False


@dataclass(frozen=True)
class PlainReport:
    """Report of a rank to the others on its plain pass.

    `cut`: differences between a batch and its halves. The next fields are names of parameters:
    `made` by the forward; `written` by it, and of these, those `spread` over ranks, written
    `by_samples`, or written `unseen` by the observed operators. `prints` are fingerprints of the
    `written` ones, and `buffer_prints` of the saved buffers that the first piece changed; None
    without samples. `moved_back`: buffers that a backward changes and on which the loss depends.
    `unscaled`: parameters whose gradients do not grow with the loss. `by_rank`: by how much the
    loss changes with the rank. `hidden`: parameters that the forward writes to, of modules in plain
    attributes.
    """

    cut: CutDifference
    state: KeptState
    made: Sequence[str]
    written: Sequence[str]
    spread: Sequence[str]
    by_samples: Sequence[str]
    unseen: Sequence[str]
    prints: Mapping[str, int | None] | None
    buffer_prints: Mapping[str, int | None] | None
    moved_back: Sequence[str]
    unscaled: Sequence[str]
    by_rank: float
    hidden: Sequence[str]


class PlainPass:
    """A copy of the structure of an objective that has not been laid out yet.

    `blocks` are the names of the parts that recompute, if the user gives them.
    """

    def __init__(
        self, objective: nn.Module, plan: Plan, ranks: Ranks, blocks: Blocks | None = None
    ) -> None:
        self._plan, self._ranks, self._blocks = plan, ranks, blocks
        self.left_out: str | None = None
        self.synchronised = any(isinstance(m, SynchronisedBatchNorm) for m in objective.modules())
        self._recomputes = False
        self.draws_alike = False  # whether what is drawn is what the layout will draw
        self._copy: nn.Module | None = None
        self._trained: list[nn.Module] = []
        self._hooks = {
            name: (gradient_hooks(parameter), accumulation_hooks(parameter))
            for name, parameter in model_of(objective).named_parameters()
        }
        in_use = NamesInUse(objective, getattr(objective, "loss", None))
        hooked = any(gradient for gradient, _ in self._hooks.values())
        self._has_hooks = hooked or in_use.mentions("register_hook")  # on activations
        self._asks_for_rank = may_ask_for_rank(in_use)
        try:
            self._copy = meta_copy(objective, _buffers_of_loss(objective))
            self._copy.register_forward_pre_hook(_give_copies)
            self._trained = list(objective.modules())
        except Exception as error:
            self.left_out = f"the module cannot be copied ({type(error).__name__}: {error})"

    @property
    def model(self) -> nn.Module:
        """The copy of the user's module, until it has run."""
        assert self._copy is not None
        return model_of(self._copy)

    @property
    def ranks_per_share(self) -> int:
        """Number of ranks that have the same samples."""
        return (self._plan.world_size - self._plan.servers) // self._plan.data_parallel

    def run(
        self,
        layout: Layout,
        passes: Sequence[Batch],
        hooks: StepHooks,
        holders: Sequence[ModuleDtypes],
        allowed: ComparisonLimits,
    ) -> "PlainSums | PlainFailure":
        """Return the sums of this rank's part, or the reason why some rank has none. Collective.

        `holders`: which rank holds what. `allowed`: the tolerances between a batch and its parts.
        Call it once, because it gives up the copy.
        """
        device = layout._device()
        draws = layout.plain_draws()
        self.draws_alike = self.ranks_per_share == 1 or draws is not None
        if self._plan.data_rank(self._ranks.rank) is None:
            passes = []
        state = None
        with self._fill(layout, holders) as (plain, found):
            self.release()
            model = model_of(plain)
            looked_at: Batch | None = None
            if self.ranks_per_share > 1:  # of which each has a part of the pieces
                looked_at = _reduce(self._first_piece(passes), has_dropout(plain))
                state = self._find_state(plain, looked_at, passes, hooks)
            in_order = state is not None and self._needs_order(state)
            watch = MovedParameters(model.named_parameters())
            pieces = self._pieces(passes, in_order)
            held = hidden_parameters(model)
            versions = parameter_versions(held)
            reason = self._run_pieces(plain, found, pieces, hooks, draws, watch)
            hidden = [n for n, v in parameter_versions(held).items() if versions[n] != v]
            self.synchronised |= watch.communicates  # by collectives of the user's own
            unseen = watch.written_unseen()
            found.moved = watch.put_back()
            found.written = watch.written
            reason = gather_first(reason)
            if reason is not None:
                return self._explain_failure(plain, reason, passes, hooks)
            if state is None:
                looked_at = _reduce(None if found.first is None else found.first[0], found.drops)
                state = self._find_state(plain, looked_at, passes, hooks, found.drops)
            first = self._first_of(found, state, in_order, looked_at)
            asked_cut = passes, hooks, self.synchronised, allowed.cut
            apart = compare_cut(plain, self._plan, first, *asked_cut)
            moved_back: Sequence[str] = ()
            if found.moved_back and found.first is not None and not self.synchronised:
                asked = plain, hooks, found.drops, found.moved_back, found.first[0]
                moved_back = find_read_buffers(*asked)
            made = [name for name, _ in model.named_parameters() if name not in found.names]
            unscaled = self._find_unscaled(plain, found, hooks, allowed)
            by_rank = self._compare_ranks(plain, found, hooks)
            # What is told or refused otherwise may be of the same cause.
            other_cause = bool(
                self.synchronised or state.is_any or made or unseen or found.written
                or found.moved_back or apart.read or apart.loss > allowed.cut
            )  # fmt: skip
            mixed = MixedSamples(
                plain, found.names, found.projection, found.divert, hooks, found.drops,
                self._plan.strategy, device,
            )  # fmt: skip
            found.mixed = mixed.compare(*self._choose_piece(passes), other_cause, allowed)
        named = dict(layout.named_parameters())
        prints = {name: fingerprint(values) for name, values in found.moved.items()}
        buffer_prints = {name: fingerprint(values) for name, values in found.buffers.items()}
        samples = self._plan.data_rank(self._ranks.rank) is not None
        report = PlainReport(
            apart, state, made, sorted(found.written),
            [name for name in found.written if name in named and is_spread(named[name])],
            sorted(watch.written_by_samples), unseen,
            prints if samples else None, buffer_prints if samples else None, moved_back, unscaled,
            by_rank, hidden,
        )  # fmt: skip
        said: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(said, report)
        found.reports = said
        return found

    def run_apart(
        self,
        layout: Layout,
        passes: Sequence[Batch],
        hooks: StepHooks,
        holders: Sequence[ModuleDtypes],
        allowed: ComparisonLimits,
    ) -> "PlainSums | None":
        """Return the sums of this rank's part of all samples, combined otherwise. Collective.

        If the layout, which runs whole micro-batches, computes the same, then samples do not affect
        each other, nor do previous calls. None if samples cannot be separated, if a few of them
        show that a forward draws or changes something or that they affect each other (by more than
        `allowed`), or if a forward of the parts changes something.
        """
        if not self._recombines:
            return None
        parts = self._recombine(passes, layout._device())
        reason = None if parts else "samples cannot be combined otherwise"
        if gather_first(reason) is not None or parts is None:
            return None
        with self._fill(layout, holders) as (plain, found):
            model = model_of(plain)
            reason = self._explain_dependence(plain, parts[0], hooks, allowed)
            if gather_first(reason) is not None:
                return None
            watch = MovedParameters(model.named_parameters())
            pieces = [(number, part, True) for number, part in enumerate(parts)]
            reason = self._run_pieces(plain, found, pieces, hooks, None, watch, keeps=True)
            changed = any((
                watch.written_unseen(), watch.put_back(), watch.written,
                found.buffers, found.moved_back, found.keeps, found.ran_backward,
                self._find_unscaled(plain, found, hooks, allowed),
            ))  # fmt: skip
            made = len(all_parameters(model)) != len(found.names)
        if changed or made or watch.communicates:
            reason = reason or "forwards change what may matter"
        return found if gather_first(reason) is None else None

    @property
    def _recombines(self) -> bool:
        """Return whether the plain pass may combine samples otherwise than the plan does.

        In 16 bits, parts round otherwise by more than most strategies may; and what is dropped at
        random is the layout's in the same batches alone.
        """
        plan = self._plan
        if plan.tp > 1:
            return True
        if has_dropout(self.model) or self._asks_for_rank:
            return False
        own = self.ranks_per_share == 1 and not plan.servers and plan.data_parallel > 1
        shared = plan.pp > 1 and plan.data_parallel == 1
        return (own or shared) and not self.synchronised and plan.precision in ("fp32", "fp64")

    def _explain_dependence(
        self, plain: nn.Module, part: Batch, hooks: StepHooks, allowed: ComparisonLimits
    ) -> str | None:
        """Return why a pass over other batches would show nothing, by few samples; None if not.

        Not asked where the layout's own pass is not the step's, which leaves no time for it.
        """
        splits = self._plan.tp > 1
        if splits and has_dropout(plain):
            return None
        with self._guard_forwards():
            return explain_dependence(plain, take_first(part, 2), hooks, allowed.cut, drops=splits)

    def _recombine(self, passes: Sequence[Batch], device: torch.device) -> list[Batch] | None:
        """Return this rank's part of all samples in other batches than the plan's. Collective.

        None if that cannot be done.
        """
        if self._plan.tp > 1:  # all ranks have the same samples
            return take_apart(passes, self._place, self.ranks_per_share)
        if self._plan.pp == 1:
            return swap_samples(passes, device)
        turned = turn_samples(passes, self._plan.pp_microbatches)
        if turned is None:
            return None
        mine = turned[self._place :: self.ranks_per_share]
        # A gradient may depend on the number of samples, too.
        return mine if self._place else [*cut(mine[0], 2), *mine[1:]]

    def release(self) -> None:
        self._copy, self._trained = None, []

    @contextmanager
    def _fill(
        self, layout: Layout, holders: Sequence[ModuleDtypes]
    ) -> Iterator[tuple[nn.Module, "PlainSums"]]:
        """Give the copy the layout's values; yield it and empty sums. Collective.

        Generators and buffers are as they were afterwards.
        """
        plain, device = self._copy, layout._device()
        assert plain is not None
        with (
            preserve_state(layout.objective, device),
            fill_copy(plain, layout, self._plan, self._ranks, holders) as names,
            redirect_references(self._trained, plain),
        ):
            yield plain, PlainSums(names, model_of(plain), device)

    def _let_recompute(self, model: nn.Module) -> None:
        """Make the copy recompute like the run, which has no memory for more. Called once."""
        if not self._recomputes:
            named = None if self._blocks is None else named_blocks(model, flat(self._blocks))
            apply_checkpointing(model, "full", named)
            self._recomputes = True

    def _first_of(
        self, found: "PlainSums", state: KeptState, in_order: bool, looked_at: Batch | None
    ) -> FirstPiece | None:
        """Return this rank's first piece, in the form for comparing it with its parts.

        If only a part of it was `looked_at` for state, that is compared.

        Among ranks with the same samples, all but the first compare half of theirs with quarters:
        halves may happen to have equally many targets, and then show nothing. `in_order`: their
        loss is computed after other pieces.
        """
        if found.first is None:
            return None
        piece, mean = found.first
        if self._place:
            if self.synchronised:  # ranks may be unequal in number of forwards
                return None
            mean = None if in_order or samples_in(piece) % 4 == 0 else mean
        elif looked_at is not None and samples_in(looked_at) < samples_in(piece):
            piece, mean = looked_at, None
        two = [] if state.is_any or state.writes else found.two
        return FirstPiece(piece, mean, state.halves, found.drops, found.buffers, two)

    def _choose_piece(self, passes: Sequence[Batch]) -> tuple[Batch | None, int]:
        """Return the micro-batch from which this rank gives samples, and its index among ranks.

        None if the plan does not cut, or if others give some of the same. If all ranks have the
        same samples, they use different micro-batches.
        """
        share = self._plan.data_rank(self._ranks.rank)
        if share is None or not passes or not self._is_cut(passes):
            return None, 0
        if self._plan.data_parallel > 1:
            return self._first_piece(passes), share
        parts = self._plan.pp_microbatches
        number = self._place * len(passes) * parts // self.ranks_per_share
        return cut(passes[number // parts], parts)[number % parts], self._place

    def _first_piece(self, passes: Sequence[Batch]) -> Batch | None:
        """Return the first micro-batch, on the rank that runs it."""
        if not passes or self._place:
            return None
        return cut(passes[0], self._plan.pp_microbatches)[0]

    @property
    def _place(self) -> int:
        """Return this rank's index among those with the same samples."""
        if self.ranks_per_share == 1:
            return 0
        rank, plan = self._ranks.rank, self._plan
        return rank % plan.tp if plan.tp > 1 else rank // (plan.world_size // plan.pp)

    def _find_unscaled(
        self, plain: nn.Module, found: "PlainSums", hooks: StepHooks, allowed: ComparisonLimits
    ) -> Sequence[str]:
        """Return parameters whose gradients do not grow with the loss, if the user's code may."""
        if found.first is None or not (self._has_hooks or found.user_backward):
            return ()
        return find_unscaled_gradients(
            plain, found.first[0], found.names, found.projection, found.divert, hooks,
            found.drops, self._plan.strategy, allowed,
        )  # fmt: skip

    def _compare_ranks(self, plain: nn.Module, found: "PlainSums", hooks: StepHooks) -> float:
        """Return by how much the loss changes with the rank, where the user's code asks for it.

        A rank that acts as another cannot take its place in collectives of the user's own.
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
        # A forward of some ranks alone would wait for the others' batch statistics.
        if self.synchronised:
            return KeptState(writes=True)
        other = self._find_other(piece, passes, next(plain.parameters()).device)
        if piece is None:
            return KeptState()
        share = self._plan.data_rank(self._ranks.rank) or 0, self._plan.data_parallel
        with self._guard_forwards():
            return find_kept_state(
                plain, piece, hooks, alone=False, other=other,
                drops=drops, in_halves=self._is_cut(passes), share=share,
            )  # fmt: skip

    def _guard_forwards(self) -> AbstractContextManager[object]:
        """Return the context for forwards that not all ranks run at once."""
        alone = self.ranks_per_share == 1
        return nullcontext() if alone else NoCollectives(self._plan.strategy)

    def _is_cut(self, passes: Sequence[Batch]) -> bool:
        """Return whether ranks or micro-batches cut the batch."""
        return self._plan.data_parallel * self._plan.pp_microbatches * len(passes) > 1

    def _needs_order(self, state: KeptState) -> bool:
        """Return whether a piece needs the previous ones, as some rank has found. Collective.

        This is the case for buffers, counters, or generators of the module's own.
        """
        said: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(said, state.is_any or state.writes)
        return any(said)

    def _find_other(
        self, piece: Batch | None, passes: Sequence[Batch], device: torch.device
    ) -> Batch | None:
        """Return samples outside of a rank's first piece: from its next one, or from another rank.

        Two other ranks send theirs if the piece is a single sample. Collective.
        """
        mine = self._plan.data_rank(self._ranks.rank)
        sends = piece is not None and samples_in(piece) == 1 and mine in (0, 1)
        sent = pack(piece) if sends else None
        said: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(said, (mine, sent))
        if self._plan.pp_microbatches > 1 and passes:
            return cut(passes[0], self._plan.pp_microbatches)[1]
        if len(passes) > 1:
            return passes[1]
        theirs = next((data for rank, data in said if rank != mine and data is not None), None)
        return None if theirs is None else unpack(theirs, device)

    def _run_pieces(
        self,
        plain: nn.Module,
        found: "PlainSums",
        pieces: Iterable[tuple[int, Batch, bool]],
        hooks: StepHooks,
        draws: PlainDraws | None,
        watch: MovedParameters,
        keeps: bool = False,
    ) -> str | None:
        """Add up this rank's part of the `pieces` from `_pieces`; return why not, or None.

        `draws` makes ranks with the same samples draw what the layout will; without it, dropout is
        disabled. `watch` observes forwards: in a backward it would keep gradients alive, so that
        each is copied. `keeps`: record whether attributes change.
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
                self._let_recompute(model)
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
            return _failure(error)
        if draws.drew and not self.draws_alike:
            return "the module draws random numbers, dropout apart"
        if draws.drew and found.first is not None:  # what dropping makes of it
            found.first, found.two = (found.first[0], None), []
        return None

    def _explain_failure(
        self, plain: nn.Module, reason: str, passes: Sequence[Batch], hooks: StepHooks
    ) -> PlainFailure:
        """Check whether the module fails because a batch is cut, or not cut alike. Collective.

        That is the case if the copy runs on the whole batch. If this cannot be tried, it may be.
        """
        if reason.startswith(COLLECTIVE):
            return PlainFailure(reason, by_cut=True)
        lengths = gather_first((explain_lengths(passes[0]) or None) if passes else None)
        if not reason.startswith(_FAILS):
            return PlainFailure(reason)
        whole = self._gather_whole(passes)
        # Ranks may be unequal in number of forwards, for which batch statistics would wait.
        asked = bool(passes) and whole is not None and not self.synchronised
        said: list[bool | None] = [None] * self._ranks.world_size
        dist.all_gather_object(said, _runs(plain, whole, hooks) if asked else None)
        known = {one for one in said if one is not None}
        if known == {False} or (lengths is None and known != {True}):
            return PlainFailure(reason)
        if lengths is None:
            lengths = (
                "it runs on the whole batch, not on a micro-batch of it, so that something in it "
                "is of a fixed number of samples. Let it take any number of samples"
            )
        return PlainFailure(f"{reason}: {lengths.removesuffix('.')}", by_cut=known == {True})

    def _gather_whole(self, passes: Sequence[Batch]) -> Batch | None:
        """Return the global batch on the CPU; None if it cannot be concatenated. Collective."""
        sent = [pack(batch) for batch in passes]
        said: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(said, (self._plan.data_rank(self._ranks.rank), sent))
        shares = {rank: data for rank, data in said if rank is not None}
        packed = [one for rank in sorted(shares) for one in shares[rank]]
        if None in packed:
            return None
        parts = [unpack(one, torch.device("cpu")) for one in packed]
        whole = parts[0]
        for part in parts[1:]:
            whole = None if whole is None else concatenate(whole, part)
        return whole

    def _pieces(self, passes: Sequence[Batch], in_order: bool) -> Iterator[tuple[int, Batch, bool]]:
        """Return this rank's micro-batches as one process would take them: number, batch and True.

        `in_order`: include those of ranks with the same samples, with False.
        """
        plan, number = self._plan, 0
        for batch in passes:
            parts = cut(batch, plan.pp_microbatches) if plan.pp_microbatches > 1 else [batch]
            for part in parts:
                mine = number % self.ranks_per_share == self._place
                if mine or in_order:
                    yield number, part, mine
                number += 1


def _buffers_of_loss(objective: nn.Module) -> dict[int, Tensor]:
    """Return copies of buffers that no part of the model has, by `id`: no rank sends them."""
    of_model = {id(buffer) for buffer in model_of(objective).buffers()}
    own = (buffer for buffer in objective.buffers() if id(buffer) not in of_model)
    return {id(buffer): buffer.detach().clone() for buffer in own}


def _run_backward(
    model: nn.Module,
    found: "PlainSums",
    number: int,
    piece: Batch,
    loss_sum: Tensor,
    count: Tensor,
    versions: Mapping[str, Any],
) -> None:
    """Run a piece's backward and count it; record the buffers that it changes.

    `versions` are those of buffers before all pieces.
    """
    first, moved = found.first is None, _find_moved(model, versions)
    if not number:
        found.buffers = moved
    begun = buffer_versions(model)
    found.user_backward |= first and has_user_backward(loss_sum)
    loss_sum.backward()
    found.count(number, piece, loss_sum.detach(), count)
    if first:
        back = _find_moved(model, begun)
        found.moved_back = {name: b for name, b in back.items() if name not in moved}


class PlainSums:
    """Results of the plain module on this rank.

    They are sums of loss, count and sizes, then gradients' inner products, then their numbers.
    """

    def __init__(self, names: Sequence[str], model: nn.Module, device: torch.device) -> None:
        self.names = list(names)
        largest = max((p.numel() for p in all_parameters(model)), default=1)
        self.projection = Projection(largest, device)
        self.sums = torch.zeros(3 + 2 * len(names), dtype=torch.float64, device=device)
        # This rank's first piece, and its mean loss if it can be had again.
        self.first: tuple[Batch, float | None] | None = None
        self.two: list[tuple[Batch, Totals]] = []  # its first two, and their sums and counts
        self.moved: dict[str, Tensor] = {}  # what parameters became by the forward itself
        self.written: set[str] = set()  # also where the values have stayed as they were
        self.buffers: dict[str, Tensor] = {}  # saved ones that the first piece has moved
        self.moved_back: dict[str, Tensor] = {}  # saved ones that its backward alone has moved
        self.drops = True  # whether forwards draw numbers, or would but for dropout that is off
        self.user_backward = False  # whether a Function in Python is in the first piece's graph
        self.keeps = False  # whether forwards change attributes, if that was asked
        # Whether a forward runs now, and whether one has run a backward of its own.
        self.in_forward = self.ran_backward = False
        self.reports: list[PlainReport] = []  # of all ranks
        self.mixed = MixedDifference()  # as all ranks know it
        self._taker: Taker | None = None
        self._places = {name: number for number, name in enumerate(names)}
        self._products: list[Tensor | None] = [None] * len(names)
        self._gradients = [0] * len(names)

    @property
    def states(self) -> list[KeptState]:
        """Return the states in attributes that ranks have found."""
        return [report.state for report in self.reports if report.state.is_any]

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """Project a gradient of a piece, and give it up.

        No mode watches what is the look's own: of small gradients that would take as long again.
        """
        if parameter.grad is None:
            return  # which a user's hook has done
        self.ran_backward |= self.in_forward
        with _disable_current_modes():
            if self._taker is not None:
                self._taker(name, parameter.grad)
            else:
                self._add(self._places[name], self.projection.project(parameter.grad))
            parameter.grad = None

    def _add(self, place: int, product: Tensor) -> None:
        before = self._products[place]
        self._products[place] = product if before is None else before + product
        self._gradients[place] += 1

    def divert(self, taker: Taker | None) -> None:
        """Pass gradients to a function instead of adding them to the sums; None ends that."""
        self._taker = taker

    def add_up(self) -> None:
        """Add the values of all pieces to the sums."""
        for place, product in enumerate(self._products):
            if product is not None:
                self.sums[3 + place] = product
        made = torch.tensor(self._gradients, dtype=torch.float64, device=self.sums.device)
        self.sums[3 + len(self.names) :] = made

    def count(self, number: int, piece: Batch, loss_sum: Tensor, count: Tensor) -> None:
        """Count a finished piece."""
        totals = torch.stack((loss_sum.double(), count.double(), loss_sum.abs().double()))
        self.sums[:3] += totals
        if self.first is None:
            self.first = piece, float(totals[0] / totals[1])
        if len(self.two) < 2:
            self.two.append((piece, (float(totals[0]), float(totals[1]))))


def _give_copies(plain: nn.Module, batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """Give a forward its own batch, which it may change; others are to see it as it was."""
    return tuple(map(copy_batch, batches))


def _reduce(piece: Batch | None, drops: bool) -> Batch | None:
    """Return half of a piece whose loss is not known without dropout, if that is enough samples."""
    if piece is None or not drops or samples_in(piece) % 8:
        return piece
    return cut(piece, 2)[0]


def _find_moved(model: nn.Module, versions: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values of saved buffers that have other versions."""
    now = buffer_versions(model)
    moved = {n: b for n, b in model.named_buffers() if versions.get(n) != now[n]}
    saved = model.state_dict(keep_vars=True) if moved else {}
    return {name: buffer.detach().clone() for name, buffer in moved.items() if name in saved}


def _runs(plain: nn.Module, batch: Batch, hooks: StepHooks) -> bool | None:
    """Return whether a forward over a batch completes; None if there is not enough memory."""
    model = model_of(plain)
    device = next(model.parameters()).device
    batch = move_batch(batch, device)
    try:
        with (
            preserve_state(plain, device),
            keep_values(model.named_parameters()),
            torch.no_grad(),
            hooks.cast(),
        ):
            plain(batch)
    except torch.OutOfMemoryError:
        return None
    except Exception:
        return False
    return True


def _failure(error: Exception) -> str:
    """Return why the plain forward and backward did not complete."""
    if isinstance(error, CollectiveError) or _is_advice(error):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "there is no memory for one process' forward and backward"
    said = str(error).strip().splitlines() or [""]
    return f"{_FAILS} ({type(error).__name__}: {said[0][:200]})"


def _is_advice(error: Exception) -> bool:
    """Return whether an error tells the user what to do, and is no error of a user's code."""
    return isinstance(error, BadInputError) and error.__cause__ is None


def gather_first(reason: str | None) -> str | None:
    """Return the first reason that any rank has. Collective."""
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, reason)
    return next((one for one in said if one is not None), None)


def explain_new_parameters(names: Sequence[str]) -> str:
    """Return a message for a forward that creates parameters, which no optimizer updates."""
    return (
        f"the forward makes {first_names(names)}, which {'is' if len(names) == 1 else 'are'} not "
        "there before, so that no optimizer would step it. Make it in __init__, or use the module "
        "after a batch has run through it once."
    )
