"""The check of the first batch tells what ranks and micro-batches change by cutting the batch."""

import itertools
import math
import os

import pytest
import torch
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.interop.custom_model import CustomModel, CustomObjective
from outpace.launch.forked_job import run_forked
from outpace.parallel.layout import StepHooks
from outpace.parallel.parity.comparison import SINGLE
from outpace.parallel.parity.cut_cause import find_cut_cause
from outpace.parallel.parity.cut_difference import CutRequest, FirstPiece, compare_cut
from outpace.records.errors import BadInputError
from tests.parallel.parity.first_batch_cases import (
    SAMPLES,
    NoisyStack,
    Quiet,
    Stack,
    contrast,
    global_batch,
    run_first_step,
    squares,
)

pytestmark = pytest.mark.gloo
PROCESS = "getpid"  # where a loss's code has this name, the check runs two samples more


class Narrow(Stack):
    """Its BatchNorm takes no single sample."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.head(self.norm(self.stem(x[:, 0]))).unsqueeze(1)


def first_entry(module, batch):
    return (module(batch[0]) - batch[1][:, :1]).square().mean()


def test_a_module_that_refuses_half_a_batch_still_trains(tmp_path):
    """The check alone splits a micro-batch of 2 samples in two, and then joins two of them."""
    both = run_first_step(tmp_path, "ddp", Narrow, first_entry)
    for said in both:
        assert "loss" in said and said["passes"] == 1 and said["restored"]
    assert "when the batch is split in two" in both[0]["warnings"][0]


def mean_of_present(module, batch):
    """A mean over samples that have targets; a constant without any."""
    there = batch[1].isfinite().all(-1).all(-1)
    if not there.any():
        return torch.zeros(())
    return (module(batch[0])[there] - batch[1][there]).square().mean()


def test_parts_whose_loss_has_no_gradient_are_compared():
    x, y = (part.clone() for part in global_batch())
    y[1:] = math.nan
    objective = CustomObjective(CustomModel(Quiet(), mean_of_present))
    first = FirstPiece((x[:2], y[:2]), mean=None, halves=None, drops=False, buffers={})
    plan = plan_for_module("ddp", 2, SAMPLES)
    asked = [first.piece], StepHooks(), False, SINGLE.cut
    found = compare_cut(CutRequest(objective, plan, first, *asked))
    assert found.loss == pytest.approx(0.5)


class NormalisedStack(Stack):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.head(self.norm(self.stem(x).transpose(1, 2)).transpose(1, 2))


def test_micro_batches_of_one_sample_are_compared_in_pairs(tmp_path):
    first, _ = run_first_step(tmp_path, "ddp", Stack, contrast, change={"micro_batch": 1})
    assert "when the batch is split in two" in first["warnings"][0]


@pytest.mark.parametrize(
    ("make", "loss", "sync", "cure", "others"),
    [
        (Stack, contrast, False, "accept the difference", ("(sum, count)", "sync_batchnorm")),
        (
            NormalisedStack, squares, False, "sync_batchnorm=True and one micro-batch per step",
            ("(sum, count)", "negatives"),
        ),
        (
            NormalisedStack, squares, True,
            f"micro_batch={SAMPLES // 2} (all samples of a rank), because with sync_batchnorm the "
            "statistics of norm cover one micro-batch of all ranks", ("(sum, count)", "negatives"),
        ),
    ],
)  # fmt: skip
def test_a_loss_that_depends_on_the_cut_is_reported_once_with_the_cure(
    tmp_path, make, loss, sync, cure, others
):
    """Only what helps is offered."""
    first, second = run_first_step(tmp_path, "zero2", make, loss, sync_batchnorm=sync)
    assert second["warnings"] == [] and "refused" not in first
    [said] = first["warnings"]
    assert "when the batch is split in two" in said and cure in said
    assert not any(words in said for words in others)


class Untracked(NormalisedStack):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)


@pytest.mark.parametrize(
    ("strategy", "make"),
    [("ddp", NormalisedStack), ("ddp", Untracked), ("zero2", NormalisedStack),
     ("zero3", NormalisedStack)],
)  # fmt: skip
def test_shared_statistics_of_one_micro_batch_are_those_of_the_whole_batch(
    tmp_path, strategy, make
):
    one = {"micro_batch": SAMPLES // 2}
    both = run_first_step(tmp_path, strategy, make, squares, change=one, sync_batchnorm=True)
    assert all(said["warnings"] == [] and "loss" in said for said in both)


@pytest.mark.parametrize("micro_batch", [SAMPLES // 2, SAMPLES // 4])
@pytest.mark.parametrize("make", [NormalisedStack, Untracked])
def test_samples_that_are_mixed_beside_shared_statistics_are_reported(tmp_path, make, micro_batch):
    change = {"micro_batch": micro_batch}
    first, _ = run_first_step(tmp_path, "ddp", make, contrast, change=change, sync_batchnorm=True)
    [said] = first["warnings"]
    assert "when the batch is split in two" in said and "accept the difference" in said
    assert "BatchNorm normalises" not in said and "sync_batchnorm" not in said


def test_statistics_of_each_rank_are_reported_for_one_micro_batch(tmp_path):
    one = {"micro_batch": SAMPLES // 2}
    first, _ = run_first_step(tmp_path, "ddp", NormalisedStack, squares, change=one)
    assert "BatchNorm normalises each part by itself" in first["warnings"][0]
    assert "use sync_batchnorm=True" in first["warnings"][0]


def slopes(module, batch):
    x = batch[0].detach().requires_grad_()
    [slope] = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    return slope.square().mean()


class Following(Quiet):
    """It subtracts a mean that follows its samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        x = x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return super().forward(x)


