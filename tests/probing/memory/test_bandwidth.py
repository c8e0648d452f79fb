"""What hides of transfers between host and device, by direction."""

import pytest
import torch

from outpace.probing.memory.bandwidth import (
    WAYS,
    hidden_advice,
    hidden_notes,
    hidden_shares,
    memory_cases,
)
from outpace.probing.timing.measure import figure_of
from outpace.records.figure import Key


def took(of, seconds):
    key = Key(kind="memory", what="overlap", of={"of": of})
    return figure_of(key, "s", [[one] for one in seconds])


def overlap_of(matmul_s, transfer_s, both_s):
    """Rounds of a matmul, transfers each way, and both; what hides differs by way."""
    figures = [took("matmul", [matmul_s] * 12)]
    for way in WAYS:
        both = both_s[way]
        figures.append(took(f"transfer {way}", [transfer_s] * 12))
        figures.append(took(f"matmul and transfer {way}", both if isinstance(both, list)
                            else [both] * 12))  # fmt: skip
    return figures


def test_each_direction_and_both_have_a_share_with_its_interval():
    noisy = [3.0, 1.0] * 6
    shares = hidden_shares(overlap_of(2.0, 1.0, {WAYS[0]: 2.0, WAYS[1]: 2.5, WAYS[2]: noisy}))
    assert [one.key.of["of"] for one in shares] == [f"transfer {way}" for way in WAYS]
    assert [one.value for one in shares] == [1.0, 0.5, None]
    first, second = hidden_advice(shares)
    assert "transfer to the host: 100% of the shorter hides" in first.text
    assert "(50% to 50%)" in second.text and second.of == (shares[1].key,)
    (note,) = hidden_notes(shares)
    assert "transfer both ways is not stable enough" in note


@pytest.mark.usefixtures("small_arrays")
def test_without_a_device_there_is_nothing_to_hide():
    assert hidden_shares([]) == []
    cases = memory_cases(torch.device("cpu"), quick=True)
    assert not any(case.key.what == "overlap" for case in cases)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_all_directions_are_timed():
    cases = [case for case in memory_cases(torch.device("cuda"), quick=True)
             if case.key.what == "overlap"]  # fmt: skip
    assert len(cases) == 1 + 2 * len(WAYS)
    for case in cases:
        case.make()()
    torch.cuda.synchronize()
