"""Layouts: the result of applying a strategy to an objective on the ranks of a plan."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outpace.nn.compiler_exclusion import leave_to_python
from outpace.nn.scratch_files import Scratch
from outpace.optim.build import Build, step_alone
from outpace.optim.master import master_weights
from outpace.parallel.gradient_clipping import scale_by_norm
from outpace.parallel.refusals import LoopPosition, refuse_between_steps
from outpace.parallel.shard_access import (
    ShardStorages,
    combine_with_whole,
    read_whole_values,
    refuse_copies,
    wait_before_communication,
)
from outpace.parallel.shared_buffers import SharedBuffers
from outpace.parallel.stage_draws import PlainDraws
from outpace.parallel.tensors import (
    by_dtype,
    local,
    replace_by_wider,
    square_sum,
    total_norm,
    whole,
)
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks

Batch = Any


@dataclass(frozen=True)
class StepHooks:
    """Callbacks to the trainer, which the forward and backward passes of a step call.

    `cast()` returns the context of each forward (autocast). `scale(loss_sum)` returns the value on
    which the backward is called: the loss as a share of the global mean, times fp16's loss scale.
    `mark(part)` attributes the time since the last mark to `part`: "forward", "backward" or
    "communication".
    """

    cast: Callable[[], AbstractContextManager[None]] = nullcontext
    scale: Callable[[Tensor], Tensor] = lambda loss_sum: loss_sum
    mark: Callable[[str], None] = lambda part: None


@dataclass(frozen=True)
class LayoutRequest:
    """A request to a strategy to lay out an objective on ranks.

    The objective is on `device`, or on the meta device if `deferred_init.fills_later`.

    For a custom model, `blocks` are the names of its repeated submodules, or a list of names for
    each pipeline stage (None: detected). `layouts` maps names of matrices to how tp splits them.
    `scratch` stores parameters that the plan offloads to disk. `cuda_graphs`: strategy `single`
    replays passes as CUDA graphs; `on_failure` is called with the reason if that is impossible.
    """

    objective: nn.Module
    plan: Plan
    ranks: Ranks
    device: torch.device
    blocks: Sequence[str] | Sequence[Sequence[str]] | None = None
    layouts: Mapping[str, str] | None = None
    scratch: Scratch | None = None
    cuda_graphs: bool = False
    on_failure: Callable[[str], None] | None = None

    @property
    def runs_on(self) -> str:
        """Return the device type to choose kernels for; a trace on a CPU may set it to "cuda"."""
        return getattr(self.objective, "runs_on", None) or self.device.type


def _totals_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Metal lacks float64


def totals_of(loss_sum: Tensor, count: Tensor, *sums: Tensor) -> Tensor:
    """Return the totals of a pass as one tensor: loss sum, count of targets, and further sums.

    Totals can be added over passes and ranks.
    """
    dtype = _totals_dtype(loss_sum.device)
    return torch.cat([part.to(dtype).view(-1) for part in (loss_sum, count, *sums)])


def divisor(count: Tensor) -> Tensor:
    """Return the divisor of a sum over `count` targets (or weights): `count`, or 1 if it is 0."""
    return torch.where(count > 0, count, torch.ones_like(count))


class Layout:
    """This rank's part of an objective. The base class has all of it and does not communicate.

    Forwards call `module`, which may wrap the objective. `model` has this rank's parameters under
    their single-process names. The reduction divides the sum of gradients over ranks by `averages`;
    the trainer scales the loss accordingly, so that gradients are those of the mean over the global
    batch's targets. `computes_on` is the device that computes, if parameters are stored on another.
    """

    averages: int = 1
    computes_on: torch.device | None = None
    shares_casts: bool = True  # whether micro-batches may use one cast of the weights
    buffers: SharedBuffers | None = None  # of a custom model on data-parallel ranks
    has_sums: bool = True  # whether this rank ends with the global batch's gradients

    def __init__(self, objective: nn.Module, module: nn.Module | None = None) -> None:
        self.objective = objective
        self.module = objective if module is None else module
        # norms of gradients that were freed in the backward
        self._stepped: list[Tensor] | None = None
        self._known: list[nn.Parameter] | None = None

    @property
    def model(self) -> nn.Module:
        """Return this rank's part of the model."""
        model: nn.Module = self.objective.model  # type: ignore[assignment]
        return model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with their single-process names."""
        yield from self.model.named_parameters()

    def _parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters, from a list that is made only once.

        Walking over all modules in each step would take longer than clipping.
        """
        if self._known is None:
            self._known = [parameter for _, parameter in self.named_parameters()]
        return self._known

    def make_optimizer(self, groups: list[dict[str, Any]], build: Build) -> torch.optim.Optimizer:
        """Return this rank's optimizer; `build` creates one from groups of its parameters."""
        return build(groups)

    def step_in_backward(
        self,
        optimizer: torch.optim.Optimizer,
        look: Callable[[nn.Parameter], None] = lambda parameter: None,
    ) -> None:
        """Update each parameter as soon as its gradient is computed, and then free the gradient.

        This follows Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited
        Resources" (LOMO), arXiv 2306.09782, §3.1, with any optimizer. The norms of freed gradients
        are kept for `total_norm`. `look` is called with each parameter before its update. The plan
        must have a single backward per step (see `records.plan.IN_BACKWARD`).
        """
        norms: list[Tensor] = []
        self._stepped = norms

        def update_parameter(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            look(parameter)
            norms.append(total_norm([local(parameter.grad)]))
            step_alone(optimizer, parameter)
            parameter.grad = None

        for _, parameter in self.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(update_parameter)

    def _take_freed_norms(self) -> list[Tensor]:
        norms = list(self._stepped or ())
        if self._stepped:
            self._stepped.clear()
        return norms

    def checkpoint_state(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module | None, torch.optim.Optimizer | None]:
        """Return the module and the optimizer whose state this rank saves or loads.

        Either is None if its state does not belong in a checkpoint. Collective.
        """
        self._make_buffers_equal()
        return self.model, optimizer

    def _make_buffers_equal(self) -> None:
        if self.buffers is not None:
            self.buffers.make_equal()

    def resume_from(self, start_step: int) -> None:
        """Prepare to resume a run after `start_step` steps."""

    def learn_forms(self, batch: Batch, hooks: StepHooks) -> None:
        """Determine the structure of the messages between ranks from the first batch. Collective.

        This is called before the check of that batch, which restores state. Most layouts do
        nothing.
        """

    def plain_draws(self) -> PlainDraws | None:
        """Return seeds for a plain module to draw the random numbers of the stages' next step.

        Returns None if that is impossible, or if it is unnecessary because each rank has different
        samples. Collective.
        """
        return None

    def guard(self) -> None:
        """Refuse, from now on, uses of parameters by the user's loop that would give wrong values.

        They are refused outside of `in_call`.
        """

    def in_call(self) -> AbstractContextManager[None]:
        """Return the context for a step or an evaluation, in which `guard` refuses nothing."""
        return nullcontext()

    def watch_communication(self, watches: bool) -> None:
        """Choose whether operations of the user's loop wait for all ranks before they communicate.

        This concerns operations outside of `in_call`.
        """

    def begin_optimizer_step(self) -> None:
        """Begin an optimizer's step, in which only the first communication waits for all ranks.

        Nothing waits unless `watch_communication` has chosen to.
        """

    def end_optimizer_step(self) -> None:
        """End an optimizer's step: operations wait again as `watch_communication` has chosen."""

    def discard_comparison(self) -> None:
        """Do not count the last call of `gradients` as a step: it checked the first batch."""

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Run the forward and backward of this rank's micro-batches, and reduce the gradients.

        Returns (2,) float64 (float32 on Metal): this rank's contributions to the sum of losses and
        the number of targets. Their sums over all ranks are the global batch's totals.
        """
        if self.buffers is not None:
            self.buffers.begin_step()
        totals = torch.zeros(2, dtype=_totals_dtype(self._device()), device=self._device())
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            if last and number > 1:
                self.prepare_reduction()
            with nullcontext() if last else self.no_sync():
                totals += self._forward_backward(batch, hooks)
        return totals

    def prepare_reduction(self) -> None:
        """Prepare for the last of several micro-batches, whose backward reduces the gradients."""

    def add_up_in_fp32(self) -> None:
        """Accumulate 16-bit gradients over micro-batches in fp32.

        Autograd casts each gradient to the parameter's `grad_dtype`. Parameters under `fully_shard`
        are left alone, because `fully_shard` has a setting for the dtype of reduced gradients.
        """
        for parameter in self._accumulated_parameters():
            if parameter.grad_dtype != torch.float32:
                parameter.grad_dtype = torch.float32

    def _accumulated_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the trained 16-bit parameters that `fully_shard` does not shard."""
        gathered = {p for part in _fsdp_modules(self.objective) for p in part.parameters()}
        for _, parameter in self.named_parameters():
            if parameter.requires_grad and parameter.itemsize == 2 and parameter not in gathered:
                yield parameter

    def _forward_backward(self, batch: Batch, hooks: StepHooks) -> Tensor:
        with hooks.cast():
            loss_sum, count = self.module(batch)
        hooks.mark("forward")
        self._backward(hooks.scale(loss_sum), hooks)
        return totals_of(loss_sum.detach(), count)

    def _backward(self, loss: Tensor, hooks: StepHooks) -> None:
        loss.backward()
        hooks.mark("backward")

    def _device(self) -> torch.device:
        return self.computes_on or next(self.model.parameters()).device

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context for all but a step's last micro-batch, which reduces gradients."""
        return nullcontext()

    def evaluate(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Run one micro-batch without gradients, and return its totals.

        If the objective returns further sums, these follow the two totals.
        """
        if self.buffers is not None:
            self.buffers.begin_evaluation()
        with hooks.cast():
            loss_sum, count, *sums = self.objective(batch)
        return totals_of(loss_sum, count, *sums)

    def free_gathered(self) -> None:
        """Free other ranks' parameters that were gathered for an evaluation."""

    def local_gradients(self) -> list[Tensor]:
        """Return this rank's part of each gradient."""
        return [local(p.grad) for p in self._parameters() if p.grad is not None]

    def counted_gradients(self) -> list[Tensor]:
        """Return this rank's gradients, without those that another rank counts in the norm."""
        return [p.grad for p in self._parameters() if p.grad is not None]

    def total_norm(self) -> Tensor:
        """Return the 2-norm of the whole model's gradient, counting each parameter once.

        Collective.
        """
        return total_norm([*self._take_freed_norms(), *self.local_gradients()])

    def clip(self, limit: float, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """Clip the gradients to a norm of `limit`; 0 disables clipping.

        If `optimizer` has master weights and gradients have 16 bits, its next step scales them, in
        fp32. Returns the norm before clipping. Collective.
        """
        norm = self.total_norm()
        scale_by_norm(norm, limit, self._parameters(), optimizer, self.scale_gradients)
        return norm

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by `factor`."""
        for gradients in by_dtype(self.local_gradients()):
            precise = torch.promote_types(gradients[0].dtype, torch.float32)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, precise))

    def widen_gradients(self) -> None:
        """Convert 16-bit gradients to fp32 until `drop_wide_gradients`."""
        for parameter in self._parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                parameter.grad = None  # or torch refuses a gradient of another dtype
                parameter.grad_dtype = gradient.dtype
                parameter.grad = gradient

    def drop_wide_gradients(self) -> None:
        """Drop all gradients, and let the next ones have the weights' dtype again."""
        for parameter in self._parameters():
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype

    def sync_found_inf(self, found_inf: Tensor) -> None:
        """Make all ranks skip an fp16 step if one of them must. Collective."""

    def raise_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace weights with the optimizer's master weights at the end of a run. Collective."""
        replace_by_wider(self.model, master_weights(optimizer))

    def whole_model(self, wanted: bool) -> nn.Module | None:
        """Return the whole model on ranks where it is `wanted`, None on others. Collective."""
        return self.model if wanted else None


def _fsdp_modules(module: nn.Module) -> list[Any]:
    """Return the modules to which `fully_shard` was applied, without importing it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


class SpreadLayout(Layout):
    """A layout in which the ranks of `group` hold different parts of the model.

    Each part is replicated or sharded over `ranks_of_a_part` of these ranks.
    """

    def __init__(
        self, objective: nn.Module, group: dist.ProcessGroup, ranks_of_a_part: int = 1
    ) -> None:
        super().__init__(objective)
        self._group = group
        self._ranks_of_a_part = ranks_of_a_part
        self._watched: Collection[nn.Module] = ()  # modules that a loop may not call
        self._watches: list[RemovableHandle] = []

    def guard(self) -> None:
        """Refuse forwards that the user's loop runs outside a step or an evaluation."""
        self._enter = leave_to_python(lambda *_: self._handle_forward_between_steps())
        self._watched = self._list_watched()
        self._watch_forwards()

    def _watch_forwards(self) -> None:
        self._watches = [
            part.register_forward_pre_hook(self._enter, prepend=True) for part in self._watched
        ]

    def _list_watched(self) -> set[nn.Module]:
        """Return the modules that a loop may not call between steps."""
        return {self.model, *_fsdp_modules(self.model)}

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Allow forwards inside the context.

        The hooks that refuse forwards are removed meanwhile, because calling them takes time.
        """
        for watch in self._watches:
            watch.remove()
        try:
            yield
        finally:
            self._watch_forwards()

    def _handle_forward_between_steps(self) -> None:
        raise refuse_between_steps(
            "the module's forward is called between steps, but this rank holds only a part of its "
            "parameters. Call evaluate(batch) of what parallelize returned, on all ranks. Or copy "
            "the module on rank 0 before parallelize, load the state_dict() of what parallelize "
            "returned into the copy, and call the copy. Or use strategy ddp or zero1."
        )

    def total_norm(self) -> Tensor:
        """Return the norm of the gradients on all ranks, each counted once. Collective."""
        square = square_sum(self.counted_gradients(), self._ranks_of_a_part, self._device())
        for norm in self._take_freed_norms():  # parts that only this rank has
            square += norm.double().square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    def sync_found_inf(self, found_inf: Tensor) -> None:
        """Make all ranks skip a step if one must, since each checks only its part's gradients."""
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._group)


class ShardedLayout(SpreadLayout):
    """A layout whose parameters (at least the large ones) are DTensors sharded over `group`.

    `meta_copy` is the unsharded model on the meta device.
    """

    def __init__(
        self, objective: nn.Module, meta_copy: nn.Module, group: dist.ProcessGroup
    ) -> None:
        super().__init__(objective, group, group.size())
        self._meta_model = meta_copy
        self._storages: ShardStorages | None = None
        self._place: LoopPosition | None = None
        self._watches_communication = False

    def guard(self) -> None:
        """Give the user's loop whole values where it reads shards, and refuse what cannot work.

        Refused are forwards, copies of sharded modules, and writes without any effect, such as
        `p.data = …`.
        """
        super().guard()
        self._place = LoopPosition()
        read_whole_values(self._place)
        refuse_copies(_fsdp_modules(self.objective))
        self._storages = ShardStorages(self.named_parameters())
        combine_with_whole(True)

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Enter a step or evaluation; raise BadInputError if a shard's memory was replaced before.

        Inside the context, whole tensors cannot be combined with DTensors, and operations that
        communicate do not wait for all ranks first.
        """
        if self._storages is not None and self._place is not None:
            self._place.announce()
            self._storages.require_unchanged()
            combine_with_whole(False)
            wait_before_communication(None)
        try:
            with super().in_call():
                yield
        finally:
            if self._storages is not None:
                combine_with_whole(True)
                self.end_optimizer_step()
        if self._storages is not None:
            self._storages.note()

    def watch_communication(self, watches: bool) -> None:
        self._watches_communication = watches

    def begin_optimizer_step(self) -> None:
        if self._watches_communication:
            wait_before_communication(self._place, once=True)

    def end_optimizer_step(self) -> None:
        wait_before_communication(self._place if self._watches_communication else None)

    def _handle_forward_between_steps(self) -> None:
        if _fsdp_modules(self.objective):
            super()._handle_forward_between_steps()
        assert self._place is not None  # tensor parallelism, whose ranks compute the same
        self._place.wait_for_all("calls the module's forward")

    def free_gathered(self) -> None:
        """Free gathered parameters, so that `named_parameters` are this rank's shards again."""
        for part in _fsdp_modules(self.objective):
            part.reshard()

    def whole_model(self, wanted: bool) -> nn.Module | None:
        """Gather the weights one by one; ranks where the model is not `wanted` keep none."""
        weights: dict[str, Any] = {}
        for name, held in self.model.state_dict().items():
            gathered = whole(held) if isinstance(held, Tensor) else held  # extra state
            if wanted:
                weights[name] = gathered.cpu() if isinstance(held, Tensor) else held
        if not wanted:
            return None
        self._meta_model.load_state_dict(weights, assign=True)
        return self._meta_model
