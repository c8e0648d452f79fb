"""Bytes that a step sends and time that ranks wait, for runs that only measure.

Measured steps are not disturbed: bytes are counted in the last warm-up step, and clocks are read
after it and after the very last step.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outpace.jobs.train.context import Job
from outpace.parallel.rank_objects import gather_objects
from outpace.records.measurement import WARMUP_STEPS
from outpace.training.collective_counter import CollectiveCounter
from outpace.training.step import Batch
from outpace.training.timing import thread_busy_s


class CommStats:
    """Measures the bytes that this rank sends in a step, and the share of time it is idle.

    `start_step`: the last step before this run; 0 for a new run. Warm-up steps follow it.
    """

    def __init__(self, job: Job, start_step: int) -> None:
        self._job = job
        self._warm = start_step + WARMUP_STEPS
        self._sent_bytes: int | None = None
        self._began: tuple[float, float] | None = None
        self._idle_share: float | None = None

    @property
    def _can_count(self) -> bool:
        """Return whether operator hooks see all communication, and all steps communicate alike."""
        plan = self._job.plan
        begun = plan.powersgd_start is None or plan.powersgd_start < self._warm
        return begun and not plan.compile and plan.strategy != "horovod"

    @contextmanager
    def step_context(self, step: int, batches: list[Batch]) -> Iterator[None]:
        """Count the bytes sent in the last warm-up step; do nothing in other steps."""
        if step != self._warm or not self._can_count:
            yield
            return
        # On CUDA, the backward runs in a separate thread, which the counter does not see.
        with CollectiveCounter() as wire, torch.autograd.set_multithreading_enabled(False):
            yield
        self._sent_bytes = wire.tally.bytes

    def after_step(self, step: int) -> None:
        """Measure this rank's idle share from the last warm-up step to the last step, on a CPU."""
        # On an accelerator, the main thread only launches work.
        if self._job.device.type != "cpu" or step not in (self._warm, self._job.total_steps):
            return
        now = time.perf_counter(), thread_busy_s()
        if self._began is not None:
            took_s, busy_s = (end - begin for begin, end in zip(self._began, now, strict=True))
            self._idle_share = min(1.0, max(0.0, 1 - busy_s / took_s))
        self._began = now

    def figures(self) -> dict[str, Any]:
        """Return the bytes sent in a step, summed over all ranks, and the ranks' mean idle share.

        The keys are fields of `Measurement`; a value is None if a rank did not measure it. All
        ranks must call this.
        """
        said = gather_objects((self._sent_bytes, self._idle_share), self._job.groups.control)
        sent, idle = zip(*said, strict=True)
        return {
            "sent_bytes": None if None in sent else sum(sent),
            "idle_share": None if None in idle else sum(idle) / len(idle),
        }
