"""One optimizer step on one rank, from micro-batches to new weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.nn.mixed_precision import MixedPrecision, casts_kept
from outpace.nn.torch_versions import all_gather_single
from outpace.optim.build import begin_step
from outpace.parallel import Layout, StepHooks
from outpace.parallel.layout import divisor
from outpace.records.plan import Plan
from outpace.training.device_queue import DeviceFigures, DeviceQueue, queue_of
from outpace.training.memory import CacheFreer, peak_memory_bytes
from outpace.training.timing import BusyTime, Marks, StepTimer

Batch = Any


class RankReports:
    """Reports of all ranks on a step; reading them waits until they have arrived.

    Each rank reports whether it was asked to stop, its peak memory in bytes, and its busy time in
    seconds; −1 stands for unknown.
    """

    def __init__(self, values: Tensor | list[list[float]], work: Any = None) -> None:
        self._values = values
        self._work = work

    def wait(self) -> list[list[float]]:
        """Wait for the reports and return them (world size × 3)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if isinstance(self._values, Tensor):
            self._values = self._values.tolist()
        return self._values

    @property
    def stop(self) -> bool:
        """Whether any rank was asked to stop."""
        return any(stop for stop, _, _ in self.wait())

    @property
    def peak_memory_by_rank(self) -> tuple[int, ...]:
        """Peak memory of each rank in bytes; empty if unknown for any rank."""
        peaks = [int(peak) for _, peak, _ in self.wait()]
        return tuple(peaks) if min(peaks) >= 0 else ()

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of the step in which each rank worked; empty if unknown for any rank.

        The rest of the step, ranks waited for each other.
        """
        own = tuple(own_s for _, _, own_s in self.wait())
        return own if min(own) >= 0 else ()

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory in bytes of the rank that used the most; None if unknown."""
        peak = max(int(peak) for _, peak, _ in self.wait())
        return peak if peak >= 0 else None


@dataclass(frozen=True)
class Figures:
    """Figures of a finished step; `loss_scale` is None except in fp16."""

    loss_sum: float
    count: float  # targets in the global batch
    grad_norm: float
    loss_scale: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class RawStep:
    """A step that the device may not have finished; its figures are being copied to the host."""

    step: int
    lr: float
    totals: Tensor  # (2,) float64: loss sum and target count of the global batch
    grad_norm: Tensor
    marks: Marks
    copied: DeviceFigures
    gathered: RankReports
    cache_freed_bytes: int | None = None

    @property
    def done(self) -> bool:
        """Whether the device has finished the step, so that `figures` does not wait."""
        return self.marks[-1][1].query()

    def figures(self) -> Figures:
        """Wait until the device has finished the step, and return its figures."""
        read = self.copied.read(self.marks[-1][1])
        loss_sum, count = read.pop("totals")
        (grad_norm,) = read.pop("grad_norm")
        scale = read.pop("loss_scale", None)
        skipped = any(found > 0 for (found,) in read.values())
        return Figures(loss_sum, count, grad_norm, None if scale is None else scale[0], skipped)


