"""How costs grow: exponents, and that each curve can be measured."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of benchmarks/ import each other by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_is_that_of_large_sizes(power):
    from scaling import exponent

    sizes = [1, 10, 100, 1000, 10_000]
    grown = [max(5.0, 1e-3 * size**power) if power else 5.0 for size in sizes]
    assert exponent(sizes, [1e-3 * size**power for size in sizes]) == pytest.approx(power)
    assert exponent(sizes[:2], [3.0, 3.0 * 10**power]) == pytest.approx(power)
    assert exponent([1, 2, *sizes[2:]], [9.0, 9.0, *grown[2:]]) <= power + 1e-9


@pytest.mark.parametrize("name", ["trace", "shards", "planner-layers"])
def test_a_curve_has_a_cost_at_every_size(name):
    from scaling import CURVES, measured

    curve = CURVES[name]
    row = measured(name, curve, quick=True)
    assert row["sizes"] == list(curve.quick)
    for cost in row["costs"].values():
        assert len(cost["medians"]) == len(curve.quick) and min(cost["medians"]) > 0


@pytest.mark.slow
def test_every_curve_can_be_measured():
    words = [sys.executable, str(BENCHMARKS / "scaling.py"), "--quick"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_without_one_on_small_shapes(tmp_path):
    from figures_performance import gpu
    from gpu import SMALL, all_rows

    found = all_rows(SMALL, tmp_path, cuda=False)
    (row,) = found["rows"]
    (ours,) = row["runs"]
    assert "failure" not in ours and ours["tokens_per_s"] > 0 and ours["traced_bytes"] > 0
    assert row["peers"]["plain loop"]["tokens_per_s"] > 0 and not found["left_out"]
    stand = {
        "machine": {"host_cores": 2, "cpu": "a processor", "devices": []},
        "versions": {"torch": "2.13.0", "python": "3.11"}, "date": "2026-11-22", "commit": "0",
        "uncommitted_changes": False, "command": ["python", "x.py"],
    }  # fmt: skip
    shown = gpu({**found, **stand})
    assert "| outpace-tiny, 2 × 64 | outpace, eager |" in shown and "plain loop" in shown


def test_the_guard_sees_what_was_lost_beyond_the_noise():
    from guard import judged, ratios

    assert judged([1.20, 1.21, 1.19], [1.20, 1.22])[0]
    assert not judged([1.05, 1.06, 1.05], [1.20, 1.22])[0]
    assert judged([1.05, 1.30, 1.10], [1.10, 1.30])[0]  # too noisy to tell
    ends = {"plain loop": [5, 6, 7, 10], "outpace": [3, 4, 5, 6]}
    row = {"entrants": {name: {"runs": [{"steps_s": steps}]} for name, steps in ends.items()}}
    assert ratios(row) == [2.0]
