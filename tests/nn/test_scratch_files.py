"""Scratch memory: values stay, names never are, and what the disk cannot hold is refused."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outpace.nn.scratch_files import Scratch
from outpace.records.errors import BadInputError

KILLED = """
import os, signal, sys, torch
from pathlib import Path
from outpace.nn.scratch_files import Scratch
(placed,), _ = Scratch(Path(sys.argv[1])).copy_permanently([torch.ones(1000)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_values_outlive_their_release_and_keep_their_shape(tmp_path):
    scratch = Scratch(tmp_path)
    tensors = [torch.randn(5, 300).t(), torch.arange(3), torch.zeros(0, 2)]
    placed, region = scratch.copy_permanently(tensors)
    region.release()
    for tensor, kept in zip(tensors, placed, strict=True):
        assert torch.equal(tensor, kept) and tensor.stride() == kept.stride()
    assert scratch.region_of(placed[0]) is region and scratch.region_of(tensors[0]) is None


def test_memory_that_is_lent_comes_back_with_the_last_view_of_it():
    scratch = Scratch()
    lent, _ = scratch.copy_temporarily(torch.ones(2000))
    view, where = lent[1000:], lent.data_ptr()
    del lent
    other, _ = scratch.copy_temporarily(torch.zeros(2000))
    assert other.data_ptr() != where and view.sum() == 1000
    del view
    assert scratch.copy_temporarily(torch.zeros(2000))[0].data_ptr() == where
    assert scratch.taken_bytes == 2 * 8192


def test_a_killed_process_leaves_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused_before_it_is_used(tmp_path, monkeypatch):
    """Nothing of it is taken: what others write meanwhile would not fit."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("takes what is left"))
    free = os.statvfs(tmp_path)
    with pytest.raises(BadInputError, match="Name another directory with --offload-dir"):
        Scratch(tmp_path).allocate(free.f_bavail * free.f_frsize * 4)


def test_a_disk_that_fills_meanwhile_gets_back_what_was_taken(tmp_path, monkeypatch):
    allocate, sizes = os.posix_fallocate, []

    def fill(descriptor, start, nbytes):
        allocate(descriptor, start, nbytes // 2)
        sizes.append((descriptor, os.fstat(descriptor).st_blocks))
        raise OSError(errno.ENOSPC, "No space left on device")

    scratch = Scratch(tmp_path)
    placed, _ = scratch.copy_permanently([torch.ones(1000)])
    monkeypatch.setattr(os, "posix_fallocate", fill)
    no_room = r"has no room for 1.00 MiB in addition .*No space left"
    with pytest.raises(BadInputError, match=no_room):
        scratch.allocate(1 << 20)
    ((descriptor, blocks),) = sizes
    assert blocks * 512 >= 1 << 19 and os.fstat(descriptor).st_blocks * 512 == 4096
    monkeypatch.undo()
    again, _ = scratch.copy_permanently([torch.zeros(1000)])
    assert placed[0].sum() == 1000 and again[0].sum() == 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
def test_a_directory_that_is_in_memory_is_refused():
    with pytest.raises(BadInputError, match="kept in memory"):
        Scratch(Path("/dev/shm/outpace-scratch")).allocate(1)
    assert not Path("/dev/shm/outpace-scratch").exists()
