"""Before step 1 a strategy is compared with the plain module: faults are refused, state is kept."""

import json
import os
import random
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked
from outpace.nn.spread import local
from outpace.parallel.layout import Layout, StepHooks
from outpace.parallel.parity.first_batch import FirstBatch
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan

pytestmark = pytest.mark.gloo

SAMPLES = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(x.mean((0, 1)), 0.1)
        return x + self.drop(torch.tanh(self.linear(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def squares(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()


def global_batch(samples=SAMPLES):
    drawn = torch.Generator().manual_seed(1)
    shape = (samples, 4)
    return torch.randn(*shape, 5, generator=drawn), torch.randn(*shape, 3, generator=drawn)


def looked_at(
    tmp_path,
    strategy,
    make=Stack,
    loss=squares,
    spoil=None,
    change=None,
    samples=SAMPLES,
    **options,
):
    """What each of two ranks said in a first step: warnings, the loss or the refusal, and more."""

    def act(rank):
        plan = plan_for_module(strategy, 2, samples)
        plan = Plan.model_validate({**plan.model_dump(), **(change or {})})
        said = {}
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", UserWarning)
            model = outpace.parallelize(make(), plan, loss=loss, **options)
            if spoil is not None:
                spoil(model.layout)
            torch.manual_seed(7)
            random.seed(7)
            np.random.seed(7)
            state = torch.get_rng_state()
            before = {n: b.clone() for n, b in model.layout.model.named_buffers()}
            given = model.layout.gradients
            seen = []

            def gradients(passes, how):
                seen.append(
                    torch.equal(state, torch.get_rng_state())
                    and all(
                        torch.equal(b, before[n]) for n, b in model.layout.model.named_buffers()
                    )
                )
                return given(passes, how)

            model.layout.gradients = gradients
            try:
                said["loss"] = float(model.forward_backward(model.share(global_batch(samples))))
                held = model.named_parameters()
                said["gradients"] = {
                    n: local(p.grad).double().sum().item() for n, p in held if p.grad is not None
                }
            except BadInputError as error:
                said["refused"] = str(error)
        said["passes"], said["restored"] = len(seen), all(seen[-1:])
        said["warnings"] = [str(one.message) for one in heard if one.category is UserWarning]
        (tmp_path / f"{rank.ranks.rank}.json").write_text(json.dumps(said))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("strategy", "passes"), [("ddp", 1), ("zero3", 1), ("hsdp", 1), ("1f1b", 1)]
)
def test_what_is_right_is_passed_and_nothing_is_moved(tmp_path, strategy, passes):
    """Ranks with samples of their own drop the same in both, and so do stages, by their seeds."""
    for said in looked_at(tmp_path, strategy):
        assert said["warnings"] == [] and "refused" not in said
        assert said["passes"] == passes and said["restored"]


def test_it_is_left_out_on_demand(tmp_path):
    for said in looked_at(tmp_path, "ddp", check="off"):
        assert said["passes"] == 1


class Remembering(Stack):
    """Keeps a counter, a list, a tensor, an object and generators, all of which its loss sees."""

    def __init__(self):
        super().__init__()
        self.calls, self.history, self.aux = 0, [], None
        self.total = torch.zeros(())
        self.inner = SimpleNamespace(calls=0, seen={"last": 0.0})
        self.drawn = random.Random(3)

    def forward(self, x):
        self.calls += 1
        self.history.append(x.mean())
        self.total += 1
        self.inner.calls += 1
        self.inner.seen["last"] += 1.0
        made = super().forward(x) * self.calls * self.total * self.inner.seen["last"]
        self.aux = made.square().mean()
        return made * len(self.history) * self.inner.calls * self.drawn.random()


class Drawing(Stack):
    """Draws from Python's and NumPy's generators, as stochastic depth may."""

    def forward(self, x):
        return super().forward(x) * (random.random() + np.random.rand())


class Still(Remembering):
    """Drops nothing, so that what the layout computes in the look is its first step."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.drop.p = 0.0


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
def test_the_first_step_is_the_one_without_a_look(tmp_path, make, strategy, passes):
    found = []
    for check in ("on", "off"):
        folder = tmp_path / check
        folder.mkdir()
        said = looked_at(folder, strategy, make, check=check)
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


# Where a loss's code has these names, the look runs a few samples more.
ASK, HOOK = "get_rank", "register_hook"


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("make", [Stack, Loose])
def test_a_look_costs_one_backward_and_few_forwards_beside_the_step(tmp_path, strategy, make):
    """With dropout, too: what the layout computes is the first step's.

    Forwards beside the plain one are of the halves of a micro-batch of 2: one, the other, and the
    first again. A Stack drops, and moves buffers: both whole, and in halves; then twice, with the
    buffers of before and of after. Without drops, both micro-batches run as one, too. A sample of
    each rank goes forward and backward once more: with that of the other on rank 0, and each by
    itself on rank 1.
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

    for number, said in enumerate(looked_at(tmp_path, strategy, make, loss)):
        assert "refused" not in said and said["warnings"] == []
        forward, backward = (
            sum(map(int, (tmp_path / f"{kind}-{number}").read_text().split()))
            for kind in ("forward", "backward")
        )
        both_passes = 2 * SAMPLES // 2
        few = 3 + (2 + 2 + 2 * 2 if make is Stack else 2 * 2)
        mixed = 2
        assert (forward, backward) == (both_passes + few + mixed, both_passes + mixed)


class Narrow(Stack):
    """Its BatchNorm takes no single sample."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.head(self.norm(self.stem(x[:, 0]))).unsqueeze(1)


def first_entry(module, batch):
    return (module(batch[0]) - batch[1][:, :1]).square().mean()


def test_halves_that_the_module_refuses_are_no_reason_to_end(tmp_path):
    """A micro-batch of 2 samples is cut in two by the look alone, which then joins two of them."""
    both = looked_at(tmp_path, "ddp", Narrow, first_entry)
    for said in both:
        assert "loss" in said and said["passes"] == 1 and said["restored"]
    assert "when the batch is cut in two" in both[0]["warnings"][0]


def test_what_recomputes_is_what_the_user_names(tmp_path):
    change = {"checkpointing": "full"}
    for said in looked_at(tmp_path, "ddp", Loose, change=change, blocks=["a", "b"]):
        assert said["warnings"] == [] and said["passes"] == 1


def drop_a_term(layout):
    for part in layout.objective.modules():
        if callable(vars(part).get("loss")):
            part.loss = squares


def swap_buffers(layout):
    first, second = (layout.model.blocks[number].scale for number in (0, 1))
    if first is None:
        return  # of blocks that other stages have
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


class Scaled(Stack):
    def __init__(self):
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.register_buffer("scale", torch.tensor(1.0 + number))
            block.forward = None
            block.__class__ = ScaledBlock
            del block.forward


class ScaledBlock(Block):
    def forward(self, x):
        return x + self.scale * torch.tanh(self.linear(x))


def swap_in_the_layout(layout):
    """After the look has taken its copy's values, as a strategy that confuses buffers would."""
    given = layout.gradients

    def gradients(passes, how):
        swap_buffers(layout)
        return given(passes, how)

    layout.gradients = gradients


def with_term(module, batch):
    made = module(batch[0])
    return (made - batch[1]).square().mean() + made.abs().mean()


def at_the_end(change):
    """Return a fault that changes what a rank has after a layout's backward."""

    def spoil(layout):
        given = layout.gradients

        def gradients(passes, how):
            totals = given(passes, how)
            for name, parameter in layout.named_parameters():
                if name == "blocks.1.linear.weight" and parameter.grad is not None:
                    change(local(parameter.grad))
            return totals

        layout.gradients = gradients

    return spoil


lose_at_the_end = at_the_end(torch.Tensor.zero_)
double_at_the_end = at_the_end(lambda gradient: gradient.mul_(2))


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "1f1b"])
@pytest.mark.parametrize(
    ("fault", "make", "loss", "words"),
    [
        (lose_at_the_end, Stack, squares, "blocks.1.linear.weight has no gradient"),
        (double_at_the_end, Stack, squares, "blocks.1.linear.weight is 2 × the plain module's"),
        (drop_a_term, Stack, with_term, "the loss is"),
        (swap_in_the_layout, Scaled, squares, "the loss is"),
    ],
)
def test_planted_faults_are_refused_on_all_ranks(tmp_path, strategy, fault, make, loss, words):
    for said in looked_at(tmp_path, strategy, make, loss, fault):
        begin = f"strategy {strategy} does not compute what your module computes"
        assert said["refused"].startswith(begin)
        assert words in said["refused"] and 'check="off"' in said["refused"]


def halve_a_weight(layout):
    """Before its forward, which the plain module's does not."""
    given = layout.gradients

    def gradients(passes, how):
        with torch.no_grad():
            dict(layout.named_parameters())["blocks.1.linear.weight"].mul_(0.5)
        return given(passes, how)

    layout.gradients = gradients


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_weights_that_the_layout_alone_changes_are_refused(tmp_path, strategy):
    for said in looked_at(tmp_path, strategy, spoil=halve_a_weight):
        assert "changes the values of blocks.1.linear.weight" in said["refused"]
        assert "or by something else, than in one process" in said["refused"]


@pytest.mark.parametrize(
    ("strategy", "change"),
    [
        ("zero3", {"offload_parameters": "cpu"}),
        ("zero3", {"offload_parameters": "disk"}),
        ("ddp", {"offload_parameters": "disk"}),
        ("zero2", {"offload_activations": "disk"}),
        ("ddp", {"compress_gradients": "bf16"}),
        ("ddp", {"compress_gradients": "powersgd"}),
        ("ring", {"compress_gradients": "bf16"}),
    ],
)
def test_what_is_offloaded_or_compressed_is_looked_at(tmp_path, strategy, change):
    for spoil in (None, double_at_the_end):
        for said in looked_at(tmp_path, strategy, spoil=spoil, change=change):
            assert said["warnings"] == []
            assert ("× the plain module's" in said.get("refused", "")) == (spoil is not None)


def contrast(module, batch):
    made = module(batch[0]).mean(1)
    return nn.functional.cross_entropy(made @ made.T, torch.arange(len(made)))


class Normalised(Stack):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.head(self.norm(self.stem(x).transpose(1, 2)).transpose(1, 2))


def test_passes_of_one_sample_are_compared_in_pairs(tmp_path):
    first, _ = looked_at(tmp_path, "ddp", Stack, contrast, change={"micro_batch": 1})
    assert "when the batch is cut in two" in first["warnings"][0]


@pytest.mark.parametrize(
    ("make", "loss", "options"),
    [(Stack, contrast, {}), (Normalised, squares, {}), (Normalised, squares, {"sync": True})],
)
def test_what_the_cut_changes_is_said_once_with_the_cure(tmp_path, make, loss, options):
    sync = {"sync_batchnorm": True} if options else {}
    first, second = looked_at(tmp_path, "zero2", make, loss, **sync)
    assert second["warnings"] == [] and "refused" not in first
    [said] = first["warnings"]
    assert "when the batch is cut in two" in said and "(sum, count)" in said
    assert ("larger micro-batches" if options else "sync_batchnorm=True") in said


class Codebook(Stack):
    """Codes that follow the samples that took them, each another one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(64, 3))

    def forward(self, x):
        y = super().forward(x)
        taken = (1e4 * x.flatten(1).sum(1).abs()).long() % 64
        codes = self.codes[taken][:, None]
        with torch.no_grad():
            self.codes[taken] = 0.5 * self.codes[taken] + 0.5 * y.detach().mean(1)
        return y * codes


def test_buffers_that_samples_move_and_the_loss_reads_are_told(tmp_path):
    """A Stack's `average`, which no loss depends on, is not."""
    first, second = looked_at(tmp_path, "ddp", Codebook, change={"micro_batch": 4})
    assert second["warnings"] == [] and "refused" not in first
    [said] = first["warnings"]
    assert "the forward moves" in said and "codes" in said and "each step begins with" in said


class Chosen(Stack):
    """A tenth of the gradient goes on where the first sample of a batch is of one kind."""

    def forward(self, x):
        y = super().forward(x)
        return y.detach() + 0.1 * (y - y.detach()) if _is_of_late(x[:1]) else y


class Centred(Stack):
    """Samples' gradients have their mean taken off."""

    def forward(self, x):
        x = self.stem(x)
        x.register_hook(lambda gradient: gradient - gradient.mean(0))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _is_of_late(x):
    """Whether it is of the second half of the first global batch, which other ranks may have."""
    late = global_batch()[0][SAMPLES // 2 :]
    return bool((late == x).flatten(1).all(1).any())


@pytest.mark.parametrize(
    ("make", "strategy", "name"),
    [(Chosen, "ddp", "stem.weight"), (Centred, "ddp", "stem.weight"), (Chosen, "gpipe", "blocks.")],
)
def test_gradients_that_the_cut_changes_are_said_once_where_the_loss_is_the_same(
    tmp_path, make, strategy, name
):
    """Of Chosen, halves of micro-batches show nothing: all of their samples are of a kind."""
    first, second = looked_at(tmp_path, strategy, make)
    assert second["warnings"] == [] and "refused" not in first
    [said] = first["warnings"]
    assert said.startswith("the gradient of the first batch changes") and name in said
    assert "decide it for each sample by itself" in said


class Quiet(nn.Module):
    """Blocks that drop nothing and move nothing, so that samples may be combined otherwise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class QuietChosen(Quiet):
    """A tenth of the gradient goes on where the first sample of a batch is of one kind."""

    def forward(self, x):
        y = super().forward(x)
        late = (global_batch(16)[0][8:] == x[:1]).flatten(1).all(1).any()
        return y.detach() + 0.1 * (y - y.detach()) if late else y


class QuietSized(Quiet):
    """A gradient grows with the number of samples."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * len(gradient))
        return y


class QuietCentred(Quiet):
    """Samples' gradients have their mean taken off."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient - gradient.mean(0))
        return y


@pytest.mark.parametrize("strategy", ["ddp", "1f1b"])
@pytest.mark.parametrize("make", [QuietChosen, QuietSized, QuietCentred])
def test_gradients_that_the_cut_changes_are_said_of_modules_that_keep_nothing(
    tmp_path, make, strategy
):
    """Their samples are combined otherwise first, with one of another rank or micro-batch."""
    first, second = looked_at(tmp_path, strategy, make, change={"micro_batch": 4}, samples=16)
    assert second["warnings"] == [] and "refused" not in first
    [said] = first["warnings"]
    assert said.startswith("the gradient of the first batch changes")


def mean_of_positives(module, batch):
    made, wanted = module(batch[0]), batch[1] > 0.5
    return made[wanted].square().mean()


def contrast_samples(module, batch):
    made = module(batch[0]).mean(1)
    return (made @ made.T).exp().sum(1).log().mean()


def deviations(module, batch):
    """A single sample has none, of which torch warns."""
    return (module(batch[0]).std(0) - 1).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "gpipe"])
@pytest.mark.parametrize("loss", [mean_of_positives, contrast_samples, deviations])
def test_losses_that_the_cut_changes_are_said_of_modules_that_keep_nothing(
    tmp_path, loss, strategy
):
    first, second = looked_at(tmp_path, strategy, Quiet, loss, samples=16)
    assert second["warnings"] == [] and "refused" not in first
    [said] = first["warnings"]
    assert said.startswith("the loss of the first batch changes")


def rare_classes(module, batch):
    """One label a sample, whose class weighs by how rare it is among those that are given."""
    labels = batch[1][:, 0, 0].gt(0.3).long()
    weights = len(labels) / torch.bincount(labels, minlength=3).clamp(min=1)
    return nn.functional.cross_entropy(module(batch[0]).mean(1), labels, weights)


@pytest.mark.parametrize(
    ("strategy", "samples", "parts"), [("ddp", 2, 1), ("1f1b", 2, 8), ("1f1b", 4, 4)]
)
def test_weights_by_counts_of_classes_are_told_where_halves_happen_to_show_nothing(
    tmp_path, strategy, samples, parts
):
    """Of two samples with a label each no class is rarer; the first four have two of each class."""
    change = {"micro_batch": samples, "pp_microbatches": parts}
    said, _ = looked_at(tmp_path, strategy, Quiet, rare_classes, samples=16, change=change)
    [sentence] = said["warnings"]
    assert sentence.startswith("the loss of the first batch changes")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_module_that_keeps_nothing_is_asked_for_four_samples_beside_two_passes(
    tmp_path, strategy
):
    """Two samples together and one by one; the layout's pass is the first step's."""

    def loss(module, batch):
        with (tmp_path / f"forward-{os.getpid()}").open("a") as file:
            file.write(f"{len(batch[0])}\n")
        return squares(module, batch)

    for said in looked_at(tmp_path, strategy, Quiet, loss, samples=16):
        assert "refused" not in said and said["warnings"] == [] and said["passes"] == 1
    counted = [path.read_text().split() for path in tmp_path.glob("forward-*")]
    assert [sum(map(int, one)) for one in counted] == [8 + 8 + 4] * 2


def drop_stem_gradient(layout):
    given = layout.gradients

    def gradients(passes, how):
        totals = given(passes, how)
        for name, parameter in layout.named_parameters():
            if name == "stem.weight":
                local(parameter.grad).zero_()
        return totals

    layout.gradients = gradients


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "1f1b"])
def test_a_lost_gradient_of_a_module_that_keeps_nothing_is_refused(tmp_path, strategy):
    both = looked_at(tmp_path, strategy, Quiet, spoil=drop_stem_gradient, samples=16)
    assert all("stem.weight has no gradient" in said["refused"] for said in both)


class RaggedModule(nn.Module):
    """Nodes of graphs, with edges by their numbers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, nodes, edges):
        sent = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
        return self.b(torch.tanh(self.a(nodes + sent)))


def test_a_batch_whose_tensors_are_not_cut_alike_is_refused_where_that_fails(tmp_path):
    """Nodes are cut, and edges name nodes that are on another rank."""
    ring = torch.stack((torch.arange(8), (torch.arange(8) + 1) % 8)).repeat(1, 2)

    def loss(module, batch):
        return module(batch["nodes"], batch["edges"]).square().mean()

    def act(rank):
        plan = plan_for_module("ddp", 2, 8).model_copy(update={"micro_batch": 4})
        model = outpace.parallelize(RaggedModule(), plan, loss=loss)
        share = model.share({"nodes": torch.randn(8, 5), "edges": ring})
        with pytest.raises(BadInputError, match="those with 2 are whole in each part"):
            model.forward_backward(share)

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]