class Stepper:
    """Runner of training steps on one rank.

    `expected_targets` is the number of targets in a global batch: exact if `targets_known`,
    otherwise an estimate that is corrected before the optimizer's step. `on_gradients` is called
    when a step's gradients are complete, before clipping. `queue` defaults to the device's.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        mixed: MixedPrecision,
        plan: Plan,
        clip: float,
        device: torch.device,
        control: dist.ProcessGroup,
        expected_targets: int,
        targets_known: bool,
        on_gradients: Callable[[], None] | None = None,
        queue: DeviceQueue | None = None,
    ) -> None:
        self._layout = layout
        self._optimizer = optimizer
        self.mixed = mixed
        self._clip = clip
        self._device = device
        self._control = control
        self._world_size = plan.world_size
        self._parts = plan.pp_microbatches  # into which a pipeline splits each batch
        self._expected_targets = expected_targets
        self._targets_known = targets_known
        self._on_gradients = on_gradients
        # Keep the casts of weights across micro-batches if weights do not change in between, and if
        # the backward needs the casts anyway, so that this takes no more memory.
        whole = plan.strategy in ("single", "ddp", "zero1") and plan.offload_parameters == "none"
        whole = whole and layout.shares_casts
        self._keeps_casts = whole and not plan.recomputes and not plan.optimizer_in_backward
        # called with the name of each part of a step when it ends
        self.on_mark: Callable[[str], None] = lambda part: None
        # The loss is a sum over local targets, and averaging divides gradients by `averages`.
        self._scale = layout.averages / expected_targets
        self.queue = queue_of(device) if queue is None else queue
        self._timer = StepTimer(self.queue)
        self._own_time = BusyTime(self.queue)
        self.heard: RankReports | None = None  # the latest complete reports
        self._speaking: RankReports | None = None  # reports on their way
        self._freer = CacheFreer(device) if plan.empty_cache else None
        # totals of the next step if the check of the first batch has already run its passes
        self.totals: Tensor | None = None

    def begin(self) -> None:
        """Start the next step. The time until `run` counts as waiting for data."""
        self._timer.begin()

    def pause(self) -> None:
        """Exclude the time until the next `begin` from all steps, for example an evaluation."""
        self._timer.pause()

    def run(
        self, step: int, lr: float, batches: Iterable[Batch], stop: Callable[[], bool]
    ) -> RawStep:
        """Run step number `step` (from 1) with learning rate `lr`; call `begin` before.

        `stop` is called after the passes, so that all ranks learn of a signal in this step, or in
        the next one if the device runs behind the host.
        """
        timer = self._timer
        timer.mark("data")
        begin_step(self._optimizer, step, lr)
        totals, self.totals = self.totals, None
        if totals is None:
            totals = self.forward_backward(list(batches), self.step_pass)
        if self.mixed.wide_gradients:
            self._layout.widen_gradients()
        gathered, summed = self._share_totals(totals, stop())
        if not self._targets_known:
            _wait_for(summed)
            # Rescale gradients to the true number of targets in the global batch.
            self._layout.scale_gradients(self._expected_targets / divisor(totals[1]))
        self._mark("communication")
        if self._on_gradients is not None:
            self._on_gradients()
            timer.mark("other")
        grad_norm, fp16 = self._update_weights()
        self._mark("optimizer")
        _wait_for(summed)
        self._wait_for_reports(gathered)
        copied = DeviceFigures(self.queue, {"totals": totals, "grad_norm": grad_norm, **fp16})
        timer.mark("communication")
        marks = timer.pop_marks()
        if self._world_size > 1:  # a single rank does not report, so marks would pile up
            self._own_time.add(marks)
        freed = None if self._freer is None else self._freer.pop_freed_bytes()
        return RawStep(step, lr, totals, grad_norm, marks, copied, gathered, freed)

    @property
    def step_pass(self) -> StepHooks:
        """Functions to call during a step's passes: casts, loss scaling and the timer."""
        return StepHooks(self.mixed.cast, self._scale_loss, self._mark)

    def forward_backward(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Run the forward and backward passes of a step over all micro-batches.

        Return this rank's sum of losses and number of targets, (2,) float64.
        """
        if self.mixed.wide_sums and len(batches) * self._parts > 1:
            self._layout.add_up_in_fp32()
        if not (self._keeps_casts and len(batches) > 1):
            return self._layout.gradients(batches, hooks)
        with casts_kept():
            cast = partial(self.mixed.cast, True)
            return self._layout.gradients(batches, replace(hooks, cast=cast))

    def _mark(self, part: str) -> None:
        """Mark the end of a part of the step, after freeing cached memory."""
        if part in ("forward", "backward", "optimizer"):
            self.free_cache()
        self._timer.mark(part)
        self.on_mark(part)

    def free_cache(self) -> None:
        """Free the allocator's cached memory if the plan asks for it (`empty_cache`)."""
        if self._freer is not None:
            self._freer.free()

    def _scale_loss(self, loss_sum: Tensor) -> Tensor:
        scaled = loss_sum * self._scale
        return scaled if self.mixed.scaler is None else self.mixed.scaler.scale(scaled)

    def _share_totals(self, totals: Tensor, stop: bool) -> tuple[RankReports, Any]:
        """Start two collectives: the sum of `totals` over ranks, and the gathering of reports."""
        peak = peak_memory_bytes(self._device)
        known_peak = -1.0 if peak is None else float(peak)
        if self._world_size == 1:
            return RankReports([[float(stop), known_peak, -1.0]]), None
        said = torch.tensor([[stop, known_peak, self._own_time.pop_seconds()]], dtype=torch.float64)
        heard = torch.empty(self._world_size, said.shape[1], dtype=torch.float64)
        group = None if self._device.type == "cuda" else self._control
        summed = dist.all_reduce(totals, group=group, async_op=True)
        work = all_gather_single(heard, said, group=self._control, async_op=True)
        return RankReports(heard, work), summed

    def _wait_for_reports(self, gathered: RankReports) -> None:
        """Wait for the ranks' reports on this step; on a GPU, for those on the previous step.

        All ranks must use reports on the same step, so that they stop together.
        """
        if self.queue.steps_behind and self._world_size > 1:
            before, self._speaking = self._speaking, gathered
            if before is None:
                return
            gathered = before
        gathered.wait()
        self.heard = gathered

    def _update_weights(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Clip the gradients, step the optimizer, and free the gradients.

        Return the gradients' norm before clipping. In fp16, also return the loss scale and, for
        each device, whether it skipped the step because of an overflow.
        """
        optimizer, scaler = self._optimizer, self.mixed.scaler
        if scaler is None:
            norm = self._layout.clip(self._clip, optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return norm, {}
        # `scaler.get_scale()` would wait for the device.
        scale = scaler._get_scale_async()
        seen = {} if scale is None else {"loss_scale": scale.clone()}
        scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for found_inf in found.values():
            self._layout.sync_found_inf(found_inf)
        seen |= {f"overflow on {device}": found_inf for device, found_inf in found.items()}
        norm = self._layout.clip(self._clip, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if self.mixed.wide_gradients:
            self._layout.drop_wide_gradients()
        return norm, seen


def _wait_for(work: Any) -> None:
    """Wait for a collective, if there is one. For NCCL, the stream waits, not the host."""
    if work is not None:
        work.wait()
