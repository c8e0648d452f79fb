import pytest

from outpace.launch.environment import ranks_from, restart_count
from outpace.records.errors import BadInputError
from outpace.records.ranks import Ranks


def test_outside_of_a_launcher_there_are_no_ranks() -> None:
    assert ranks_from({"PATH": "/bin", "RANK": ""}) is None
    assert restart_count({}) == 0


def test_what_torchrun_sets_is_read() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert ranks_from(environ) == Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert restart_count({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2


def test_a_launcher_without_local_ranks_is_taken_for_one_host() -> None:
    ranks = ranks_from({"RANK": "1", "WORLD_SIZE": "2"})
    assert ranks == Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0"}, "not WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_RANK and WORLD_SIZE but not RANK"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK = 'one' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        ranks_from(environ)