class Known(nn.Module):
    """Knows itself, which no copy does."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(5, 3), id(self)

    def forward(self, x):
        if id(self) != self.own:
            raise KeyError("not me")
        return self.layer(x)


def test_a_copy_that_fails_on_any_batch_is_said_and_lengths_are_not_blamed(tmp_path):
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
        assert all("fails (KeyError: 'not me')" in s and "is cut" not in s for s in said)

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]


class Clamped(Stack):
    """Keeps a weight small in its forward, by what it is or by what it is given."""

    def __init__(self, by_samples=False):
        super().__init__()
        self.by_samples = by_samples

    def forward(self, x):
        most = 0.1 + 0.1 * float(x.max()) if self.by_samples else 0.1
        self.blocks[0].linear.weight.data.clamp_(-most, most)
        return super().forward(x)


@pytest.mark.parametrize(
    ("strategy", "by_samples", "words"),
    [
        ("ddp", True, "each rank changes it by its own samples"),
        ("zero2", False, "what it writes is lost, since ranks hold shards"),
        ("zero1", False, None),
    ],
)
def test_weights_that_the_forward_changes(tmp_path, strategy, by_samples, words):
    found = looked_at(tmp_path, strategy, lambda: Clamped(by_samples))
    if words is None:
        assert [one.get("refused") for one in found] == [None, None]
        return
    for said in found:
        assert words in said["refused"] and "blocks.0.linear.weight" in said["refused"]


class Renormalised(nn.Module):
    """Its embedding shortens the rows that it looks up, once they are longer than `longest`."""

    def __init__(self, longest=0.5):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 6, max_norm=longest)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.embedding((x[..., 0] * 7).long() % 16)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("strategy", "longest"),
    [("ddp", 0.5), ("ddp", 50.0), ("ring", 0.5), ("zero1", 0.5), ("zero3", 50.0), ("hsdp", 0.5)],
)
def test_embeddings_with_max_norm_are_refused(tmp_path, strategy, longest):
    """Also where no row is too long in the first batch."""
    for said in looked_at(tmp_path, strategy, lambda: Renormalised(longest)):
        assert "changes the values of embedding.weight" in said["refused"]
        assert "Change parameters between steps" in said["refused"]


class RunningMean:
    """A loss with state of its own, which no checkpoint has."""

    def __init__(self):
        self.mean = 0.0

    def __call__(self, module, batch):
        out = module(batch[0])
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return (out - self.mean - batch[1]).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "gpipe"])
def test_a_loss_with_a_running_mean_is_refused_or_told(tmp_path, strategy):
    found = looked_at(tmp_path, strategy, Stack, RunningMean())
    said = found[0].get("refused") or found[0]["warnings"][-1]
    assert ("refused" in found[0]) == ("refused" in found[1]) == (strategy != "gpipe")
    assert "keeps loss.mean in an attribute" in said and "register_buffer" in said


class Stopped(Stack):
    def forward(self, x):
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x.detach() if number == 2 else x)
        return self.head(x)


def test_zeros_of_a_stage_where_the_gradient_stops_are_refused(tmp_path):
    for said in looked_at(tmp_path, "1f1b", Stopped):
        assert "get a gradient of zeros, but none in one process" in said["refused"]
        assert "requires_grad_(False)" in said["refused"]


class Hooked(Stack):
    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient * 0.5)
        self.head.bias.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter):
        parameter.grad.mul_(0.5)


def test_hooks_on_parameters_are_compared(tmp_path):
    """ddp runs the first kind on each rank, and what the second leaves it adds up otherwise."""
    for said in looked_at(tmp_path, "ddp", Hooked):
        assert "the gradient of head.bias differs" in said["refused"]


class Annealed(Block):
    def __init__(self):
        super().__init__()
        self.calls, self.coin = 0, random.Random(1)

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls + self.coin.random()


class Counted(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Annealed() for _ in range(4))


def test_counters_and_generators_of_blocks_are_no_fault_of_a_pipeline(tmp_path):
    for said in looked_at(tmp_path, "1f1b", Counted):
        assert said.get("refused") is None and said["passes"] == 1


class Uncopied(Stack):
    def __deepcopy__(self, memo):
        raise TypeError("not me")


def test_what_cannot_be_looked_at_is_said(tmp_path):
    first, _ = looked_at(tmp_path, "ddp", Uncopied)
    [said] = first["warnings"]
    assert "was not compared with the plain module" in said and "cannot be copied" in said
    assert "outpace.verify(module" in said


def test_what_no_rank_has_is_named(tmp_path):
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


def test_when_one_rank_refuses_all_end_with_its_sentence(tmp_path):
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


FILE = """
import itertools
import torch
from torch import nn

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.randn(5, generator=torch.Generator().manual_seed(index)), torch.ones(3)

