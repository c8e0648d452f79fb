"""Norms and embeddings over weights of 16 bits: as over the same weights in fp32."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from outpace.nn.compilation import compile_forwards
from outpace.nn.fp32_modules import compute_in_fp32

CPU = "cpu"
NORMS = {
    "layer": lambda: nn.LayerNorm(6),
    "rms": lambda: nn.RMSNorm(6, eps=1e-5),
    "group": lambda: nn.GroupNorm(2, 6),
    "batch": lambda: nn.BatchNorm1d(6),
}


def lowered(module):
    """With weights as ranks gather them: of 16 bits, beside buffers that stay."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape).bfloat16())
    low = copy.deepcopy(module)
    for parameter in low.parameters():
        parameter.data = parameter.data.bfloat16()
    return module, low


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_takes_fp32_beside_weights_of_16_bits(kind):
    wide, low = lowered(NORMS[kind]())
    held = dict(low.named_parameters())
    compute_in_fp32(low, CPU)
    x = torch.randn(4, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = wide(x), low(y)
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    for name, parameter in low.named_parameters():
        assert parameter is held[name]
        assert torch.equal(parameter.grad, wide.get_parameter(name).grad.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(low.buffers(), wide.buffers(), strict=True))


def test_an_embeddings_sums_are_fp32_and_so_are_those_of_its_gradient():
    """In bf16 a row that is looked up 1,000 times would stop to grow at 256."""
    _, low = lowered(nn.Embedding(3, 4))
    compute_in_fp32(low, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        found = low(torch.zeros(1000, dtype=torch.long))
    assert found.dtype == torch.float32
    found.sum().backward()
    assert low.weight.grad.dtype == torch.bfloat16
    assert torch.equal(low.weight.grad[0], torch.full((4,), 1000.0).bfloat16())


def test_an_accelerators_embedding_is_raised_after_it_was_looked_up():
    """The table stays in 16 bits there; what is seen here is that of a CPU with that hook."""
    _, low = lowered(nn.Embedding(3, 4))
    compute_in_fp32(low, "cuda")
    numbers = torch.tensor([2, 0])
    with torch.autocast("cpu", torch.bfloat16):
        found = low(numbers)
    assert torch.equal(found, low.weight[numbers].float())
    assert low(numbers).dtype == torch.bfloat16


def test_without_autocast_all_stays_in_16_bits():
    norm = nn.LayerNorm(6).bfloat16()
    compute_in_fp32(norm, CPU)
    assert norm(torch.randn(2, 6).bfloat16()).dtype == torch.bfloat16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.linear(self.norm(x))


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_compiled_layers_share_a_graph(monkeypatch):
    """Beyond as many graphs as torch compiles of one function, layers would be eager."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    _, low = lowered(nn.Sequential(*(Layer() for _ in range(3))))
    compute_in_fp32(low, CPU)
    eager = copy.deepcopy(low)
    compile_forwards(list(low))
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = eager(x), low(x)
    assert torch.equal(found, expected)
    expected.sum().backward(), found.sum().backward()
    for one, other in zip(eager.parameters(), low.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert all(p.dtype == torch.bfloat16 for p in low.parameters())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
