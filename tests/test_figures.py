"""The pages say what is recorded."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_pages_hold_the_recorded_figures():
    done = subprocess.run(
        [sys.executable, "benchmarks/figures.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
