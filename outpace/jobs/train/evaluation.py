"""Evaluation of a job's held-out data."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from outpace.data.loader import Loader
from outpace.data.padded_batches import PaddedDataset
from outpace.data.samples import TokenDataset
from outpace.jobs.defaults import DEFAULT_EVAL_SAMPLES
from outpace.jobs.train.context import Job
from outpace.nn.mixed_precision import MixedPrecision
from outpace.parallel import Layout
from outpace.parallel.parity.module_state import preserve_state
from outpace.records.measurement import Evaluation
from outpace.training.callbacks import notify
from outpace.training.evaluate import evaluate
from outpace.training.guards import StopSignal


def make_loader(
    job: Job, data: Any, start_step: int, total_steps: int, batch: int | None = None
) -> Loader:
    """Return a loader of this rank's micro-batches of `data`, one step at a time.

    `batch` replaces the global batch of the settings.
    """
    settings = job.settings
    pin = job.device.type == "cuda" if settings.pin_memory is None else settings.pin_memory
    return Loader(
        data,
        seed=settings.seed,
        global_batch=batch or settings.global_batch,
        micro_batch=job.plan.samples_read,
        rank=job.plan.data_rank(job.ranks.rank),
        data_parallel=job.plan.readers,
        start_step=start_step,
        total_steps=total_steps,
        workers=settings.workers,
        pin_memory=pin,
        device=job.device,
        timeout_s=settings.comm_timeout_s,
    )


def warn_if_not_finite(hint_once: Callable[[str], None], found: Evaluation | None) -> None:
    """Warn the user if the validation loss is NaN or infinite.

    `hint_once`: shows a hint, unless it has been shown before.
    """
    if found is not None and not math.isfinite(found.loss):
        hint_once(
            f"the validation loss is {found.loss}: check the validation data for NaN, for very "
            "large values and for samples without a target"
        )


def evaluate_held_out(
    job: Job, layout: Layout, mixed: MixedPrecision, step: int, stop: StopSignal | None
) -> Evaluation | None:
    """Return the held-out loss and a task's metrics; None without held-out data or evaluation.

    Each sample of outpace's own data is used once, whatever the global batch and the number of
    ranks. In a user's data set, samples that do not fill a batch of all ranks are left out.
    """
    data = job.inputs.eval_data
    if data is None or job.settings.eval_batches == 0:
        return None
    most = _max_held_out_samples(job)
    batch = job.plan.samples_read * job.plan.readers
    own_data = not isinstance(data, (PaddedDataset, TokenDataset))  # the user's, of any loss
    if isinstance(data, (PaddedDataset, TokenDataset)):
        data = data.single_pass(most, batch)
        most = len(data)
    batches = max(1, min(most, len(data)) // batch)
    loader = make_loader(job, data, 0, batches, batch)
    try:
        found = evaluate(
            layout,
            loader,
            step=step,
            mixed=mixed,
            device=job.device,
            group=job.groups.control,
            stop=None if stop is None else lambda: stop.requested,
        )
    finally:
        loader.close()
    return found.model_copy(update={"perplexity": None}) if own_data else found


def _max_held_out_samples(job: Job) -> int:
    if job.settings.eval_batches is not None:
        return job.settings.eval_batches * job.settings.global_batch
    data = job.inputs.eval_data
    return DEFAULT_EVAL_SAMPLES if job.inputs.labels is None or data is None else len(data)


def evaluation_stage(job: Job, which: str) -> str:
    """Describe an evaluation and its length, since on a CPU it may take longer than training."""
    stage, data = f"measuring the {which} loss", job.inputs.eval_data
    if data is None or job.settings.eval_batches == 0:
        return stage
    samples = min(_max_held_out_samples(job), len(data))
    fewer = "" if job.settings.eval_batches is not None else " (for fewer: --eval-batches)"
    return f"{stage} on {samples:,} sample{'s' * (samples != 1)}{fewer}"


def evaluate_before(
    job: Job, start_step: int, measure: Callable[[int], Evaluation | None], layout: Layout
) -> Evaluation | None:
    """Evaluate before the first step; for a resumed run, return the recorded result.

    Afterwards, the state of a custom module is as before, since the check of the first batch has
    already copied it.
    """
    if start_step > 0:
        return job.groups.run_on_rank_0(lambda: job.run_dir.evaluation(0))
    notify(job.callbacks, "on_stage", evaluation_stage(job, "initial"))
    own = job.inputs.custom_model is not None
    with preserve_state(layout.objective, job.device) if own else nullcontext():
        initial = measure(0)
    if initial is not None:
        notify(job.callbacks, "on_eval", initial, False)
    return initial