def squares(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()

def build():
    torch.manual_seed(0)
    return {"module": Named(), "loss": squares, "dataset": Data(), "blocks": ["first", "second"]}

numbers = itertools.count(1)  # which the look cannot put back

def growing(module, batch):
    return squares(module, batch) * next(numbers)

def wrong():
    return {**build(), "loss": growing}

def large_at_first(module, batch):
    if next(numbers) == 1:
        torch.ones(100 << 20)
    return squares(module, batch)

def large():
    return {**build(), "loss": large_at_first}
"""


@pytest.mark.timeout(900)
def test_training_by_command_cuts_as_build_says_and_refuses_what_differs(command, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)

    def train(function, strategy, size=2):
        words = ["train", f"--model={tmp_path}/mine.py:{function}", f"--strategy={strategy}",
                 "--steps=2", "--global-batch=8", "--micro-batch=2", "--precision=fp32",
                 f"--out={tmp_path}/{function}-{strategy}"]  # fmt: skip
        return command(Path(__file__).parent.parent / "forked.py", size, "outpace", *words)

    done = train("build", "1f1b")  # which finds no repeated blocks by itself
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout and "tokens/s" not in done.stdout
    done = train("build", "ps", 3)
    assert done.returncode == 0, done.stderr
    assert "was not compared" not in done.stdout + done.stderr
    done = train("wrong", "ps", 3)
    assert done.returncode == 2 and "strategy ps does not compute what" in done.stderr
    peaks = []
    for function in ("build", "large"):  # by 400 MiB, which the look alone takes
        done = train(function, "ddp")
        assert done.returncode == 0, done.stderr
        rows = (tmp_path / f"{function}-ddp" / "metrics.jsonl").read_text().splitlines()
        peaks.append(max(json.loads(row).get("peak_memory_bytes") or 0 for row in rows))
    assert 0 < peaks[1] < peaks[0] + (200 << 20)
    done = train("wrong", "ddp")
    assert done.returncode == 2 and "strategy ddp does not compute what your module" in done.stderr
    assert "--check off" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "wrong-ddp").exists()


class Averaged(Stack):
    """Subtracts a running mean of its outputs, which lies in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.mean = 0.0

    def forward(self, x):
        made = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * made.detach().mean((0, 1))
        return made - self.mean


class Recurrent(Still):
    """Goes on with the state that each sample had."""

    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, x):
        made = Stack.forward(self, x)
        made = made if self.state is None else made + 0.5 * self.state
        self.state = made.detach()
        return made


