"""A forward that first writes to parameters in a later step is refused, or right on all ranks."""

import json
import warnings

import pytest
import torch
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked
from outpace.parallel.parity.moved_parameters import MovedParameters
from outpace.records.errors import BadInputError

pytestmark = pytest.mark.gloo

SAMPLES, STEPS, FIRST = 4, 5, 5  # of the block's forwards, two a step, FIRST is in step 3


@torch.no_grad()
def clamp(weight, x):
    weight.clamp_(-0.1, 0.1)


def clamp_data(weight, x):
    weight.data.clamp_(-0.1, 0.1)


def replace_data(weight, x):
    weight.data = weight.data.clamp(-0.1, 0.1)


@torch.no_grad()
def clamp_by_samples(weight, x):
    most = float(x.detach().abs().mean()) / 10
    weight.clamp_(-most, most)


def replace_by_samples(weight, x):
    most = float(x.detach().abs().mean()) / 10
    weight.data = weight.data.clamp(-most, most)


class Block(nn.Module):
    def __init__(self, write=None, first=FIRST):
        super().__init__()
        self.linear, self.write, self.first = nn.Linear(6, 6), write, first
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.forwards += 1
        if self.write is not None and self.forwards >= self.first:
            self.write(self.linear.weight, x)
        return x + torch.tanh(self.linear(x))


def make(write, first=FIRST):
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), Block(write, first))


def squares(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()


def trained(tmp_path, strategy, write, first=FIRST):
    """What each of two ranks said: the step it came to, its weight, or the refusal."""

    def act(rank):
        plan = plan_for_module(strategy, 2, SAMPLES)
        said = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = outpace.parallelize(make(write, first), plan, loss=squares)
            optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
            try:
                for step in range(1, STEPS + 1):
                    said["step"] = step
                    drawn = torch.Generator().manual_seed(step)
                    batch = [torch.randn(SAMPLES, 6, generator=drawn) for _ in range(2)]
                    model.forward_backward(model.share(batch))
                    optimizer.step()
                state = model.state_dict()
                if state is not None:
                    said["weight"] = float(state["3.linear.weight"].double().sum())
            except BadInputError as error:
                said["refused"] = str(error)
                raise  # and leave
            finally:
                (tmp_path / f"{rank.ranks.rank}.json").write_text(json.dumps(said))

    run_forked(2, act, 240.0, tmp_path / "job")
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


def alone(write, first=FIRST):
    """The last weight of one process, which takes two passes a step."""
    model = make(write, first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        drawn = torch.Generator().manual_seed(step)
        batch = [torch.randn(SAMPLES, 6, generator=drawn) for _ in range(2)]
        for number in range(2):
            (squares(model, [one[2 * number :][:2] for one in batch]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(model[3].linear.weight.detach().double().sum())


@pytest.mark.parametrize(
    ("strategy", "write", "step", "words"),
    [
        ("zero3", clamp, 3, "lost, because ranks hold shards"),
        ("zero2", clamp_data, 4, "lost, because ranks hold shards"),  # seen in steps 2, 4, 8, …
        ("hsdp", replace_data, 4, "lost, because ranks hold shards"),
        ("1f1b", clamp, 3, "other micro-batches"),
        ("ddp", clamp_by_samples, 3, "by its own samples"),
        ("ddp", replace_by_samples, 4, "by its own samples"),
        ("zero1", replace_by_samples, 4, "by its own samples"),
    ],
)
def test_later_writes_are_refused(tmp_path, strategy, write, step, words):
    for said in trained(tmp_path, strategy, write):
        assert words in said["refused"] and "3.linear.weight" in said["refused"]
        assert said["step"] == step and f"in step {step}" in said["refused"]


@pytest.mark.parametrize(("strategy", "write"), [("ddp", clamp), ("zero1", clamp_data)])
def test_later_writes_that_all_ranks_do_alike_stay_right(tmp_path, strategy, write):
    found = trained(tmp_path, strategy, write)
    assert not any("refused" in said for said in found)
    assert found[0]["weight"] == pytest.approx(alone(write), abs=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_data_replaced_in_every_forward_trains_if_all_ranks_do_it_alike(tmp_path, strategy):
    """Each forward gives memory up, which may be another tensor's when the next looks at it."""
    found = trained(tmp_path, strategy, replace_data, first=1)
    assert found[0] == {"step": STEPS, "weight": pytest.approx(alone(replace_data, 1), abs=1e-6)}
    assert found[1] == {"step": STEPS}


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_data_replaced_by_each_ranks_samples_is_refused_in_the_first_step(tmp_path, strategy):
    for said in trained(tmp_path, strategy, replace_by_samples, first=1):
        assert said["step"] == 1 and "changes the values of 3.linear.weight" in said["refused"]


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "hsdp", "gpipe"])
def test_modules_that_write_nothing_are_not_refused(tmp_path, strategy):
    assert all(said == {"step": STEPS} | said and "refused" not in said
               for said in trained(tmp_path, strategy, None))  # fmt: skip


class _WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        with torch.no_grad():
            ctx.weight.mul_(0.5)
        return gradient, None


@pytest.mark.parametrize(
    ("device", "seen"), [("cpu", True), pytest.param("cuda", False, marks=pytest.mark.gpu)]
)
def test_a_write_in_a_backward_is_noticed_in_whichever_thread_it_runs(device, seen):
    """Autograd runs a backward on CUDA in a thread of its own, where modes are not entered."""
    linear = nn.Linear(3, 3).to(device)
    with (watch := MovedParameters(linear.named_parameters())):
        x = linear(torch.randn(2, 3, device=device))
        _WritesInBackward.apply(x, linear.weight.detach()).sum().backward()
    assert ("weight" in watch.written) == seen
    assert watch.written_unseen() == ([] if seen else ["weight"])
