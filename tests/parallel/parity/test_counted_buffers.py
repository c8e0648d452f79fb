"""The check of the first batch reports buffers in which ranks count their own samples."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from outpace.interop.custom_model import CustomModel, CustomObjective
from outpace.parallel.layout import StepHooks
from outpace.parallel.parity.counted_buffers import (
    explain_counted_attributes,
    explain_counted_buffers,
    find_counted_buffers,
)
from tests.parallel.parity.first_batch_cases import Quiet, global_batch, run_first_step, squares


class Router(Quiet):
    """Counts each feature's wins for its loop, next to buffers that no sample changes.

    `usage` is in no checkpoint. `last` is a cache of the last samples, in none either.
    """

    sums = False  # over the ranks

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.register_buffer("load", torch.zeros(6, dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("usage", torch.zeros(6), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(6))
        self.register_buffer("last", torch.zeros(6), persistent=False)

    def forward(self, x):
        h = self.norm(self.stem(x))
        with torch.no_grad():
            wins = F.one_hot(h.argmax(-1), 6).sum((0, 1))
            mean, seen = h.mean((0, 1)), torch.tensor(float(len(x)))
            if self.sums and dist.is_initialized():
                for one in (wins, mean, seen):
                    dist.all_reduce(one)
                mean /= dist.get_world_size()
            self.load += wins
            self.average.lerp_(mean, 0.1)
            self.seen += seen
            self.usage += wins
            self.calls += 1
            self.mask.copy_(torch.rand(6) > 0.5)
            self.last = h[0, 0].clone()
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class RouterOverRanks(Router):
    sums = True


class OneForgotten(RouterOverRanks):
    """Counts one thing without the other ranks'."""

    def __init__(self):
        super().__init__()
        self.register_buffer("hits", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.hits += (x.sum((0, 1)).repeat(2)[:6] > 0).float()
        return super().forward(x)


class Notes(Quiet):
    """Counts in plain attributes, lists, dicts and hooks of the backward, beside a cache."""

    def __init__(self):
        super().__init__()
        self.hits, self.seen, self.calls, self.last = torch.zeros(6), 0, 0, None
        self.register_buffer("signs", torch.zeros(6))
        self.large = torch.zeros(3)
        self.usage, self.totals, self.log = [0] * 6, {}, []
        self.head.register_full_backward_hook(self.note)

    def note(self, part, inputs, outputs):
        self.large += (outputs[0] > 0).sum((0, 1))

    def count(self, gradient):
        self.signs += gradient.sign().sum((0, 1))

    def forward(self, x):
        h = self.stem(x)
        if h.requires_grad:
            h.register_hook(self.count)
        self.hits += (h.detach() > 0).sum((0, 1))
        self.seen += len(x)
        self.calls += 1
        self.usage[0] += int((h.detach() > 0).sum())
        self.totals["seen"] = self.totals.get("seen", 0) + len(x)
        self.log.append(float(h.detach().mean()))
        self.last = h.detach()[0]
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class NormModel(Quiet):
    """Its BatchNorm's moving averages are of no interest to the loss, which has its own words."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return super().forward(x) + 0.1 * self.norm(self.stem(x).transpose(1, 2)).abs().mean()


NAMES = "average, load, seen and 1 more"


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_counted_buffers_are_reported_once_with_size_and_cure(tmp_path, strategy):
    first, second = run_first_step(tmp_path, strategy, Router)
    assert second["warnings"] == [] and "loss" in first
    [said], [place] = first["warnings"], first["files"]
    assert place.endswith("first_batch_cases.py"), "the line of the user's own code"
    assert f"counts or averages samples in {NAMES} (buffers)" in said
    assert "in the first batch ranks differ by" in said and "cover 1/2 of each batch" in said
    assert "all_reduce(counts)" in said and "sync_batchnorm" not in said


@pytest.mark.gloo
def test_counts_of_single_samples_are_reported(tmp_path):
    """A micro-batch of one has no parts; its ranks' values differ."""
    first, _ = run_first_step(tmp_path, "ddp", OneForgotten, change={"micro_batch": 1})
    [said] = first["warnings"]
    assert "counts or averages samples in hits (a buffer)" in said


@pytest.mark.gloo
@pytest.mark.parametrize(("strategy", "make"), [("zero2", RouterOverRanks), ("gpipe", Router)])
def test_counts_of_all_samples_are_not_reported(tmp_path, strategy, make):
    """Those summed over the ranks, and those of a pipeline, each stage of which sees all.

    Nor does FSDP warn of a pair's sum that is a view.
    """

    def pair(module, batch):
        losses = (module(batch[0]) - batch[1]).square().mean((1, 2))
        return losses.sum(0, keepdim=True)[0], len(losses)

    for said in run_first_step(tmp_path, strategy, make, pair):
        assert said["warnings"] == [] and "loss" in said


@pytest.mark.gloo
def test_counts_in_attributes_and_in_hooks_of_the_backward_are_reported(tmp_path):
    """Not the number of calls, nor what each forward sets again."""
    first, second = run_first_step(tmp_path, "ddp", Notes)
    assert second["warnings"] == [] and "loss" in first
    buffers, attributes = first["warnings"]
    assert "a step counts or averages samples in signs (a buffer)" in buffers
    assert "counts or averages samples in hits, large, seen and 2 more (plain" in attributes
    assert "no checkpoint contains them, so they would cover 1/2 of each batch" in attributes


@pytest.mark.gloo
def test_averages_of_batch_normalisations_are_not_reported_as_counts(tmp_path):
    first, _ = run_first_step(tmp_path, "ddp", NormModel)
    [said] = first["warnings"]
    assert said.startswith("the loss of the first batch changes")


def test_buffers_that_depend_on_samples_are_told_from_others():
    """Everything is put back, and forwards begin with the same random numbers."""
    module = Router()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    drawn = torch.get_rng_state()
    found = find_counted_buffers(
        CustomObjective(CustomModel(module, squares)), StepHooks(), True, global_batch()
    )
    assert found == ["load", "average", "seen", "usage"]
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert torch.equal(drawn, torch.get_rng_state())


class Keyed(nn.Linear):
    """Its `total` counts samples in a value; `names` has numbers only as keys."""

    def __init__(self):
        super().__init__(4, 2)
        self.total, self.names = {0: 0}, {0: "none"}

    def forward(self, x):
        self.total[0] += len(x)
        self.names = {self.total[0]: "last"}
        return super().forward(x)


def test_numbers_that_are_keys_are_not_counts():
    objective = CustomObjective(CustomModel(Keyed(), lambda m, batch: m(batch).mean()))
    given = torch.ones(8, 4)
    found = find_counted_buffers(objective, StepHooks(), True, given, attributes=None)
    assert found is not None and [name for name in found if "total" in name]
    assert not [name for name in found if "names" in name]


def test_a_variable_outside_of_the_module_has_its_own_kind():
    said = explain_counted_attributes(["SEEN (a global of train.py)"], 2)
    assert "samples in SEEN (a global of train.py). Each rank" in said


def test_a_size_of_more_than_all_is_written_out():
    assert "differ by 200 %" in explain_counted_buffers(["a"], 2.0, 2)
