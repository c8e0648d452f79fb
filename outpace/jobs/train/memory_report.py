"""`outpace train --memory`: a run's predicted memory next to its measured memory.

One step is traced tensor by tensor; for the whole run, the allocator and the process are measured.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from outpace.jobs.memory.fit import MemoryFit
from outpace.jobs.memory.trace_worker import Tracer
from outpace.jobs.train.context import Job
from outpace.parallel import Layout
from outpace.parallel.rank_objects import gather_objects
from outpace.records.base import write_atomic
from outpace.records.errors import BadInputError
from outpace.records.memory import MemoryAccount, MemoryUse
from outpace.trace.account import summarise_parts
from outpace.trace.allocation_tracer import AllocationTracer
from outpace.trace.depth_extrapolation import to_part_trace
from outpace.trace.device import Rules
from outpace.trace.resident import resident_growth
from outpace.trace.steps import states
from outpace.training.callbacks import notify
from outpace.training.step import Batch, Stepper

MEMORY_FILE = "memory.json"
# The first step starts without optimizer state; the second may still create buffers.
_SETTLED = 3
_LOOK_EVERY_S = 0.02


class MemoryReporter:
    """Monitors one run's memory on this rank, from before its model is built."""

    def __init__(self, job: Job, fitting: MemoryFit, tracer: Tracer, stack: ExitStack) -> None:
        self._job = job
        self._grown = stack.enter_context(resident_growth(_LOOK_EVERY_S))
        self._traced: MemoryAccount | None = job.groups.run_on_rank_0(
            lambda: _trace_fullest_rank(job, fitting, tracer)
        )
        self._watched: MemoryAccount | None = None
        if job.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(job.device)
        notify(job.callbacks, "on_memory", job.plan, MemoryUse(traced=self._traced))

    def follow(
        self, stepper: Stepper, layout: Layout, optimizer: torch.optim.Optimizer, start_step: int
    ) -> None:
        """Set the objects whose memory is reported. Call this just before the first step."""
        self._stepper, self._layout, self._optimizer = stepper, layout, optimizer
        self._step = min(start_step + _SETTLED, self._job.total_steps)

    @contextmanager
    def step_context(self, step: int, batches: list[Batch]) -> Iterator[None]:
        """Trace the allocations of one of the first steps; do nothing in other steps."""
        # Compiled code has no operators to trace.
        if step != self._step or self._job.plan.compile:
            yield
            return
        watch = AllocationTracer()
        # On CUDA, the backward runs in a separate thread, which the tracer does not see.
        with watch, torch.autograd.set_multithreading_enabled(False):
            named = self._layout.named_parameters()
            watch.register(self._layout.model, (parameter for _, parameter in named))
            watch.classify(states(self._optimizer), "optimizer state")
            watch.classify((x for x in tree_leaves(batches) if isinstance(x, Tensor)), "inputs")
            watch.begin_step(step)
            self._stepper.on_mark = watch.mark
            try:
                yield
            finally:
                self._stepper.on_mark = lambda part: None
            segments = watch.segments
        traces = [to_part_trace(segment) for segment in segments]
        self._watched = summarise_parts(traces, self._job.plan, self._job.ranks.rank, Rules())

    def finish(self) -> None:
        """Gather all measurements; show and save those of the fullest rank. Collective."""
        job = self._job
        said = gather_objects(self._measure(), job.groups.control)
        if job.ranks.rank != 0:
            return
        there = [account for account in said if account is not None]
        fullest = max(there, key=lambda account: account.peak_memory_bytes, default=None)
        if self._traced is not None and said[self._traced.rank] is not None:
            fullest = said[self._traced.rank]
        use = MemoryUse(traced=self._traced, measured=fullest)
        write_atomic(job.run_dir.path / MEMORY_FILE, use.model_dump_json(indent=2) + "\n")
        notify(job.callbacks, "on_memory", job.plan, use)

    def _measure(self) -> MemoryAccount | None:
        if self._watched is None:
            return None
        device = self._job.device
        seen: dict[str, object] = {"source": "measured", "device": device.type}
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            held = torch.cuda.memory_reserved(device)
            seen["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
            seen["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
            seen["unseen_bytes"] = max(0, total - free - held)
        elif self._grown:
            seen["resident_bytes"] = self._grown[0]
        return self._watched.model_copy(update=seen)


def _trace_fullest_rank(job: Job, fitting: MemoryFit, tracer: Tracer) -> MemoryAccount | None:
    if job.inputs.custom_model is not None:
        notify(
            job.callbacks, "on_hint",
            "--memory: for a custom model, memory is measured but not predicted. To predict it, "
            "use outpace memory --model FILE.py:FUNCTION with the same options.",
        )  # fmt: skip
        return None
    try:
        found = [tracer.trace_timeline(ask) for ask in fitting.trace_requests(job.plan)]
    except BadInputError as error:
        notify(job.callbacks, "on_hint", f"--memory: the step cannot be traced: {error}")
        return None
    return max(found, key=lambda account: account.needed_bytes, default=None)
