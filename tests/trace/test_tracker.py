import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outpace.trace.tracker import Tracker


def test_the_tracker_counts_storages_once():
    tracker = Tracker()
    with FakeTensorMode(), tracker:
        x = torch.empty(256)
        y = x.view(16, 16).t()
        z = y + 1
        del x, y
        assert tracker.live_bytes == 1024
        del z
    assert tracker.live_bytes == 0 and tracker.peak_bytes == 2048
    assert tracker.events == [(1, 1024), (2, 1024), (1, -1024), (2, -1024)]
