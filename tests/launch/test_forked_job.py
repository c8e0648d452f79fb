"""A forked job leaves nothing behind, and kills no group that is not its own."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

import outpace
from outpace.launch.forked_job import run_forked
from outpace.records.errors import BadInputError

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux"),
]


def test_a_group_is_killed_while_its_rank_has_its_id(tmp_path, monkeypatch):
    killed, kill = [], os.killpg

    def killpg(group, signum):
        killed.append((group, psutil.pid_exists(group)))
        kill(group, signum)

    monkeypatch.setattr(os, "killpg", killpg)

    def act(rank):
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / f"child-{rank.ranks.rank}").write_text(str(child.pid))
        if rank.ranks.rank:
            os.kill(os.getpid(), signal.SIGKILL)

    ends = run_forked(2, act, 240.0, tmp_path)
    assert ends[1].exit_code == -signal.SIGKILL
    assert len(killed) == 2 and all(alive for _, alive in killed)
    for rank in (0, 1):
        child = int((tmp_path / f"child-{rank}").read_text())
        until_s = time.monotonic() + 600.0
        while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
            assert time.monotonic() < until_s
            time.sleep(0.05)


def test_a_job_in_the_folder_of_another_meets_and_says_by_itself(tmp_path):
    def fail(rank):
        """Raise as torch's pipeline stage does, and with several lines as compilers do."""
        rank.note_phase("failing")
        planted = (BadInputError("one\ntwo"), ValueError("it says:\n planted\n\nand more"))
        raise RuntimeError("[Stage 0] failed to run forward:\nargs") from planted[rank.ranks.rank]

    ends = run_forked(2, fail, 240.0, tmp_path)
    assert [end.said for end in ends] == ["one\ntwo", "ValueError: it says: planted"]
    assert all(end.at == "failing" for end in ends) and ends[0].refused > ends[1].refused
    store = tmp_path / "store"
    before = store.read_bytes()  # the addresses of the ranks of before

    def meet(rank):
        assert not store.read_bytes().startswith(before)

    for end in run_forked(2, meet, 240.0, tmp_path):
        assert end.fine and end.said is None and end.at == "starting"


def test_gradients_that_a_fork_cannot_compute_are_refused(tmp_path, monkeypatch):
    """What torch raises where its threads for accelerators ran before the fork."""

    def refuse(*_):
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based …")

    def act(_):
        raise AssertionError("ran")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    module = torch.nn.Linear(2, 2)
    with pytest.raises(BadInputError, match=r"Call outpace\.verify before any backward pass"):
        outpace.verify(module, loss=_squares, batch=(torch.ones(4, 2),), plans=["ddp"])
    for end in run_forked(2, act, 240.0, tmp_path):
        assert end.refused and "has already computed gradients with" in end.said


def _squares(module, batch):
    return module(batch[0]).square().mean()
