"""Random numbers that depend only on the training position, so no state has to be saved."""

import random

import numpy as np
import torch


def seed_generators(*key: int) -> int:
    """Seed the CPU generators of torch, NumPy and Python from `key`; return torch's seed."""
    mixed = np.random.SeedSequence(key).generate_state(2, np.uint32)
    wide = int(mixed[0]) << 32 | int(mixed[1])
    # Not torch.manual_seed: until CUDA is initialised, each call queues a traceback that is never
    # freed, and it takes as long as all other bookkeeping of a step.
    torch.default_generator.manual_seed(wide)
    random.seed(int(mixed[0]))
    np.random.seed(mixed[1])
    return wide


def seed_all_generators(device: torch.device, *key: int) -> None:
    """Seed the CPU generators and the generator of `device` from `key`."""
    wide = seed_generators(*key)
    if device.type == "cuda":
        torch.cuda.manual_seed(wide)
    elif device.type == "mps":
        torch.mps.manual_seed(wide)