@pytest.mark.parametrize("loss", [squares, slopes])
def test_buffers_that_move_are_the_cause_that_is_told(tmp_path, loss):
    """Slopes need a graph: forwards without one would only fail."""
    first, second = run_first_step(tmp_path, "ddp", Following, loss)
    assert "refused" not in first and second["warnings"] == []
    assert first["warnings"][0].startswith("the forward updates mean")


class Chosen(Stack):
    """A tenth of the gradient goes on where the first sample of a batch is of one kind."""

    def forward(self, x):
        y = super().forward(x)
        return y.detach() + 0.1 * (y - y.detach()) if _is_of_late(x[:1]) else y


class CentredStack(Stack):
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
    [
        (Chosen, "ddp", "stem.weight"),
        (CentredStack, "ddp", "stem.weight"),
        (Chosen, "gpipe", "blocks."),
    ],
)
def test_gradients_that_depend_on_the_cut_are_reported_once(tmp_path, make, strategy, name):
    """Of Chosen, halves of micro-batches show nothing: all of their samples are of a kind."""
    first, second = run_first_step(tmp_path, strategy, make)
    assert second["warnings"] == [] and "refused" not in first
    [said] = first["warnings"]
    assert said.startswith("the gradient of the first batch changes") and name in said
    assert "decide for each sample separately" in said


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
def test_gradients_of_stateless_modules_that_depend_on_the_cut_are_reported(
    tmp_path, make, strategy
):
    """Their samples are combined differently first, with one of another rank or micro-batch."""
    first, second = run_first_step(tmp_path, strategy, make, change={"micro_batch": 4}, samples=16)
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


def mean_over_samples(module, batch):
    """Its parts are weighted by their numbers of targets, as those of a batch with labels are."""
    wanted = batch[1] > 0.5
    sums = (module(batch[0]) * wanted).square().sum((1, 2))
    return (sums / wanted.sum((1, 2)).clamp(min=1)).mean() * wanted.sum(), wanted.sum()


def weighted_mean(module, batch):
    weights = batch[1].abs().mean((1, 2))
    return ((module(batch[0]) - batch[1]).square().mean((1, 2)) * weights).sum() / weights.sum()


def summed(module, batch):
    return (module(batch[0]) - batch[1]).square().sum()


def root(module, batch):
    return squares(module, batch).sqrt()


def contrast_with_slopes(module, batch):
    return contrast(module, batch) + slopes(module, batch)


@pytest.mark.parametrize(
    ("make", "loss", "cause"),
    [
        (Quiet, mean_of_positives, "counts"), (Quiet, weighted_mean, "counts"),
        (Quiet, summed, "sum"), (Quiet, contrast, "batch"), (Quiet, root, "batch"),
        (Quiet, deviations, "batch"), (Quiet, contrast_with_slopes, "batch"),
        (NormalisedStack, squares, "batchnorm"),
        (NormalisedStack, contrast, ""),
    ],
)  # fmt: skip
def test_the_cause_of_a_cut_is_found_from_a_few_samples(make, loss, cause):
    """Nothing is left changed."""
    module = make()
    module.train()
    objective = CustomObjective(CustomModel(module, loss))
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    tolerance = SINGLE.cut
    assert find_cut_cause(objective, StepHooks(), True, global_batch(), tolerance) == cause
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize("strategy", ["ddp", "gpipe"])
@pytest.mark.parametrize(
    "loss", [mean_of_positives, contrast_samples, deviations, mean_over_samples]
)
def test_losses_of_stateless_modules_that_depend_on_the_cut_are_reported(tmp_path, loss, strategy):
    first, second = run_first_step(tmp_path, strategy, Quiet, loss, samples=16)
    assert second["warnings"] == [] and "refused" not in first
    [said] = first["warnings"]
    assert said.startswith("the loss of the first batch changes")
    assert ("the loss is a mean over samples, but" in said) == (loss is mean_over_samples)


