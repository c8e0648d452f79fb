"""Segments of CUDA memory grow unless someone has set the allocator up."""

import os
import sys

import pytest
import torch

from outpace.training.cuda_allocator import SETTINGS, grow_segments

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux")


@linux
def test_segments_grow_unless_someone_has_set_the_allocator_up():
    environ = {"HOME": "/root"}
    assert grow_segments(environ)
    assert environ == {"HOME": "/root", SETTINGS: "expandable_segments:True"}
    for name in (SETTINGS, "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "max_split_size_mb:64"}
        assert not grow_segments(own)
        assert own == {name: "max_split_size_mb:64"}


@pytest.mark.gpu
@linux
def test_torch_grows_its_segments(monkeypatch):
    if not torch.cuda.is_available() or torch.cuda.is_initialized():
        pytest.skip("needs a GPU that this process has not used")
    monkeypatch.delenv(SETTINGS, raising=False)
    assert grow_segments(os.environ)
    torch.zeros(1, device="cuda")
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    monkeypatch.delenv(SETTINGS)
    assert settings["expandable_segments"]
