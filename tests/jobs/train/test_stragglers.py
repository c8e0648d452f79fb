"""What is said of a rank that is slower than the others, and which ranks are compared."""

import pytest

from outpace.jobs.train.stragglers import Facts, cause, equal_ranks
from outpace.records.plan import Plan

USUAL = Facts("b", "a processor", 8, others_cores=0.1, clock_hz=3e9)


@pytest.mark.parametrize(
    ("its", "said"),
    [
        (Facts("a", "a processor", 8, others_cores=2.1), "Other programs use 2.1 cores"),
        (Facts("a", "a processor", 8, clock_hz=2e9), "Its cores run at 2.00 GHz, the others' at 3"),
        (Facts("a", "a processor", 4), "It computes with 4 threads"),
        (Facts("a", "an older processor", 8), "a different processor: an older"),
        (Facts("a", "a processor", 8, others_cores=0.2, clock_hz=2.9e9), "Nothing observed"),
    ],
)
def test_the_cause_is_what_differs(its, said):
    assert said in cause(its, [USUAL, USUAL])


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ({"strategy": "ddp", "dp_replicate": 4}, [(0, 1, 2, 3)]),
        ({"strategy": "1f1b", "pp": 4, "pp_microbatches": 4}, []),
        ({"strategy": "3d", "pp": 2, "tp": 2, "pp_microbatches": 2}, [(0, 1), (2, 3)]),
        ({"strategy": "ps", "dp_replicate": 3, "servers": 1}, []),
    ],
)
def test_ranks_of_a_stage_are_compared(values, groups):
    assert (
        equal_ranks(Plan.parse({"micro_batch": 1, "precision": "fp32", **values}, "test")) == groups
    )
