"""The look at the first global batch: a strategy against the plain module, before any step.

A copy of the user's module, taken before it is laid out, runs forward and backward on the same
samples, cut as the plan cuts them; every rank takes a part of the pieces. Then the layout does the
same. Compared are the sums of losses and, of each parameter's gradient, a projection
(comparison.py), and what the forward itself writes to parameters. Generators stay as they are;
buffers, and weights that the forward changes, are put back. Where nothing is dropped at random,
what the layout did is the first step's, and is not done again: all stays as it has become.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.fingerprint import fingerprint
from outpace.nn.levers import apply_checkpointing
from outpace.nn.spread import is_spread, local
from outpace.parallel.api import Batch, Layout, Pass
from outpace.parallel.batches import cut, samples_in
from outpace.parallel.batchnorm import SynchronisedBatchNorm
from outpace.parallel.blocks import Blocks, flat, named_blocks
from outpace.parallel.comparison import (
    ComparisonLimits,
    LayoutComparison,
    Projection,
    choose_tolerance,
    difference,
    halves_tolerance,
    square,
)
from outpace.parallel.gradient_hooks import accumulation_hooks, add_hooks, gradient_hooks
from outpace.parallel.module_state import moves_buffers, preserved
from outpace.parallel.moved_parameters import MovedParameters, keep_values
from outpace.parallel.plain import (
    random_state,
    same_random_state,
    set_random_state,
    without_dropout,
)
from outpace.parallel.plain_copy import filled, held_by, holders_of, model_of, standing_for
from outpace.parallel.tensors import copies, hollow
from outpace.records.errors import BadInputError, first_names
from outpace.records.optimizers import SCALED
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.units import show_bytes

Say = Callable[[str], None]
Run = Callable[[Sequence[Batch], Pass], Tensor]  # a layout's forward and backward of passes

_MOST_OF_FREE = 0.8
_BY_SAMPLES = "each rank changes it by its own samples, so that ranks would train different weights"

WAYS_OUT = {
    True: "Use another --strategy (outpace verify --model says which are equal to one process), or "
    "--check off to train all the same.",
    False: "Use another strategy (outpace.verify says which are equal to one process), or "
    'parallelize(…, check="off") to train all the same.',
}


class FirstBatch:
    """Compares a layout with the plain module, once.

    Made before the objective is laid out, of which it copies the structure alone. `say` is given
    sentences, on rank 0. `by_command`: the reader has flags, not a loop. `blocks` are the names
    of the parts that recompute, where the user gives them.
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
        self._plan, self._ranks, self._by_command = plan, ranks, by_command
        self._blocks = blocks
        self._say: Say = say if ranks.rank == 0 else lambda sentence: None
        self._left_out: str | None = None
        self._synchronised = any(isinstance(m, SynchronisedBatchNorm) for m in objective.modules())
        self._plain: nn.Module | None = None
        self._trained: list[nn.Module] = []
        self._hooks = {
            name: (gradient_hooks(parameter), accumulation_hooks(parameter))
            for name, parameter in model_of(objective).named_parameters()
        }
        try:
            self._plain = hollow(objective)
            self._trained = list(objective.modules())
        except Exception as error:
            self._left_out = f"the module cannot be copied ({type(error).__name__}: {error})"

    def look(
        self,
        layout: Layout,
        passes: Sequence[Batch],
        given: Pass,
        run: Run | None = None,
        reuse: bool = True,
        ready: Callable[[], None] = lambda: None,
    ) -> Tensor | None:
        """Compare, on this rank's `passes`. Collective. Raises BadInputError on all ranks.

        `run` makes the first step's forward and backward with `given` (None: the layout does).
        Where nothing is dropped at random, and with `reuse`, they are made once: returns its
        totals, and leaves gradients, buffers and generators as it does. Else returns None, and all
        is as it was. `ready` is called before what the layout does.
        """
        run = layout.gradients if run is None else run
        reason = _agreed(self._left_out or self._too_large(layout)) or self._on_no_rank(layout)
        if reason is not None:
            self._tell_left_out(reason)
            return None
        device = layout._device()
        allowed = choose_tolerance(self._plan, _narrowest(layout))
        layout.learn_forms(passes[0] if passes else None, Pass(given.cast))
        for _, parameter in layout.named_parameters():
            parameter.grad = None
        found, apart = self._plain_pass(layout, passes, Pass(given.cast), device)
        if found is None:
            return None
        self._require_alike(found, layout)
        ready()
        watch = MovedParameters(layout.named_parameters())
        kept = False
        with preserved(layout.objective, device) as keep, watch.put_back_unless(lambda: kept):
            totals, again = self._run_watched(layout, passes, given, run, watch, found.moved)
            self._require_same(found.moved, watch.changes(), layout, allowed)
            sums = self._sums(layout, found, device, self._factor(layout, given, device))
            compared = LayoutComparison(
                found.names, found.sums, totals.to(device), sums, allowed, self._plan.pp > 1
            )
            wrong = compared.first_wrong()
            if wrong is not None:
                raise _on_all_ranks(self._refusal(*wrong))
            kept = reuse and not again and self._plan.precision not in SCALED
            if kept:
                keep()
            else:
                for _, parameter in layout.named_parameters():
                    parameter.grad = None
        if not kept:
            layout.take_back()
        if apart > halves_tolerance(self._plan, allowed):
            self._say(self._about_cut(apart))
        return totals if kept else None

    def _plain_pass(
        self, layout: Layout, passes: Sequence[Batch], given: Pass, device: torch.device
    ) -> tuple["_Plain | None", float]:
        """Run the plain module; return its sums, and how far halves are apart. Collective.

        None where it cannot: that is said.
        """
        assert self._plain is not None
        plain, self._plain = self._plain, None
        trained, self._trained = self._trained, []
        if self._plan.data_rank(self._ranks.rank) is None:
            passes = []
        with (
            preserved(layout.objective, device),
            filled(plain, layout, self._plan, self._ranks) as names,
            standing_for(trained, plain),
        ):
            model = model_of(plain)
            found = _Plain(names, model, device)
            watch = MovedParameters(model.named_parameters())
            with watch:
                reason = self._run_plain(plain, found, passes, given, device)
            found.moved = watch.put_back()
            found.written, found.written_by_samples = watch.written, watch.written_by_samples
            reason = _agreed(reason)
            apart = 0.0
            if reason is None:
                apart = _agreed_number(self._cut_apart(plain, found, passes, given))
            made = [name for name, _ in model.named_parameters() if name not in found.names]
        if reason is not None:
            self._tell_left_out(reason)
            return None, 0.0
        made_by_forward = _agreed(explain_new_parameters(made) if made else None)
        if made_by_forward is not None:
            raise _on_all_ranks(made_by_forward)
        return found, apart

    def _require_alike(self, found: "_Plain", layout: Layout) -> None:
        """Refuse writes to parameters of which ranks hold parts, or that ranks do differently.

        That is also what has changed nothing yet: an embedding with max_norm will, at a later
        step. Raises BadInputError. Collective.
        """
        named = dict(layout.named_parameters())
        spread = [name for name in found.written if name in named and is_spread(named[name])]
        said: list[Any] = [None] * self._ranks.world_size
        of_pieces = self._plan.data_rank(self._ranks.rank) is not None
        prints = {name: fingerprint(values) for name, values in found.moved.items()}
        by_samples = sorted(found.written_by_samples)
        dist.all_gather_object(said, (spread, by_samples, prints if of_pieces else None))
        shards = sorted({name for names, _, _ in said for name in names})
        if shards:
            raise _on_all_ranks(
                self._explain_moves(shards, "what it writes is lost, since ranks hold shards")
            )
        if self._plan.data_parallel == 1:
            return
        apart = sorted({name for _, names, _ in said for name in names})
        if self._ranks_per_share == 1:  # ranks with the same samples have taken a part of them each
            apart = apart or _apart_names([one for _, _, one in said if one is not None])
        if apart:
            raise _on_all_ranks(self._explain_moves(apart, _BY_SAMPLES))

    def _run_watched(
        self,
        layout: Layout,
        passes: Sequence[Batch],
        given: Pass,
        run: Run,
        watch: MovedParameters,
        moved: Mapping[str, Tensor],
    ) -> tuple[Tensor, bool]:
        """Run the layout as `_run_layout`; `watch` notes what changes. Raises BadInputError.

        Micro-batches that are under way at once may need what another one has changed.
        """
        try:
            offloads = self._plan.offload_parameters != "none"  # which writes to them itself
            with nullcontext() if offloads else watch:
                return self._run_layout(layout, passes, given, run)
        except (RuntimeError, TypeError, AttributeError, ValueError, LookupError) as error:
            if isinstance(error, torch.OutOfMemoryError) or _of_another_rank(error):
                raise
            if moved:
                why = "other micro-batches, which are under way, need it as it was"
                raise BadInputError(self._explain_moves(sorted(moved), why)) from error
            said = str(error.__cause__ or error).strip() or type(error).__name__
            raise BadInputError(
                f"under strategy {self._plan.strategy} the module fails, and in one process it "
                f"does not: {type(error).__name__}: {said[:300]}. {WAYS_OUT[self._by_command]}"
            ) from error

    def _require_same(
        self,
        moved: Mapping[str, Tensor],
        moved_too: Mapping[str, Tensor],
        layout: Layout,
        allowed: ComparisonLimits,
    ) -> None:
        """Refuse a layout in which the forward changes parameters otherwise. Collective.

        Raises BadInputError.
        """
        held = {n: p.detach() for n, p in layout.named_parameters() if not is_spread(p)}
        said: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(said, ({*moved, *moved_too}, self._find_wrong_changes(
            moved, moved_too, held, allowed
        )))  # fmt: skip
        wrong = sorted(set().union(*(names for _, names in said)))
        if wrong:
            why = "it is changed more often, or by something else, than in one process"
            raise _on_all_ranks(self._explain_moves(wrong, why))
        changed = set().union(*(names for names, _ in said)) & held.keys()
        prints: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(prints, {name: fingerprint(held[name]) for name in changed})
        apart = _apart_names(prints, holders_alone=True)
        if apart:
            raise _on_all_ranks(self._explain_moves(apart, _BY_SAMPLES))

    def _find_wrong_changes(
        self,
        moved: Mapping[str, Tensor],
        moved_too: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        allowed: ComparisonLimits,
    ) -> list[str]:
        """Return the parameters of this rank without the values that the plain module's got."""
        wrong = []
        for name in {*moved, *moved_too} & held.keys():
            wanted, found = moved.get(name), held[name]
            if self._plan.data_rank(self._ranks.rank) is None:
                continue  # no forward ran here
            if wanted is None or wanted.shape != found.shape or not torch.allclose(
                wanted.double(), found.double(), rtol=allowed.relative, atol=allowed.loss
            ):  # fmt: skip
                wrong.append(name)
        return wrong

    def _explain_moves(self, names: Sequence[str], why: str) -> str:
        return (
            f"the module's forward changes the values of {first_names(names)}, and under strategy "
            f"{self._plan.strategy} {why}. Change parameters between steps instead, all ranks "
            f"alike. {WAYS_OUT[self._by_command]}"
        )

    def _factor(self, layout: Layout, given: Pass, device: torch.device) -> float:
        """Return the factor of gradients beside what the collective divides them by."""
        if self._plan.precision in SCALED:
            return 1.0
        one = torch.ones((), dtype=torch.float32, device=device)
        return float(given.scale(one)) / layout.averages

    def _on_no_rank(self, layout: Layout) -> str | None:
        """Which of the module's tensors no rank has; None where there is none. Collective."""
        assert self._plain is not None
        model, held = model_of(self._plain), set().union(*holders_of(held_by(layout), self._ranks))
        named = (*model.named_parameters(), *model.named_buffers())
        lost = [name for name, _ in named if name not in held]
        return f"no rank has {first_names(lost)} of the module" if lost else None

    def _too_large(self, layout: Layout) -> str | None:
        """Why there is no room for the weights that this rank does not have; None where there is.

        Of gradients there is never more than one at a time.
        """
        assert self._plain is not None
        if self._plan.data_rank(self._ranks.rank) is None:
            return None  # which has no samples to run it on
        device = layout._device()
        held = {n for n, p in layout.named_parameters() if not is_spread(p)}
        if self._plan.offload_parameters != "none":
            held = set()  # what lies elsewhere is brought, or read from a disk
        lacking = [p for n, p in model_of(self._plain).named_parameters() if n not in held]
        needed = sum(p.nbytes for p in lacking)
        free = _free_bytes(device) / (1 if device.type == "cuda" else self._ranks.local_world_size)
        if needed <= _MOST_OF_FREE * free:
            return None
        return (
            f"one process would hold {show_bytes(needed)} of weights that a rank does not, and "
            f"{show_bytes(int(free))} are free"
        )

    def _run_plain(
        self,
        plain: nn.Module,
        found: "_Plain",
        passes: Sequence[Batch],
        given: Pass,
        device: torch.device,
    ) -> str | None:
        """Add up this rank's part of the pieces; why that cannot be, or None.

        Of several ranks with the same samples each takes every n-th piece.
        """
        model = model_of(plain)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                add_hooks(parameter, *self._hooks.get(name, ((), ())))
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: found.take(name, p)
                )
        begin = random_state(device)
        try:
            if self._plan.recomputes or self._plan.offload_activations != "none":
                # As the run, which has no memory for more.
                named = None if self._blocks is None else named_blocks(model, flat(self._blocks))
                apply_checkpointing(model, "full", named)
            with preserved(plain, device), without_dropout(plain), torch.enable_grad():
                in_order = self._in_order(plain, passes, given, device)
                for number, piece, mine in self._pieces(passes, in_order):
                    with given.cast(), torch.set_grad_enabled(mine):
                        loss_sum, count, *_ = plain(piece)
                    if mine:
                        loss_sum.backward()
                        found.count(number, piece, loss_sum.detach(), count)
                drew = not same_random_state(begin, random_state(device))
        except Exception as error:
            return _failure(error)
        if drew and self._ranks_per_share > 1:
            return "the module draws random numbers, dropout apart"
        return None

    @property
    def _ranks_per_share(self) -> int:
        """Number of ranks that have the same samples."""
        return (self._plan.world_size - self._plan.servers) // self._plan.data_parallel

    def _in_order(
        self, plain: nn.Module, passes: Sequence[Batch], given: Pass, device: torch.device
    ) -> bool:
        """Whether a piece needs those before it, for buffers, counters or generators of its own."""
        if self._ranks_per_share == 1 or not passes:
            return False  # each rank has all pieces of its samples anyway

        piece = cut(passes[0], self._plan.pp_microbatches)[0]
        losses: list[Tensor] = []

        def run() -> None:
            begin = random_state(device)
            for _ in range(2):  # counters, generators of its own: the second differs
                set_random_state(begin, device)
                with torch.no_grad(), given.cast():
                    losses.append(plain(piece)[0])

        watch = MovedParameters(model_of(plain).named_parameters())
        with watch:
            moves = moves_buffers(plain, device, run)
        return bool(watch.put_back()) or moves or not torch.equal(*losses)

    def _pieces(self, passes: Sequence[Batch], in_order: bool) -> Iterator[tuple[int, Batch, bool]]:
        """The micro-batches of this rank, as one process would take them: number, batch and True.

        `in_order`: among them those of ranks with the same samples, with False.
        """
        plan, number = self._plan, 0
        place = self._ranks.rank % plan.tp if plan.tp > 1 else self._ranks.rank // (
            plan.world_size // plan.pp
        )  # fmt: skip
        for batch in passes:
            parts = cut(batch, plan.pp_microbatches) if plan.pp_microbatches > 1 else [batch]
            for part in parts:
                mine = number % self._ranks_per_share == (
                    0 if self._ranks_per_share == 1 else place
                )
                if mine or in_order:
                    yield number, part, mine
                number += 1

    def _cut_apart(
        self, plain: nn.Module, found: "_Plain", passes: Sequence[Batch], given: Pass
    ) -> float:
        """How far the loss of a batch is from that of its two halves; 0 where there is no cut.

        The run takes no halves, so that what they raise (BatchNorm, of one sample) is no fault.
        """
        plan = self._plan
        if not passes or (plan.data_parallel == 1 and len(passes) * plan.pp_microbatches == 1):
            return 0.0
        if found.first is None:  # which of several ranks with the same samples one has
            return 0.0
        for compare in (self._halves_apart, self._pair_apart):
            try:
                with keep_values(model_of(plain).named_parameters()):
                    apart = compare(plain, found.first, passes, given)
            except Exception:
                continue
            if apart is not None:
                return apart
        return 0.0

    def _halves_apart(
        self, plain: nn.Module, first: tuple[Batch, float], passes: Sequence[Batch], given: Pass
    ) -> float | None:
        """Compare the first piece with its halves; None where it cannot be halved."""
        piece, mean = first
        if samples_in(piece) % 2:
            return None
        return _difference(mean, self._mean_of(plain, cut(piece, 2), given))

    def _pair_apart(
        self, plain: nn.Module, first: tuple[Batch, float], passes: Sequence[Batch], given: Pass
    ) -> float | None:
        """Compare a pipeline's first two pieces with both in one; None where there are none."""
        samples, size = samples_in(passes[0]), 2 * samples_in(first[0])
        if self._plan.pp_microbatches == 1 or samples % size:
            return None
        pair = cut(passes[0], samples // size)[0]
        means = [self._mean_of(plain, pieces, given) for pieces in ([pair], cut(pair, 2))]
        return _difference(*means)

    def _mean_of(self, plain: nn.Module, pieces: Sequence[Batch], given: Pass) -> float:
        device = next(plain.parameters()).device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad(), without_dropout(plain), preserved(plain, device):
            for piece in pieces:
                with given.cast():
                    loss_sum, count, *_ = plain(piece)
                totals += torch.stack((loss_sum.double(), count.double()))
        return float(totals[0] / totals[1])

    def _run_layout(
        self, layout: Layout, passes: Sequence[Batch], given: Pass, run: Run
    ) -> tuple[Tensor, bool]:
        """Sums of loss and count of this rank, as the layout has them; leaves gradients.

        And whether the step is to be computed again, for here it was another one. Collective.
        """
        averages, compiled = layout.averages, self._plan.compile
        if self._plan.precision in SCALED:
            given = Pass(given.cast, scale=lambda loss_sum: loss_sum * averages)
        with ExitStack() as stack:
            nothing = stack.enter_context(without_dropout(layout.objective))
            if compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            totals = run(list(passes), given)
        again = compiled or nothing.would_drop
        return totals, bool(_agreed_number(float(again)))

    def _sums(self, layout: Layout, plain: "_Plain", device: torch.device, factor: float) -> Tensor:
        """This rank's shares of products and squares of gradients, and 1 for each: (3, names)."""
        named = dict(layout.named_parameters()) if layout.has_sums else {}
        holders = holders_of(named, self._ranks)
        sums = torch.zeros(3, len(plain.names), dtype=torch.float64, device=device)
        for number, name in enumerate(plain.names):
            parameter = named.get(name)
            if parameter is None or parameter.grad is None:
                continue
            held_by = sum(name in one for one in holders)
            share = copies(parameter.grad, self._ranks.world_size)
            alike = share if is_spread(parameter.grad) else held_by
            product = plain.projection.project_part(parameter.grad, parameter)
            sums[0, number] = product / (alike * factor)
            sums[1, number] = square(local(parameter.grad)) / (alike * factor**2)
            sums[2, number] = 1
        return sums

    def _tell_left_out(self, reason: str) -> None:
        self._say(
            f"strategy {self._plan.strategy} was not compared with the plain module before the "
            f"first step: {reason}. To see that they are equal, if need be of a smaller module "
            f"of the same code, use {self._verify()}."
        )

    def _verify(self) -> str:
        if self._by_command:
            return "outpace verify --model FILE.py:FUNCTION"
        return "outpace.verify(module, loss=…, batch=…)"

    def _refusal(self, what: str, cause: str) -> str:
        return (
            f"strategy {self._plan.strategy} does not compute what your module computes in one "
            f"process: on the first global batch {what}. {cause} {WAYS_OUT[self._by_command]}"
        )

    def _about_cut(self, apart: float) -> str:
        where = " in what build returns" if self._by_command else ""
        cure = (
            "return (sum, count) from the loss where it is a mean over something other than "
            "samples, such as targets that are not padding, or use "
        )
        cure += (
            "larger micro-batches, since statistics are those of all ranks already"
            if self._synchronised
            else f"sync_batchnorm=True{where} where the module has BatchNorm"
        )
        return (
            f"the loss of the first batch changes by {100 * apart:.2g} % when the batch is cut in "
            "two, as ranks and micro-batches cut it, so one process over the whole batch would "
            "train otherwise: the loss is no mean over samples, or samples see each other. To "
            f"train the same, {cure}"
        )


def explain_new_parameters(names: Sequence[str]) -> str:
    """Return what to do where a forward makes parameters, which no optimizer has."""
    return (
        f"the forward makes {first_names(names)}, which {'is' if len(names) == 1 else 'are'} not "
        "there before, so that no optimizer would step it. Make it in __init__, or use the module "
        "after a batch has run through it once."
    )


def _apart_names(prints: Sequence[Mapping[str, Any]], holders_alone: bool = False) -> list[str]:
    """Return names of several fingerprints; or, but for `holders_alone`, of none on some rank."""
    names = sorted(set().union(*prints))
    return [
        name
        for name in names
        if len({one.get(name) for one in prints if name in one or not holders_alone}) > 1
    ]


def _of_another_rank(error: Exception) -> bool:
    """Whether a collective failed because a peer has gone."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in said or "nccl" in said


def _on_all_ranks(sentence: str) -> BadInputError:
    error = BadInputError(sentence)
    error.on_all_ranks = True
    return error


def _failure(error: Exception) -> str:
    """Why the plain forward and backward did not come to their end."""
    if isinstance(error, torch.OutOfMemoryError):
        return "there is no memory for one process' forward and backward"
    said = str(error).strip().splitlines() or [""]
    return f"a copy of the module fails ({type(error).__name__}: {said[0][:200]})"


def _narrowest(layout: Layout) -> int:
    """The bytes of the narrowest floating-point numbers of any rank's parameters. Collective."""
    sizes = [p.itemsize for _, p in layout.named_parameters() if p.is_floating_point()]
    return 16 - int(_agreed_number(16 - min(sizes, default=8)))


def _difference(whole_mean: float, halves_mean: float) -> float:
    apart = difference(whole_mean, halves_mean)
    return apart if math.isfinite(apart) else 0.0


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _agreed(reason: str | None) -> str | None:
    """The first reason that any rank has. Collective."""
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, reason)
    return next((one for one in said if one is not None), None)


