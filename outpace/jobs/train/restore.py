"""Resuming a run: everything is read before anything is changed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from outpace.jobs.train.context import Job
from outpace.jobs.train.run_record import changed_settings
from outpace.nn.mixed_precision import MixedPrecision
from outpace.records.errors import BadInputError
from outpace.records.run import RunRecord
from outpace.training.callbacks import notify
from outpace.training.checkpoint import (
    PROGRESS_FILE,
    Checkpointer,
    Progress,
    newest_intact,
    put_later_aside,
)
from outpace.training.run_dir import History, model_damage


def restore(
    job: Job,
    checkpointer: Checkpointer,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    mixed: MixedPrecision,
) -> Progress | None:
    """Load a resumed run's newest intact checkpoint; return None if the run starts at step 0.

    The run's folder is not changed. Collective. Raises BadInputError if starting at step 0 would
    overwrite work.
    """
    if not job.settings.resume:
        return None
    say = partial(notify, job.callbacks, "on_hint")
    folder = job.groups.run_on_rank_0(lambda: _choose_checkpoint(job, say))
    if folder is None:
        say(f"{job.run_dir.path} has no checkpoint yet; starting from step 0")
        return None
    progress = checkpointer.load(folder, model, optimizer)
    if mixed.scaler is not None and progress.scaler is not None:
        mixed.scaler.load_state_dict(progress.scaler)
    return progress


def _choose_checkpoint(job: Job, say: Callable[[str], None]) -> Path | None:
    chosen = newest_intact(job.run_dir.checkpoints, say)
    if chosen is None:
        _require_never_saved(job, job.run_dir.require_run(), job.run_dir.history())
    else:
        _require_same_run(chosen, job.run_dir.require_run())
    return chosen


def _require_same_run(checkpoint: Path, run: RunRecord) -> None:
    of = Progress.load(checkpoint / PROGRESS_FILE).run_started
    if of is not None and of != run.started:
        raise BadInputError(
            f"checkpoint {checkpoint} was saved by another run, started at {of}; the run that you "
            f"resume was started at {run.started}. Move it out of {checkpoint.parent} to resume "
            "from this run's checkpoints, or resume the run that it belongs to."
        )


def _require_never_saved(job: Job, earlier: RunRecord, history: History) -> None:
    """Raise BadInputError if a run has no checkpoint although it once had one, or has finished.

    Resuming it would start at step 0 and overwrite the run.
    """
    sign = _find_evidence_of_checkpoint(earlier, history)
    if sign is None:
        return
    run = job.run_dir.path
    model = f"start another run from its model with --model {run}, " if history.has_model else ""
    raise BadInputError(
        f"{job.run_dir.checkpoints} has no checkpoint, but {sign}: resuming would start at step 0 "
        f"and overwrite the run. Restore the checkpoints, {model}or start another run with another "
        "--out."
    )


def _find_evidence_of_checkpoint(earlier: RunRecord, history: History) -> str | None:
    if history.is_finished:
        return "the run finished before"
    resumed = max((int(one.get("step", 0)) for one in earlier.resumes), default=0)
    if resumed > 0:
        return f"the run was resumed from one at step {resumed}"
    saved = history.failure.checkpoint_step if history.failure is not None else None
    if saved is not None:
        return f"there was one at step {saved}"
    every, done = earlier.settings.save_every, history.steps.last_step
    # The second save waits until the first is on disk.
    if every and not earlier.settings.measure_only and done > 2 * every:
        return f"{done} steps were completed, with a checkpoint every {every}"
    return None


def continue_run(job: Job, record: RunRecord, start_step: int) -> None:
    """Record that a run is resumed after `start_step`; refuse a run with no steps left.

    Call it on rank 0, after everything that resuming needs has been read.
    """
    if not job.settings.resume:
        return
    run_dir, say = job.run_dir, partial(notify, job.callbacks, "on_hint")
    history = run_dir.history()
    finished = history.measurement is not None and history.measurement.steps == start_step
    whole = finished and model_damage(run_dir.model) is None
    if (whole and start_step == job.total_steps) or start_step > job.total_steps:
        raise BadInputError(
            f"{run_dir.path} has already completed {start_step} of {job.total_steps} steps. Train "
            f"it further with --steps above {start_step}, or start another run from its weights "
            f"with --model {run_dir.path}."
        )
    run_dir.put_models_aside(say)
    earlier = run_dir.require_run()
    change = changed_settings(earlier, job, start_step)
    if change is not None:
        say(change)
    put_later_aside(run_dir.checkpoints, start_step, say)
    run_dir.continue_from(start_step, job.total_steps, history, say)
    *before, last = record.resumes
    last = {**last, "step": start_step, "changed": list(record.changes_since(earlier))}
    run_dir.begin(record.model_copy(update={"resumes": (*before, last)}))
