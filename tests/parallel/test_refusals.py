"""What one rank refuses ends the others, and hides nothing that comes later."""

import atexit

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outpace
from outpace.launch.forked_job import run_forked
from outpace.parallel import refusals
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan

pytestmark = pytest.mark.gloo


class Faulty(nn.Module):
    """Fails as its batch says, on the ranks that the batch names."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x):
        if x[0, 0] == 1:
            raise torch.OutOfMemoryError("the real fault")
        if x[0, 0] == 2:
            raise RuntimeError("another real fault")
        return self.linear(x)


def loss(module, batch):
    return module(batch).square().mean()


def batch(first, samples=2):
    x = torch.zeros(samples, 2)
    x[0, 0] = first
    return x


def train(rank):
    plan = Plan(strategy="ddp", dp_replicate=2, micro_batch=2)
    made = outpace.parallelize(Faulty(), plan, loss=loss, check="off")
    entries = atexit._ncallbacks()
    for _ in range(3):
        with pytest.raises(BadInputError, match="3 samples cannot be shared"):
            made.share(batch(0, 3))
    assert atexit._ncallbacks() <= entries + 1
    with pytest.raises(torch.OutOfMemoryError, match="the real fault"):
        made.forward_backward(batch(1))
    with pytest.raises(RuntimeError, match="another real fault"):
        made.forward_backward(batch(2))

    dist.barrier()
    # A refusal that ends its rank is heard by the one that waits for it.
    if rank.ranks.rank == 0:
        with pytest.raises(BadInputError, match="share of 3 samples"):
            made.forward_backward(batch(0, 3))
        atexit._run_exitfuncs()  # as the process ends
        raise BadInputError("rank 0 is gone")
    with pytest.raises(BadInputError, match="share of 3 samples") as caught:
        made.forward_backward(batch(0))
    assert caught.value.on_all_ranks and isinstance(caught.value.__cause__, RuntimeError)
    raise BadInputError("rank 1 has heard")


def test_a_refusal_is_heard_once_and_hides_no_later_fault(tmp_path):
    ends = run_forked(2, train, 60.0, tmp_path)
    assert [end.said for end in ends] == ["rank 0 is gone", "rank 1 has heard"]


def refuse_alone(rank):
    """Rank 0 alone refuses, catches it, and goes on: rank 1's fault is its own."""
    if rank.ranks.rank == 0:
        with pytest.raises(BadInputError), refusals.refusing_together(2):
            raise BadInputError("of before")
        with refusals.refusing_together(2):
            pass
    dist.barrier()
    if rank.ranks.rank == 1:
        with pytest.raises(RuntimeError, match="mine"), refusals.refusing_together(2):
            raise RuntimeError("mine")
    dist.barrier()


def test_a_refusal_that_was_caught_is_withdrawn(tmp_path):
    ends = run_forked(2, refuse_alone, 60.0, tmp_path)
    assert all(end.fine for end in ends), ends
