"""The pages say what is recorded."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

from outpace.records.plan import Strategy

ROOT = Path(__file__).parent.parent


def test_pages_hold_the_recorded_figures():
    done = subprocess.run(
        [sys.executable, "benchmarks/figures.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_strategys_utilisation_is_of_each_device_or_core(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from figures import utilisation

    assert utilisation(None) == utilisation([]) == "not recorded yet"
    cores = {"devices": [], "host": {"cores": [0.914, None]}}
    assert utilisation([cores]) == "91%, n/a"
    devices = {"devices": [{"utilisation": 0.5}, {"utilisation": 1.0}], "host": {"cores": [0.1]}}
    assert utilisation([devices, devices]) == "50%, 100%, 50%, 100%"


def test_every_strategy_has_a_paragraph():
    page = (ROOT / "docs" / "concepts" / "strategies.md").read_text(encoding="utf-8")
    for strategy in get_args(Strategy):
        paragraph = page.partition(f"\n### {strategy}\n")[2].partition("\n### ")[0]
        paragraph = " ".join(paragraph.split())
        for word in ("**Use it**", "**Cost:**", "**Avoid it"):
            assert word in paragraph, (strategy, word)
