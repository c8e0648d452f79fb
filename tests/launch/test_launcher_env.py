import pytest
import torch

from outpace.jobs.ranks.process_groups import resolve_backend
from outpace.launch.launcher_env import ranks_from
from outpace.records.errors import BadInputError
from outpace.records.ranks import Ranks

MEETING = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
FIFTH = Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_outside_of_a_launcher_there_are_no_ranks() -> None:
    assert ranks_from({"PATH": "/bin", "RANK": "", "LOCAL_RANK": "0"}) is None


def test_what_torchrun_sets_is_read() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert ranks_from({**environ, **MEETING}) == FIFTH


def test_what_open_mpi_and_horovodrun_set_is_read() -> None:
    assert ranks_from({**OPEN_MPI, **MEETING}) == FIFTH
    horovod = {
        name.replace("OMPI_COMM_WORLD", "HOROVOD"): value for name, value in OPEN_MPI.items()
    }
    assert ranks_from({**horovod, **MEETING}) == FIFTH


# As MPICH 5.0's mpiexec sets them; where hosts are SLURM's, srun starts one proxy of it on each.
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_JOB_ID": "712", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "1",
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip


def test_what_other_mpis_set_is_read() -> None:
    assert ranks_from({**HYDRA, **MEETING}) == FIFTH
    assert ranks_from({**HYDRA, **SRUN, **MEETING}) == FIFTH
    mvapich = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
    assert ranks_from({**mvapich, **MEETING}) == FIFTH
    cray = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
    assert ranks_from({**cray, "PALS_RANKID": "5", **MEETING}) == FIFTH
    assert ranks_from({"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}) is None


def test_what_srun_sets_for_mpis_as_well_is_srun_s() -> None:
    second = Ranks(rank=1, world_size=2, local_rank=0, local_world_size=1)
    assert ranks_from({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2", "PMIX_RANK": "1"}) == second
    shell = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMI_SIZE": "1"}
    assert ranks_from({**shell, "PMI_RANK": "0", "PMIX_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            "not PMI_LOCAL_RANK and PMI_LOCAL_SIZE, so it is unknown",
        ),
        (HYDRA, "not MASTER_ADDR and MASTER_PORT.* with mpiexec -genv MASTER_ADDR"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK = '3': this is one of several processes"),
        ({"ALPS_APP_PE": "1"}, "ALPS_APP_PE = '1'"),
    ],
)
def test_no_process_of_several_trains_by_itself(environ: dict[str, str], said: str) -> None:
    """Each would write a run of its own, and none would say so."""
    with pytest.raises(BadInputError, match=said):
        ranks_from(environ)


def test_torchrun_under_mpirun_is_nearer() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", **OPEN_MPI}
    assert ranks_from(environ) == Ranks()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("MASTER_PORT", "has OMPI_COMM_WORLD_RANK but not MASTER_PORT.* with mpirun -x"),
        ("OMPI_COMM_WORLD_SIZE", "Open MPI sets both"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "unknown which of the 8 processes share a host"),
    ],
)
def test_what_open_mpi_leaves_open_is_refused(missing: str, said: str) -> None:
    environ = {**OPEN_MPI, **MEETING}
    del environ[missing]
    with pytest.raises(BadInputError, match=said):
        ranks_from(environ)


def test_a_launcher_without_local_ranks_is_not_taken_for_one_host() -> None:
    with pytest.raises(BadInputError, match="but not LOCAL_RANK and LOCAL_WORLD_SIZE"):
        ranks_from({"RANK": "1", "WORLD_SIZE": "2", **MEETING})
    assert ranks_from({"RANK": "0", "WORLD_SIZE": "1"}) == Ranks()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0"}, "not WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_RANK and WORLD_SIZE but not RANK"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK = 'one' is not a whole number"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **MEETING},
            "rank 2 of 2",
        ),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        ranks_from(environ)


@pytest.mark.parametrize("port", ["abc", "-1", "0", "65536", "29500.0", " "])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(BadInputError, match="MASTER_PORT = "):
        ranks_from({**environ, **MEETING, "MASTER_PORT": port})


def test_backends_follow_the_device_and_are_refused_where_they_are_not() -> None:
    cpu = torch.device("cpu")
    assert resolve_backend("auto", cpu) == resolve_backend("gloo", cpu) == "gloo"
    with pytest.raises(BadInputError, match="the device is cpu"):
        resolve_backend("nccl", cpu)
    if torch.distributed.is_nccl_available():
        assert resolve_backend("auto", torch.device("cuda")) == "cpu:gloo,cuda:nccl"
    if not torch.distributed.is_mpi_available():
        with pytest.raises(BadInputError, match="built without MPI"):
            resolve_backend("mpi", cpu)
