"""Modules, losses and a first step for tests of the check of the first batch."""

import json
import random
import warnings
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked
from outpace.nn.dtensor import local
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan

SAMPLES = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.linear.weight.mean(0), 0.1)
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


def run_first_step(
    tmp_path,
    strategy,
    make=Stack,
    loss=squares,
    spoil=None,
    change=None,
    samples=SAMPLES,
    batch=None,
    processes=2,
    **options,
):
    """What each rank said in a first step: warnings, the loss or the refusal, and more."""
    batch = global_batch(samples) if batch is None else batch

    def act(rank):
        plan = plan_for_module(strategy, processes, samples)
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
                said["loss"] = float(model.forward_backward(model.share(batch)))
                held = model.named_parameters()
                said["gradients"] = {
                    n: local(p.grad).double().sum().item() for n, p in held if p.grad is not None
                }
            except BadInputError as error:
                said["refused"] = str(error)
        said["passes"], said["restored"] = len(seen), all(seen[-1:])
        told = [one for one in heard if one.category is UserWarning]
        said["warnings"] = [str(one.message) for one in told]
        said["files"] = [one.filename for one in told]
        (tmp_path / f"{rank.ranks.rank}.json").write_text(json.dumps(said))

    ends = run_forked(processes, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]


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


class Still(Remembering):
    """Drops nothing, so that what the layout computes in the check is its first step."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.drop.p = 0.0


def drop_a_term(layout):
    for part in layout.objective.modules():
        if callable(vars(part).get("loss")):
            part.loss = squares


def with_term(module, batch):
    made = module(batch[0])
    return (made - batch[1]).square().mean() + made.abs().mean()


def contrast(module, batch):
    made = module(batch[0]).mean(1)
    return nn.functional.cross_entropy(made @ made.T, torch.arange(len(made)))


class Quiet(nn.Module):
    """Blocks that drop nothing and move nothing, so that samples may be combined differently."""

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


class NoisyStack(Stack):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))