class Cached(Still):
    """Keeps what it computes, and what it has looked up, neither of which is read again."""

    def __init__(self):
        super().__init__()
        self.masks = {}

    def forward(self, x):
        made = Stack.forward(self, x)
        self.masks[x.shape[1]] = torch.ones(x.shape[1])
        self.aux = made.square().mean()
        return made


@pytest.mark.parametrize(
    ("make", "strategy", "samples", "refused", "words"),
    [
        (Averaged, "ddp", 8, True, "keeps mean in an attribute from step to step"),
        (Averaged, "ddp", 2, True, "keeps mean in an attribute from step to step"),
        (Averaged, "gpipe", 8, False, "keeps mean in an attribute from step to step"),
        (Recurrent, "zero2", 8, False, "keeps state in an attribute from step to step"),
        (Recurrent, "ddp", 2, False, "keeps state in an attribute from step to step"),
        (Cached, "ddp", 8, False, None),
    ],
)
def test_state_in_attributes_is_said_or_refused(tmp_path, make, strategy, samples, refused, words):
    """Of two samples each rank has one, and compares with the other's."""
    found = looked_at(tmp_path, strategy, make, samples=samples)
    assert all(("refused" in said) == refused for said in found), found
    told = [said["refused"] for said in found] if refused else found[0]["warnings"]
    about_state = [one for one in told if "from step to step" in one]
    assert bool(about_state) == (words is not None), told
    for one in about_state:
        assert words in one and "register_buffer" in one


