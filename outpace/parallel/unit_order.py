"""A common order of collectives for units of a user's module, even if not every rank calls them.

A unit's parameters are gathered when its forward is called, and its gradients are scattered after
its backward. If one rank drops a layer or takes a different branch, ranks would gather different
units at the same time, and would hang or receive each other's parameters. So every rank takes part
in the collectives of each unit that any rank calls, in the same order on all ranks. If a rank skips
a unit, it still gathers the unit and runs its backward without a gradient, as if it had called the
unit without samples.

At first, ranks announce before each unit which unit they have reached, and the lowest one is next.
After a training pass, ranks adopt the order of units, and no longer announce them, in two cases:
they followed the order of units in the module, or all of them called all units in the same order,
some perhaps several times. An evaluation pass does not count, because it drops no layers. If all
ranks later call a unit more often than in this order, in the same pass, they announce units again
from then on. If only some ranks do, these refuse, because the others cannot know.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._pytree import tree_leaves

from outpace.nn.compiler_exclusion import leave_to_python
from outpace.nn.torch_versions import all_gather_single, fsdp_param_groups
from outpace.parallel.gradient_use import GradientUse
from outpace.parallel.tensors import graph_nodes, is_in_python
from outpace.records.errors import BadInputError

_WAIT_S, _LOOK_AGAIN_S = 60.0, 0.005
_MOST_OF_A_CONSTANT = 64  # maximum graph nodes of a loss that depends on no unit's output


class UnitOrder:
    """Control of the order in which the ranks of `group` run the collectives of `units`.

    `units` are modules under `root` to which `fully_shard` was applied. A gradient that a rank
    lacks counts as zeros.
    """

    def __init__(
        self, root: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup
    ) -> None:
        self._units, self._group = list(units), group
        self._states = [unit._get_fsdp_state() for unit in units]  # type: ignore[operator]
        self._end = len(self._units)
        self._sequence: list[int] | None = None  # the order of units in a pass, once known
        self._keeps = True
        self._root_state = root._get_fsdp_state()  # type: ignore[operator]
        self.used: set[Any] = set()  # parameters that get a gradient on this rank in a step
        self._forwards = False  # whether the objective's forward is running
        self._thread = threading.get_ident()  # the thread of that forward
        for state in (self._root_state, *self._states):
            for held in fsdp_param_groups(state):
                _refuse_backward_in_forward(held, lambda: self._forwards)
                _fill_missing_gradients(held, self.used, partial(self._is_in_pass, state))
        for number, unit in enumerate(self._units):
            unit.register_forward_pre_hook(
                self._pre_forward_hook(number), prepend=True, with_kwargs=True
            )
        self._forward = root.forward
        root.forward = self._run_objective
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._announced: list[int] = []  # the units of this pass on all ranks
        self._ranks_agree = True
        self._next = 0  # position in the sequence
        self._called: set[Any] = set()
        self._tokens: list[Tensor] = []

    def _is_in_pass(self, state: Any) -> bool:
        return state is self._root_state or state in self._called

    def _run_objective(self, batch: Any) -> tuple[Tensor, ...]:
        """Run the objective's forward.

        Then take part in the collectives of units that only other ranks have called.
        """
        self._begin_pass()
        self._thread = threading.get_ident()
        self._forwards = True
        try:
            loss_sum, *others = self._forward(batch)
        finally:
            self._forwards = False
        _require_graph(loss_sum)
        if self._units:
            self._finish_pass()
        if self._tokens and loss_sum.requires_grad:
            loss_sum = _JoinedLoss.apply(loss_sum, *self._tokens)  # type: ignore[no-untyped-call]
        self._tokens = []
        return (loss_sum, *others)

    def _pre_forward_hook(self, number: int) -> Callable[..., None]:
        def enter(unit: nn.Module, args: Any, kwargs: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # otherwise, a backward is recomputing it
                self._enter_unit(number, args, kwargs)

        return leave_to_python(enter)

    def _enter_unit(self, number: int, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            raise BadInputError(
                "the forward calls a block in another thread, but all ranks must gather the shards "
                "of blocks in the same order, which threads do not guarantee. Call blocks one "
                "after the other, or use strategy ddp or zero1."
            )
        if self._sequence is not None and number not in self._sequence[self._next :]:
            self._skip_units_before(len(self._sequence))
            self._abandon_order(number)
        if self._sequence is None:
            while self._announce_unit(number) != number:
                self._skip_unit(self._announced[-1])
        else:
            place = self._sequence.index(number, self._next)
            self._skip_units_before(place)
            self._next = place + 1
        self._called.add(self._states[number])
        given = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        if not any(one.requires_grad for one in given):
            self._scatter_after_unit(number)

    def _abandon_order(self, number: int) -> None:
        """Stop following the adopted order of units, and announce each unit again.

        This rank has called a unit out of order. Raises BadInputError if not all ranks abandon the
        order in this pass. Ranks do not check in each pass whether they follow the same order,
        because the host would have to wait for the device.
        """
        store = _get_default_store()
        # Ranks that leave an order for the n-th time increment the same counter. A rank that does
        # not leave its order waits for this one in a different collective.
        turn = store.add(f"outpace/orders-left-{dist.get_rank()}", 1)
        key = f"outpace/order-left-{turn}"
        until_s = time.monotonic() + _WAIT_S
        here = store.add(key, 1)
        kind = type(self._units[number]).__name__.removeprefix("FSDP")
        while here < self._group.size():
            if time.monotonic() > until_s:
                raise BadInputError(
                    f"block {number} (a {kind}) is called more often than in the first "
                    "batches, or in another order, but not on all ranks, so they would wait for "
                    "each other. Pass blocks=[] to parallelize to treat the model as one block, or "
                    "use strategy ddp or zero1."
                )
            time.sleep(_LOOK_AGAIN_S)
            here = store.add(key, 0)
        self._sequence, self._keeps = None, False

    def _scatter_after_unit(self, number: int) -> None:
        """Make `fully_shard` scatter a unit's gradients right after the unit's backward.

        If no input of the unit needs a gradient, `fully_shard` would scatter the gradients at the
        end of the whole backward. The order would then differ from that on ranks whose input needs
        one.
        """
        if torch.is_grad_enabled():
            token = torch.zeros((), device=self._states[number]._device, requires_grad=True)
            for held in fsdp_param_groups(self._states[number]):
                (token,), _ = held._register_post_backward_hook((token,), {})
            self._tokens.append(token)

    def _finish_pass(self) -> None:
        if self._sequence is not None:
            self._skip_units_before(len(self._sequence))
            return
        while self._announce_unit(self._end) != self._end:
            self._skip_unit(self._announced[-1])
        self._announced.pop()
        if torch.is_grad_enabled() and self._keeps:
            self._sequence = self._observed_order()

    def _observed_order(self) -> list[int] | None:
        """Return the order in which the units of later passes are called; None if it is unknown.

        The result is equal on all ranks.
        """
        everyone = list(range(self._end))
        ascending = all(one < other for one, other in pairwise(self._announced))
        if ascending and (len(self._announced) > 1 or self._end == 1):
            return everyone
        if self._ranks_agree and set(self._announced) == set(everyone):
            return self._announced
        return None

    def _skip_units_before(self, place: int) -> None:
        assert self._sequence is not None
        for passed in self._sequence[self._next : place]:
            self._skip_unit(passed)

    def _announce_unit(self, number: int) -> int:
        """Announce unit `number`; return the lowest number that any rank announces. Collective."""
        mine = torch.tensor([number], device=self._states[0]._device)
        reached = mine.new_empty(self._group.size())
        all_gather_single(reached, mine, group=self._group)
        numbers: list[int] = reached.tolist()
        self._announced.append(min(numbers))
        self._ranks_agree = self._ranks_agree and max(numbers) == self._announced[-1]
        return self._announced[-1]

    def _skip_unit(self, number: int) -> None:
        """Take part in the collectives of a unit that this rank does not call."""
        unit, state = self._units[number], self._states[number]
        self._called.add(state)
        nothing = torch.zeros((), device=state._device, requires_grad=torch.is_grad_enabled())
        (given,), _ = state._pre_forward(unit, (nothing,), {})
        gathered = [p for held in fsdp_param_groups(state) for p in _unsharded_parameters(held)]
        token = _UnusedParameters.apply(given, *gathered)  # type: ignore[no-untyped-call]
        token = state._post_forward(unit, (given,), token)
        if token.requires_grad:
            self._tokens.append(token)

    def wait_for_reductions(self) -> None:
        """Make the current stream wait until all reduced gradients are in the shards."""
        for state in (self._root_state, *self._states):
            for held in fsdp_param_groups(state):
                wait_for_reduction(held)

    def agree(
        self,
        use: GradientUse,
        parameters: Sequence[nn.Parameter],
        replicated: Sequence[nn.Parameter],
    ) -> None:
        """Agree with other ranks on which parameters have a gradient. Collective.

        A parameter that no rank used gets None. Where only some ranks used it, the gradients of the
        others count as zeros. `replicated` parameters belong to no unit.
        """
        self.used.update(p for p in replicated if p.grad is not None)
        for parameter in replicated:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        use.agree([p in self.used for p in parameters])
        self.used.clear()


def wait_for_reduction(held: Any) -> None:
    """Make the current stream wait for the gradient reduction of an FSDP parameter group.

    If no reduction is running, do nothing.
    """
    if held._post_reduce_event is not None:
        held.device_handle.current_stream().wait_event(held._post_reduce_event)


def _unsharded_parameters(held: Any) -> list[nn.Parameter]:
    found = [one.unsharded_param for one in held.fsdp_params]
    return [parameter for parameter in found if parameter.requires_grad]


def _require_graph(loss_sum: Tensor) -> None:
    """Raise BadInputError for a loss whose backward reaches no parameter.

    The backwards of other ranks would wait for this rank. A `torch.autograd.Function` in Python
    counts as reaching parameters.
    """
    nodes = list(islice(graph_nodes(loss_sum), _MOST_OF_A_CONSTANT + 1))
    reaches = any(
        is_in_python(node) or isinstance(getattr(node, "variable", None), nn.Parameter)
        for node in nodes
    )
    if loss_sum.requires_grad and not reaches and len(nodes) <= _MOST_OF_A_CONSTANT:
        raise BadInputError(
            "the loss of this rank's samples is a constant that depends on no output of the "
            "module (there may be no targets among them, for example), so this rank has no "
            "backward pass in which to reduce gradients with the others. Return 0 times a sum of "
            "the module's output, or use strategy ddp or zero1."
        )


def _refuse_backward_in_forward(group: Any, is_in_forward: Callable[[], bool]) -> None:
    prepare = group.pre_backward

    def prepare_outside(*given: Any) -> None:
        if is_in_forward():
            raise BadInputError(
                "the module or its loss computes gradients within the forward "
                "(torch.autograd.grad through its blocks, as for forces or gradient penalties), "
                "which ranks with shards of the blocks cannot do. Use strategy ddp or zero1."
            )
        prepare(*given)

    group.pre_backward = prepare_outside


def _fill_missing_gradients(group: Any, used: set[Any], in_pass: Callable[[], bool]) -> None:
    """Make a parameter group set missing gradients to zeros before it reduces them.

    Shards that have a gradient are added to `used`. Nothing happens unless `in_pass()`.
    """
    reduce = group.post_backward

    def fill_and_reduce(*unused: Any) -> None:
        if in_pass():
            for one in group.fsdp_params:
                unsharded = getattr(one, "_unsharded_param", None)
                if unsharded is None or not one.sharded_param.requires_grad:
                    continue
                if unsharded.grad is not None or one.unsharded_accumulated_grad is not None:
                    used.add(one.sharded_param)
                else:
                    unsharded.grad = torch.zeros_like(unsharded)
        reduce(*unused)

    group.post_backward = fill_and_reduce


class _UnusedParameters(torch.autograd.Function):
    """A scalar zero that depends on a unit's parameters but passes no gradient to them.

    With this token in the loss, the backward of a unit runs on ranks that do not use it.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, *parameters: Tensor) -> Tensor:
        return torch.zeros_like(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return (gradient, *[None] * (len(ctx.needs_input_grad) - 1))


class _JoinedLoss(torch.autograd.Function):
    """A loss with tokens of units in its graph, so that its backward runs the units' backwards."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tokens: Tensor) -> Tensor:
        ctx.forms = [torch.empty_like(token, device="meta") for token in tokens]
        ctx.device = tokens[0].device
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (*gradients, *(torch.zeros_like(form, device=ctx.device) for form in ctx.forms))
