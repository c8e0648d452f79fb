"""The check of the first batch tells what a forward or a backward writes to weights and buffers."""

import threading

import pytest
import torch
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked
from tests.parallel.parity.first_batch_cases import (
    SAMPLES,
    Block,
    NoisyStack,
    Quiet,
    Stack,
    global_batch,
    run_first_step,
    squares,
)

pytestmark = pytest.mark.gloo


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
    for said in run_first_step(tmp_path, strategy, spoil=halve_a_weight):
        assert "changes the values of blocks.1.linear.weight" in said["refused"]
        assert "or by something else, than in one process" in said["refused"]


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


def test_buffers_that_samples_change_and_the_loss_reads_are_reported(tmp_path):
    """A Stack's `average`, which no loss depends on, is not."""
    first, second = run_first_step(tmp_path, "ddp", Codebook, change={"micro_batch": 4})
    assert second["warnings"] == [] and "refused" not in first
    [said] = first["warnings"]
    assert "the forward updates" in said and "codes" in said and "each step begins with" in said


class AnnealingStack(Stack):
    """A share of progress that each call increases, whatever its samples, and that counts late."""

    def __init__(self):
        super().__init__()
        self.register_buffer("progress", torch.zeros(()))

    def forward(self, x):
        self.progress += 0.125
        return super().forward(x) * (1 + (self.progress > 2))


@pytest.mark.parametrize(("micro_batch", "told"), [(4, False), (2, True)])
def test_a_share_of_progress_is_reported_if_several_micro_batches_move_it(
    tmp_path, micro_batch, told
):
    change = {"micro_batch": micro_batch}  # of the four samples of a rank
    first, _ = run_first_step(tmp_path, "ddp", AnnealingStack, change=change)
    assert "refused" not in first
    assert any("the forward updates progress" in said for said in first["warnings"]) == told, first


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
        ("ddp", True, "each rank changes them by its own samples"),
        ("zero2", False, "what it writes is lost, because ranks hold shards"),
        ("zero1", False, None),
    ],
)
def test_weights_that_a_forward_changes_are_refused_if_ranks_would_differ(
    tmp_path, strategy, by_samples, words
):
    found = run_first_step(tmp_path, strategy, lambda: Clamped(by_samples))
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
    for said in run_first_step(tmp_path, strategy, lambda: Renormalised(longest)):
        assert "changes the values of embedding.weight" in said["refused"]
        assert "Change parameters between steps" in said["refused"]


class FollowerStack(Stack):
    """Has a frozen teacher, which follows the head's weight in each forward."""

    def __init__(self):
        super().__init__()
        self.teacher = torch.nn.Parameter(self.head.weight.detach().clone(), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.mul_(0.9).add_(self.head.weight, alpha=0.1)
        return super().forward(x)


@pytest.mark.parametrize(("micro_batch", "times"), [(4, None), (2, "2 times per step")])
def test_parameters_that_each_micro_batch_changes_are_reported(tmp_path, micro_batch, times):
    found = run_first_step(tmp_path, "ddp", FollowerStack, change={"micro_batch": micro_batch})
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


def test_writes_in_another_thread_are_refused(tmp_path):
    for said in run_first_step(tmp_path, "ddp", Threaded):
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
def test_buffers_that_a_backward_changes_are_refused(tmp_path, strategy):
    for said in run_first_step(tmp_path, strategy, MovedBack):
        assert "changes share, on which its loss depends" in said["refused"]
        assert f"under strategy {strategy} it would see gradients of parts" in said["refused"]


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
def test_buffers_that_each_micro_batch_changes_are_reported(tmp_path, strategy, told):
    """Though a micro-batch's halves, which take other codes, move and read them as the whole."""
    first, _ = run_first_step(tmp_path, strategy, Codes, samples=4)
    assert "refused" not in first
    assert any("updates codes, a buffer on which" in one for one in first["warnings"]) == told


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
    for said in run_first_step(tmp_path, "ddp", HiddenTeacher, samples=samples):
        assert "hidden.blocks.0.0.bias" in said["refused"] and "Register" in said["refused"]
    for said in run_first_step(tmp_path, "ddp", FixedHiddenTeacher, samples=samples):
        assert said["warnings"] == [] and "refused" not in said


class NoisyAverages(NoisyStack):
    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(6))

    def forward(self, x):
        x = self.stem(x + torch.randn_like(x))
        with torch.no_grad():
            self.level.lerp_(x.mean((0, 1)), 0.1)
        return self.head(x - self.level)


def test_buffers_that_the_loss_reads_are_reported_for_forwards_that_draw_random_numbers(tmp_path):
    first, _ = run_first_step(tmp_path, "zero3", make=NoisyAverages)
    assert any("updates level, a buffer on which" in one for one in first["warnings"])


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
