"""RMSNorm as one operator, against float64 by its definition and against torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from outpace.nn import norms
from outpace.nn.norms import RMSNorm, rms_norm, rms_norm_backward

ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def _exact(x, weight, eps):
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    rms = (wide[0].square().mean(-1, keepdim=True) + eps).sqrt()
    return wide[0] / rms * wide[1], wide


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), width=st.integers(1, 70),
    size=st.sampled_from([1e-3, 1.0, 30.0]), dtype=st.sampled_from(list(ROUNDING)),
    low_weight=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_value_and_gradients_are_those_of_the_definition(
    shape, width, size, dtype, low_weight, seed
):
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(*shape, width, generator=draw) * size).to(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    norm = RMSNorm(width, eps=1e-5, dtype=dtype if low_weight else wide)
    nn.init.normal_(norm.weight, 1.0, 0.3, generator=draw)
    exact, operands = _exact(x, norm.weight, 1e-5)
    grad = torch.randn(exact.shape, generator=draw).to(dtype)
    made = norm(x)
    assert made.dtype == dtype and made.shape == x.shape
    own = [made, *torch.autograd.grad(made, [x, norm.weight], grad)]
    right = [exact, *torch.autograd.grad(exact, operands, grad.double())]
    # What rounding is in proportion to: the terms of a sum, also where they cancel.
    by_row = (grad.double() * norm.weight.double()).norm() * (
        operands[0].square().mean(-1) + 1e-5
    ).rsqrt().max()
    normed = exact / norm.weight.double()
    by_column = (grad.double() * normed).flatten(0, -2).abs().sum(0).norm()
    for one, its, most in zip(own, right, [exact.norm(), by_row, by_column], strict=True):
        assert (one.double() - its).norm() <= ROUNDING[dtype] * most + 1e-12


def test_the_operator_has_the_gradient_of_its_value():
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=draw, dtype=torch.float64, requires_grad=True)
                 for s in ((3, 4, 6), (6,)))  # fmt: skip
    assert torch.autograd.gradcheck(lambda *given: rms_norm(*given, 1e-3)[0], (x, weight))


def test_rows_join_where_they_are_cut(monkeypatch):
    x, weight = torch.randn(37, 24), torch.rand(24)
    whole = rms_norm(x, weight, 1e-6)[0]
    monkeypatch.setattr(norms, "ROW_BYTES", 5 * 24 * 4)
    assert torch.equal(rms_norm(x, weight, 1e-6)[0], whole)


def test_it_keeps_its_input_and_a_number_of_each_row():
    x, norm = torch.randn(5, 3, 64, requires_grad=True), RMSNorm(64, eps=1e-6)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(x)
    assert sorted(tensor.numel() for tensor in kept) == [15, 64, 15 * 64]
    assert any(tensor is x or tensor.data_ptr() == x.data_ptr() for tensor in kept)


def test_a_frozen_weight_costs_no_gradient():
    x, norm = torch.randn(4, 8, requires_grad=True), RMSNorm(8, eps=1e-6).requires_grad_(False)
    norm(x).sum().backward()
    trained = RMSNorm(8, eps=1e-6)
    (grad,) = torch.autograd.grad(trained(x).sum(), x)
    assert torch.equal(x.grad, grad) and norm.weight.grad is None
    factor = rms_norm(x.detach(), norm.weight, 1e-6)[1]
    assert len(rms_norm_backward(grad, x.detach(), norm.weight, factor, False)) == 1


def test_a_second_backward_is_refused():
    x, norm = torch.randn(4, 8, requires_grad=True), RMSNorm(8, eps=1e-6)
    (grad,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_transforms_of_functions_go_through_torchs_own():
    x, along, norm = torch.randn(4, 8), torch.randn(4, 8), RMSNorm(8, eps=1e-6)
    grad = torch.func.grad(lambda given: (norm(given) * along).sum())(x)
    own = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(norm(own), own, along)
    torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-6)


def _called(norm, x):
    """What it gives, and whether the package's operator was called for it."""
    with torch.profiler.profile(acc_events=True) as profile:
        made = norm(x)
    return made, any("outpace::rms_norm" in event.key for event in profile.key_averages())


def test_a_dense_tensor_goes_through_the_operator():
    assert _called(RMSNorm(8, eps=1e-6), torch.randn(3, 8))[1]


@pytest.mark.parametrize("x", [
    torch.randn(3, 5, 8).transpose(0, 1), torch.empty(0, 8), torch.empty(3, 8, device="meta"),
])  # fmt: skip
def test_what_it_is_not_for_is_left_to_torch(x):
    norm = RMSNorm(8, eps=1e-6, device=x.device)
    made, calls_own = _called(norm, x)
    assert made.shape == x.shape and not calls_own
    if x.numel() and not x.is_meta:
        torch.testing.assert_close(made, F.rms_norm(x, [8], norm.weight, 1e-6))


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_it_is_compiled_as_torchs_own():
    norm, x = RMSNorm(16, eps=1e-6), torch.randn(4, 16)
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.testing.assert_close(torch.compile(norm, backend=backend)(x), norm(x))
    assert any("rms_norm" in name for name in seen)
    assert not any("outpace" in name for name in seen)
