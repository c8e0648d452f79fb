"""Attention by blocks against torch's own, and against float64 by the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from outpace.nn.attention import ROWS, attention
from outpace.nn.block import suited_attention
from outpace.nn.masks import visibility

CPU = torch.device("cpu")


def _heads(batch, heads, kv_heads, queries, keys, width, dtype):
    draw = torch.Generator().manual_seed(queries)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [
        torch.randn(batch, length, count, width, generator=draw).to(dtype).transpose(1, 2)
        .requires_grad_()
        for count, length in shapes
    ]  # fmt: skip


def _exact(operands, mask, causal):
    q, k, v = (one.detach().double().requires_grad_() for one in operands)
    seen = _seen(q, k, mask, causal)
    return seen @ v.repeat_interleave(q.shape[1] // k.shape[1], 1), (q, k, v)


def _seen(q, k, mask, causal):
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) / q.shape[3] ** 0.5
    if causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1)


def _summed(operands, mask, causal, grad):
    """Of the result and of each gradient the size of what is summed to it, if nothing cancels.

    Rounding is in proportion to this: two keys of nearly the same value have a gradient of nearly
    nothing, that is what is left of large terms.
    """
    q, k, v = operands
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    seen = _seen(q, k, mask, causal)
    q, k, v, grad = q.abs(), *(x.abs().repeat_interleave(group, 1) for x in (k, v)), grad.abs()
    through = grad @ v.transpose(2, 3)
    scores = seen * (through + (seen * through).sum(-1, keepdim=True)) / q.shape[3] ** 0.5
    of_keys = (scores.transpose(2, 3) @ q, seen.transpose(2, 3) @ grad)
    of_keys = (x.unflatten(1, (kv_heads, group)).sum(2) for x in of_keys)
    return [x.norm().item() for x in (seen @ v, scores @ k, *of_keys)]


def _error(own, exact):
    return ((own.double() - exact).norm() / exact.norm()).item()


def _check(operands, mask, causal, tolerance):
    out, exact_operands = _exact(operands, mask, causal)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    exact = [out, *torch.autograd.grad(out, exact_operands, grad.double())]
    own = attention(*operands, mask, causal)
    assert own.shape == out.shape and own.dtype == operands[0].dtype
    assert own.transpose(1, 2).is_contiguous()
    made = [own, *torch.autograd.grad(own, operands, grad.to(own.dtype))]
    sizes = _summed([x.detach() for x in exact_operands], mask, causal, grad.double())
    for one, right, size in zip(made, exact, sizes, strict=True):
        assert (one.double() - right).norm().item() < tolerance * size


@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 3), kv_heads=st.integers(1, 3), group=st.integers(1, 3),
    queries=st.sampled_from([1, 2, 7, 40, ROWS, ROWS + 3]), width=st.sampled_from([4, 16]),
    kind=st.sampled_from(["causal", "all", "window", "documents", "padding"]),
)  # fmt: skip
def test_is_the_definitions(batch, kv_heads, group, queries, width, kind):
    operands = _heads(batch, kv_heads * group, kv_heads, queries, queries, width, torch.float32)
    documents = padding = None
    if kind == "documents":
        documents = torch.arange(queries).div(5, rounding_mode="floor").expand(batch, -1)
        documents = documents + torch.arange(batch).unsqueeze(1)
    if kind == "padding":
        lengths = torch.arange(batch).unsqueeze(1) % queries + 1
        padding = torch.arange(queries).unsqueeze(0) < lengths
    window = 3 if kind == "window" else None
    causal = kind not in ("all", "padding")
    sees = visibility(queries, queries, causal, window, documents, padding, CPU)
    _check(operands, sees.mask, sees.is_causal, 5e-7)


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (ROWS + 1, 2 * ROWS)])
def test_keys_may_be_more_than_queries(queries, keys):
    sees = visibility(queries, keys, True, None, None, None, CPU)
    _check(_heads(2, 4, 2, queries, keys, 8, torch.float32), sees.mask, sees.is_causal, 5e-7)


@pytest.mark.parametrize("causal", [True, False])
def test_scores_that_are_too_many_for_one_block(causal, monkeypatch):
    """Some entries of the batch at a time, or some heads of one."""
    for limit in (1 << 10, 1 << 14, 26_000, 1 << 16, 80_000):  # 26,000: two heads of three
        monkeypatch.setattr("outpace.nn.attention.SCORE_BYTES", limit)
        mask = None if causal else torch.rand(3, 1, 40, 40) < 0.7
        if mask is not None:
            mask = mask | torch.eye(40, dtype=torch.bool)
        _check(_heads(3, 6, 3, 40, 40, 8, torch.float32), mask, causal, 5e-7)


def test_in_bf16_it_is_as_near_as_torchs_own():
    """Scores are rounded once more than in torch's kernel: within twice its error."""
    operands = _heads(2, 4, 2, 2 * ROWS, 2 * ROWS, 64, torch.bfloat16)
    out, exact_operands = _exact(operands, None, True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    exact = [out, *torch.autograd.grad(out, exact_operands, grad.double())]

    def errors(made):
        grads = torch.autograd.grad(made, operands, grad.bfloat16())
        return [_error(one, right) for one, right in zip([made, *grads], exact, strict=True)]

    own = errors(attention(*operands, None, True))
    its = errors(F.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True))
    assert all(mine < 2 * other for mine, other in zip(own, its, strict=True))


def test_is_taken_in_bf16_on_a_cpu_and_not_with_dropout():
    def operators(dtype, dropout):
        operands = _heads(1, 2, 2, 8, 8, 4, dtype)
        sees = visibility(8, 8, True, None, None, None, CPU)
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, acc_events=True) as seen:
            suited_attention(*operands, sees, dropout)
        return "outpace::attention" in {event.key for event in seen.key_averages()}

    assert operators(torch.bfloat16, 0.0)
    assert not operators(torch.float32, 0.0) and not operators(torch.bfloat16, 0.5)


# torch 2.15 warns of what its own check does.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operators_keep_to_torchs_rules():
    """What tracing and compiling rely on: shapes, strides, no writing into arguments."""
    for kv_heads, causal in ((2, True), (4, False)):
        operands = _heads(2, 4, kv_heads, 6, 6, 4, torch.bfloat16)
        torch.library.opcheck(attention.overload, (*operands, None, causal))
