"""The model of a job laid out over its ranks, and the check of its first batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from outpace.jobs.defaults import takes_cuda_graphs
from outpace.jobs.train.context import Job
from outpace.nn.extra_state import require_plain
from outpace.nn.model_options import apply_options
from outpace.nn.scratch_files import Scratch
from outpace.parallel import Layout, LayoutRequest, apply
from outpace.parallel.parallel_module import apply_plan_options, synchronise_statistics
from outpace.parallel.parity.first_batch import FirstBatch
from outpace.parallel.parity.state_check import StateCheck
from outpace.parallel.shared_memory import refuse_shared_memory
from outpace.parallel.sparse_gradients import refuse_sparse_gradients
from outpace.training.memory import reset_peak_memory
from outpace.training.step import Stepper


def lay_out(
    job: Job, objective: nn.Module, scratch: Scratch, say: Callable[[str], None]
) -> tuple[Layout, FirstBatch | StateCheck | None]:
    """Lay the model out by the plan; return the layout and a custom model's first-batch check.

    The check is None for a model of outpace's own, or if checks are off. All ranks must call this.
    """
    own, plan = job.inputs.custom_model, job.plan
    first: FirstBatch | StateCheck | None = None
    if own is not None:
        refuse_sparse_gradients(own.module)
        refuse_shared_memory(own.module, plan.strategy, own.loss)
        if not job.settings.measure_only:
            require_plain(own.module)
        synchronise_statistics(own, plan)
        if job.settings.check != "off" and plan.world_size == 1:
            # Nothing is saved, so there is nothing to report.
            first = None if job.settings.measure_only else StateCheck(plan, say, by_command=True)
        elif job.settings.check != "off":
            first = FirstBatch(objective, plan, job.ranks, say, by_command=True, blocks=own.blocks)
        apply_plan_options(own, plan, job.device, scratch, say)
    else:
        model: nn.Module = objective.model  # type: ignore[assignment]
        apply_options(model, plan, scratch=scratch, on_failure=say, device=job.device)
    layout = apply(
        LayoutRequest(
            objective, plan, job.ranks, job.device, scratch=scratch,
            blocks=None if own is None else own.blocks,
            layouts=None if own is None else own.layouts,
            cuda_graphs=takes_cuda_graphs(
                job.settings, plan, job.device, own is not None, _dropout_probability(job)
            ),
            on_failure=say,
        )
    )  # fmt: skip
    return layout, first


def make_first_check(
    first: FirstBatch | StateCheck | None,
    layout: Layout,
    stepper: Stepper,
    device: torch.device,
    start_step: int,
) -> Callable[[list[Any], bool], torch.Tensor | None] | None:
    """Return a function that checks the first batch of the run; None if `first` is None.

    `start_step`: the step after which a resumed run continues; otherwise 0.
    """
    if first is None:
        return None
    first.resumed = start_step > 0
    return partial(_check_first_batch, first, layout, stepper, device)


def _check_first_batch(
    first: FirstBatch | StateCheck,
    layout: Layout,
    stepper: Stepper,
    device: torch.device,
    batches: list[Any],
    reuse: bool,
) -> torch.Tensor | None:
    """Run the check `first` on the first global batch, and return its totals.

    Memory peaks are reset afterwards, so that they exclude the check.
    """

    def ready() -> None:
        reset_peak_memory(device)
        stepper.begin()

    if isinstance(first, StateCheck):
        totals = first.check(layout, batches, stepper.step_pass)
    else:
        step = stepper.forward_backward
        totals = first.check(layout, batches, stepper.step_pass, step, reuse, ready)
    if totals is None:
        reset_peak_memory(device)
    return totals


def _dropout_probability(job: Job) -> float:
    spec = job.inputs.spec
    return 0.0 if spec is None else spec.dropout
