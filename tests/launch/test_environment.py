import pytest
import torch

from outpace.launch.environment import ranks_from, restart_count
from outpace.launch.group import resolve_backend
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
    assert restart_count({}) == 0


def test_what_torchrun_sets_is_read() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert ranks_from({**environ, **MEETING}) == FIFTH
    assert restart_count({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2


def test_what_open_mpi_and_horovodrun_set_is_read() -> None:
    assert ranks_from({**OPEN_MPI, **MEETING}) == FIFTH
    horovod = {
        name.replace("OMPI_COMM_WORLD", "HOROVOD"): value for name, value in OPEN_MPI.items()
    }
    assert ranks_from({**horovod, **MEETING}) == FIFTH


def test_torchrun_under_mpirun_is_nearer() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", **OPEN_MPI}
    assert ranks_from(environ) == Ranks()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("MASTER_PORT", "has OMPI_COMM_WORLD_RANK but not MASTER_PORT.* with mpirun -x"),
        ("OMPI_COMM_WORLD_SIZE", "Open MPI sets both"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "open which of the 8 processes share a host"),
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