class QuietIterated(Quiet):
    """Its numbers cannot be named nor put back."""

    def __init__(self):
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x):
        return super().forward(x) * (1 + 1e-3 * next(self.numbers))


def squares_of_some(module, batch):
    """Count the samples with targets, as the first ones of the second rank are not."""
    without = global_batch(16)[1][8:10, 0, 0]
    wanted = ~torch.isin(batch[1][:, 0, 0], without)
    return (module(batch[0]) - batch[1]).square().mean((1, 2)) @ wanted.float(), wanted.sum()


def dropping(make):
    class Dropping(make):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(self.stem, nn.Dropout(0.3))

    return Dropping


@pytest.mark.parametrize(
    ("make", "loss", "words"),
    [
        (Quiet, squares, None),
        (Quiet, mean_of_positives, "the loss of the first batch changes"),
        (Quiet, contrast_samples, "the loss of the first batch changes"),
        (QuietChosen, squares, "the gradient of the first batch changes"),
        (QuietCentred, squares_of_some, "the gradient of the first batch changes"),
        (QuietIterated, squares, "something that outpace cannot name"),
    ],
)
def test_few_samples_of_several_ranks_suffice_where_activations_are_dropped(
    tmp_path, make, loss, words
):
    """Three samples together and by themselves, of which the sample of its own twice."""

    def counted(module, batch):
        with (tmp_path / f"forward-{getattr(os, PROCESS)()}").open("a") as file:
            file.write(f"{len(batch[0])}\n")
        return loss(module, batch)

    first, _ = run_first_step(tmp_path, "ddp", dropping(make), counted, samples=16)
    said = [*first["warnings"], *filter(None, [first.get("refused")])]
    assert words in said[-1] if words else not said
    if words is None:
        logs = [path.read_text().split() for path in tmp_path.glob("forward-*")]
        assert [sum(map(int, one)) for one in logs] == [8 + 8 + 2 + (1 + 3 + 1)] * 2


