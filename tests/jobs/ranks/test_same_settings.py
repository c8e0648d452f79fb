"""Ranks that a user started with different settings."""

from pathlib import Path

import pytest

FORKED = Path(__file__).parents[2] / "parallel" / "forked.py"
FLAGS = ("--model=outpace-tiny", "--seq-len=32", "--global-batch=4", "--steps=2", "--lr=1e-3",
         "--sample-tokens=0", "--precision=fp32", "--device=cpu", "--threads=1")  # fmt: skip
UNLIKE = """
import os, sys
from outpace.cli.main import command

unlike = sys.argv[1:3] if os.environ["RANK"] == "1" else []
command(["train", *sys.argv[3:], *unlike])
"""


@pytest.mark.parametrize("setting", [("--lr", "9e-3"), ("--seed", "5"), ("--save-every", "1")])
def test_ranks_with_other_settings_are_refused(setting, command, corpus, token_cache, tmp_path):
    """They would train, each with a rate or an order of its own, or wait for each other."""
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE)
    places = (f"--data={corpus}", f"--cache-dir={token_cache}", f"--out={tmp_path / 'run'}")
    done = command(FORKED, 2, script, *setting, *FLAGS, *places)
    assert done.returncode != 0
    assert f"rank 1 has another {setting[0]} than rank 0: " in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
