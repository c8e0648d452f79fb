"""What the benchmark of host time counts: operators, which no neighbour disturbs."""

from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def host_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import host_time

    before = torch.get_num_threads()
    with host_time.as_on_cuda():
        yield host_time
    torch.set_num_threads(before)


def test_a_step_asks_of_the_host_what_transformers_does(host_time):
    found = {}
    for name in ("plain", "selective"):
        case = host_time.CASES[name]
        ours = host_time.outpace_step(case, host_time.Ranks(), None)
        found[name] = ours
    theirs = host_time.transformers_step(host_time.CASES["plain"])
    for step in (*found.values(), theirs):
        for _ in range(3):
            step()
    known = host_time.count_operators(theirs)
    assert host_time.count_operators(found["plain"]) <= 1.2 * known
    # Norms and activations anew, and casts of weights; no matmul.
    assert host_time.count_operators(found["selective"]) <= 1.5 * known


def test_bookkeeping_asks_next_to_nothing(host_time):
    step = host_time.bookkeeping_step()
    step()
    assert host_time.count_operators(step) <= 10
