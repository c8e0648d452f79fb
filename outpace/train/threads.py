"""CPU threads: as many per process as its share of the cores."""

import torch


def set_threads(asked: int | None, cores: int, local_world_size: int) -> int:
    """Set and return the number of threads that this process computes with."""
    threads = asked or max(1, cores // local_world_size)
    torch.set_num_threads(threads)
    return threads
