"""The benchmark of modules of one's own, run small."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_a_look_and_a_price_have_every_figure():
    command = [sys.executable, "own_modules.py", "--quick", "--only=zero2", "--before=.."]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    name, *words = done.stdout.split()
    figures = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    assert name == "zero2"
    assert set(figures) == {
        "look_in_steps", "look_in_steps_of_processor_time", "peak_over_off", "now_over_before",
        "now_over_before_in_processor_time",
    }  # fmt: skip
    assert figures["look_in_steps"] > 0 and figures["now_over_before"] > 0
