"""The check of the first batch refuses faults of a strategy, and what it computes differently."""

import json
from pathlib import Path

import pytest
import torch

from outpace.nn.dtensor import local
from tests.parallel.parity.first_batch_cases import (
    Block,
    Quiet,
    Stack,
    drop_a_term,
    run_first_step,
    squares,
    with_term,
)

pytestmark = pytest.mark.gloo


def swap_buffers(layout):
    first, second = (layout.model.blocks[number].scale for number in (0, 1))
    if first is None:
        return  # of blocks that other stages have
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


class ScaledStack(Stack):
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


class FaintStack(ScaledStack):
    """Its second block begins as nearly nothing, as residual branches often do."""

    def __init__(self):
        super().__init__()
        self.blocks[1].scale.fill_(1e-4)


def swap_in_the_layout(layout):
    """After the check has taken its copy's values, as a strategy that confuses buffers would."""
    given = layout.gradients

    def gradients(passes, how):
        swap_buffers(layout)
        return given(passes, how)

    layout.gradients = gradients


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
        (lose_at_the_end, FaintStack, squares, "blocks.1.linear.weight has no gradient"),
        (double_at_the_end, Stack, squares, "for blocks.1.linear.weight, it is 2 × the plain"),
        (drop_a_term, Stack, with_term, "the loss is"),
        (swap_in_the_layout, ScaledStack, squares, "the loss is"),
    ],
)
def test_planted_faults_are_refused_on_all_ranks(tmp_path, strategy, fault, make, loss, words):
    for said in run_first_step(tmp_path, strategy, make, loss, fault):
        begin = f"strategy {strategy} does not compute what your module computes"
        assert said["refused"].startswith(begin)
        assert words in said["refused"] and 'check="off"' in said["refused"]


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
def test_plans_that_offload_or_compress_are_checked(tmp_path, strategy, change):
    for spoil in (None, double_at_the_end):
        for said in run_first_step(tmp_path, strategy, spoil=spoil, change=change):
            assert said["warnings"] == []
            assert ("× the plain module's" in said.get("refused", "")) == (spoil is not None)


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
def test_a_lost_gradient_of_a_stateless_module_is_refused(tmp_path, strategy):
    both = run_first_step(tmp_path, strategy, Quiet, spoil=drop_stem_gradient, samples=16)
    assert all("stem.weight has no gradient" in said["refused"] for said in both)


class StoppedStack(Stack):
    def forward(self, x):
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x.detach() if number == 2 else x)
        return self.head(x)


def test_a_stage_behind_a_detach_that_gets_zero_gradients_is_refused(tmp_path):
    for said in run_first_step(tmp_path, "1f1b", StoppedStack):
        assert "get a gradient of zeros, but none in one process" in said["refused"]
        assert "requires_grad_(False)" in said["refused"]


class HookedStack(Stack):
    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient * 0.5)
        self.head.bias.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter):
        parameter.grad.mul_(0.5)


def test_gradient_hooks_that_ranks_apply_differently_are_refused(tmp_path):
    """ddp runs the first kind on each rank, and what the second leaves it adds up otherwise."""
    for said in run_first_step(tmp_path, "ddp", HookedStack):
        assert "the gradient of head.bias differs" in said["refused"]


FILE = """
import itertools
import torch
from torch import nn

class NamedModule(nn.Module):
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
    blocks = ["first", "second"]
    return {"module": NamedModule(), "loss": squares, "dataset": Data(), "blocks": blocks}

numbers = itertools.count(1)  # which the check cannot put back

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
def test_outpace_train_refuses_a_custom_model_that_differs_from_one_process(command, tmp_path):
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
    for function in ("build", "large"):  # by 400 MiB, which the check alone takes
        done = train(function, "ddp")
        assert done.returncode == 0, done.stderr
        rows = (tmp_path / f"{function}-ddp" / "metrics.jsonl").read_text().splitlines()
        peaks.append(max(json.loads(row).get("peak_memory_bytes") or 0 for row in rows))
    assert 0 < peaks[1] < peaks[0] + (200 << 20)
    done = train("wrong", "ddp")
    assert done.returncode == 2 and "strategy ddp does not compute what your module" in done.stderr
    assert "--check off" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "wrong-ddp").exists()