class Followed(Stack):
    """Has a frozen teacher, which follows the head's weight in each forward."""

    def __init__(self):
        super().__init__()
        self.teacher = torch.nn.Parameter(self.head.weight.detach().clone(), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.mul_(0.9).add_(self.head.weight, alpha=0.1)
        return super().forward(x)


@pytest.mark.parametrize(("micro_batch", "times"), [(4, None), (2, "2 times a step")])
def test_parameters_that_move_with_each_micro_batch_are_told(tmp_path, micro_batch, times):
    found = looked_at(tmp_path, "ddp", Followed, change={"micro_batch": micro_batch})
    told = [one for one in found[0]["warnings"] if "the forward writes to" in one]
    assert len(told) == (times is not None), found
    for one in told:
        assert "teacher" in one and times in one


class Threaded(Stack):
    """Writes to a weight in another thread, as a backward on CUDA is one."""

    @torch.no_grad()
    def halve(self):
        self.head.weight.mul_(0.5)

    def forward(self, x):
        writer = threading.Thread(target=self.halve)
        writer.start()
        writer.join()
        return super().forward(x)


def test_writes_that_no_operator_shows_are_refused(tmp_path):
    for said in looked_at(tmp_path, "ddp", Threaded):
        assert "head.weight" in said["refused"] and "in another thread" in said["refused"]


class MovedBack(Stack):
    """GradNorm's manner: a hook on a gradient moves a buffer by which the next forward weighs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.tensor(1.0))

    def forward(self, x):
        made = super().forward(x)
        if made.requires_grad:
            made.register_hook(self.move)
        return made * self.share.clone()

    def move(self, gradient):
        self.share.lerp_(gradient.norm(), 0.5)


@pytest.mark.parametrize("strategy", ["ddp", "gpipe"])
def test_buffers_that_a_backward_moves_are_refused(tmp_path, strategy):
    for said in looked_at(tmp_path, strategy, MovedBack):
        assert "changes share, on which its loss depends" in said["refused"]
        assert f"under strategy {strategy} gradients are those of parts" in said["refused"]


def missing_as_nan(module, batch):
    """The mean over targets that are there: as many in each half, and not in each quarter."""
    missing = torch.zeros(SAMPLES, 4, 3, dtype=torch.bool)
    missing[::2, :, 0] = True
    targets = batch[1].masked_fill(missing[: len(batch[1])], float("nan"))
    return (module(batch[0]) - targets)[~targets.isnan()].square().mean()


def test_a_mean_over_what_is_there_is_told_by_quarters_where_halves_have_as_many(tmp_path):
    change = {"micro_batch": 4, "pp_microbatches": 2}
    first, _ = looked_at(tmp_path, "gpipe", loss=missing_as_nan, change=change)
    assert "when the batch is cut in two" in first["warnings"][0]


class Codes(Stack):
    """Two codes, which follow the samples that take them: one of each in a micro-batch here."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(2, 1, 5))

    def forward(self, x):
        taken = (x[:, 0, 0] > 0).long()
        moved = x - self.codes[taken]
        with torch.no_grad():
            self.codes.index_add_(0, taken, x.mean(1, keepdim=True))
        return super().forward(moved)


@pytest.mark.parametrize(("strategy", "told"), [("mp", False), ("gpipe", True)])
def test_buffers_that_micro_batches_move_in_turn_are_told(tmp_path, strategy, told):
    """Though a micro-batch's halves, which take other codes, move and read them as the whole."""
    first, _ = looked_at(tmp_path, strategy, Codes, samples=4)
    assert "refused" not in first
    assert any("moves codes, a buffer on which" in one for one in first["warnings"]) == told


def gathered(module, batch):
    """Contrast with the samples of all ranks, which the loss gathers."""
    made = module(batch[0]).flatten(1)
    parts = [torch.empty_like(made) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, batch[1].flatten(1))
    wanted = dist.get_rank() * len(made) + torch.arange(len(made))
    return nn.functional.cross_entropy(made @ torch.cat(parts).T, wanted)


@pytest.mark.parametrize("strategy", ["ddp", "1f1b", "tp"])
def test_collectives_of_the_users_own_are_told_or_refused(tmp_path, strategy):
    """They hang where one rank alone computes the loss."""
    layouts = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    options = {"layouts": layouts} if strategy == "tp" else {}
    first, second = looked_at(tmp_path, strategy, Wide, gathered, **options)
    if strategy == "ddp":
        assert "refused" not in first and "cut in two" in first["warnings"][0]
    else:
        assert first["refused"] == second["refused"]
        assert "calls a collective of torch.distributed (allgather)" in first["refused"]


class GroupOfOne(Quiet):
    """Gathers from a group of its own rank alone, in which no other rank can take its place."""

    groups = None

    def forward(self, x):
        y = super().forward(x)
        if self.groups is None:
            type(self).groups = [dist.new_group([rank]) for rank in range(2)]
        gathered = [torch.zeros_like(y)]
        dist.all_gather(gathered, y.detach(), group=self.groups[dist.get_rank()])
        return y + gathered[0]


def test_a_rank_with_a_group_of_its_own_is_not_taken_for_another(tmp_path):
    for said in looked_at(tmp_path, "ddp", GroupOfOne):
        assert "refused" not in said


class Wide(nn.Module):
    """A stack whose blocks may be split by columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x[..., :3]


class WideBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Dropping(nn.Module):
    """Blocks in which half of the features are split by tp, and drop what is whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x[..., :3]


class DroppingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 64), nn.Linear(64, 5)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(self.drop(torch.tanh(self.up(x)))))


