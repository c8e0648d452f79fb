"""Ranks of several hosts, which have to see one directory."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
TINY = ("--model=outpace-tiny", "--seq-len=32", "--global-batch=8", "--steps=2", "--threads=1",
        "--sample-tokens=0", "--eval-batches=1", "--precision=fp32", "--out=run")  # fmt: skip


def started(rank, port, folder, *words):
    """A rank that is alone on its host, as torchrun on each of two would start it."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "outpace", "train", *TINY, *words],
        cwd=folder, env={**os.environ, **{name: str(value) for name, value in place.items()}},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def both(port, first, second, *words):
    """Exit codes and errors."""
    ranks = [started(0, port, first, *words), started(1, port, second, *words)]
    said = [rank.communicate()[1] for rank in ranks]
    return [rank.returncode for rank in ranks], said


def test_a_folder_that_one_host_does_not_see_is_refused_before_training(tmp_path, hold_port):
    codes, said = both(hold_port(), tmp_path / "a", tmp_path / "b")
    assert codes == [2, 2], said
    assert "is not visible on" in said[0] and "Pass an --out that all hosts share" in said[0]
    assert not list(tmp_path.glob("*/run/*"))
    assert both(hold_port(), tmp_path / "a", tmp_path / "b", "--measure-only")[0] == [0, 0]
    assert both(hold_port(), tmp_path / "c", tmp_path / "c")[0] == [0, 0]
    assert not list((tmp_path / "c" / "run").glob(".outpace-*"))