class RaggedModule(nn.Module):
    """Nodes of graphs, with edges by their numbers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, nodes, edges):
        sent = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
        return self.b(torch.tanh(self.a(nodes + sent)))


def test_a_batch_of_tensors_of_unequal_lengths_is_refused_if_the_module_fails(tmp_path):
    """Nodes are cut, and edges name nodes that are on another rank."""
    ring = torch.stack((torch.arange(8), (torch.arange(8) + 1) % 8)).repeat(1, 2)

    def loss(module, batch):
        return module(batch["nodes"], batch["edges"]).square().mean()

    def act(rank):
        plan = plan_for_module("ddp", 2, 8).model_copy(update={"micro_batch": 4})
        model = outpace.parallelize(RaggedModule(), plan, loss=loss)
        share = model.share({"nodes": torch.randn(8, 5), "edges": ring})
        with pytest.raises(BadInputError, match="tensors with 2 entries stay whole in each part"):
            model.forward_backward(share)

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]


def of_their_images(module, batch):
    """Targets are sorted into images by their numbers, as YOLOv8 does, which never fails."""
    made, of = module(batch["images"]).mean(1), batch["of"]
    sums = [(one - batch["targets"][of == place]).square().sum() for place, one in enumerate(made)]
    return torch.stack(sums).mean()


def on_the_boundary(module, batch):
    """Some points are whole in each part, and belong to no sample."""
    return squares(module, (batch["images"], 0.0)) + module(batch["points"]).square().mean()


def targets_in_one(images=SAMPLES):
    drawn = torch.Generator().manual_seed(2)
    of = torch.arange(images).repeat_interleave(torch.arange(images) % 3 + 1)
    return {
        "images": torch.randn(images, 4, 5, generator=drawn), "of": of,
        "targets": torch.randn(len(of), 3, generator=drawn),
        "points": torch.randn(5, 4, 5, generator=drawn),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "change"),
    [("zero3", {}), ("ddp", {"micro_batch": 4}), ("1f1b", {}), ("ddp", {"micro_batch": 1})],
)
def test_tensors_that_name_samples_by_their_places_are_refused(tmp_path, strategy, change):
    """Else each rank's images would have the targets of rank 0's."""
    asked = tmp_path, strategy, Quiet, of_their_images
    for said in run_first_step(*asked, batch=targets_in_one(), change=change):
        assert "refer to samples by their position" in said["refused"] and said["warnings"] == []
        assert "a list with one tensor per sample" in said["refused"]


def test_tensors_that_belong_to_no_sample_are_whole_in_each_part(tmp_path):
    said, _ = run_first_step(tmp_path, "ddp", Quiet, on_the_boundary, batch=targets_in_one())
    assert said["warnings"] == [] and "refused" not in said


def missing_as_nan(module, batch):
    """The mean over targets that are there: as many in each half, and not in each quarter."""
    missing = torch.zeros(SAMPLES, 4, 3, dtype=torch.bool)
    missing[::2, :, 0] = True
    targets = batch[1].masked_fill(missing[: len(batch[1])], float("nan"))
    return (module(batch[0]) - targets)[~targets.isnan()].square().mean()


def test_a_mean_over_missing_targets_is_found_by_quarters_of_a_micro_batch(tmp_path):
    change = {"micro_batch": 4, "pp_microbatches": 2}
    first, _ = run_first_step(tmp_path, "gpipe", loss=missing_as_nan, change=change)
    assert "when the batch is split in two" in first["warnings"][0]


@pytest.mark.parametrize("strategy", ["zero3", "1f1b"])
def test_random_numbers_of_a_forward_are_not_reported_as_an_effect_of_the_cut(tmp_path, strategy):
    first, second = run_first_step(tmp_path, strategy, make=NoisyStack)
    assert "refused" not in first and second["warnings"] == []
    [said] = first["warnings"]
    assert "draws random numbers" in said and "changes by" not in said


def with_accuracy(module, batch):
    made, labels = module(batch[0]).mean(1), batch[1][:, 0].argmax(-1)
    right = (made.argmax(-1) == labels).float().mean()
    return nn.functional.cross_entropy(made, labels), right + 0.1


def with_nothing_right(module, batch):
    return with_accuracy(module, batch)[0], 0.0


@pytest.mark.parametrize(
    ("strategy", "make", "loss"),
    [
        ("zero3", Quiet, with_accuracy),
        ("1f1b", Quiet, with_accuracy),
        ("ddp", dropping(Quiet), with_accuracy),
        ("ddp", Quiet, with_nothing_right),
    ],
)
def test_a_pair_whose_second_value_is_no_count_is_told(tmp_path, strategy, make, loss):
    said, _ = run_first_step(tmp_path, strategy, make, loss, samples=16)
    words = "(sum of losses, count) and divides, but the second value is not a count"
    assert any(words in sentence for sentence in said["warnings"])


def rare_classes(module, batch):
    """One label a sample, whose class weighs by how rare it is among those that are given."""
    labels = batch[1][:, 0, 0].gt(0.3).long()
    weights = len(labels) / torch.bincount(labels, minlength=3).clamp(min=1)
    return nn.functional.cross_entropy(module(batch[0]).mean(1), labels, weights)


@pytest.mark.parametrize(
    ("strategy", "samples", "parts"), [("ddp", 2, 1), ("1f1b", 2, 8), ("1f1b", 4, 4)]
)
def test_weights_by_counts_of_classes_are_reported_if_halves_show_no_difference(
    tmp_path, strategy, samples, parts
):
    """Of two samples with a label each no class is rarer; the first four have two of each class."""
    change = {"micro_batch": samples, "pp_microbatches": parts}
    said, _ = run_first_step(tmp_path, strategy, Quiet, rare_classes, samples=16, change=change)
    [sentence] = said["warnings"]
    assert sentence.startswith("the loss of the first batch changes")


@pytest.mark.parametrize(
    ("measure", "level"),
    [(lambda off: off[:, :, 1].abs().mean(), 0.72), (lambda off: off[:, 3].square().mean(), 0.49)],
    ids=["halves of the second micro-batch", "other halves of the first"],
)
def test_a_level_that_two_samples_and_their_micro_batch_are_above_is_reported(
    tmp_path, measure, level
):
    """Halves of the first micro-batch, and quarters of the second, are on one side of the level."""

    def flooded(module, batch):
        return (measure(module(batch[0]) - batch[1]) - level).abs() + level

    change = {"micro_batch": 4, "pp_microbatches": 2}
    said, _ = run_first_step(tmp_path, "gpipe", Quiet, flooded, change=change)
    [sentence] = said["warnings"]
    assert sentence.startswith("the loss of the first batch changes")


@pytest.mark.parametrize("by_place", [False, True])
def test_samples_mixed_with_their_neighbours_beside_a_table_refer_to_no_places(by_place):
    """The order of samples matters, but the table is the same for all of them."""

    def loss(module, batch):
        x, table = batch
        weights = table[: len(x)] if by_place else table.mean()
        mixed = 0.7 * x + 0.3 * x.roll(1, 0)
        return (module(mixed).square().mean((1, 2)) * weights).mean()

    drawn = torch.Generator().manual_seed(0)
    given = tuple(torch.rand(n, 2, 5, generator=drawn).double() for n in (8, 11))
    table = given[1][:, 0, 0]
    objective = CustomObjective(CustomModel(Quiet().double(), loss))
    cause = find_cut_cause(objective, StepHooks(), True, (given[0], table), 1e-9)
    assert (cause == "places") == by_place
