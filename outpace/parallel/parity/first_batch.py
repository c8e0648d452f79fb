"""Check of the first global batch: compare a strategy with the plain module before any step.

A copy of the user's module, made before it is laid out, runs forward and backward on the same
samples, split as in the plan; every rank runs some of the micro-batches. Then the layout runs on
the same samples. The check compares the sums of losses, a projection of each parameter's gradient
(comparison.py), and what the forward itself writes to parameters. Generators, buffers, and weights
that the forward changes are restored. If the plain module and the layout use the same dropout
masks, the layout's pass becomes the first step and is not repeated.

Where possible, the plain pass combines samples differently from the plan
(`PlainPass.run_recombined`). If its results still equal the layout's, samples do not affect each
other, and no further forwards are needed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outpace.nn.compiler_exclusion import has_compiled_parts, run_eagerly
from outpace.nn.dtensor import is_spread
from outpace.nn.fingerprint import fingerprint
from outpace.parallel.batches import BatchCopies
from outpace.parallel.blocks import Blocks
from outpace.parallel.layout import Batch, Layout, StepHooks
from outpace.parallel.parity.build_difference import explain_builds
from outpace.parallel.parity.comparison import (
    SINGLE,
    ComparisonLimits,
    FoundDifference,
    LayoutComparison,
    choose_tolerance,
    halves_tolerance,
    parts_tolerance,
)
from outpace.parallel.parity.counted_buffers import (
    compare_ranks_buffers,
    explain_counted_attributes,
    explain_counted_buffers,
)
from outpace.parallel.parity.cut_cause import (
    PLACED,
    CutCause,
    batchnorm_cure,
    common_cause,
    explain_cut,
    synchronised_cure,
)
from outpace.parallel.parity.cut_difference import explain_counts
from outpace.parallel.parity.first_batch_messages import (
    BY_THEMSELVES,
    SWAPPED,
    WAYS_OUT,
    explain_draws,
    explain_gradient_cut,
    explain_hidden,
    explain_moved_back,
    explain_moved_buffers,
    explain_new_parameters,
    explain_repeated_writes,
)
from outpace.parallel.parity.later_writes import LaterWrites
from outpace.parallel.parity.loss_scale import explain_backwards, explain_unscaled_gradients
from outpace.parallel.parity.module_state import preserve_state
from outpace.parallel.parity.moved_parameters import (
    NEEDED_BEFORE,
    MovedParameters,
    explain_lost_value,
    explain_writes,
    is_lost_value,
)
from outpace.parallel.parity.plain_copy import (
    ModuleDtypes,
    explain_lost_tensors,
    explain_size,
    held_tensors,
)
from outpace.parallel.parity.plain_failure import PlainFailure
from outpace.parallel.parity.plain_pass import PlainPass
from outpace.parallel.parity.plain_sums import PlainSums, sum_gradients
from outpace.parallel.parity.rank_dependence import explain_rank_dependence
from outpace.parallel.parity.split_messages import explain_split_failure
from outpace.parallel.parity.state_messages import (
    explain_kept_state,
    explain_reshaped,
    explain_state_apart,
    explain_state_as_cause,
)
from outpace.parallel.plain import random_state, without_dropout
from outpace.parallel.rank_objects import gather_objects
from outpace.parallel.refusals import has_other_cause
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Plan
from outpace.records.precisions import SCALED
from outpace.records.ranks import Ranks

Say = Callable[[str], None]
Run = Callable[[Sequence[Batch], StepHooks], Tensor]  # runs forward and backward of passes

_BY_SAMPLES = "each rank changes them by its own samples, so ranks would train different weights"
_UNSEEN = "it does so in the backward or in another thread, where outpace cannot restore the values"


class FirstBatch:
    """A one-time comparison of a layout with the user's module in a single process.

    It precedes the first step. Create this before the objective is laid out, because it copies the
    objective's structure. `say` receives warnings, on rank 0 only. `by_command`: messages refer to
    command-line flags instead of Python arguments. `blocks` names the blocks that recompute
    activations, if the user chose them. Set `resumed` if the run was resumed.
    """

    def __init__(
        self,
        objective: nn.Module,
        plan: Plan,
        ranks: Ranks,
        say: Say,
        by_command: bool,
        blocks: Blocks | None = None,
    ) -> None:
        self.resumed = False
        self._plan, self._ranks, self._by_command = plan, ranks, by_command
        self._say: Say = say if ranks.rank == 0 else lambda sentence: None
        self._plain = PlainPass(objective, plan, ranks, blocks)
        self._compiled = plan.compile

    def check(
        self,
        layout: Layout,
        passes: Sequence[Batch],
        hooks: StepHooks,
        run: Run | None = None,
        reuse: bool = True,
        ready: Callable[[], None] = lambda: None,
    ) -> Tensor | None:
        """Compare the layout with a single process on this rank's batches, `passes`. Collective.

        Raises BadInputError on all ranks if they differ. `run` computes the forward and backward of
        the first step; None means `layout.gradients`. `ready` is called before the layout runs.

        With `reuse`, the layout's pass becomes the first step where possible, which requires that
        the single process draws the same random numbers. Then this method returns the step's
        totals, and keeps the gradients, buffers and generators as the pass leaves them. Otherwise,
        it returns None and restores everything.
        """
        self._compiled = self._plan.compile or has_compiled_parts(layout.objective)
        with run_eagerly(self._compiled):
            return self._check(layout, passes, hooks, run, reuse, ready)

    def _check(
        self,
        layout: Layout,
        passes: Sequence[Batch],
        hooks: StepHooks,
        run: Run | None,
        reuse: bool,
        ready: Callable[[], None],
    ) -> Tensor | None:
        run = layout.gradients if run is None else run
        self._plain.follow_loop()
        reason = self._plain.left_out
        reason = reason or explain_size(self._plain.model, layout, self._plan, self._ranks)
        told = gather_objects((reason, held_tensors(layout)))
        holders: list[ModuleDtypes] = [held for _, held in told]
        reason = next((one for one, _ in told if one is not None), None)
        reason = reason or explain_lost_tensors(self._plain.model, holders)
        if reason is not None:
            self._say_not_compared(reason)
            return None
        allowed = choose_tolerance(self._plan, min(held.narrowest for held in holders))
        layout.learn_forms(passes[0] if passes else None, StepHooks(hooks.cast))
        for _, parameter in layout.named_parameters():
            parameter.grad = None
        parts = parts_tolerance(self._plan, allowed)
        asked = layout, passes, StepHooks(hooks.cast), holders
        apart = self._plain.run_recombined(*asked, parts)
        loss_apart = 0.0  # difference in loss between two combinations of the samples
        if apart is not None:
            ready()
            near = replace(allowed, loss=min(allowed.loss, parts.cut))
            wrong, totals = self._compare(apart, layout, passes, hooks, run, holders, near, reuse)
            if wrong is None:
                self._plain.release()
                return totals
            loss_apart = wrong.loss_apart
        found = self._plain.run(*asked, parts)
        if isinstance(found, PlainFailure):
            if found.by_cut:
                raise _shared_error(found.reason)
            self._say_not_compared(found.reason)
            return None
        self._require_reproducible_changes(found)
        self._require_same_loss(found)
        self._require_equal_state(found, allowed)
        ready()
        wrong, totals = self._compare(found, layout, passes, hooks, run, holders, allowed, reuse)
        if wrong is not None:
            what, cause = wrong.what, wrong.cause
            cause = explain_state_as_cause(found.states) or cause
            raise _shared_error(self._explain_wrong(what, cause))
        count = len(passes) * self._plan.pp_microbatches
        self._warn_of_differences(found, allowed, count, loss_apart)
        return totals

    def _compare(
        self,
        plain: PlainSums,
        layout: Layout,
        passes: Sequence[Batch],
        hooks: StepHooks,
        run: Run,
        holders: Sequence[ModuleDtypes],
        allowed: ComparisonLimits,
        reuse: bool,
    ) -> tuple[FoundDifference | None, Tensor | None]:
        """Run the layout; return its first difference from `plain`, and the totals. Collective.

        The totals are None if this pass does not become the first step. Raises BadInputError if the
        layout fails, or changes parameters differently from the plain module.
        """
        device = layout._device()
        watch = MovedParameters(layout.named_parameters())
        kept = False
        with preserve_state(layout.objective, device) as keep, watch.put_back_unless(lambda: kept):
            totals, again = self._run_watched(layout, passes, hooks, run, watch, plain)
            again = self._require_same_changes(plain, watch, layout, allowed, again)
            factor = self._gradient_factor(layout, hooks, device)
            sums = sum_gradients(layout, plain, holders, factor, self._ranks.world_size)
            schedule = SCHEDULES.get(self._plan.schedule)
            tp = self._plan.tp
            asked = plain.names, plain.sums, totals.to(device), sums, allowed, schedule, tp
            compared = LayoutComparison(*asked)
            wrong = compared.first_wrong()
            kept = wrong is None and reuse and not again and self._plan.precision not in SCALED
            if kept:
                keep()
            else:
                for _, parameter in layout.named_parameters():
                    parameter.grad = None
        if not kept:
            layout.discard_comparison()
        if wrong is None:
            ways_out = WAYS_OUT[self._by_command]
            LaterWrites(layout, self._plan, plain.written, ways_out, steps=int(kept)).begin()
        return wrong, totals if kept else None

    def _warn_of_differences(
        self, plain: PlainSums, allowed: ComparisonLimits, count: int, loss_apart: float
    ) -> None:
        """Warn of unsaved state, and of effects of splitting the batch that are no errors.

        `count` is the number of micro-batches in a step. `loss_apart` is the relative difference in
        loss between this step's batches and other batches of the same samples. Collective.
        """
        apart = max(report.cut.loss for report in plain.reports)
        counts = [report.cut.counts for report in plain.reports if report.cut.counts]
        least = halves_tolerance(self._plan, allowed)
        mixed = plain.mixed
        if counts:
            self._say(explain_counts(counts[0]))
        elif apart > least:
            cause = common_cause([r.cut.cause for r in plain.reports if r.cut.loss > least])
            read = sorted({name for report in plain.reports for name in report.cut.read})
            if read and not cause:
                self._say(explain_moved_buffers(read))
            else:
                swapped = any(report.cut.swapped for report in plain.reports)
                how = SWAPPED if swapped else "the batch is split in two"
                self._say(self._explain_cut(apart, how, count, cause))
        elif mixed.loss:
            self._say(self._explain_cut(mixed.loss, BY_THEMSELVES, count, mixed.cause))
        elif mixed.gradient:
            self._say(explain_gradient_cut(mixed))
        else:
            moved = self._find_moved_buffers(plain, count)
            if moved:
                self._say(explain_moved_buffers(moved))
            elif loss_apart > max(least, allowed.loss) and not (plain.written or plain.states):
                self._say(
                    self._explain_cut(loss_apart, "its samples are combined differently", count)
                )
        self._warn_of_counted_values(plain)
        self._warn_of_repetitions(plain, count)
        states = plain.states
        if states:
            told = states, self._plan.data_parallel, self._by_command, self.resumed
            self._say(explain_kept_state(*told))

    def _warn_of_repetitions(self, plain: PlainSums, count: int) -> None:
        """Warn of a forward that draws random numbers or writes to parameters. Collective.

        Each of the `count` micro-batches in a step does so again.
        """
        if any(report.state.draws for report in plain.reports):
            self._warn_of_draws(plain.sums.device, count)
        if plain.written and count > 1:
            self._say(explain_repeated_writes(sorted(plain.written), count))

    def _warn_of_draws(self, device: torch.device, count: int) -> None:
        """Warn that this plan draws other random numbers than one process. Collective."""
        states = [state.cpu().numpy().tobytes() for state in random_state(device)[2:]]
        alike = all(one == states for one in gather_objects(states))
        if self._plan.data_parallel > 1 or count > 1:
            self._say(explain_draws(alike and self._plan.data_parallel > 1))

    def _warn_of_counted_values(self, plain: PlainSums) -> None:
        """Warn of buffers and attributes that cover only one rank's samples. Collective.

        Those on which the loss depends are left out, because there are other warnings about them.
        """
        reports = plain.reports
        counted = {name for report in reports for name in report.counted}
        unsure = {name for report in reports for name in report.unsure}
        read = {name for report in reports for name in report.cut.read}
        prints = [one.buffer_prints for one in reports if one.buffer_prints is not None]
        names = sorted((counted | unsure & {*_differing_names(prints)}) - read)
        if names:
            apart = compare_ranks_buffers({n: plain.buffers.get(n) for n in names})
            self._say(explain_counted_buffers(names, apart, self._plan.data_parallel))
        attributes = sorted({name for report in reports for name in report.attributes})
        if attributes:
            self._say(explain_counted_attributes(attributes, self._plan.data_parallel))

    def _find_moved_buffers(self, plain: PlainSums, count: int) -> list[str]:
        """Return buffers that the loss depends on and that depend on how the batch is split.

        If a rank has several micro-batches, these are all changing buffers on which the loss
        depends, because each micro-batch reads what the previous ones have left. One process would
        read what the previous step has left.
        """
        by_halves = {name for report in plain.reports for name in report.cut.buffers}
        prints = [one.buffer_prints for one in plain.reports if one.buffer_prints is not None]
        # Ranks with the same samples ran different micro-batches, so their fingerprints differ.
        by_ranks = _differing_names(prints) if self._plain.pieces.ranks_per_share == 1 else []
        read = {name for report in plain.reports for name in report.cut.read}
        return sorted(read if count > 1 else {*by_halves, *by_ranks} & read)

    def _require_reproducible_changes(self, plain: PlainSums) -> None:
        """Refuse changes by the forward or backward that strategies cannot reproduce.

        These are writes to sharded parameters, writes that differ between ranks or may do so later
        (by an embedding with max_norm), and writes that cannot be observed. Also refuse new
        parameters, writes to modules in plain attributes, saved buffers that change shape, and
        buffers that a backward changes. Raises BadInputError on all ranks.
        """
        reports = plain.reports
        made = next((report.made for report in reports if report.made), None)
        if made is not None:
            raise _shared_error(explain_new_parameters(made))
        reshaped = sorted({name for report in reports for name in report.state.reshaped})
        if reshaped:
            raise _shared_error(f"{explain_reshaped(reshaped)} {WAYS_OUT[self._by_command]}")
        hidden = sorted({name for report in reports for name in report.hidden})
        if hidden:
            raise _shared_error(explain_hidden(hidden))
        unseen = sorted({name for report in reports for name in report.unseen})
        if unseen:
            raise _shared_error(self._explain_moves(unseen, _UNSEEN))
        shards = sorted({name for report in reports for name in report.spread})
        if shards:
            raise _shared_error(
                self._explain_moves(shards, "what it writes is lost, because ranks hold shards")
            )
        moved_back = sorted({name for report in reports for name in report.moved_back})
        if moved_back:
            said = explain_moved_back(moved_back, self._plan.strategy)
            raise _shared_error(f"{said} {WAYS_OUT[self._by_command]}")
        if self._plan.data_parallel == 1:
            return
        apart = sorted({name for report in reports for name in report.by_samples})
        # Ranks with the same samples ran different micro-batches, so their fingerprints differ.
        if self._plain.pieces.ranks_per_share == 1:
            prints = [report.prints for report in reports if report.prints is not None]
            apart = apart or _differing_names(prints)
        if apart:
            raise _shared_error(self._explain_moves(apart, _BY_SAMPLES))

    def _require_same_loss(self, plain: PlainSums) -> None:
        """Refuse a loss that differs between ranks, or gradients that do not scale with the loss.

        Also refuse a forward or loss that calls backward itself, and batch tensors that index
        samples by position, since positions refer to other samples in a rank's part. Raises
        BadInputError on all ranks.
        """
        if any(one.cut.cause == "places" for one in plain.reports):
            raise _shared_error(f"{PLACED}. {WAYS_OUT[self._by_command]}")
        by_rank = max(report.by_rank for report in plain.reports)
        if by_rank > SINGLE.loss:
            raise _shared_error(f"{explain_rank_dependence(by_rank)} {WAYS_OUT[self._by_command]}")
        if plain.builds.apart > SINGLE.loss:
            raise _shared_error(f"{explain_builds(plain.builds)} {WAYS_OUT[self._by_command]}")
        backwards = sorted({name for report in plain.reports for name in report.state.backwards})
        if backwards:
            raise _shared_error(explain_backwards(backwards))
        unscaled = sorted({name for report in plain.reports for name in report.unscaled})
        if unscaled:
            said = explain_unscaled_gradients(unscaled)
            raise _shared_error(f"{said} {WAYS_OUT[self._by_command]}")

    def _require_equal_state(self, plain: PlainSums, allowed: ComparisonLimits) -> None:
        least = halves_tolerance(self._plan, allowed)
        if self._plan.data_parallel > 1 and any(one.apart > least for one in plain.states):
            ways_out = WAYS_OUT[self._by_command]
            raise _shared_error(explain_state_apart(plain.states, self._plan.strategy, ways_out))

    def _run_watched(
        self,
        layout: Layout,
        passes: Sequence[Batch],
        hooks: StepHooks,
        run: Run,
        watch: MovedParameters,
        plain: PlainSums,
    ) -> tuple[Tensor, bool]:
        """Run the layout by `_run_layout`, and let `watch` record its writes to parameters.

        Raises BadInputError if the layout fails. A possible reason is that a backward needs a
        parameter that the forward of another micro-batch has overwritten, even with an equal value
        (an embedding with max_norm, while no row exceeds the limit).

        Operators are observed only if the module has written to parameters on some rank in a single
        process. Otherwise, version counters suffice, which cost nothing.
        """
        try:
            watches = not self._offloads and any(report.written for report in plain.reports)
            with watch if watches else nullcontext():
                return self._run_layout(layout, passes, hooks, run)
        except (RuntimeError, TypeError, AttributeError, ValueError, LookupError) as error:
            if has_other_cause(error):
                raise
            written = sorted(plain.moved or (plain.written if is_lost_value(error) else ()))
            if written:
                raise BadInputError(self._explain_moves(written, NEEDED_BEFORE)) from error
            if is_lost_value(error) and self._plan.pp > 1:
                said = explain_lost_value(sorted(plain.buffers), self._plan.strategy)
                raise BadInputError(f"{said} {WAYS_OUT[self._by_command]}") from error
            said = str(error.__cause__ or error).strip() or type(error).__name__
            tp = self._plan.tp
            advice = f" {explain_split_failure(said, tp)}" if tp > 1 else ""
            said = said[:300].removesuffix(".")
            raise BadInputError(
                f"under strategy {self._plan.strategy} the module fails, but in one process it "
                f"does not: {type(error).__name__}: {said}.{advice} {WAYS_OUT[self._by_command]}"
            ) from error

    @property
    def _offloads(self) -> bool:
        """Whether parameters are offloaded, so the layout itself writes to them."""
        return self._plan.offload_parameters != "none"

    def _require_same_changes(
        self,
        plain: PlainSums,
        watch: MovedParameters,
        layout: Layout,
        allowed: ComparisonLimits,
        again: bool,
    ) -> bool:
        """Refuse a layout that changes parameters differently from a single process. Collective.

        `again`: on this rank, the step has to be computed again. Returns whether any rank has set
        it.
        """
        moved, moved_too = plain.moved, watch.changes()
        held = {n: p.detach() for n, p in layout.named_parameters() if not is_spread(p)}
        unseen = [] if self._offloads else watch.written_unseen()
        wrong_here = unseen + self._find_wrong_changes(moved, moved_too, held, allowed)
        said = gather_objects(({*moved, *moved_too}, wrong_here, again))
        wrong = sorted(set().union(*(names for _, names, _ in said)))
        if wrong:
            why = "they are changed more often, or by something else, than in one process"
            raise _shared_error(self._explain_moves(wrong, why))
        changed = set().union(*(names for names, *_ in said))
        if changed:
            mine = {name: fingerprint(held[name]) for name in changed & held.keys()}
            apart = _differing_names(gather_objects(mine), holders_only=True)
            if apart:
                raise _shared_error(self._explain_moves(apart, _BY_SAMPLES))
        return any(one for *_, one in said)

    def _find_wrong_changes(
        self,
        plain_moved: Mapping[str, Tensor],
        layout_moved: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        allowed: ComparisonLimits,
    ) -> list[str]:
        wrong = []
        for name in {*plain_moved, *layout_moved} & held.keys():
            wanted, found = plain_moved.get(name), held[name]
            if self._plan.data_rank(self._ranks.rank) is None:
                continue  # this rank ran no forward
            if wanted is None or wanted.shape != found.shape or not torch.allclose(
                wanted.double(), found.double(), rtol=allowed.relative, atol=allowed.loss
            ):  # fmt: skip
                wrong.append(name)
        return wrong

    def _explain_moves(self, names: Sequence[str], why: str) -> str:
        said = explain_writes(names, self._plan.strategy, why)
        return f"{said} {WAYS_OUT[self._by_command]}"

    def _gradient_factor(self, layout: Layout, hooks: StepHooks, device: torch.device) -> float:
        """Return the ratio of the layout's gradients to the plain module's."""
        if self._plan.precision in SCALED:
            return 1.0
        one = torch.ones((), dtype=torch.float32, device=device)
        return float(hooks.scale(one)) / layout.averages

    def _run_layout(
        self, layout: Layout, passes: Sequence[Batch], hooks: StepHooks, run: Run
    ) -> tuple[Tensor, bool]:
        """Run the layout on copies of the batches; return this rank's totals. Collective.

        Gradients are kept. The second result tells whether the step has to be computed again,
        because this pass ran without compilation or dropout.
        """
        averages = layout.averages
        if self._plan.precision in SCALED:
            hooks = StepHooks(hooks.cast, scale=lambda loss_sum: loss_sum * averages)
        with ExitStack() as stack:
            nothing = None
            if not self._plain.draws_alike:
                nothing = stack.enter_context(without_dropout(layout.objective))
            totals = run(BatchCopies(passes), hooks)
        return totals, self._compiled or (nothing is not None and nothing.would_drop)

    def _say_not_compared(self, reason: str) -> None:
        self._say(
            f"strategy {self._plan.strategy} was not compared with the plain module before the "
            f"first step: {reason}. To compare them, with a smaller module of the same code if "
            f"necessary, use {self._name_verify_command()}."
        )

    def _name_verify_command(self) -> str:
        if self._by_command:
            return "outpace verify --model FILE.py:FUNCTION"
        return "outpace.verify(module, loss=…, batch=…)"

    def _explain_wrong(self, what: str, cause: str) -> str:
        return (
            f"strategy {self._plan.strategy} does not compute what your module computes in one "
            f"process: on the first global batch {what}. {cause} {WAYS_OUT[self._by_command]}"
        )

    def _explain_cut(self, apart: float, how: str, count: int, cause: CutCause = "") -> str:
        where = " in what build returns" if self._by_command else ""
        cure = ""
        if self._plain.shared_norms:
            name = "--micro-batch " if self._by_command else "micro_batch="
            setting = f"{name}{count * self._plan.micro_batch} (all samples of a rank)"
            cure = synchronised_cure(self._plain.shared_norms, setting) if count > 1 else ""
        elif self._plain.has_batchnorm:
            cure = batchnorm_cure(self._plan, count, where)
        split = "as ranks and micro-batches split it"
        how = f"{how}, {split}, so one process over the whole batch would train differently"
        return explain_cut(apart, how, cure, cause)


def _differing_names(prints: Sequence[Mapping[str, Any]], holders_only: bool = False) -> list[str]:
    """Return the names whose values differ between ranks, by the fingerprints of each rank.

    A name that is missing on some ranks counts as different, unless `holders_only`.
    """
    names = sorted(set().union(*prints))
    return [
        name
        for name in names
        if len({one.get(name) for one in prints if name in one or not holders_only}) > 1
    ]


def _shared_error(sentence: str) -> BadInputError:
    error = BadInputError(sentence)
    error.on_all_ranks = True
    return error
