"""Random numbers that depend only on the position in training, so no state has to be saved."""

import random

import numpy as np
import torch


def seed_generators(*key: int) -> int:
    """Seed the CPU's generators of torch, NumPy and Python from `key`; returns torch's seed."""
    mixed = np.random.SeedSequence(key).generate_state(2, np.uint32)
    wide = int(mixed[0]) << 32 | int(mixed[1])
    # Not torch.manual_seed: as long as CUDA is not initialised, each call queues a traceback, which
    # is never freed, and takes as long as all other accounting of a step.
    torch.default_generator.manual_seed(wide)
    random.seed(int(mixed[0]))
    np.random.seed(mixed[1])
    return wide


def seed_all_generators(device: torch.device, *key: int) -> None:
    """Seed the CPU's generators from `key`, and the device's."""
    wide = seed_generators(*key)
    if device.type == "cuda":
        torch.cuda.manual_seed(wide)
    elif device.type == "mps":
        torch.mps.manual_seed(wide)
