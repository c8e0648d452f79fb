"""The benchmark of false claims: real comparisons, counted, and written as a table."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of benchmarks/ import each other by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.slow
def test_a_large_difference_is_claimed_within_the_rounds_and_counted() -> None:
    from false_claims import compared, summed

    found = compared(more=4.0, rounds=20)
    assert 10 <= found["claimed_at"] <= 20 and found["claimed_slower"]
    assert found["slowdown"] == pytest.approx(4.0, abs=2.0)
    assert len(found["seconds"]["a"]) == len(found["seconds"]["b"]) == found["rounds"]
    few = compared(more=0.0, rounds=2)
    assert few["claimed_at"] is None and few["low"] is None and few["rounds"] == 2
    total = summed([found, {**found, "claimed_at": None, "claimed_slower": False}])
    assert (total["comparisons"], total["claims"], total["right_way"]) == (2, 1, 1)


def test_the_table_has_a_row_for_each_kind() -> None:
    from figures_compare import false_claims

    kinds = [
        {"more": more, "comparisons": 20, "claims": claims, "right_way": claims,
         "rounds_to_claim": [12] * claims, "covered": 19, "bounded": 20}
        for more, claims in ((0.0, 0), (0.05, 18))
    ]  # fmt: skip
    stand = {
        "machine": {"host_cores": 2, "cpu": "a processor", "devices": []},
        "versions": {"torch": "2.13.0", "python": "3.11"}, "date": "2026-11-22", "commit": "0",
        "uncommitted_changes": False, "command": ["python", "x.py"],
    }  # fmt: skip
    result = {"kinds": kinds, "most_false": 0.5, "reached": True, "rounds": 30, "took_s": 60.0}
    shown = false_claims({**result, **stand})
    assert "| the same | 20 | 0 | – | – | 19 of 20 |" in shown
    assert "| 5 % more | 20 | 18 | 18 | 12 | 19 of 20 |" in shown
    assert "at most 0.5 false claims in 20 comparisons" in shown
