"""One optimizer step on one rank, from micro-batches to new weights."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.nn.mixed import Mixed
from outpace.optim.build import begin_step
from outpace.parallel import Layout, Pass
from outpace.records.plan import Plan
from outpace.train.memory import CacheFreer, peak_memory_bytes
from outpace.train.timing import OwnTime, StepTimer

Batch = Any


@dataclass(frozen=True)
class Gathered:
    """What all ranks said about a step: (world, 3) float64.

    Stop wish, peak memory in bytes, and the seconds that it took of the rank's own time.
    """

    values: Tensor

    @property
    def stop(self) -> bool:
        """Whether any rank was asked to stop."""
        return bool(self.values[:, 0].any())

    @property
    def peak_memory_by_rank(self) -> tuple[int, ...]:
        """Of each rank, bytes; empty where a rank does not know."""
        peaks = self.values[:, 1]
        return tuple(map(int, peaks.tolist())) if bool((peaks >= 0).all()) else ()

    @property
    def own_s(self) -> tuple[float, ...]:
        """Of each rank, without waiting for others; empty where a rank does not know."""
        own = self.values[:, 2]
        return tuple(own.tolist()) if bool((own >= 0).all()) else ()

    @property
    def peak_memory_bytes(self) -> int | None:
        """Of the fullest rank."""
        peak = float(self.values[:, 1].max())
        return int(peak) if peak >= 0 else None


@dataclass(frozen=True)
class RawStep:
    """A step whose device work may still be going on; tensors are read in `accounting`."""

    step: int
    lr: float
    totals: Tensor  # (2,) float64: loss sum, target count, over the global batch
    grad_norm: Tensor
    marks: list[tuple[str, Any]]
    communication_s: float
    gathered: Gathered
    loss_scale: float | None
    skipped: bool
    cache_freed_bytes: int | None = None


class Stepper:
    """The live parts that a step needs.

    `expected_targets` is the number of targets in a global batch: exact when `targets_known`,
    otherwise a guess that is corrected before the optimizer steps. `on_gradients` is called when
    a step's gradients are whole, before they are clipped.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        mixed: Mixed,
        plan: Plan,
        clip: float,
        device: torch.device,
        control: dist.ProcessGroup,
        expected_targets: int,
        targets_known: bool,
        on_gradients: Callable[[], None] | None = None,
    ) -> None:
        self._layout = layout
        self._optimizer = optimizer
        self.mixed = mixed
        self._clip = clip
        self._device = device
        self._control = control
        self._world_size = plan.world_size
        self._expected_targets = expected_targets
        self._targets_known = targets_known
        self._on_gradients = on_gradients
        self.on_mark: Callable[[str], None] = lambda part: None  # a part of a step is done
        # The loss is a sum over local targets; what averages gradients divides it by the ranks
        # (x W / N: see docs/design).
        self._scale = layout.averages / expected_targets
        self._timer = StepTimer(device)
        self._own_time = OwnTime(device)
        self._marks_before: list[tuple[str, Any]] = []
        self._freer = CacheFreer(device) if plan.empty_cache else None

    def begin(self) -> None:
        """Start the clock of the next step: what follows is time spent waiting for data."""
        self._timer.begin()

    def run(
        self, step: int, lr: float, batches: Iterable[Batch], stop: Callable[[], bool]
    ) -> RawStep:
        """Do step number `step` (from 1) with learning rate `lr`; `begin` was called before.

        `stop` is asked late, so that a signal during the step is heard by all ranks within it.
        """
        timer = self._timer
        timer.mark("data")
        begin_step(self._optimizer, step, lr)
        given = Pass(self.mixed.cast, self._scaled, self._mark)
        totals = self._layout.gradients(list(batches), given)
        communication_s = self._layout.exposed_communication_s()
        if self.mixed.wide_gradients:
            self._layout.widen_gradients()
        gathered, pending = self._exchange(totals, stop())
        if not self._targets_known:
            _wait(pending)
            pending = []
            # Correct the gradients for the true number of targets in the global batch.
            self._layout.scale_gradients(self._expected_targets / totals[1].clamp(min=1))
        self._mark("communication")
        if self._on_gradients is not None:
            self._on_gradients()
            timer.mark("other")
        grad_norm, loss_scale, skipped = self._update()
        self._mark("optimizer")
        _wait(pending)
        timer.mark("communication")
        self._marks_before = timer.take()
        return RawStep(
            step,
            lr,
            totals,
            grad_norm,
            self._marks_before,
            communication_s,
            gathered,
            loss_scale,
            skipped,
            None if self._freer is None else self._freer.take(),
        )

    def _mark(self, part: str) -> None:
        """A part is done; freeing its cache belongs to it."""
        if part in ("forward", "backward", "optimizer"):
            self.free_cache()
        self._timer.mark(part)
        self.on_mark(part)

    def free_cache(self) -> None:
        """What allocators keep for later, where the plan says so."""
        if self._freer is not None:
            self._freer.free()

    def _scaled(self, loss_sum: Tensor) -> Tensor:
        scaled = loss_sum * self._scale
        return scaled if self.mixed.scaler is None else self.mixed.scaler.scale(scaled)

    def _exchange(self, totals: Tensor, stop: bool) -> tuple[Gathered, list[Any]]:
        """Begin to sum the totals over ranks and to gather what each rank has to say."""
        peak = peak_memory_bytes(self._device)
        own_s = self._own_time.take(self._marks_before)
        said = torch.tensor(
            [[float(stop), -1.0 if peak is None else peak, own_s]], dtype=torch.float64
        )
        if self._world_size == 1:
            return Gathered(said), []
        heard = torch.empty(self._world_size, said.shape[1], dtype=torch.float64)
        group = None if self._device.type == "cuda" else self._control
        works = [
            dist.all_reduce(totals, group=group, async_op=True),
            dist.all_gather_single(heard, said, group=self._control, async_op=True),
        ]
        return Gathered(heard), works

    def _update(self) -> tuple[Tensor, float | None, bool]:
        """Clip, step, zero. Returns the norm before clipping, loss scale, and whether skipped."""
        optimizer, scaler = self._optimizer, self.mixed.scaler
        if scaler is None:
            norm = self._layout.clip(self._clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return norm, None, False
        used_scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for found_inf in found.values():
            self._layout.agree(found_inf)
        norm = self._layout.clip(self._clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if self.mixed.wide_gradients:
            self._layout.drop_wide_gradients()
        return norm, used_scale, scaler.get_scale() < used_scale


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