class Products(TorchDispatchMode):
    """Counts multiplications of matrix products, those of this rank's parts of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        if any(issubclass(kind, FakeTensor) for kind in types):
            return made  # of which DTensor learns placements
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count += made.numel() * args[-2].shape[-1]
        return made


SPLIT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@pytest.mark.parametrize(
    ("strategy", "change"),
    [
        ("gpipe", {}),
        ("tp", {}),
        pytest.param("tp", {"micro_batch": 16}, marks=pytest.mark.slow),
        *(pytest.param(one, {}, marks=pytest.mark.slow) for one in ("1f1b", "interleaved", "zb")),
    ],
)
def test_a_look_with_dropout_costs_two_steps_at_most(tmp_path, strategy, change):
    """By multiplications of the rank that has most, in looks and in steps."""

    def act(rank):
        plan = plan_for_module(strategy, 2, 16).model_copy(update=change)
        options = {"layouts": SPLIT} if strategy == "tp" else {}
        counts = {}
        for check in ("on", "off"):
            model = outpace.parallelize(Dropping(), plan, loss=squares, check=check, **options)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with Products() as products:
                    model.forward_backward(model.share(global_batch(16)))
            counts[check] = products.count
        with Products() as products:
            model.forward_backward(model.share(global_batch(16)))
        found = [counts["on"] - counts["off"], products.count]
        (tmp_path / f"{rank.ranks.rank}").write_text(json.dumps(found))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    found = [json.loads((tmp_path / f"{one}").read_text()) for one in range(2)]
    looks, steps = zip(*found, strict=True)
    assert 1 <= max(looks) / max(steps) <= 2


def drop_one_gradient(layout):
    given = layout.gradients

    def gradients(passes, how):
        totals = given(passes, how)
        local(layout.model.blocks[1].up.weight.grad).zero_()
        return totals

    layout.gradients = gradients


@pytest.mark.parametrize(
    ("fault", "loss", "refused", "told"),
    [
        (drop_one_gradient, squares, "blocks.1.up.weight has no gradient", ""),
        (None, contrast, "", "when the batch is cut in two"),
        pytest.param(drop_a_term, with_term, "the loss is", "", marks=pytest.mark.slow),
    ],
)
def test_faults_of_tensor_parallel_ranks_and_what_the_cut_changes(
    tmp_path, fault, loss, refused, told
):
    """Also where samples were taken together otherwise first."""
    both = looked_at(tmp_path, "tp", Dropping, loss, fault, layouts=SPLIT)
    assert all(refused in said.get("refused", "") for said in both)
    assert all(("refused" in said) == bool(refused) for said in both)
    assert [told in one for one in both[0]["warnings"]] == [True] * bool(told)


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
    monkeypatch.setattr(f"{__name__}.global_batch", lambda samples: dict(enumerate(given)))
    for said in looked_at(tmp_path, strategy, make=Table, loss=popped):
        assert said["warnings"] == [] and "refused" not in said


class PenaltyStack(Stack):
    def __init__(self):
        super().__init__()
        self.parts = [self.head.weight]

    def forward(self, x):
        return super().forward(x) + sum(part.square().sum() for part in self.parts)


def test_a_copy_has_parameters_in_plain_lists_too(tmp_path):
    for said in looked_at(tmp_path, "zero1", make=PenaltyStack):
        assert said["warnings"] == [] and "refused" not in said


class NoisyStack(Stack):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


@pytest.mark.parametrize("strategy", ["zero3", "1f1b"])
def test_numbers_that_a_forward_draws_are_no_effect_of_the_cut(tmp_path, strategy):
    for said in looked_at(tmp_path, strategy, make=NoisyStack):
        assert said["warnings"] == [] and "refused" not in said


class OneMask(Quiet):
    """One mask, drawn before the blocks, of what each of them returns."""

    def forward(self, x):
        x = self.stem(x)
        mask = nn.functional.dropout(torch.ones_like(x), 0.3, self.training)
        for block in self.blocks:
            x = block(x) * mask
        return self.head(x)


class LateNoise(Quiet):
    """What is drawn after the first block is read after all of them."""

    def forward(self, x):
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(nn.functional.dropout(x, 0.2, self.training))
            if not number:
                noise = torch.randn_like(x)
        return self.head(x + noise)


class EncoderOutside(Quiet):
    """Blocks take what an encoder outside of them drops, within checkpoints."""

    def __init__(self):
        super().__init__()
        self.encoder, self.drop = nn.Linear(5, 6), nn.Dropout(0.3)

    def forward(self, x):
        encoded, x = self.drop(self.encoder(x)), self.stem(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x + encoded, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (OneMask, "1f1b"),
        (LateNoise, "1f1b"),
        (EncoderOutside, "1f1b"),  # an encoder outside of blocks is at the first and the last stage
        pytest.param(OneMask, "interleaved", marks=pytest.mark.slow),
        pytest.param(LateNoise, "interleaved", marks=pytest.mark.slow),
    ],
)
def test_what_code_outside_of_blocks_draws_is_the_same_on_all_stages(tmp_path, make, strategy):
    """The layout's pass equals one process, which draws it once, and is the first step's."""
    for said in looked_at(tmp_path, strategy, make):
        assert said["warnings"] == [] and "refused" not in said and said["passes"] == 1


class HiddenTeacher(Quiet):
    """A teacher that is hidden in a list, and follows its student if it `follows`."""

    follows = True

    def __init__(self):
        super().__init__()
        self.hidden = [Quiet().requires_grad_(False)]

    def forward(self, x):
        (teacher,) = self.hidden
        if self.follows:
            pairs = zip(teacher.named_parameters(), self.named_parameters(), strict=True)
            for (_, one), (_, other) in pairs:
                one.data = 0.9 * one.data + 0.1 * other.data
        return super().forward(x) - teacher(x)


class FixedHiddenTeacher(HiddenTeacher):
    follows = False


@pytest.mark.parametrize("samples", [8, 16])
def test_a_forward_that_changes_a_hidden_module_is_refused(tmp_path, samples):
    """Its first values are the student's, so that nothing else shows it in the first step."""
    for said in looked_at(tmp_path, "ddp", HiddenTeacher, samples=samples):
        assert "hidden.blocks.0.0.bias" in said["refused"] and "Register" in said["refused"]
    for said in looked_at(tmp_path, "ddp", FixedHiddenTeacher, samples=samples):
        assert said["warnings"] == [] and "refused" not in said


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero3", "1f1b"])
def test_what_users_compile_is_compiled_after_the_look(tmp_path, strategy):
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