def _agreed_number(number: float) -> float:
    """The largest of all ranks'. Collective."""
    said: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(said, number)
    return max(said)


class _Plain:
    """Results of the plain module on this rank.

    Sums of loss, count and sizes, then products of gradients, then how many gradients there were.
    """

    def __init__(self, names: Sequence[str], model: nn.Module, device: torch.device) -> None:
        self.names = list(names)
        largest = max((p.numel() for p in model.parameters()), default=1)
        self.projection = Projection(largest, device)
        self.sums = torch.zeros(3 + 2 * len(names), dtype=torch.float64, device=device)
        self.first: tuple[Batch, float] | None = None  # piece and its mean loss, if it has run here
        self.moved: dict[str, Tensor] = {}  # what parameters became by the forward itself
        self.written: set[str] = set()
        self.written_by_samples: set[str] = set()
        self._places = {name: 3 + number for number, name in enumerate(names)}

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """A gradient of a piece is there, and is given up."""
        if parameter.grad is None:
            return  # which a user's hook has done
        self.sums[self._places[name]] += self.projection.project(parameter.grad)
        self.sums[self._places[name] + len(self.names)] += 1
        parameter.grad = None

    def count(self, number: int, piece: Batch, loss_sum: Tensor, count: Tensor) -> None:
        """A piece is done."""
        totals = torch.stack((loss_sum.double(), count.double(), loss_sum.abs().double()))
        self.sums[:3] += totals
        if not number:
            self.first = piece, float(totals[0] / totals[1])
