"""Number of CPU threads: the setting, OMP_NUM_THREADS, or a process's share of the cores."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from outpace.records.inventory import omp_threads

OMP_NUM_THREADS = "OMP_NUM_THREADS"
OUTPACE = "outpace-"  # prefix of the run IDs that outpace's launcher sets


def set_threads(
    asked: int | None,
    cores: int,
    local_world_size: int,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Set torch's number of threads in this process, and return it."""
    threads = asked or _threads_from_environment(environ) or max(1, cores // local_world_size)
    torch.set_num_threads(threads)
    return threads


def _threads_from_environment(environ: Mapping[str, str]) -> int | None:
    """Return the number of threads that the user set in OMP_NUM_THREADS; None if unset.

    A 1 under torchrun counts as unset, because it is torchrun's default. It would leave all but one
    of a rank's cores idle.
    """
    threads = omp_threads(environ.get(OMP_NUM_THREADS, ""))
    run_id = environ.get("TORCHELASTIC_RUN_ID", OUTPACE)
    by_torchrun = threads == 1 and not run_id.startswith(OUTPACE)
    return None if by_torchrun else threads
