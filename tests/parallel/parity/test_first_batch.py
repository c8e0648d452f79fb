"""Before step 1 a strategy is compared with the plain module: faults are refused, state is kept."""

import json
import os
import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked
from outpace.parallel.layout import Layout, StepHooks
from outpace.parallel.parity.first_batch import FirstBatch
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan
from tests.parallel.parity.first_batch_cases import (
    SAMPLES,
    Quiet,
    Remembering,
    Stack,
    Still,
    global_batch,
    run_first_step,
    squares,
)

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("strategy", "passes"), [("ddp", 1), ("zero3", 1), ("hsdp", 1), ("1f1b", 1)]
)
def test_a_right_layout_passes_and_changes_no_state(tmp_path, strategy, passes):
    """Ranks with samples of their own drop the same in both, and so do stages, by their seeds."""
    for said in run_first_step(tmp_path, strategy):
        assert said["warnings"] == [] and "refused" not in said
        assert said["passes"] == passes and said["restored"]


def test_check_off_skips_the_check(tmp_path):
    for said in run_first_step(tmp_path, "ddp", check="off"):
        assert said["passes"] == 1


class Drawing(Stack):
    """Draws from Python's and NumPy's generators, as stochastic depth may."""

    def forward(self, x):
        return super().forward(x) * (random.random() + np.random.rand())


class Functional(Remembering):
    """Drops by a function, which no attribute tells."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.drop.p = 0.0

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


@pytest.mark.parametrize(
    ("make", "strategy", "passes"),
    [
        (Remembering, "zero3", 1),
        (Remembering, "1f1b", 1),
        (Functional, "ddp", 1),
        (Functional, "1f1b", 1),
        (Drawing, "gpipe", 1),
        (Drawing, "zero2", 1),
        (Still, "ddp", 1),
        (Still, "zero3", 1),
        (Still, "1f1b", 1),
    ],
)
def test_the_first_step_is_the_same_with_and_without_the_check(tmp_path, make, strategy, passes):
    found = []
    for check in ("on", "off"):
        folder = tmp_path / check
        folder.mkdir()
        said = run_first_step(folder, strategy, make, check=check)
        assert [one["passes"] for one in said] == [passes if check == "on" else 1] * 2
        found.append([(one["loss"], one["gradients"]) for one in said])
    assert found[0] == found[1]


class Loose(nn.Module):
    """Blocks that are in no list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


# Where a loss's code has these names, the check runs a few samples more.
ASK, HOOK = "get_rank", "register_hook"


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("make", [Stack, Loose])
def test_the_check_costs_one_backward_and_a_few_forwards(tmp_path, strategy, make):
    """With dropout, too: what the layout computes is the first step's.

    Forwards beside the plain one are of the halves of a micro-batch of 2: one, the other, and the
    first again. A Stack drops, and moves buffers: both whole, and in halves; a pair and its halves
    to see whether buffers depend on samples; then twice, with the buffers of before and of after,
    and, since no loss shows these, forward and backward with both, eight times in a row, and once
    after that. Without drops, both micro-batches run as one, too. A sample of each rank goes
    forward and backward once more: with that of the other on rank 0, and each by itself on rank 1.
    """

    def note(kind, batch):
        with (tmp_path / f"{kind}-{getattr(dist, ASK)()}").open("a") as file:
            file.write(f"{len(batch[0])}\n")

    def loss(module, batch):
        value = squares(module, batch)
        note("forward", batch)
        if value.requires_grad:
            getattr(value, HOOK)(lambda gradient: note("backward", batch))
        return value

    for number, said in enumerate(run_first_step(tmp_path, strategy, make, loss)):
        assert "refused" not in said and said["warnings"] == []
        forward, backward = (
            sum(map(int, (tmp_path / f"{kind}-{number}").read_text().split()))
            for kind in ("forward", "backward")
        )
        both_passes = 2 * SAMPLES // 2
        few = 3 + (2 + 2 + 2 * 2 if make is Stack else 2 * 2)
        later = (2 * 2 + 8 * 2 + 2, 2 * 2 + 2) if make is Stack else (0, 0)
        counted = 2 + 2 if make is Stack else 0
        mixed = 2
        wanted = both_passes + few + counted + mixed + later[0], both_passes + mixed + later[1]
        assert (forward, backward) == wanted


def test_the_plain_copy_recomputes_the_blocks_that_the_user_names(tmp_path):
    change = {"checkpointing": "full"}
    for said in run_first_step(tmp_path, "ddp", Loose, change=change, blocks=["a", "b"]):
        assert said["warnings"] == [] and said["passes"] == 1


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_check_of_a_stateless_module_costs_one_pass_and_four_samples(tmp_path, strategy):
    """Two samples together and one by one; the layout's pass is the first step's."""

    def loss(module, batch):
        with (tmp_path / f"forward-{os.getpid()}").open("a") as file:
            file.write(f"{len(batch[0])}\n")
        return squares(module, batch)

    for said in run_first_step(tmp_path, strategy, Quiet, loss, samples=16):
        assert "refused" not in said and said["warnings"] == [] and said["passes"] == 1
    counted = [path.read_text().split() for path in tmp_path.glob("forward-*")]
    assert [sum(map(int, one)) for one in counted] == [8 + 8 + 4] * 2


