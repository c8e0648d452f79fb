"""What tells one job from another by its environment."""

import pytest

from outpace.launch.job_identity import is_restarted, job_identity

SLURM = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        ({}, {}),
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, {}),
        # Ranks of one elastic run may come from several allocations.
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "7", **SLURM}, {"TORCHELASTIC_RUN_ID": "7"}),
        # srun's step has all ranks, unless it starts torchrun once on each node.
        (SLURM, {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}),
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "none", **SLURM}, {"SLURM_JOB_ID": "12"}),
        ({"SLURM_HET_SIZE": "2", **SLURM}, {"SLURM_STEP_ID": "3"}),
        ({"PMIX_NAMESPACE": "prterun-a-1@1"}, {"PMIX_NAMESPACE": "prterun-a-1@1"}),
        ({"PMIX_NAMESPACE": "prterun-a-1@1", "RANK": "0"}, {}),
    ],
)  # fmt: skip
def test_identity_of_a_job(environ, identity):
    assert job_identity(environ) == identity


def test_torchrun_counts_restarts():
    assert is_restarted({"TORCHELASTIC_RESTART_COUNT": "1"})
    assert not is_restarted({"TORCHELASTIC_RESTART_COUNT": "0"})
    assert not is_restarted({})
