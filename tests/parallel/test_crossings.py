"""Checkpoints cross strategies and world sizes with nothing lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CROSSINGS = Path(__file__).with_name("crossings.py")
pytestmark = pytest.mark.gloo


@pytest.mark.slow
@pytest.mark.parametrize("pairs", ["offloaded", "chosen", "others"])
def test_a_run_goes_on_under_another_plan_as_one_without_a_break(tmp_path, pairs):
    done = subprocess.run(
        [sys.executable, str(CROSSINGS), str(tmp_path), pairs],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["loaded"]) >= 8
    names = {name for saved in said["saved"].values() for name in saved["names"]}
    for before, saved in said["saved"].items():
        assert set(saved["names"]) == names, before  # whatever the plan, the same tensors
        assert saved["apart"] < 1e-9, before
    tensors = {name for name in names if not name.startswith("optimizer.param_groups.")}
    for pair, ranks in said["loaded"].items():
        assert set().union(*(rank["held"] for rank in ranks)) == tensors, pair
        for rank in ranks:
            assert rank["changed"] == [], pair  # bit for bit what the files hold
            assert rank["steps"] == 2 and rank["strays"] == []
            assert rank["numbers"] < 1e-9 and rank["state"] < 1e-9, pair
