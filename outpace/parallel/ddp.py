"""Replicas that start from equal weights and average their gradients during the backward.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020:
gradients are put into buckets, and a bucket is all-reduced as soon as it is full.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from outpace.nn.compiler_exclusion import leave_alone, skip_compile_query
from outpace.nn.torch_versions import without_buffers
from outpace.parallel.gradient_use import GradientUse, ranks_may_differ
from outpace.parallel.layout import Batch, Layout, LayoutRequest, StepHooks
from outpace.parallel.peer_memory import GradientAveraging, peer_memory_group
from outpace.records.errors import BadInputError
from outpace.records.plan import POWERSGD_LEAST_START, Plan


def reduce_in_bf16(
    group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Call torch's bf16 compression hook, which DDP refuses on gloo although it works there."""
    return bf16_compress_hook(group, bucket)


def reduce_low_rank(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket's matrices as P Qᵀ (Vogels et al., "PowerSGD", NeurIPS 2019, alg. 1 and 2).

    torch's hook starts its second and third collectives in callbacks of the previous ones. With
    gloo, these callbacks run in gloo's threads, between the collectives of the next bucket, and
    both buckets hang. On a CPU, this function therefore waits for the bucket before it returns.
    """
    reduced = powerSGD_hook(state, bucket)
    if bucket.buffer().device.type == "cpu":
        reduced.wait()
    return reduced


def low_rank_state(plan: Plan, device: torch.device) -> PowerSGDState:
    """Create PowerSGD's state. Raises BadInputError if PowerSGD is not supported."""
    if device.type == "cpu" and torch.cuda.is_available():
        raise BadInputError(
            "--compress-gradients powersgd: torch's PowerSGD synchronises with a CUDA device if "
            "the machine has one, so it fails with --device cpu. Use --device cuda."
        )
    start = plan.powersgd_start or POWERSGD_LEAST_START
    return PowerSGDState(None, plan.powersgd_rank, start_powerSGD_iter=start)


class Replicas(Layout):
    """The objective, wrapped in DistributedDataParallel."""

    module: DistributedDataParallel
    low_rank: PowerSGDState | None = None
    _adds_in_fp32 = False

    def __init__(self, request: LayoutRequest) -> None:
        device, plan = request.device, request.plan
        wrapped = _wrap_in_ddp(request)
        _release_reducer_before_group(wrapped)
        super().__init__(request.objective, wrapped)
        self.averages = plan.data_parallel * plan.cp
        self.use: GradientUse | None = None
        if ranks_may_differ(request.objective):
            named = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
            self._trained = [parameter for _, parameter in named]
            self.use = GradientUse(named, device)
            self._before: dict[nn.Parameter, tuple[Tensor, int]] = {}
            self._unused: set[nn.Parameter] = set()
        self.on_disk = plan.offload_parameters == "disk"
        if plan.compress_gradients == "bf16":
            wrapped.register_comm_hook(None, reduce_in_bf16)
        elif plan.compress_gradients == "powersgd":
            self.low_rank = low_rank_state(plan, device)
            wrapped.register_comm_hook(self.low_rank, reduce_low_rank)
        elif device.type == "cpu" and request.ranks.local_world_size == request.ranks.world_size:
            near = peer_memory_group(wrapped.process_group)
            if near is not None:
                averaging = GradientAveraging(near, wrapped.process_group)
                wrapped.register_comm_hook(None, averaging.begin)

    def no_sync(self) -> AbstractContextManager[None]:
        if self._adds_in_fp32:
            super().add_up_in_fp32()
        return self.module.no_sync()

    def add_up_in_fp32(self) -> None:
        """Accumulate the gradients of all micro-batches except the last in fp32.

        The last micro-batch is added in DDP's buckets, which have the parameters' dtype.
        """
        self._adds_in_fp32 = True

    @torch.no_grad()
    def prepare_reduction(self) -> None:
        """Round accumulated gradients to the dtype of DDP's buckets, before the last micro-batch.

        Also record these gradients and their version counters, so that `_has_new_gradient` can tell
        which of them the last micro-batch changes.
        """
        if self._adds_in_fp32:
            self._round_accumulated_gradients()
        if self.use is not None:
            sums = [(p, p.grad) for p in self._trained if p.grad is not None]
            self._before = {parameter: (sum_, sum_._version) for parameter, sum_ in sums}

    def _round_accumulated_gradients(self) -> None:
        sums = [(p, p.grad) for p in self._accumulated_parameters() if p.grad is not None]
        narrow = [torch.empty_like(sum_, dtype=p.dtype) for p, sum_ in sums]
        if sums:
            torch._foreach_copy_(narrow, [sum_ for _, sum_ in sums])
        for parameter in self._accumulated_parameters():
            parameter.grad = None  # otherwise torch refuses a gradient of another dtype
            parameter.grad_dtype = parameter.dtype
        for (parameter, _), gradient in zip(sums, narrow, strict=True):
            parameter.grad = gradient

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute the step's gradients. Parameters that no rank has used get no gradient."""
        totals = super().gradients(batches, hooks)
        if self.use is not None:
            self.use.agree([p not in self._unused for p in self._trained])
            self._unused.clear()
            self._before.clear()
        return totals

    def resume_from(self, start_step: int) -> None:
        """Make PowerSGD and `GradientUse` count steps from `start_step` on."""
        if self.use is not None:
            self.use.steps = start_step
        if self.low_rank is not None:
            left = self.low_rank.start_powerSGD_iter - start_step
            self.low_rank.start_powerSGD_iter = max(POWERSGD_LEAST_START, left)

    def discard_comparison(self) -> None:
        """Do not count the pass that checked the first batch as a step.

        The count matters, because PowerSGD does not compress the first steps.
        """
        if self.use is not None:
            self.use.steps -= 1
        if self.low_rank is not None:
            self.low_rank.iter -= 1

    def _backward(self, loss: Tensor, hooks: StepHooks) -> None:
        """Run the backward, and attribute the wait for collectives at its end to communication.

        When all gradients are computed, autograd calls the queued callbacks in order. The first,
        queued here, ends the time of the backward. The next, which DDP queued with its last bucket,
        waits for the collectives (on a GPU, in its stream). DDP's logging data are no alternative,
        because they describe a much earlier step.
        """
        if not self.module.require_backward_grad_sync:
            super()._backward(loss, hooks)
            return
        # Callbacks run at the end of the current backward.
        after = Variable._execution_engine.queue_callback
        loss.register_hook(lambda gradient: after(lambda: hooks.mark("backward")))
        loss.backward()
        if self.use is not None:
            self._complete_buckets()
        hooks.mark("communication")

    def _complete_buckets(self) -> None:
        """Give DDP zero gradients for parameters that this backward did not reach.

        DDP's buckets wait for all parameters, including those that the user's forward has frozen.
        """
        try:
            self.module._check_reducer_finalized()
            # DDP does not expect a backward that reaches no parameter (a loss of constant 0).
            if any(self._has_new_gradient(parameter) for parameter in self._trained):
                return
        except RuntimeError:
            pass  # DDP's error suggests `find_unused_parameters`, which walks every graph
        lacking = [p for p in self._trained if not self._has_new_gradient(p)]
        self._unused.update(p for p in lacking if p.grad is None)
        frozen = [p for p in lacking if not p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        torch.autograd.backward(lacking, [torch.zeros_like(p) for p in lacking])
        for parameter in frozen:
            parameter.requires_grad_(False)

    def _has_new_gradient(self, parameter: nn.Parameter) -> bool:
        before = self._before.get(parameter)
        if parameter.grad is None or before is None:
            return parameter.grad is not None
        return parameter.grad is not before[0] or before[0]._version != before[1]


def _wrap_in_ddp(request: LayoutRequest) -> DistributedDataParallel:
    device, plan = request.device, request.plan
    wrap = partial(
        DistributedDataParallel,
        request.objective,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=plan.bucket_mib,
        **(without_buffers() if ranks_may_differ(request.objective) else {}),  # see SharedBuffers
    )
    if plan.compile:
        return wrap()
    leave_alone(DistributedDataParallel._inside_ddp_forward)
    with skip_compile_query():
        return wrap()


def _release_reducer_before_group(wrapped: DistributedDataParallel) -> None:
    """Make the module release its reducer before its process group.

    If the reducer is the group's last owner, as after `destroy_process_group`, it ends gloo's
    threads while it holds the GIL. A thread that needs the GIL to release a tensor then makes the
    process hang at exit (torch 2.13). If Python is the last owner, the group ends without the GIL.
    A module releases its attributes in the order in which they were set.
    """
    held = wrapped.__dict__
    held["process_group"] = held.pop("process_group")


def apply(request: LayoutRequest) -> Layout:
    """Wrap the objective in DistributedDataParallel. Needs the default process group."""
    return Replicas(request)
