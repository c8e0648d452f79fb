"""Launchers and the environment variables that they set for each process.

Every command imports this module, so it imports little.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """A launcher's variable names for the fields of `Ranks`."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Variable names: rank, world size, local rank and local world size."""
        return self.rank, self.world_size, self.local_rank, self.local_world_size


# Innermost launcher first: torchrun may itself be started by mpirun.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # horovod/runner/gloo_run.py, create_slot_env_vars
    Launcher(
        "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    ),
    # docs.open-mpi.org, "Environment variables set at run time"
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # mvapich.cse.ohio-state.edu, MVAPICH2 user guide, "Environment variables"
    Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
)
# MPICH and Intel MPI (src/pm/hydra of MPICH), Cray PALS and others that implement PMI.
HYDRA = Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
PMI = Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
# Variables of launchers that set a process's rank but not the number of processes: PMIx (prun),
# aprun, PALS and flux.
RANK_ALONE = ("PMIX_RANK", "ALPS_APP_PE", "PALS_RANKID", "FLUX_TASK_RANK")


def rank_name(environ: Mapping[str, str]) -> str:
    """Return this process's rank as text, from any launcher's variables; "0" without one.

    The text is not checked.
    """
    names = [launcher.rank for launcher in (*LAUNCHERS, HYDRA)]
    if environ.get("SLURM_STEP_NUM_TASKS"):
        names.append("SLURM_PROCID")
    names += RANK_ALONE
    return next((environ[name] for name in names if environ.get(name)), "0")
