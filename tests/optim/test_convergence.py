"""Optimizers and precisions that round train as AdamW in fp32 does, on Python's own source."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 40
# In nats, of a held-out loss that has fallen by 0.7. docs/concepts/optimizers.md has the figures of
# longer runs.
NEAR = {
    "adamw-bf16": 0.005, "adamw-8bit": 0.005, "adamw-4bit": 0.1, "bf16": 0.005,
    "bf16-pure": 0.005, "bf16-pure, adamw-8bit": 0.005, "bf16-pure, adamw-4bit": 0.1,
}  # fmt: skip
OTHERS = ("adafactor", "muon", "sgd")  # are to train, not to be near


@pytest.fixture(scope="module")
def found():
    """The held-out loss of each case, by the benchmark's own program."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("convergence", BENCHMARKS / "convergence.py")
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
    finally:
        sys.path.remove(str(BENCHMARKS))
    cases = (program.REFERENCE, *NEAR, *OTHERS)
    return {name: program.losses(name, STEPS, 1, "cpu")[0] for name in cases}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_rounds_stays_near_adamw_and_what_is_another_optimizer_trains(found):
    known = found.pop("adamw")
    untrained = 6.24  # ln 512
    assert known < untrained - 0.5
    for name, most in NEAR.items():
        assert abs(found[name] - known) < most, name
    for name in OTHERS:
        assert found[name] < untrained - 0.2, name
