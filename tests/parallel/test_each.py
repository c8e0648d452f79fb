"""`outpace train --strategy X` works from the first step to the exported model, for every X."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from outpace.records.plan import Strategy

EACH = Path(__file__).with_name("each.py")
# Each half of a run under a strategy of its own.
CROSSED = ("single", "zero3@2→ps@3")
# Computed by a package that may not be there.
NEEDS = {"horovod": "horovod"}


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategies", [CROSSED, get_args(Strategy)], ids=["crossed", "all"])
def test_training_without_options_works_under_the_strategy(tmp_path, strategies, runnable):
    strategies = runnable(strategies)
    done = subprocess.run(
        [sys.executable, str(EACH), str(tmp_path), *strategies],
        capture_output=True, text=True, timeout=1700, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said) == set(strategies)
    one = said["single"]
    assert len(one["losses"]) == 4 and len(one["evaluations"]) == 3
    for strategy, found in said.items():
        if "refused" in found:
            assert strategy in NEEDS and find_spec(NEEDS[strategy]) is None, found
            continue
        assert found["losses"] == pytest.approx(one["losses"], abs=2e-5), strategy
        assert found["evaluations"] == pytest.approx(one["evaluations"], abs=2e-5), strategy
        assert found["text"] == one["text"], strategy
