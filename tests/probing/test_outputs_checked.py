"""What is timed is checked: a wrong value in any result is found."""

import pytest
import torch

from outpace.probing.collectives.overlap import _make_matmul
from outpace.probing.collectives.pairwise import work_of
from outpace.probing.memory.bandwidth import memory_cases

pytestmark = pytest.mark.usefixtures("small_arrays")
CPU = torch.device("cpu")


def test_every_case_of_memory_has_a_check_and_finds_what_is_wrong():
    for case in memory_cases(CPU, quick=True):
        found = case.make()()
        assert case.check is not None, case.key
        assert case.check(found) is None, case.key
        if isinstance(found, torch.Tensor) and case.key.what != "AdamW step":
            found = found.clone()
            found.view(-1)[0] += 1e6
            assert case.check(found) is not None, case.key


def test_a_buffer_that_is_too_small_is_no_allocation():
    case = next(c for c in memory_cases(CPU, quick=True) if c.key.what == "allocate and fill")
    assert case.check(case.make()()[:-1]) is not None


@pytest.mark.parametrize("what", ["matmuls", "memory"])
def test_what_each_rank_does_is_checked(what):
    call, check = work_of(CPU)[what]
    found = call()
    assert check(found) is None
    found.view(-1)[0] += 1.0
    assert check(found) is not None


def test_computing_beside_a_collective_is_checked_each_time_anew():
    call, check = _make_matmul(CPU)
    found = call()
    assert check(found) is None
    assert "times its rounding error" in check(found)  # what was looked at is gone
    assert check(call()) is None