class NoisyAverages(NoisyStack):
    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(6))

    def forward(self, x):
        x = self.stem(x + torch.randn_like(x))
        with torch.no_grad():
            self.level.lerp_(x.mean((0, 1)), 0.1)
        return self.head(x - self.level)


def test_buffers_that_the_loss_reads_are_told_of_forwards_that_draw_numbers(tmp_path):
    first, _ = looked_at(tmp_path, "zero3", make=NoisyAverages)
    assert any("moves level, a buffer on which" in one for one in first["warnings"])


class Level(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("level", torch.ones(()))

    def forward(self, x):
        self.level.lerp_(x.detach().square().mean(), 0.1)
        return self.linear(x) / self.level


class LevelStack(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Level() for _ in range(4))


def test_a_buffer_that_other_micro_batches_need_is_named(tmp_path):
    def act(rank):
        model = outpace.parallelize(LevelStack(), plan_for_module("1f1b", 2, SAMPLES), loss=squares)
        model.forward_backward(model.share(global_batch()))

    said = next(end.said for end in run_forked(2, act, 240.0, tmp_path) if end.refused)
    assert "changes blocks." in said and "in place" in said
    assert "Use a copy where the loss depends on it (self." in said


class Criterion(nn.Module):
    """A loss that is a module, with a running mean of itself if it `keeps` one."""

    def __init__(self, keeps):
        super().__init__()
        self.keeps = keeps
        self.register_buffer("mean", torch.ones(()))

    def forward(self, module, batch):
        value = squares(module, batch)
        if not self.keeps:
            return value * self.mean
        with torch.no_grad():
            self.mean.lerp_(value, 0.3)
        return value / self.mean


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "1f1b"])
def test_a_loss_may_be_a_module_with_buffers(tmp_path, strategy):
    for said in looked_at(tmp_path, strategy, Quiet, Criterion(keeps=False)):
        assert said["warnings"] == [] and "refused" not in said
    if strategy == "zero3":
        refused, _ = looked_at(tmp_path / "keeping", strategy, Quiet, Criterion(keeps=True))
        assert "loss.mean (a buffer of the loss) from step to step" in refused["refused"]
