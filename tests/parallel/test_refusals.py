"""What one rank refuses ends the others, and hides nothing that comes later."""

import atexit
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outpace
from outpace.launch.forked_job import run_forked
from outpace.parallel import refusal_watch, refusals
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
        made = self.linear(x)
        return made.detach() if x[0, 0] == 3 else made


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
        with pytest.raises(BadInputError, match="3 samples cannot be divided evenly"):
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
    ends = run_forked(2, train, 240.0, tmp_path)
    assert [end.said for end in ends] == ["rank 0 is gone", "rank 1 has heard"]


def refuse_alone(rank):
    """Rank 0 alone refuses, catches it, and goes on: rank 1's fault is its own."""
    if rank.ranks.rank == 0:
        with pytest.raises(BadInputError), refusals.refuse_together(2):
            raise BadInputError("of before")
        with refusals.refuse_together(2):
            pass
    dist.barrier()
    if rank.ranks.rank == 1:
        with pytest.raises(RuntimeError, match="mine"), refusals.refuse_together(2):
            raise RuntimeError("mine")
    dist.barrier()


def test_a_refusal_that_was_caught_is_withdrawn(tmp_path):
    ends = run_forked(2, refuse_alone, 240.0, tmp_path)
    assert all(end.fine for end in ends), ends


def refuse_in_a_step(rank):
    """Rank 0 refuses in its forward, catches that, and goes on, while rank 1 waits for it."""
    refusals._WAIT_S = 1.0
    plan = Plan(strategy="ddp", dp_replicate=2, micro_batch=2)
    made = outpace.parallelize(Faulty(), plan, loss=loss, check="off")
    made.forward_backward(batch(0))
    with pytest.raises(BadInputError, match="share of 3 samples"):  # on both
        made.forward_backward(batch(0, 3))
    made.forward_backward(batch(0))
    if rank.ranks.rank == 1:
        made.forward_backward(batch(0))
        return
    with pytest.raises(BadInputError, match="the loss has no gradient"):
        made.forward_backward(batch(3))
    for _ in range(20):
        with pytest.raises(BadInputError, match=r"began the next.*: the loss has no gradient"):
            made.forward_backward(batch(0))
    atexit._run_exitfuncs()  # as the process ends: it waits until it is heard
    raise BadInputError("rank 0 is gone")


def test_a_rank_that_goes_on_from_a_step_that_others_are_in_is_refused(tmp_path):
    begin = time.monotonic()
    first, second = run_forked(2, refuse_in_a_step, 240.0, tmp_path)
    assert first.said == "rank 0 is gone", first
    assert second.refused and "the loss has no gradient" in second.said
    assert time.monotonic() - begin < 120


def wait_for_ever(rank):
    """Rank 0 refuses; rank 1 waits in what stands for a collective of NCCL."""
    refusals.waits_for_ever = lambda: True
    refusal_watch._LOOK_EVERY_S, refusal_watch._PATIENCE_S, refusal_watch._GRACE_S = 0.1, 0.2, 0.5
    with refusals.refuse_together(2):
        time.sleep(0.5 * rank.ranks.rank)  # a long call is ended by nothing
    if rank.ranks.rank == 0:
        with pytest.raises(BadInputError), refusals.refuse_together(2):
            raise BadInputError("three samples cannot be shared")
        atexit._run_exitfuncs()  # as the process ends: it waits until it is heard
        raise BadInputError("rank 0 is gone")
    with refusals.refuse_together(2):
        time.sleep(200)


def test_a_rank_whose_collective_never_fails_ends_with_what_was_refused(tmp_path, capfd):
    first, second = run_forked(2, wait_for_ever, 240.0, tmp_path)
    assert first.said == "rank 0 is gone"
    assert second.exit_code == 2
    assert "outpace: three samples cannot be shared" in capfd.readouterr().err


def refuse_and_go_on(rank):
    """Rank 0 catches its refusal, and makes the next call: rank 1, which is late, is not ended."""
    refusals.waits_for_ever = lambda: True
    refusal_watch._LOOK_EVERY_S, refusal_watch._PATIENCE_S = 0.1, 0.2
    if rank.ranks.rank == 0:
        with pytest.raises(BadInputError), refusals.refuse_together(2):
            raise BadInputError("of before")
        with refusals.refuse_together(2):
            dist.barrier()
    else:
        with refusals.refuse_together(2):
            time.sleep(1.5)
        with refusals.refuse_together(2):
            dist.barrier()


def test_a_rank_that_is_late_is_not_ended_for_what_is_dealt_with(tmp_path):
    assert all(end.fine for end in run_forked(2, refuse_and_go_on, 240.0, tmp_path))
