"""`--micro-batch auto` for one process on a GPU: sizes are tried here on random tokens.

A GPU's allocator fails immediately if a size does not fit, and frees a failed trial's memory, so
neither a prediction nor a separate process is needed: a trial costs only its steps.
"""

import gc
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from outpace.jobs.memory.fit import limit_device
from outpace.jobs.train.auto_micro_batch import OF_LIMIT, TRIAL_STEPS, sizes, with_size
from outpace.records.errors import OutOfMemoryError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback, notify
from outpace.training.synthetic import SyntheticSteps, SyntheticTraining

# Runs a few steps of a plan with this many samples each; raises torch.OutOfMemoryError.
Steps = Callable[[Plan, int], None]


def can_try(
    plan: Plan, settings: TrainSettings, device: torch.device, is_transformer: bool
) -> bool:
    """Return whether a trial run in this process needs the same memory as training will."""
    alone = plan.world_size == 1 and device.type == "cuda"
    like_training = plan.lora_rank is None and not plan.optimizer_in_backward
    like_training &= plan.offload_parameters != "disk" and not settings.document_attention
    return alone and is_transformer and like_training


def device_steps(
    spec: ModelSpec,
    seq_len: int,
    device: torch.device,
    control: dist.ProcessGroup,
    limit_bytes: int,
    asked_bytes: int | None,
) -> Steps:
    """Return a function that tries a few training steps in slightly less than `limit_bytes`.

    `asked_bytes`: the user's limit on the device's memory, which is restored after each trial;
    None: all of the device's memory.
    """

    def run_steps(plan: Plan, samples: int) -> None:
        limit_device(round(OF_LIMIT * limit_bytes), device)
        try:
            steps = SyntheticSteps(
                plan, SyntheticTraining(spec, samples, seq_len), Ranks(), device, control
            )
            for _ in range(TRIAL_STEPS):
                steps.step()
            torch.cuda.synchronize(device)
        finally:
            whole = torch.cuda.get_device_properties(device).total_memory
            limit_device(asked_bytes or whole, device)

    return run_steps


def find_on_device(
    plan: Plan, settings: TrainSettings, take: Steps, callbacks: Sequence[Callback]
) -> Plan:
    """Return the plan with the largest micro-batch that fits on the device.

    Raises OutOfMemoryError if not even one sample fits. Trials run eagerly, since otherwise each
    size would be compiled; compiled code does not need more memory.
    """
    for size in sizes(plan):
        notify(callbacks, "on_stage", f"trying micro-batch {size}")
        sized = with_size(plan, size)
        passes = min(2, sized.accumulation(settings.global_batch))
        eager = sized.model_copy(update={"compile": False})
        fits = _fits(take, eager, sized.samples_per_pass * passes)
        # Now only reference cycles and the allocator's cache hold the failed trial's memory.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if fits:
            return sized
    raise OutOfMemoryError(
        "out of memory: not even a micro-batch of 1 sample fits. Use --checkpointing full, a "
        "smaller --seq-len or model, --optimizer adamw-8bit, or --offload cpu."
    )


def _fits(take: Steps, plan: Plan, samples: int) -> bool:
    try:
        take(plan, samples)
    except torch.OutOfMemoryError:
        return False
    return True
