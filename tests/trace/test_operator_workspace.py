"""What operators take within themselves, against what torch's allocator gives out."""

import threading

import pytest
import torch

from outpace.nn.attention import attention, attention_backward
from outpace.nn.gelu import gelu_tanh
from outpace.nn.loss import linear_loss_sum
from outpace.nn.norms import rms_norm
from outpace.nn.torch_versions import add_wide_matmul
from outpace.trace.allocation_tracer import AllocationTracer
from outpace.trace.allocations import Allocations
from outpace.trace.fake import fake_tensors
from outpace.trace.tracker import Tracker

pytestmark = pytest.mark.fakeworld
ROWS, HIDDEN, VOCAB = 768, 64, 2048
OPERATORS = {
    "attention": attention, "attention_backward": attention_backward, "gelu_tanh": gelu_tanh,
    "rms_norm": rms_norm,
}  # fmt: skip


def loss():
    hidden = torch.zeros(ROWS, HIDDEN, requires_grad=True)
    weight = torch.zeros(VOCAB, HIDDEN, requires_grad=True)
    targets = torch.zeros(ROWS, dtype=torch.int64)
    return linear_loss_sum(hidden, weight, None, targets, "chunked")


def test_the_chunked_loss_is_run_for_what_it_takes():
    with Allocations() as allocated:
        kept = loss()
    watch = AllocationTracer()
    with fake_tensors(), watch:
        same = loss()
        watch.mark("forward")
        changes = [change for segment in watch.segments for change in segment.changes]
    live = peak = 0
    for change in changes:
        live += change.sign * change.storage.nbytes
        peak = max(peak, live)
    assert kept.shape == same.shape
    assert peak == pytest.approx(allocated.peak_bytes, rel=1e-3)
    # Without it, the trace would be short by the logits of a chunk.
    assert peak - live > 4 * VOCAB * 256


def test_memory_that_another_thread_frees_is_not_counted_on():
    """Its address is given out again, or a watch of storages tells of it."""
    told = Allocations()
    watch = AllocationTracer(freed_elsewhere=told.note_free)
    with told, watch:
        box = [torch.ones(1 << 20)]
        other = threading.Thread(target=box.clear)
        other.start()
        other.join()
        torch.ones(1 << 19)
    assert told.peak_bytes == 4 << 20


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_attention_of_accelerators_is_counted_with_grouped_queries(kv_heads):
    """torch's own formula refuses them before 2.13, which ended `--memory` on a GPU."""
    watch = AllocationTracer()
    with fake_tensors(), watch:
        query = torch.empty(2, 8, 128, 64, device="meta", requires_grad=True)
        key, value = (torch.empty(2, kv_heads, 128, 64, device="meta") for _ in range(2))
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        watch.mark("forward")
        out.backward(torch.empty_like(out))
        watch.mark("backward")
    matmul = 2 * 2 * 8 * 128 * 128 * 64
    assert [segment.flops for segment in watch.segments] == [2 * matmul, 5 * matmul]


def test_a_chunks_matmul_that_adds_is_counted_once_and_takes_no_memory():
    """torch 2.11 has no such operator for traced tensors."""
    watch = AllocationTracer()
    with fake_tensors(), watch:
        left = torch.empty(128, 512, dtype=torch.bfloat16)
        right = torch.empty(512, 64, dtype=torch.bfloat16)
        total = torch.empty(128, 64)
        watch.mark("forward")
        assert add_wide_matmul(total, left, right) is total
        watch.mark("backward")
    segment = watch.segments[-1]
    assert segment.flops == 2 * 128 * 512 * 64 and not segment.changes


class Calls(Tracker):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("name", OPERATORS)
def test_pieces_of_the_same_size_are_traced_twice_and_take_what_all_take(name):
    """A batch of thousands of samples has as many pieces, and took minutes to trace."""

    def run():
        x = torch.ones(70, 6, 384, 16, dtype=torch.bfloat16)
        given = {
            "attention": (x, x, x, None, True), "attention_backward": (x, x, x, x, None, True),
            "gelu_tanh": (x,), "rms_norm": (x, x[0, 0, 0], 1e-6),
        }  # fmt: skip
        return OPERATORS[name].code(*given[name])

    with Calls() as real:
        run()
    with fake_tensors(), Calls() as fake:
        run()
    assert fake.peak_bytes == real.peak_bytes and fake.count < real.count
