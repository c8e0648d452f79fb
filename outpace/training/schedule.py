"""Learning rate as a pure function of the step, so that resuming needs no state."""

import math

from outpace.records.settings import TrainSettings


def warmup_steps(settings: TrainSettings, total_steps: int) -> int:
    """Return the number of linear warm-up steps: `--warmup`, or 5 % of the run."""
    return total_steps // 20 if settings.warmup is None else settings.warmup


def learning_rate(settings: TrainSettings, step: int, total_steps: int) -> float:
    """Return the learning rate of a step; `step` counts from 0.

    It rises linearly to `lr` during warm-up. The schedule after that is cosine (Loshchilov and
    Hutter 2017, eq. 5), linear, constant, or WSD (constant, then linear over the last fifth: Hu et
    al. 2024, MiniCPM, §4).
    """
    assert settings.lr is not None  # resolved before the first step
    warmup = warmup_steps(settings, total_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if settings.schedule == "constant":
        left = 1.0
    elif settings.schedule == "linear":
        left = 1.0 - done
    elif settings.schedule == "wsd":
        left = min(1.0, (1.0 - done) / 0.2)
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left)
