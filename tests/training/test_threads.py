"""How many threads a process computes with."""

import pytest
import torch

from outpace.training.threads import set_threads


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "environ", "threads"),
    [
        (None, {}, 4),  # a rank's share of eight cores
        (3, {"OMP_NUM_THREADS": "2"}, 3),
        (None, {"OMP_NUM_THREADS": "2"}, 2),
        (None, {"OMP_NUM_THREADS": "1"}, 1),
        (None, {"OMP_NUM_THREADS": "2,4"}, 2),
        (None, {"OMP_NUM_THREADS": "many"}, 4),
        (None, {"OMP_NUM_THREADS": "0"}, 4),
        # torchrun's own default is not what somebody asked for
        (None, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 4),
        (None, {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, 2),
        (None, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "outpace-3f"}, 1),
    ],
)
def test_threads_are_as_asked_then_as_the_variable_says_then_a_share(asked, environ, threads):
    assert set_threads(asked, 8, 2, environ) == torch.get_num_threads() == threads
