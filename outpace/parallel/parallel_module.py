"""`outpace.parallelize`: layout of a custom model for the user's own training loop."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from outpace.interop.custom_model import CustomModel, CustomObjective, build_custom_model
from outpace.nn.compiler_exclusion import leave_to_python
from outpace.nn.evaluation_mode import evaluation_mode
from outpace.nn.model_options import apply_options
from outpace.nn.scratch_files import Scratch
from outpace.nn.user_warning import warn_user
from outpace.optim.offload import OffloadedOptimizer
from outpace.parallel import apply
from outpace.parallel.batches import copy_batch, length_of, samples_in, tensors_in
from outpace.parallel.batchnorm import require_run_once, synchronise
from outpace.parallel.blocks import Blocks, flatten_blocks, named_blocks
from outpace.parallel.gloo_shutdown import register_gloo_shutdown
from outpace.parallel.layout import Batch, Layout, LayoutRequest, StepHooks, divisor
from outpace.parallel.offload import place_optimizer
from outpace.parallel.optimizer_split import explain_optimizer
from outpace.parallel.parity.first_batch import FirstBatch
from outpace.parallel.parity.state_check import StateCheck
from outpace.parallel.rank_agreement import RankAgreement
from outpace.parallel.refusals import refuse_between_steps, refuse_together
from outpace.parallel.sample_rows import SampleRows
from outpace.parallel.shared_memory import refuse_shared_memory
from outpace.parallel.sparse_gradients import refuse_sparse_gradients
from outpace.parallel.stage_scaling import StageScaling
from outpace.records.errors import BadInputError, first_names
from outpace.records.plan import AXES, Plan
from outpace.records.precisions import SCALED, WEIGHTS
from outpace.records.ranks import Ranks

Loss = Callable[[nn.Module, Any], Any]

_REFUSED = {
    "dp": "only rank 0 reads data, from outpace's own loader, and scatters it. Use ddp",
    "ps": "parameter servers cannot run your training loop. Use ddp, or outpace train",
    "cp": "ring attention replaces only outpace's own attention. Use zero3, or tp",
    "3d": "only models built by outpace are split over several axes. Use hsdp, a pipeline, or tp",
}


class ParallelModule:
    """A module laid out on the ranks of a plan, for your own training loop.

    Every rank must make the same calls in the same order. `layout` is the result of the strategy.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        ranks: Ranks,
        device: torch.device,
        scratch: Scratch,
        first_batch: FirstBatch | StateCheck | None = None,
    ) -> None:
        self.layout = layout
        self._first_batch = first_batch
        checks = first_batch is not None and ranks.world_size > 1
        self._agreement = RankAgreement(layout, plan, ranks) if checks else None
        self._shared: dict[int, ReferenceType[Any]] = {}  # tensors that `share` has returned
        self._scratch = scratch
        self.plan = plan
        self._ranks = ranks
        self._device = device
        self._frozen = {n for n, p in layout.named_parameters() if not p.requires_grad}
        self._pending: Tensor | None = None  # the loss whose gradients no optimizer has used
        self._optimizers = 0
        self._rows = getattr(layout, "rows", None) or SampleRows()  # one record with a pipeline
        self._scaling = StageScaling() if plan.pp > 1 else None
        layout.guard()

    def share(self, batch: Batch) -> Batch:
        """Return this rank's samples of a global batch that all ranks have read.

        A batch that an earlier call has returned is returned unchanged.

        If each rank reads only its share instead (DistributedSampler), do not call this. Give the
        sampler rank `plan.data_rank(rank)` of `plan.data_parallel` replicas, because all ranks of a
        pipeline or tp group need the same samples.
        """
        number, shares = self.plan.data_rank(self._ranks.rank), self.plan.data_parallel
        assert number is not None
        with refuse_together(self._ranks.world_size):
            given = tensors_in(copy_batch(batch, tensors=False))
            part = next((one for one in given if self._is_shared(one)), None)
            if part is not None:
                self._refuse_mixed_batch(part, given)
                return batch
            if self._agreement is not None:
                self._agreement.note_given(batch)
            among = f"{shares} data-parallel ranks"
            mine = self._split_evenly(batch, shares, "a global batch", among)[number]
            for one in tensors_in(copy_batch(mine, tensors=False)) if shares > 1 else ():
                if all(one is not other for other in given):  # a table goes to all ranks
                    key = id(one)
                    self._shared[key] = ref(one, partial(self._shared.pop, key))
            return mine

    def _is_shared(self, value: Any) -> bool:
        known = self._shared.get(id(value))
        return known is not None and known() is value

    def _refuse_mixed_batch(self, part: Any, given: Sequence[Any]) -> None:
        samples = length_of(part) if part.ndim else 0
        whole = samples * self.plan.data_parallel
        if samples and any(
            one.ndim and length_of(one) == whole and not self._is_shared(one) for one in given
        ):
            raise BadInputError(
                f"share got a batch with a part of {samples} samples that it has returned before, "
                f"and with a tensor of {whole}, the samples of all ranks. It would split neither. "
                "Call share once, with all tensors of the global batch."
            )

    def forward_backward(self, batch: Batch) -> Tensor:
        """Return the global batch's mean loss and compute its gradients, from this rank's share.

        Call this instead of `loss.backward()`. It replaces all previous gradients by those of the
        mean loss. To accumulate gradients, pass all samples of a step in one call, which processes
        them in the plan's micro-batches. The loss is summed over samples and ranks in float64 (fp32
        on Metal), whatever the module's dtype.
        """
        with self._in_call(in_step=True):
            if self._agreement is not None:  # first, so that ranks count alike if one refuses
                self._agreement.begin_call(batch)
            self._refuse_unfrozen()
            self._warn_of_dropped_gradients()
            for _, parameter in self.layout.named_parameters():
                parameter.grad = None
            if self._scaling is not None:
                self._scaling.drop_gradients()
            averages = self.layout.averages
            given = StepHooks(self._cast, scale=lambda loss_sum: loss_sum * averages)
            passes = self._split_into_passes(batch)
            first, self._first_batch = self._first_batch, None
            totals = None if first is None else first.check(self.layout, passes, given)
            if totals is None:
                totals = self.layout.gradients(passes, given)
            totals = self._sum_totals(totals)
            self.layout.scale_gradients(1 / divisor(totals[1]))
            if self._scaling is not None:
                self._scaling.note(self.layout.local_gradients())
            loss: Tensor = totals[0] / totals[1]
            self._pending = loss
            if self._agreement is not None:
                self._agreement.end_call()
            return loss

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of the whole model's gradient is at most `max_norm`.

        Each parameter counts once, wherever its parts are stored. Returns the norm before scaling.
        With `math.inf`, gradients are not scaled.
        """
        return self.layout.clip(max_norm)

    def make_optimizer(
        self,
        build: Callable[..., torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Return this rank's optimizer. `build` is a class such as torch.optim.AdamW.

        `groups` are torch's parameter groups, with parameters from `named_parameters()`. None: one
        group of all parameters that required gradients when `parallelize` was called, even if they
        are frozen now.

        Raises BadInputError for an optimizer that would train differently with this rank's
        parameters or shards than with all whole parameters. To find out, the optimizer takes a few
        steps on small parameters.
        """
        if groups is None:
            held = [p for n, p in self.layout.named_parameters() if n not in self._frozen]
            groups = [{"params": held}]
        listed = [{**group, "params": list(group["params"])} for group in groups]
        build = partial(build, **options) if options else build
        wrong = explain_optimizer(build, listed, self.plan, self._device)
        if wrong is not None:  # in a pipeline, perhaps on this rank alone
            raise refuse_between_steps(wrong) if self.plan.pp > 1 else BadInputError(wrong)
        optimizer = place_optimizer(self.layout, self.plan, self._scratch, listed, build)
        offloaded = getattr(optimizer, "optim", optimizer)  # within ZeroRedundancyOptimizer
        if isinstance(offloaded, OffloadedOptimizer):  # the loop may change weights
            optimizer.register_step_pre_hook(lambda *_: offloaded.read_weights())
        optimizer.register_step_pre_hook(self._measure_stage_scaling)
        if self._agreement is not None:
            optimizer.register_step_pre_hook(leave_to_python(self._agreement.before_step))
            optimizer.register_step_post_hook(leave_to_python(self._agreement.after_step))
        optimizer.register_step_post_hook(self._note_gradients_used)
        self._optimizers += 1
        return optimizer

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the mean loss without gradients, with the model in evaluation mode."""
        with self._in_call(in_step=True):
            with evaluation_mode(self.layout.objective), torch.no_grad():
                parts = self._split_into_passes(batch)
                sums = [self.layout.evaluate(part, StepHooks(self._cast)) for part in parts]
                totals = self._all_reduce(torch.stack(sums).sum(0))
            self.layout.free_gathered()
            return totals[0] / totals[1]

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return the whole model's state dict, with the module's names, on rank 0, else None."""
        with self._in_call():
            whole = self.layout.whole_model(self._ranks.rank == 0)
        return None if whole is None else dict(whole.state_dict())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters or shards, with the module's names."""
        return self.layout.named_parameters()

    def _refuse_unfrozen(self) -> None:
        """Refuse parameters that require gradients but were frozen when `parallelize` was called.

        Ranks would not reduce their gradients, and `make_optimizer` leaves them out by default.
        """
        if not self._frozen:
            return
        named = self.layout.named_parameters()
        late = [name for name, p in named if p.requires_grad and name in self._frozen]
        if late:
            raise BadInputError(
                f"{first_names(late)} did not require gradients when outpace.parallelize laid out "
                "the module, but now do, so ranks and optimizers are not prepared to train them. "
                "To train parameters from a later step on, let them require gradients until "
                "parallelize has returned, then call requires_grad_(False) on them, and "
                "requires_grad_(True) before that step."
            )

    def _sum_totals(self, totals: Tensor) -> Tensor:
        """Sum totals over ranks; warn once if the loop scales stages' gradients differently."""
        scaling = self._scaling
        if scaling is None:
            return self._all_reduce(totals)
        factors = totals.new_zeros(self._ranks.world_size)
        factors[self._ranks.rank] = scaling.factor
        totals, factors = self._all_reduce(torch.cat((totals, factors))).tensor_split([2])
        told = scaling.explain(factors)
        if told is not None:
            warn_user(told)
        if scaling.is_done:  # on all ranks in the same call
            self._scaling = None
        return totals

    def _measure_stage_scaling(self, *_: Any) -> None:
        if self._scaling is not None:
            self._scaling.measure(self.layout.local_gradients())

    def _note_gradients_used(self, *_: Any) -> None:
        self._pending = None

    def _warn_of_dropped_gradients(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None or not self._optimizers or not bool(pending.isfinite()):
            return
        if any(p.grad is not None for _, p in self.layout.named_parameters()):
            self._optimizers = 0
            warn_user(
                "forward_backward drops the gradients of its previous call, which no optimizer of "
                "make_optimizer has used. To accumulate gradients, pass all samples in one call, "
                "which splits them into micro-batches of the plan's micro_batch. If you used the "
                "gradients yourself or skipped that step, ignore this warning"
            )

    @contextmanager
    def _in_call(self, in_step: bool = False) -> Iterator[None]:
        with refuse_together(self._ranks.world_size, in_step), self.layout.in_call():
            yield

    def _split_into_passes(self, batch: Batch) -> list[Batch]:
        size, held = self.plan.samples_per_pass, samples_in(batch)
        if held % size:
            raise BadInputError(
                f"a rank's share of {held} samples does not divide into micro-batches of {size} "
                f"(micro_batch {self.plan.micro_batch} × pp_microbatches "
                f"{self.plan.pp_microbatches}). Change these, or use batches that divide evenly; "
                "with drop_last=True, a DataLoader omits a smaller last batch."
            )
        return self._rows.cut(batch, held // size)

    def _split_evenly(self, batch: Batch, parts: int, what: str, among: str) -> list[Batch]:
        held = samples_in(batch)
        if held % parts:
            raise BadInputError(
                f"{what} of {held} samples cannot be divided evenly among {among}. Use a multiple "
                f"of {parts}, and drop_last=True in a DataLoader."
            )
        return self._rows.cut(batch, parts)

    def _all_reduce(self, totals: Tensor) -> Tensor:
        if self._ranks.world_size > 1:
            dist.all_reduce(totals)
        return totals

    def _cast(self) -> AbstractContextManager[None]:
        if self.plan.precision != "bf16":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)


def parallelize(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh | None = None,
    *,
    loss: Loss | None = None,
    blocks: Blocks | None = None,
    layouts: Mapping[str, str] | None = None,
    sync_batchnorm: bool = False,
    check: Literal["on", "off"] = "on",
) -> ParallelModule:
    """Lay out a module (already on its device) according to the plan. Every rank calls this.

    All ranks start from rank 0's weights. The module is changed in place; from then on, call only
    the returned object.

    `mesh` has the plan's axes by name over all ranks, in order. None: a mesh is created, and also
    the default process group if there is none, from the environment that torchrun sets.

    `loss(module, batch)` returns the mean over the batch's samples, or (sum, count) if the mean is
    over something else, such as tokens that are not padding. It may also return a dict or an object
    whose `loss` is the mean. None: the loss is the `.loss` that the module returns, or the
    cross-entropy of its logits with batch["targets"].

    `blocks` are the names of the submodules that ZeRO gathers one at a time, and that a pipeline
    distributes over its stages. The module's forward must call each block once, in this order, and
    pass its output to the next block as the first input. A list of lists names the blocks of each
    stage. None: the repeated submodules, or all members of an nn.Sequential.

    `layouts` selects the matrices that tp splits, by patterns of names: {"layers.*.q": "colwise",
    "layers.*.o": "rowwise"}. None: the layouts that a transformers model defines. The guide to
    custom models lists all layouts.

    `sync_batchnorm`: replicas normalise with statistics over the samples of all replicas.

    `check`: before the first step, the loss and gradients of its batch are compared with those of
    the plain module. A difference raises BadInputError, but if it is due only to splitting the
    batch, a warning says how large it is. The check also names state that state_dict() does not
    contain, even in a single process. "off" disables the check.

    Raises BadInputError for unsupported requests, on all ranks if any rank refuses.
    """
    _refuse_unsupported(module, plan, loss)
    if check not in ("on", "off"):
        raise BadInputError(f"check is {check!r}; use on or off")
    device = next(module.parameters()).device
    ranks = _ranks(plan, mesh, device)
    custom = CustomModel(
        module, loss, blocks=blocks, layouts=layouts, sync_batchnorm=sync_batchnorm
    )
    objective = CustomObjective(build_custom_model(lambda: custom))
    scratch = Scratch()
    with refuse_together(ranks.world_size):
        synchronise_statistics(custom, plan)
        first: FirstBatch | StateCheck | None = None
        if check == "on" and plan.world_size == 1:
            first = StateCheck(plan, warn_user, by_command=False)
        elif check == "on":
            first = FirstBatch(objective, plan, ranks, warn_user, by_command=False, blocks=blocks)
        layout = lay_out(objective, custom, plan, ranks, device, scratch)
    return ParallelModule(layout, plan, ranks, device, scratch, first)


def lay_out(
    objective: CustomObjective,
    custom: CustomModel,
    plan: Plan,
    ranks: Ranks,
    device: torch.device,
    scratch: Scratch,
    on_failure: Callable[[str], None] | None = None,
) -> Layout:
    """Lay out a custom model's objective on its ranks, with the plan's options. Collective.

    Call `synchronise_statistics` first. `on_failure` is called with the reason if the compiler
    fails.
    """
    apply_plan_options(custom, plan, device, scratch, on_failure)
    return apply(
        LayoutRequest(objective, plan, ranks, device, custom.blocks, custom.layouts, scratch)
    )


def apply_plan_options(
    custom: CustomModel,
    plan: Plan,
    device: torch.device,
    scratch: Scratch,
    on_failure: Callable[[str], None] | None = None,
) -> None:
    """Apply a plan's options to the blocks of a custom model, which computes on `device`."""
    named = (
        None
        if custom.blocks is None
        else named_blocks(custom.module, flatten_blocks(custom.blocks))
    )
    apply_options(custom.module, plan, named, scratch, on_failure, device)


def synchronise_statistics(custom: CustomModel, plan: Plan) -> None:
    """Convert batch normalisation to statistics over all replicas if requested. Collective."""
    if custom.sync_batchnorm and plan.data_parallel > 1:
        group = dist.new_group()
        assert group is not None
        synchronise(custom.module, group)


def refused_strategy(strategy: str) -> str | None:
    """Explain why `parallelize` does not support a strategy, and what to use; None if it does."""
    return _REFUSED.get(strategy)


def _refuse_unsupported(module: nn.Module, plan: Plan, loss: Loss | None) -> None:
    why_not = refused_strategy(plan.strategy)
    if why_not is not None:
        raise BadInputError(f"parallelize does not support strategy {plan.strategy}: {why_not}.")
    if plan.precision in SCALED:
        raise BadInputError(
            f"precision {plan.precision} needs a loss scaler in the training loop. Use bf16, or "
            "outpace train."
        )
    if plan.precision in WEIGHTS or plan.precision == "fp8":
        raise BadInputError(
            f"parallelize does not convert the module to precision {plan.precision}. Convert it "
            "first (module.bfloat16(), torchao's float8) and pass precision fp32, or use outpace "
            "train."
        )
    if plan.optimizer_in_backward:
        raise BadInputError(
            "optimizer_in_backward updates parameters during the backward, but with parallelize "
            "your loop steps the optimizer. Leave out optimizer_in_backward, or use outpace train."
        )
    if plan.loss != "auto":
        raise BadInputError(
            f"loss {plan.loss} applies only to outpace's own transformers. Use loss auto in the "
            "plan, and pass your loss to parallelize."
        )
    if plan.offload_parameters == "cpu" and plan.world_size == 1:
        raise BadInputError(
            "offload_parameters cpu on one process works only in outpace train, which creates a "
            "process group. Use zero3 on several processes, or offload_optimizer."
        )
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        raise BadInputError("the module has lazy parameters. Run a batch through it first.")
    if not any(p.requires_grad for p in module.parameters()):
        raise BadInputError(
            "the module has no parameter that requires gradients. Call requires_grad_(True) on "
            "those to train."
        )
    require_run_once(module, plan.recomputes)
    refuse_sparse_gradients(module, plan.strategy)
    refuse_shared_memory(module, plan.strategy, loss)


def launched_world_size() -> int:
    """Return the number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1


def _ranks(plan: Plan, mesh: DeviceMesh | None, device: torch.device) -> Ranks:
    """Return this process's rank and the world size; initialise torch.distributed if needed.

    Raises BadInputError if the processes or `mesh` do not match the plan.
    """
    started = dist.get_world_size() if dist.is_initialized() else launched_world_size()
    if plan.world_size == 1 and started == 1 and mesh is None:
        if plan.strategy != "single":
            raise BadInputError(
                f"strategy {plan.strategy} is for several processes, but the plan and this job are "
                "for one. Use strategy single, or start more with torchrun."
            )
        return Ranks()
    if mesh is None:
        if not (dist.is_initialized() or launched_world_size() > 1):
            raise BadInputError(
                f"the plan is for {plan.world_size} processes ({plan.mesh}), but there is only "
                f"this one. Start them with: torchrun --nproc-per-node {plan.world_size} …"
            )
        if not dist.is_initialized():
            dist.init_process_group()
    else:
        _require_plan_mesh(plan, mesh)
    register_gloo_shutdown()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size != plan.world_size:
        raise BadInputError(
            f"the plan is for {plan.world_size} processes ({plan.mesh}), but there are "
            f"{world_size}. Use another plan, or start that number of processes."
        )
    return Ranks(rank=rank, world_size=world_size)


def _require_plan_mesh(plan: Plan, mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=False))
    wanted = {axis: getattr(plan, axis) for axis in AXES}
    in_order = [axis for axis in AXES if axis in sizes]
    if (
        any(axis not in wanted for axis in sizes)
        or list(names) != in_order
        or any(sizes.get(axis, 1) != size for axis, size in wanted.items())
        or mesh.mesh.flatten().tolist() != list(range(plan.world_size))
    ):
        raise BadInputError(
            f"the mesh is {sizes or tuple(mesh.shape)} over ranks {mesh.mesh.flatten().tolist()}, "
            f"but the plan is {plan.mesh}, with the axes pp, dp_replicate, dp_shard, cp, tp in "
            "this order, over all ranks in ascending order. Use init_device_mesh(device, sizes, "
            "mesh_dim_names=names), or leave the mesh out."
        )
