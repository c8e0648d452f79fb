"""Identity of a job, from environment variables that are the same in all its processes."""

from collections.abc import Mapping

# torchrun's run ID if the user gives none. It does not identify the job.
_NO_RUN_ID = ("", "none")
# Variables of launchers: Open MPI 5 (PMIx) and 4, and horovodrun's server.
_OF_LAUNCHERS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "HOROVOD_GLOO_RENDEZVOUS_PORT")
# Variables of batch systems that identify an allocation, on whose hosts launchers may be started.
_OF_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
# Parts of a heterogeneous job have separate allocations (sbatch(1), "HETEROGENEOUS JOBS").
_HETEROGENEOUS = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")


def job_identity(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that distinguish this process's job from others.

    torchrun's run ID is used alone, since ranks of an elastic run may come from several
    allocations. Empty if nothing identifies the job: under torchrun without an ID and Hydra's
    mpiexec outside of a batch system, and for ranks started by hand.
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
