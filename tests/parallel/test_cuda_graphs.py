"""Passes replayed as CUDA graphs: captured once, the same numbers as kernel by kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.parallel.cuda_graphs import (
    MOST_SHAPES,
    WARMUP_PASSES,
    CudaRecorder,
    GraphedLayout,
)
from outpace.parallel.layout import Layout, StepHooks
from outpace.records.compiled import graph_obstacle
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

SPEC = ModelSpec(family="gpt2", layers=2, hidden=16, heads=2, vocab=40, max_positions=32)


class StandIn:
    """Does what a CUDA device's graphs do: the same work again, into the same tensors."""

    def __init__(self, objective: nn.Module, **changes: Any) -> None:
        self.parameters = list(objective.parameters())
        self.room, self.waits, self.fails_at = True, False, None
        self.recorded = self.replayed = self.warmed = self.released = 0
        vars(self).update(changes)

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        self.warmed += 1
        yield

    @contextmanager
    def refuse_waits(self) -> Iterator[None]:
        yield
        if self.waits:
            raise RuntimeError("called a synchronizing CUDA operation")

    def has_room(self) -> bool:
        return self.room

    def release(self) -> None:
        self.released += 1

    def record(self, work: Callable[[], list[Tensor]]) -> Callable[[], None]:
        self.recorded += 1
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        places = [tensor.detach() for tensor in work()]
        if self.recorded == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        adds = before[0] is not None
        if adds:  # what is captured is not done
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad.copy_(gradient)

        def replay() -> None:
            self.replayed += 1
            if not adds:
                for parameter in self.parameters:
                    parameter.grad = None
            for place, made in zip(places, work(), strict=True):
                place.copy_(made.detach())

        return replay


def objective() -> LanguageModelObjective:
    return LanguageModelObjective(Transformer(SPEC, seed=1))


def batch(seed: int, length: int = 8) -> dict[str, Tensor]:
    tokens = torch.randint(
        0, SPEC.vocab, (2, length + 1), generator=torch.Generator().manual_seed(seed)
    )
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}


