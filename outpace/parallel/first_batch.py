"""The look at the first global batch: a strategy against the plain module, before any step.

A copy of the user's module, taken before it is laid out, runs forward and backward on the same
samples, cut as the plan cuts them; every rank takes a part of the pieces. Then the layout does the
same. Compared are the sums of losses and, of each parameter's gradient, its inner product with a
vector of random numbers, which is linear: sums over pieces, shards and ranks are those of whole
gradients, which nobody has to hold. Weights and generators stay as they are, buffers are put back.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.levers import apply_checkpointing
from outpace.nn.spread import is_spread, local, whole
from outpace.parallel.api import Batch, Layout, Pass
from outpace.parallel.batches import cut, samples_in
from outpace.parallel.batchnorm import SynchronisedBatchNorm
from outpace.parallel.blocks import Blocks, flat, named_blocks
from outpace.parallel.fill import part_of
from outpace.parallel.module_state import moves_buffers, preserved
from outpace.parallel.plain import (
    random_state,
    same_random_state,
    set_random_state,
    without_dropout,
)
from outpace.parallel.tensors import copies, hollow
from outpace.records.errors import BadInputError, first_names
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.units import show_bytes

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Allowed:
    """How far loss and gradients may be off, and least sizes of gradients to look at.

    Gradients of many samples may cancel, so that rounding is large beside what is left of them.
    """

    loss: float
    gradient: float
    floor: float


_DOUBLE = _Allowed(1e-9, 1e-6, 1e-6)
_SINGLE = _Allowed(1e-4, 0.02, 1e-2)
_HALF = _Allowed(0.005, 0.2, 0.1)
_CUT_MATTERS = {_DOUBLE: 1e-9, _SINGLE: 1e-5, _HALF: 1e-2}
_MOST_OF_FREE = 0.8

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
        self._left_out = _left_out(plan)
        self._synchronised = any(isinstance(m, SynchronisedBatchNorm) for m in objective.modules())
        self._plain: nn.Module | None = None
        self._trained: list[nn.Module] = []
        if self._left_out is None:
            try:
                self._plain = hollow(objective)
                self._trained = list(objective.modules())
            except Exception as error:
                self._left_out = f"the module cannot be copied ({type(error).__name__}: {error})"

    def look(self, layout: Layout, passes: Sequence[Batch], given: Pass, world: Any = None) -> None:
        """Compare, on this rank's `passes`. Collective. Raises BadInputError on all ranks.

        Leaves no gradients, and buffers and generators as they were.
        """
        reason = _agreed(self._left_out)
        if reason is None:
            reason = _agreed(self._too_large(layout)) or self._on_no_rank(layout)
        if reason is not None:
            self._tell_left_out(reason)
            return
        device = layout._device()
        assert self._plain is not None
        plain, self._plain = self._plain, None
        trained, self._trained = self._trained, []
        allowed = _allowed(self._plan, layout)
        cast = Pass(given.cast)
        layout.learn_forms(passes[0], cast)
        for parameter in layout.objective.parameters():
            parameter.grad = None
        with preserved(layout.objective, device):
            with filled(plain, layout, self._ranks) as names, standing_for(trained, plain):
                reason, mine = self._run_plain(plain, names, passes, cast, device)
                reason = _agreed(reason)
                apart = 0.0 if reason else _agreed_number(self._cut_apart(plain, passes, cast))
            del plain
            if reason is not None:
                self._tell_left_out(reason)
                return
            theirs = self._run_layout(layout, passes, cast, device)
            found = _Comparison(mine, theirs, self._sums(layout, names, device), allowed)
        wrong = found.first_wrong()
        if wrong is not None:
            error = BadInputError(self._refusal(*wrong))
            error.on_all_ranks = True
            raise error
        rounded = self._plan.precision not in ("fp32", "fp64")  # other shapes, other kernels
        if apart > (_CUT_MATTERS[_HALF] if rounded else _CUT_MATTERS[allowed]):
            self._say(self._about_cut(apart))

    def _on_no_rank(self, layout: Layout) -> str | None:
        """Which of the module's tensors no rank has; None where there is none. Collective."""
        assert self._plain is not None
        model, held = _model(self._plain), set().union(*_holders(_held(layout), self._ranks))
        named = (*model.named_parameters(), *model.named_buffers())
        lost = [name for name, _ in named if name not in held]
        return f"no rank has {first_names(lost)} of the module" if lost else None

    def _too_large(self, layout: Layout) -> str | None:
        """Why there is no room for the weights that this rank does not have; None where there is.

        Of gradients there is never more than one at a time.
        """
        assert self._plain is not None
        device = layout._device()
        held = {n for n, p in layout.named_parameters() if not is_spread(p)}
        lacking = [p for n, p in _model(self._plain).named_parameters() if n not in held]
        needed = sum(p.nbytes for p in lacking)
        free = _free_bytes(device) / (1 if device.type == "cuda" else self._ranks.local_world_size)
        if needed <= _MOST_OF_FREE * free:
            return None
        return (
            f"one process would hold {show_bytes(needed)} of other ranks' weights, and a rank has "
            f"{show_bytes(int(free))} free"
        )

    def _run_plain(
        self,
        plain: nn.Module,
        names: Sequence[str],
        passes: Sequence[Batch],
        given: Pass,
        device: torch.device,
    ) -> tuple[str | None, Tensor]:
        """This rank's part of the pieces; sums of loss, count and sizes, then the products.

        Of several ranks with the same samples each takes every n-th piece.
        """
        model = _model(plain)
        sums = torch.zeros(3 + len(names), dtype=torch.float64, device=device)
        places = {name: 3 + number for number, name in enumerate(names)}

        def take(name: str, parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            sums[places[name]] += _product(parameter.grad, _vector(name, parameter))
            parameter.grad = None

        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: take(name, p))
        begin = random_state(device)
        try:
            if self._plan.recomputes:  # as the run, which has no memory for more
                named = None if self._blocks is None else named_blocks(model, flat(self._blocks))
                apply_checkpointing(model, "full", named)
            with preserved(plain, device), without_dropout(plain), torch.enable_grad():
                in_order = self._in_order(plain, passes, given, device)
                for piece, mine in self._pieces(passes, in_order):
                    with given.cast(), torch.set_grad_enabled(mine):
                        loss_sum, count, *_ = plain(piece)
                    if not mine:
                        continue
                    loss_sum.backward()
                    sums[:3] += torch.stack(
                        (
                            loss_sum.detach().double(),
                            count.double(),
                            loss_sum.detach().abs().double(),
                        )
                    )
                drew = not same_random_state(begin, random_state(device))
        except Exception as error:
            return _failure(error), sums
        if drew and self._plan.world_size > self._plan.data_parallel:
            return "the module draws random numbers, dropout apart", sums
        return None, sums

    def _in_order(
        self, plain: nn.Module, passes: Sequence[Batch], given: Pass, device: torch.device
    ) -> bool:
        """Whether a piece needs those before it, for buffers that move with each of them."""
        if self._plan.world_size == self._plan.data_parallel:
            return False  # each rank has all pieces of its samples anyway

        def run() -> None:
            with torch.no_grad(), given.cast():
                plain(cut(passes[0], self._plan.pp_microbatches)[0])

        return moves_buffers(plain, device, run)

    def _pieces(self, passes: Sequence[Batch], in_order: bool) -> Iterator[tuple[Batch, bool]]:
        """The micro-batches of this rank, as one process would take them, each with True.

        `in_order`: among them those of ranks with the same samples, with False.
        """
        plan, number = self._plan, 0
        alike = plan.world_size // plan.data_parallel  # ranks with the same samples
        place = self._ranks.rank % plan.tp if plan.tp > 1 else self._ranks.rank // (
            plan.world_size // plan.pp
        )  # fmt: skip
        for batch in passes:
            parts = cut(batch, plan.pp_microbatches) if plan.pp_microbatches > 1 else [batch]
            for part in parts:
                mine = number % alike == place
                if mine or in_order:
                    yield part, mine
                number += 1

    def _cut_apart(self, plain: nn.Module, passes: Sequence[Batch], given: Pass) -> float:
        """How far the loss of a batch is from that of its two halves; 0 where there is no cut.

        The run takes no halves, so that what they raise (BatchNorm, of one sample) is no fault.
        """
        try:
            return self._halves_apart(plain, passes, given)
        except Exception:
            return 0.0

    def _halves_apart(self, plain: nn.Module, passes: Sequence[Batch], given: Pass) -> float:
        plan = self._plan
        samples = samples_in(passes[0])
        if plan.data_parallel == 1 and len(passes) * plan.pp_microbatches == 1:
            return 0.0
        size = min(samples, 2 * plan.micro_batch)
        size -= size % 2
        if size < 2 or samples % size:
            return 0.0
        device = next(plain.parameters()).device
        whole_batch = cut(passes[0], samples // size)[0]
        state = random_state(device)
        means = []
        with torch.no_grad(), without_dropout(plain):
            for pieces in ([whole_batch], cut(whole_batch, 2)):
                set_random_state(state, device)
                totals = torch.zeros(2, dtype=torch.float64)
                with preserved(plain, device):
                    for piece in pieces:
                        with given.cast():
                            loss_sum, count, *_ = plain(piece)
                        totals += torch.stack((loss_sum.double(), count.double())).cpu()
                means.append(float(totals[0] / totals[1]))
        apart = abs(means[0] - means[1]) / max(map(abs, means), default=1.0) if any(means) else 0.0
        return apart if math.isfinite(apart) else 0.0

    def _run_layout(
        self, layout: Layout, passes: Sequence[Batch], given: Pass, device: torch.device
    ) -> Tensor:
        """Sums of loss and count over all ranks, as the layout has them; leaves gradients."""
        averages = layout.averages
        for _, parameter in layout.named_parameters():
            parameter.grad = None
        with ExitStack() as stack:
            stack.enter_context(without_dropout(layout.objective))
            if self._plan.compile:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            return layout.gradients(
                list(passes), Pass(given.cast, scale=lambda loss_sum: loss_sum * averages)
            ).to(device)

    def _sums(self, layout: Layout, names: Sequence[str], device: torch.device) -> "_Gradients":
        """This rank's shares of the products and squares of the layout's gradients."""
        named = dict(layout.named_parameters())
        said: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(said, sorted(named))
        sums = torch.zeros(3, len(names), dtype=torch.float64, device=device)
        for number, name in enumerate(names):
            parameter = named.get(name)
            if parameter is None or parameter.grad is None:
                continue
            held_by = sum(name in one for one in said)
            share = copies(parameter.grad, self._ranks.world_size)
            alike = share if is_spread(parameter.grad) else held_by
            vector = part_of(_vector(name, parameter), parameter)
            gradient = local(parameter.grad)
            sums[0, number] = _product(gradient, vector) / alike
            sums[1, number] = _square(gradient) / alike
            sums[2, number] = 1
        for _, parameter in layout.named_parameters():
            parameter.grad = None
        return _Gradients(list(names), sums)

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


def _failure(error: Exception) -> str:
    """Why the plain forward and backward did not come to their end."""
    if isinstance(error, torch.OutOfMemoryError):
        return "there is no memory for one process' forward and backward"
    said = str(error).strip().splitlines() or [""]
    return f"a copy of the module fails ({type(error).__name__}: {said[0][:200]})"


def _left_out(plan: Plan) -> str | None:
    """Why a plan cannot be looked at beforehand."""
    if plan.servers:
        return "parameter servers have no samples, and not the whole module"
    if plan.optimizer_in_backward:
        return "with optimizer_in_backward a backward is a step"
    if plan.compress_gradients != "none":
        return f"compress_gradients {plan.compress_gradients} leaves a part of the gradients out"
    if plan.offload_parameters != "none" or plan.offload_activations != "none":
        return "what is offloaded does not fit beside a whole module"
    return None


def _allowed(plan: Plan, layout: Layout) -> _Allowed:
    """By the narrowest numbers that any rank's parameters have. Collective.

    Under autocast the same samples go through the same kernels, and what is added up over them and
    over ranks is fp32; but for parts of products (tp), and weights that are gathered in 16 bits.
    """
    sizes = [p.itemsize for _, p in layout.named_parameters() if p.is_floating_point()]
    narrowest = 16 - _agreed_number(16 - min(sizes, default=8))
    casts = plan.precision not in ("fp32", "fp64")
    if narrowest <= 2 or (casts and (plan.fully_shards or plan.tp > 1)):
        return _HALF
    return _DOUBLE if narrowest == 8 and not casts else _SINGLE


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _model(objective: nn.Module) -> nn.Module:
    model: nn.Module = objective.model  # type: ignore[assignment]
    return model


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


@contextmanager
def filled(plain: nn.Module, layout: Layout, ranks: Ranks) -> Iterator[list[str]]:
    """Meanwhile a hollow copy has the layout's weights and buffers; yields the parameters' names.

    Whole tensors are shared with the layout, parts are gathered, and what other ranks have they
    send. Collective.
    """
    model = _model(plain)
    values = _values(model, layout, ranks)
    parameters = {id(p): nn.Parameter(values[id(p)], p.requires_grad) for p in model.parameters()}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in plain.modules():
        registers: tuple[tuple[dict[str, Any], Any], ...] = (
            (part._parameters, parameters), (part._buffers, values),
        )  # fmt: skip
        for register, found in registers:
            for name, tensor in list(register.items()):
                if tensor is not None and id(tensor) in found:
                    before.append((register, name, tensor))
                    register[name] = found[id(tensor)]
    try:
        yield [name for name, _ in model.named_parameters()]
    finally:
        for register, name, tensor in before:
            register[name] = tensor


@contextmanager
def standing_for(trained: Sequence[nn.Module], plain: nn.Module) -> Iterator[None]:
    """Meanwhile who refers to a part of the trained module, as a loss's closure, finds the copy's.

    `trained` are the modules of which `plain` was copied, in order.
    """
    before = [vars(part) for part in trained]
    try:
        for part, copied in zip(trained, plain.modules(), strict=True):
            object.__setattr__(part, "__dict__", vars(copied))
        yield
    finally:
        for part, attributes in zip(trained, before, strict=True):
            object.__setattr__(part, "__dict__", attributes)


def _values(model: nn.Module, layout: Layout, ranks: Ranks) -> dict[int, Tensor]:
    """Whole values for each parameter and buffer of a hollow model, by `id`. Collective."""
    device = layout._device()
    held = _held(layout)
    said = _holders(held, ranks)
    values = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owners = [rank for rank, has in enumerate(said) if name in has]
        on_all = len(owners) == ranks.world_size
        owner = owners[0] if owners else None
        values[id(tensor)] = _whole_of(tensor, held.get(name), owner, on_all, device)
    return values


def _held(layout: Layout) -> dict[str, Tensor]:
    """This rank's parameters and buffers."""
    held: dict[str, Tensor] = {n: p.detach() for n, p in layout.named_parameters()}
    return held | {n: b.detach() for n, b in layout.model.named_buffers()}


def _holders(held: Iterable[str], ranks: Ranks) -> list[set[str]]:
    """The names that each rank has. Collective."""
    said: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(said, set(held))
    return said


def _whole_of(
    hollow_tensor: Tensor,
    mine: Tensor | None,
    owner: int | None,
    on_all: bool,
    device: torch.device,
) -> Tensor:
    if mine is not None and is_spread(mine):
        return whole(mine)
    if on_all and mine is not None:
        return mine
    assert owner is not None  # a look is left out else
    values = mine if mine is not None else torch.empty_like(hollow_tensor, device=device)
    values = values.contiguous()
    dist.broadcast(values, owner)
    return values


def _vector(name: str, like: Tensor) -> Tensor:
    """Random numbers for a parameter, whole: the same on every rank."""
    generator = torch.Generator(like.device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator, device=like.device)


def _product(gradient: Tensor, vector: Tensor) -> Tensor:
    values = local(gradient)
    if values.is_complex():
        values = values.real + values.imag
    if values.is_sparse:
        values = values.to_dense()
    return (values.double() * vector).sum()


def _square(values: Tensor) -> Tensor:
    return (
        values.double().square().sum() if not values.is_complex() else values.abs().square().sum()
    )


@dataclass(frozen=True)
class _Gradients:
    """Of each name the product, the square and on how many ranks there is one; not yet summed."""

    names: list[str]
    sums: Tensor


class _Comparison:
    """What one process has, against what the layout has. Collective to make."""

    def __init__(
        self, mine: Tensor, theirs: Tensor, gradients: _Gradients, allowed: _Allowed
    ) -> None:
        dist.all_reduce(mine)
        dist.all_reduce(theirs)
        dist.all_reduce(gradients.sums)
        self._plain, self._layout = mine.tolist(), theirs.tolist()
        self._names, self._allowed = gradients.names, allowed
        self._products, squares, self._ranks = gradients.sums.tolist()
        self._sizes = [math.sqrt(square) for square in squares]

    def first_wrong(self) -> tuple[str, str] | None:
        """What differs, and the likely cause; None where nothing does."""
        loss, count, size = self._plain[:3]
        mine, mine_count = self._layout[:2]
        if not math.isfinite(loss):
            return None  # the step says so, in one process too
        if abs(count - mine_count) > self._allowed.loss * max(abs(count), 1e-30):
            return (
                f"it counts {mine_count:g} targets instead of {count:g}",
                "Samples are lost, or counted twice.",
            )
        if not abs(mine - loss) <= self._allowed.loss * max(size, 1e-30):
            return (
                f"the loss is {mine / count:.6g} instead of {loss / count:.6g}",
                "The loss takes something that this strategy does not hand on, such as a term that "
                "parts of the module leave on themselves, or parameters of other ranks.",
            )
        return self._gradient_wrong()

    def _gradient_wrong(self) -> tuple[str, str] | None:
        plain = self._plain[3:]
        largest = max([*self._sizes, *map(abs, plain)], default=0.0)
        lost: list[str] = []
        off: list[str] = []
        for number, name in enumerate(self._names):
            scale = max(self._sizes[number], abs(plain[number]), self._allowed.floor * largest)
            if abs(self._products[number] - plain[number]) > self._allowed.gradient * scale:
                (off if self._sizes[number] else lost).append(name)
        if lost:
            return (
                f"{first_names(lost)} {'has' if len(lost) == 1 else 'have'} no gradient",
                "Ranks that do not use a parameter leave it out, or what it is used for is not "
                "handed on.",
            )
        if off:
            shown = off[0]
            number = self._names.index(shown)
            ratio = self._products[number] / plain[number] if plain[number] else math.inf
            return (
                f"the gradient of {first_names(off)} is another (that of {shown} is {ratio:.4g} × "
                "the plain module's)",
                "Ranks add up what does not belong together, or leave out a part.",
            )
        return None
