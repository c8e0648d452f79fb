"""Identification of a job from the environment: equal in all its processes, unique to it."""

from collections.abc import Mapping

# torchrun's default run ID, shared by all runs without an ID.
_NO_RUN_ID = ("", "none")
# Variables of launchers that number processes: Open MPI 5 (PMIx) and 4, and horovodrun's server.
_OF_LAUNCHERS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "HOROVOD_GLOO_RENDEZVOUS_PORT")
# Variables of batch systems: an allocation, in which one launcher may start on each host.
_OF_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
# Parts of a heterogeneous job have separate allocations (sbatch(1), "HETEROGENEOUS JOBS").
_HETEROGENEOUS = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")


def job_identity(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that distinguish this process's job from others; empty if none do.

    A run ID suffices, since the ranks of one elastic run may come from several allocations. No
    variables exist for torchrun without an ID, Hydra's mpiexec, and ranks started by hand.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id not in _NO_RUN_ID:
        return {"TORCHELASTIC_RUN_ID": run_id}
    names = [] if any(environ.get(name) for name in _HETEROGENEOUS) else [*_OF_ALLOCATIONS]
    if not environ.get("RANK"):  # set by torchrun, which another launcher may start once per host
        names += _OF_LAUNCHERS
        if environ.get("SLURM_STEP_NUM_TASKS"):
            names.append("SLURM_STEP_ID")
    return {name: environ[name] for name in names if environ.get(name)}


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Return whether an elastic agent started this process to replace one that it ended."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