def train(layout: Layout, steps: list[list[dict[str, Tensor]]]) -> list[Any]:
    """Totals and weights after each step."""
    optimizer = torch.optim.SGD(layout.model.parameters(), lr=0.1)
    seen = []
    for batches in steps:
        totals = layout.gradients(batches, StepHooks(scale=lambda loss: loss / 16))
        layout.clip(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append((totals.clone(), [p.detach().clone() for p in layout.model.parameters()]))
    return seen


def assert_same(seen: list[Any], others: list[Any]) -> None:
    for (totals, weights), (other_totals, other_weights) in zip(seen, others, strict=True):
        assert torch.equal(totals, other_totals)
        assert all(map(torch.equal, weights, other_weights))


def graphed(**changes: Any) -> tuple[GraphedLayout, StandIn, list[str]]:
    made, said = objective(), []
    recorder = StandIn(made, **changes)
    return GraphedLayout(made, recorder, said.append), recorder, said


@pytest.mark.parametrize("parts", [1, 3])
def test_replayed_passes_train_the_same_weights(parts):
    layout, recorder, said = graphed()
    steps = [[batch(step * parts + part) for part in range(parts)] for step in range(8)]
    assert_same(train(layout, steps), train(Layout(objective()), steps))
    kinds = min(parts, 2)  # of a step's first micro-batch, and of those that add to it
    assert recorder.recorded == 2 * kinds
    plain = recorder.warmed
    assert WARMUP_PASSES * kinds <= plain < 8 * parts / 2
    assert recorder.replayed == 2 * (8 * parts - plain)
    assert layout.replays and said == []


def test_each_shape_has_graphs_of_its_own():
    layout, recorder, _ = graphed()
    lengths = [8, 6] * 6
    steps = [[batch(step, length)] for step, length in enumerate(lengths)]
    assert_same(train(layout, steps), train(Layout(objective()), steps))
    assert recorder.recorded == 4


def test_micro_batches_of_other_shapes_add_to_the_gradients_that_are_there():
    layout, _, _ = graphed()
    lengths = [(8, 6), (6, 8), (8, 8), (6, 6)] * 4
    steps = [
        [batch(2 * step, first), batch(2 * step + 1, second)]
        for step, (first, second) in enumerate(lengths)
    ]
    assert_same(train(layout, steps), train(Layout(objective()), steps))
    assert layout.replays


def test_parameters_that_are_given_other_memory_end_the_graphs():
    """A graph reads where they were: what is trained would be weights of before."""
    layout, recorder, said = graphed()
    plain = Layout(objective())
    first, later = ([[batch(step)] for step in steps] for steps in (range(5), range(5, 8)))
    assert_same(train(layout, first), train(plain, first))
    assert recorder.replayed
    for held in (layout, plain):
        for parameter in held.model.parameters():
            parameter.data = parameter.detach() * 2
    replayed = recorder.replayed
    assert_same(train(layout, later), train(plain, later))
    assert recorder.replayed == replayed and "p.data" in said[0] and len(said) == 1


def test_only_so_many_shapes_are_captured():
    layout, recorder, _ = graphed()
    steps = [[batch(1, length)] for length in range(4, 4 + MOST_SHAPES + 2)] * (WARMUP_PASSES + 1)
    train(layout, steps)
    assert recorder.recorded == 2 * MOST_SHAPES


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"waits": True}, "synchronizing CUDA operation"),
        ({"room": False}, "memory"),
        ({"fails_at": 1}, "when stream is capturing"),
        ({"fails_at": 2}, "when stream is capturing"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_what_cannot_be_captured_goes_on_without_and_says_why(changes, words, parts):
    layout, recorder, said = graphed(**changes)
    steps = [[batch(step * parts + part) for part in range(parts)] for step in range(6)]
    assert_same(train(layout, steps), train(Layout(objective()), steps))
    assert recorder.replayed == 0
    (sentence,) = said
    assert words in sentence and "--no-cuda-graphs" in sentence


@pytest.mark.parametrize("evaluates", [False, True])
def test_what_lacks_memory_takes_that_of_graphs(evaluates, monkeypatch):
    layout, recorder, said = graphed()
    short, long = [[batch(step)] for step in range(5)], batch(7, 20)
    seen = train(layout, short)
    assert layout.replays
    plain = layout.objective.forward

    def refused(given):
        if given["tokens"].shape[1] == 20 and not recorder.released:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return plain(given)

    monkeypatch.setattr(layout.objective, "forward", refused)
    other = Layout(objective())
    assert_same(seen, train(other, short))
    if evaluates:
        assert torch.equal(layout.evaluate(long, StepHooks()), other.evaluate(long, StepHooks()))
    else:
        assert_same(train(layout, [[long]]), train(other, [[long]]))
    assert recorder.released == 1 and not layout.replays
    assert "2.00 GiB" in said[0]


@pytest.mark.parametrize("plan, obstacle", [
    ({}, None), ({"checkpointing": "full"}, None), ({"offload_optimizer": "cpu"}, "copies"),
    ({"strategy": "ddp", "dp_replicate": 2}, "communicates"),
    ({"empty_cache": True}, "empty_cache"),
])  # fmt: skip
def test_what_a_graph_cannot_hold_is_named(plan, obstacle):
    made = Plan.parse(plan, "test")
    found = graph_obstacle(made)
    assert found is None if obstacle is None else obstacle in found
    assert (graph_obstacle(made, dropout=0.1) is None) == (obstacle is None and not made.recomputes)


def test_who_watches_operators_sees_all_of_them():
    layout, recorder, _ = graphed()
    train(layout, [[batch(step)] for step in range(WARMUP_PASSES + 1)])
    replayed = recorder.replayed
    with FlopCounterMode(display=False) as counter:
        train(layout, [[batch(9)]])
    assert recorder.replayed == replayed > 0
    assert counter.get_total_flops() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("parts, dropout", [(1, 0.0), (3, 0.0), (2, 0.2)])
def test_graphs_of_a_gpu_train_the_same_weights(compiled, parts, dropout):
    from outpace.nn.compilation import compile_forwards

    device, seen, said = torch.device("cuda"), [], []
    spec = SPEC.model_copy(update={"dropout": dropout})
    for graphs in (False, True):
        made = LanguageModelObjective(Transformer(spec, seed=1), compiles=compiled).to(device)
        if compiled:
            compile_forwards([made.model])
        layout = Layout(made)
        if graphs:
            layout = GraphedLayout(made, CudaRecorder(device), said.append)
        steps = []
        for step in range(8):
            parted = [batch(step * parts + part) for part in range(parts)]
            steps.append([{name: one.cuda() for name, one in each.items()} for each in parted])
        torch.cuda.manual_seed(5)
        seen.append(train(layout, steps))
    assert layout.replays and said == []
    for (totals, weights), (others, other_weights) in zip(*seen, strict=True):
        torch.testing.assert_close(totals, others, rtol=1e-6, atol=0)
        torch.testing.assert_close(weights, other_weights, rtol=1e-5, atol=1e-6)
