"""Where no buffer is shared, a step does not look for any."""

import torch
from torch import nn

from outpace.parallel.shared_buffers import SharedBuffers


def test_a_module_without_buffers_is_not_walked_over(monkeypatch):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    buffers = SharedBuffers(module, torch.device("cpu"))
    walks = []
    monkeypatch.setattr(module, "named_buffers", lambda: walks.append(1) or iter(()))
    for _ in range(5):
        buffers.begin_step()
    buffers.make_equal()
    assert not walks
