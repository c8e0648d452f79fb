"""Layouts of a custom model under tp: equal to one process, or a cause that names what to do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outpace
from outpace.parallel.custom.tensor import layouts_of
from outpace.records.errors import BadInputError
from tests.parallel.parity.first_batch_cases import run_first_step

pytestmark = pytest.mark.gloo
WIDTH, HEADS, HEAD_DIM = 5, 4, 2
SUMS_WEIGHTS = "replicated_with_grad_allreduce"
SUMS_OUTPUT = "replicated_with_output_grad_allreduce"


class Attention(nn.Module):
    """Multi-query attention: norms within heads, a factor for all of them, keys of one head."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.k, self.v = nn.Linear(WIDTH, HEAD_DIM), nn.Linear(WIDTH, HEAD_DIM)
        self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.norm = nn.LayerNorm(HEAD_DIM)
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        q = self.norm(self.q(x).unflatten(-1, (-1, HEAD_DIM))).transpose(1, 2) * self.factor
        k, v = self.k(x)[:, None], self.v(x)[:, None]
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + self.o(mixed.transpose(1, 2).flatten(-2))


class Fused(nn.Module):
    """One matrix for both halves of a gated unit, which a split cuts elsewhere."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class FixedHeads(Attention):
    def forward(self, x):
        q = self.q(x).view(*x.shape[:2], HEADS, HEAD_DIM)
        return x + self.o(q.flatten(-2))


class ReadWeight(Attention):
    def forward(self, x):
        return x + self.o(F.linear(x, self.q.weight, self.q.bias))


class LostFactor(Attention):
    """A factor without gradient where heads are split."""

    def forward(self, x):
        whole = self.q(x).shape[-1] == HEADS * HEAD_DIM
        factor = self.factor if whole else self.factor.detach()
        return x + self.o(self.q(x) * factor)


class LargerGradient(Attention):
    """A gradient that is a third too large where heads are split: no sum of ranks' is right."""

    def forward(self, x):
        q = self.q(x)
        if q.shape[-1] < HEADS * HEAD_DIM:
            q = q + (q - q.detach()) / 3
        return x + self.o(q)


class Layers(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def attention():
    return Layers(Attention)


def fused():
    return Layers(Fused)


def fixed_heads():
    return Layers(FixedHeads)


def read_weight():
    return Layers(ReadWeight)


def lost_factor():
    return Layers(LostFactor)


def larger_gradient():
    return Layers(LargerGradient)


def squares(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()


def batch(step):
    drawn = torch.Generator().manual_seed(step)
    return tuple(torch.randn(8, 3, WIDTH, generator=drawn) for _ in range(2))


def layouts(**by_name):
    return {f"layers.*.{name}": layout for name, layout in by_name.items()}


SPLIT = {"q": "colwise", "o": "rowwise"}
QUERIES = {**SPLIT, "norm": SUMS_WEIGHTS, "factor": SUMS_WEIGHTS}
RIGHT = {**QUERIES, "k": SUMS_OUTPUT, "v": SUMS_OUTPUT}
FACTOR_LEFT_OUT = {name: lay for name, lay in layouts(**RIGHT).items() if "factor" not in name}
# Heads are gathered before the norm.
REPEATED = layouts(**{**QUERIES, "q": "colwise_gather_output", "o": "rowwise_split_input"})
WRONG = [
    (attention, layouts(**QUERIES), ["layers.1.k.weight", SUMS_OUTPUT]),
    (attention, layouts(**{**RIGHT, "norm": "replicate"}), ["layers.0.norm.weight", SUMS_WEIGHTS]),
    (attention, FACTOR_LEFT_OUT, ["layers.0.factor", SUMS_WEIGHTS]),
    (attention, REPEATED, ["layers.0.factor", "2 times", "Leave it out of layouts"]),
    (fused, layouts(both="colwise", down="rowwise"), ["chunk() of one matrix", "loss"]),
    (fixed_heads, layouts(**SPLIT), ["invalid for input of size", "view(…, -1, head_dim)"]),
    (read_weight, layouts(**SPLIT), ["DTensor", "reads weights of split matrices itself"]),
]


def test_keys_and_norms_that_heads_of_all_ranks_use_equal_one_process():
    given = {"loss": squares, "batch": batch, "plans": "tp", "layouts": layouts(**RIGHT)}
    for ranks in (2, 4):
        [verdict] = outpace.verify(attention(), nproc=ranks, **given).verdicts
        assert verdict.passed, verdict.reason


@pytest.mark.parametrize(("make", "given", "words"), WRONG)
def test_verify_names_what_layouts_leave_in_parts(make, given, words):
    asked = {"loss": squares, "batch": batch, "plans": "tp", "layouts": given}
    [verdict] = outpace.verify(make(), **asked).verdicts
    assert not verdict.passed
    assert verdict.refused == ("rank 0 failed" in verdict.reason)
    assert all(one in verdict.reason for one in words), verdict.reason


@pytest.mark.parametrize(("make", "given", "words"), WRONG)
def test_the_check_of_the_first_batch_names_it_too(tmp_path, make, given, words):
    for said in run_first_step(tmp_path, "tp", make, squares, batch=batch(1), layouts=given):
        assert all(one in said["refused"] for one in words), said["refused"]


def test_other_causes_under_tp_are_not_told_as_layouts(tmp_path):
    """A gradient that is lost, and one that no sum over ranks corrects."""
    asked = {"loss": squares, "batch": batch, "plans": "tp", "layouts": layouts(**SPLIT)}
    [lost] = outpace.verify(lost_factor(), **asked).verdicts
    assert "layers.0.factor" in lost.cause and "one process, but on no rank" in lost.cause
    [larger] = outpace.verify(larger_gradient(), **asked).verdicts
    assert larger.cause.endswith("is 1.333 times one process's")
    given = {"batch": batch(1), "layouts": layouts(**SPLIT)}
    said = run_first_step(tmp_path, "tp", larger_gradient, squares, **given)[0]["refused"]
    assert "add up gradients that do not belong together" in said


def test_a_parameter_alone_is_named_where_its_gradient_is_summed():
    model = attention()
    found = layouts_of(model, {"layers.*.factor": SUMS_WEIGHTS}, 2)
    assert set(found) == {"layers.0.factor", "layers.1.factor"}
    with pytest.raises(BadInputError, match="no such module"):
        layouts_of(model, {"layers.*.factor": "colwise"}, 2)