class Branching(nn.Module):
    """Chooses a layer by torch.cond, which torch's compiler traces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.one.forward, self.other.forward, (x,))


def test_operators_that_the_compiler_traces_are_named(tmp_path):
    """Where operators are observed, their branches would have no gradients."""
    first, _ = run_first_step(tmp_path, "ddp", Branching)
    [said] = first["warnings"]
    assert "was not compared" in said and "calls torch's cond, which" in said

    def act(rank):
        module = Branching()
        alone = outpace.parallelize(module, Plan(strategy="single", micro_batch=8), loss=squares)
        alone.forward_backward(global_batch())
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())

    # In a fork: a backward through cond starts threads in torch 2.11 that no later fork survives.
    assert all(end.fine for end in run_forked(1, act, 240.0, tmp_path / "alone"))
    with pytest.raises(BadInputError, match="calls torch's cond, which"):
        outpace.verify(Branching(), loss=squares, batch=global_batch(), plans=["ddp"])


class Known(nn.Module):
    """Knows itself, which no copy does."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(5, 3), id(self)

    def forward(self, x):
        if id(self) != self.own:
            raise KeyError("not me")
        return self.layer(x)


def test_a_module_whose_copy_fails_is_reported_as_not_compared(tmp_path):
    def loss(module, batch):
        inputs, classes, weights = batch
        return nn.functional.cross_entropy(module(inputs), classes, weight=weights)

    def act(rank):
        plan = plan_for_module("ddp", 2, SAMPLES)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", UserWarning)
            model = outpace.parallelize(Known(), plan, loss=loss)
            batch = torch.randn(SAMPLES, 5), torch.arange(SAMPLES) % 3, torch.ones(3)
            model.forward_backward(model.share(batch))
        said = [str(one.message) for one in heard if "not compared" in str(one.message)]
        assert len(said) == (rank.ranks.rank == 0)
        assert all("fails (KeyError: 'not me')" in s and "is split" not in s for s in said)

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]


class Uncopied(Stack):
    def __deepcopy__(self, memo):
        raise TypeError("not me")


def test_a_module_that_cannot_be_copied_is_reported_as_not_compared(tmp_path):
    first, _ = run_first_step(tmp_path, "ddp", Uncopied)
    [said] = first["warnings"]
    assert "was not compared with the plain module" in said and "cannot be copied" in said
    assert "outpace.verify(module" in said


def test_parameters_that_no_rank_has_are_named(tmp_path):
    def act(rank):
        said = []
        objective = nn.Module()
        objective.model = Stack()
        plan = plan_for_module("ddp", 2, SAMPLES)
        first = FirstBatch(objective, plan, rank.ranks, said.append, by_command=True)
        objective.model.head = nn.Identity()
        first.check(Layout(objective), [], StepHooks(nullcontext))
        (tmp_path / f"{rank.ranks.rank}.json").write_text(json.dumps(said))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    [said] = json.loads((tmp_path / "0.json").read_text())
    assert "no rank has head.weight, head.bias" in said and "outpace verify --model" in said


def test_all_ranks_end_with_the_refusal_of_one(tmp_path):
    """The other one waits in a collective."""

    def loss(module, batch):
        if dist.get_rank() == 0:
            raise BadInputError("not these samples")
        return squares(module, batch)

    def act(rank):
        model = outpace.parallelize(Stack(), plan_for_module("ring", 2, SAMPLES), loss=loss,
                                    check="off")  # fmt: skip
        model.forward_backward(model.share(global_batch()))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert [end.said for end in ends] == ["not these samples"] * 2


class Table(nn.Module):
    """One table is a buffer of all blocks, and a parameter has no elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(5, 3)
        self.empty = nn.Parameter(torch.empty(0))
        table = torch.linspace(0.5, 1, 5)
        for block in self.blocks:
            block[1].register_buffer("table", table)

    def forward(self, x):
        x -= 0.5
        for block in self.blocks:
            x = block(x) * block[1].table
        return self.head(x.to(self.empty.dtype))


def popped(module, batch):
    wanted = batch.pop(1)
    return (module(batch[0]) - wanted).square().mean()


@pytest.mark.parametrize("strategy", ["zero3", "1f1b"])
def test_a_forward_may_change_its_batch(tmp_path, strategy, monkeypatch):
    """Writes to inputs, and entries that are taken out, are seen by no other forward."""
    given = global_batch()
    monkeypatch.setattr(
        "tests.parallel.parity.first_batch_cases.global_batch",
        lambda samples: dict(enumerate(given)),
    )
    for said in run_first_step(tmp_path, strategy, make=Table, loss=popped):
        assert said["warnings"] == [] and "refused" not in said


class PenaltyStack(Stack):
    def __init__(self):
        super().__init__()
        self.parts = [self.head.weight]

    def forward(self, x):
        return super().forward(x) + sum(part.square().sum() for part in self.parts)


def test_the_plain_copy_has_parameters_in_plain_lists(tmp_path):
    for said in run_first_step(tmp_path, "zero1", make=PenaltyStack):
        assert said["warnings"] == [] and "refused" not in said


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero3", "1f1b"])
def test_blocks_that_users_compile_run_compiled_after_the_check(tmp_path, strategy):
    """The compiler gives up code that it meets while a mode observes operators."""

    def act(rank):
        ran = []

        def backend(graph, inputs):
            def run(*given):
                ran.append(None)
                return graph(*given)

            return run

        module = Quiet()
        for number, block in enumerate(module.blocks):
            module.blocks[number] = torch.compile(block, backend=backend)
        plan = Plan(micro_batch=8) if strategy == "single" else plan_for_module(strategy, 2, 8)
        model = outpace.parallelize(module, plan, loss=squares)
        counts = []
        for _ in range(4):
            model.forward_backward(model.share(global_batch()))
            counts.append(len(ran))
        (tmp_path / f"{rank.ranks.rank}").write_text(json.dumps(counts))

    ends = run_forked(1 if strategy == "single" else 2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    first, *_, last = json.loads((tmp_path / "0").read_text())
    assert 0 < first < last
