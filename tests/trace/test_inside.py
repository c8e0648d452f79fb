"""What operators take within themselves, against what torch's allocator gives out."""

import threading

import pytest
import torch

from outpace.nn.loss import linear_loss_sum
from outpace.trace.allocations import Allocations
from outpace.trace.fake import hollow
from outpace.trace.watch import Watch

pytestmark = pytest.mark.fakeworld
ROWS, HIDDEN, VOCAB = 768, 64, 2048


def loss():
    hidden = torch.zeros(ROWS, HIDDEN, requires_grad=True)
    weight = torch.zeros(VOCAB, HIDDEN, requires_grad=True)
    targets = torch.zeros(ROWS, dtype=torch.int64)
    return linear_loss_sum(hidden, weight, None, targets, "chunked")


def test_the_chunked_loss_is_run_for_what_it_takes():
    with Allocations() as allocated:
        kept = loss()
    watch = Watch()
    with hollow(), watch:
        same = loss()
        watch.mark("forward")
        changes = [change for segment in watch.segments for change in segment.changes]
    live = peak = 0
    for change in changes:
        live += change.sign * change.piece.nbytes
        peak = max(peak, live)
    assert kept.shape == same.shape
    assert peak == pytest.approx(allocated.peak_bytes, rel=1e-3)
    # Without it, the trace would be short by the logits of a chunk.
    assert peak - live > 4 * VOCAB * 256


def test_memory_that_another_thread_frees_is_not_counted_on():
    """Its address is given out again, or a watch of storages tells of it."""
    told = Allocations()
    watch = Watch(freed_elsewhere=told.freed_elsewhere)
    with told, watch:
        box = [torch.ones(1 << 20)]
        other = threading.Thread(target=box.clear)
        other.start()
        other.join()
        torch.ones(1 << 19)
    assert told.peak_bytes == 4 << 20
