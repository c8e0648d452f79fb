"""ZeRO-3 of modules that call their blocks in another order, and drop some on some ranks later."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import outpace
from outpace.launch.forked_job import run_forked
from outpace.parallel import unit_order
from outpace.parallel.tensors import whole
from outpace.records.plan import Plan

pytestmark = pytest.mark.gloo


class Ordered(nn.Module):
    """Calls its blocks in `order`; where a sample says so, without those of it."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        dropped = [] if x[0, 0] < 1 or not self.training else [int(x[0, 0]) % 10]
        for place, number in enumerate(self.order):
            if place not in dropped:
                x = x + torch.tanh(self.blocks[number](x))
        return x


def loss(module, x):
    return module(x).square().mean()


def batch(step, *marks):
    """A global batch of a sample for each rank, of which `marks` say what it is to drop."""
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
    x[:, 0] = torch.tensor(marks)
    return x


STEPS = [(0, 0), (10, 0), (0, 12), (11, 12), (0, 0)]


def require_gradients_of(alone, made, step, marks):
    """Compare a step's gradients with those of one process, sample by sample."""
    alone.zero_grad()
    for sample in batch(step, *marks).split(1):
        (loss(alone, sample) / 2).backward()
    made.forward_backward(made.share(batch(step, *marks)))
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    for name, parameter in made.named_parameters():
        found = whole(parameter.grad)
        torch.testing.assert_close(found, wanted[name], msg=f"{name} in step {step}")


def train(order, rank):
    torch.set_default_dtype(torch.float64)
    alone = Ordered(order)
    plan = Plan(strategy="zero3", dp_shard=2, micro_batch=1)
    made = outpace.parallelize(
        copy.deepcopy(alone), plan, loss=loss, blocks=[f"blocks.{n}" for n in range(3)], check="off"
    )
    made.evaluate(made.share(batch(9, 10, 0)))
    for step, marks in enumerate(STEPS):
        require_gradients_of(alone, made, step, marks)
    order_of = made.layout._order
    asked = []
    order_of._announce_unit = asked.append  # no pass needs to ask any more
    made.forward_backward(made.share(batch(5, 10, 0)))
    assert not asked and order_of._sequence == list(order)


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2, 0, 1, 2), (1, 1, 0, 2)])
def test_blocks_in_any_order_may_be_dropped_by_one_rank(order, tmp_path):
    ends = run_forked(2, lambda rank: train(order, rank), 240.0, tmp_path)
    assert [end.said for end in ends] == [None, None]


def evaluate_first(rank):
    made = outpace.parallelize(
        Ordered((2, 1, 0)),
        Plan(strategy="zero3", dp_shard=2, micro_batch=1),
        loss=loss,
        blocks=[f"blocks.{n}" for n in range(3)],
        check="off",
    )
    made.evaluate(made.share(batch(0, 0, 0)))
    assert made.layout._order._sequence is None
    made.forward_backward(made.share(batch(0, 10, 11)))  # ranks differ
    assert made.layout._order._sequence is None


def test_an_evaluation_settles_no_order(tmp_path):
    ends = run_forked(2, evaluate_first, 240.0, tmp_path)
    assert [end.said for end in ends] == [None, None]


class Iterated(nn.Module):
    """Calls its first block as often as the first sample says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        for _ in range(int(x[0, 0])):
            x = x + torch.tanh(self.blocks[0](x))
        return self.blocks[1](x)


def iterate(rank):
    """All ranks once, all twice, which is against the order that is kept by then, and one alone."""
    torch.set_default_dtype(torch.float64)
    unit_order._WAIT_S = 1.0
    alone = Iterated()
    plan = Plan(strategy="zero3", dp_shard=2, micro_batch=1)
    made = outpace.parallelize(copy.deepcopy(alone), plan, loss=loss, check="off")
    for step, marks in enumerate([(1, 1), (2, 2), (3, 1)]):
        require_gradients_of(alone, made, step, marks)
    assert made.layout._order._sequence is None
    again = outpace.parallelize(Iterated(), plan, loss=loss, check="off")
    again.forward_backward(again.share(batch(0, 1, 1)))
    again.forward_backward(again.share(batch(1, 2, 1)))


def test_one_rank_alone_may_not_call_more_than_the_order_that_is_kept(tmp_path):
    ends = run_forked(2, iterate, 240.0, tmp_path)
    assert all(end.refused for end in ends), [end.said for end in ends]
    assert all("block 0 (a Linear) is called more often" in str(end.said) for end in ends)


def test_whole_parameters_wait_for_shards_that_another_stream_writes():
    waited = []
    stream = SimpleNamespace(wait_event=waited.append)
    device = SimpleNamespace(current_stream=lambda: stream)
    for event in (None, "reduced"):
        held = SimpleNamespace(_post_reduce_event=event, device_handle=device)
        unit_order.wait_for_reduction(held)
    assert waited == ["reduced"]


def penalise(rank):
    """A penalty of whole parameters, whose gradients join those of shards."""
    waits = []
    plan = Plan(strategy="zero3", dp_shard=2, micro_batch=1)

    def penalty(module, x):
        return loss(module, x) + sum(p.square().sum() for p in module.parameters())

    waited = unit_order.wait_for_reduction
    unit_order.wait_for_reduction = lambda held: (waits.append(held), waited(held))
    made = outpace.parallelize(Iterated(), plan, loss=penalty, check="off")
    made.forward_backward(made.share(batch(0, 1, 1)))
    assert len(waits) >= len(list(made.named_parameters()))


def test_each_gradient_of_a_whole_parameter_waits(tmp_path):
    ends = run_forked(2, penalise, 240.0, tmp_path)
    assert [end.said for end in ends] == [None, None]
