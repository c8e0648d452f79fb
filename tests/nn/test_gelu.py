"""GELU with its derivative, against float64, and as a block uses it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from outpace.nn.block import activate
from outpace.nn.gelu import ELEMENTS, gelu_tanh
from outpace.records.model import ModelSpec
from outpace.trace.allocations import Allocations

HALF_A_STEP = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.bfloat16, torch.float16)}
GPT = ModelSpec.parse(
    {"family": "gpt2", "layers": 1, "hidden": 16, "heads": 2, "vocab": 32, "max_positions": 8},
    "test",
)


def _exact(x):
    wide = x.detach().double().requires_grad_()
    value = F.gelu(wide, approximate="tanh")
    return value, torch.autograd.grad(value.sum(), wide)[0]


@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    size=st.sampled_from([1e-3, 0.3, 2.0, 20.0]), dtype=st.sampled_from(list(HALF_A_STEP)),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_value_and_gradient_are_those_of_float64_rounded_once(shape, size, dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=draw) * size).to(dtype).requires_grad_()
    value, slope = _exact(x)
    made = activate(GPT, x)
    grad = torch.randn(shape, generator=draw).to(dtype)
    (its_grad,) = torch.autograd.grad(made, x, grad)
    assert made.dtype == its_grad.dtype == dtype and made.shape == x.shape
    step = HALF_A_STEP[dtype]
    # Numbers below the dtype's normal ones have steps of the smallest; fp32's own rounding counts
    # where a derivative's terms cancel.
    least = torch.finfo(dtype).smallest_normal
    assert ((made.double() - value).abs() <= 1.1 * step * value.abs() + least + 1e-7).all()
    twice = slope.abs() * grad.double().abs()
    assert ((its_grad.double() - slope * grad.double()).abs() <= 2.1 * step * twice + 1e-6).all()


def test_pieces_join_where_they_are_cut():
    x = torch.linspace(-4, 4, ELEMENTS + 1001).bfloat16()
    value, slope = gelu_tanh(x)
    for start in (0, ELEMENTS - 500, ELEMENTS):
        part = slice(start, start + 1000)
        for whole, own in zip((value, slope), gelu_tanh(x[part].clone()), strict=True):
            assert torch.equal(whole[part], own)


@pytest.mark.parametrize("x", [
    torch.tensor([float("nan")]), torch.tensor([float("inf")]), torch.tensor([-float("inf")]),
])  # fmt: skip
def test_what_is_not_finite_is_as_torch_has_it(x):
    low = x.bfloat16()
    torch.testing.assert_close(gelu_tanh(low)[0], F.gelu(low, approximate="tanh"), equal_nan=True)


def test_beside_the_result_one_tensor_is_kept_and_little_taken():
    x = torch.randn(3, ELEMENTS).bfloat16().requires_grad_()
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        activate(GPT, x)
    assert [tensor.nbytes for tensor in kept] == [x.nbytes]
    with Allocations() as allocated:
        made = gelu_tanh(x)
    taken = allocated.peak_bytes - sum(one.nbytes for one in made)
    assert taken == pytest.approx(3 * 4 * ELEMENTS, abs=1024)


def test_without_gradients_and_in_fp32_it_is_torchs_own():
    low = torch.randn(100).bfloat16()
    assert torch.equal(activate(GPT, low), F.gelu(low, approximate="tanh"))
    wide = torch.randn(100, requires_grad=True)
    assert torch.equal(activate(GPT, wide), F.gelu(wide, approximate="tanh"))


def test_a_second_backward_is_refused():
    x = torch.randn(100).bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(activate(GPT, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_transforms_of_functions_go_through_torchs_own():
    x = torch.randn(100).bfloat16()
    grad = torch.func.grad(lambda given: activate(GPT, given).sum())(x)
    assert torch.equal(
        grad, torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh")
    )
