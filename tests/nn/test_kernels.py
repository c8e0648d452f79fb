"""Which attention kernel is taken where, without a GPU: what torch is told and given."""

import itertools
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from outpace.nn.block import fused_attention
from outpace.nn.kernels import attend_by, choose_kernel, suits_flash, without_faulty_kernels
from outpace.nn.masks import Visibility

LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
@pytest.mark.parametrize("queries", [1, 64, 128])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_what_torch_is_told(dtype, queries, grouped, masked, monkeypatch):
    """Of a call on a GPU: no cuDNN with a mask or for one query, and no scores for all keys."""
    told = []

    def kernel(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, **rest):
        flags = torch.backends.cuda
        told.append((flags.cudnn_sdp_enabled(), flags.flash_sdp_enabled(),
                     flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()))  # fmt: skip
        told.append((q.shape, k.shape, rest.get("enable_gqa")))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    on_gpu = partial(choose_kernel, "cuda")
    monkeypatch.setattr("outpace.nn.block.choose_kernel", lambda _, *call: on_gpu(*call))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    q = torch.empty(2, 4, queries, 20, dtype=dtype)
    k = torch.empty(2, 2 if grouped else 4, 128, 20, dtype=dtype)
    mask = torch.ones(2, 1, queries, 128, dtype=torch.bool) if masked else None
    sees = Visibility(mask, is_causal=mask is None and queries == 128)
    out = fused_attention(q, k, k, sees, 0.0)
    assert out.shape == q.shape
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    (cudnn, flash, efficient, math), (q_shape, k_shape, gqa) = told
    repeated = k_shape[1] == 4
    if masked or queries == 1:
        assert not cudnn
    if dtype == torch.float64:
        assert math and not flash and not efficient  # the others do not take it
    elif masked or dtype == torch.float32:
        assert efficient and not math and not flash
        assert repeated and not gqa and q_shape[3] == k_shape[3] == 24
    elif grouped and not repeated:
        assert flash and gqa and dtype == torch.bfloat16
    if not grouped:
        assert not gqa


def test_a_cpu_is_left_to_torch():
    for dtype, queries, grouped, masked in itertools.product(LOW, (1, 8), (0, 1), (0, 1)):
        assert choose_kernel("cpu", dtype, queries, bool(grouped), bool(masked)) == "any"


@pytest.mark.parametrize(
    ("width", "dropout", "grouped", "queries", "kernel"),
    [(128, 0.1, True, 64, "any"), (256, 0.0, True, 64, "any"), (256, 0.1, True, 64, "efficient"),
     (200, 0.0, True, 64, "efficient"), (320, 0.0, True, 64, "efficient"),
     (320, 0.0, False, 64, "any"), (320, 0.0, True, 1, "flash")],
)  # fmt: skip
def test_grouped_queries_never_have_all_scores(width, dropout, grouped, queries, kernel):
    """Where FlashAttention refuses heads, torch would take grouped ones to the math kernel."""
    flash = suits_flash(width, dropout)
    assert choose_kernel("cuda", torch.bfloat16, queries, grouped, False, flash) == kernel


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("width", [16, 20])
def test_padded_widths_and_repeated_heads_change_nothing(groups, width, monkeypatch):
    """The way to the memory-efficient kernel, with the CPU's in its place."""
    from torch.nn.attention import SDPBackend

    backends = {"efficient": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)}
    monkeypatch.setattr("outpace.nn.kernels._BACKENDS", backends)
    draw = torch.Generator().manual_seed(0)
    shapes = (4, groups, groups)
    q, k, v = (
        torch.randn(2, h, 6, width, generator=draw, dtype=torch.float64).requires_grad_()
        for h in shapes
    )
    mask = torch.rand(2, 1, 6, 6, generator=draw) < 0.6
    mask = mask | torch.eye(6, dtype=torch.bool)

    def taken(kernel):
        out = attend_by(kernel, q, k, v, mask, False, 0.0)
        return [out, *torch.autograd.grad(out.sin().sum(), (q, k, v))]

    for own, right in zip(taken("efficient"), taken("any"), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-12, atol=1e-14)


def test_the_choice_is_part_of_one_graph():
    """Inside of a compiled forward naming the kernel breaks nothing."""
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()

    def call(kernel):
        return attend_by(kernel, q, q[:, :2], q[:, :2], mask, False, 0.0)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled("math"), call("any"))


@pytest.mark.parametrize(("version", "taken"), [(91900, False), (92501, False), (92600, True)])
def test_a_model_of_ones_own_is_kept_from_a_faulty_cudnn(version, taken):
    flags = torch.backends.cuda
    before = flags.cudnn_sdp_enabled()
    with without_faulty_kernels(version):
        assert flags.cudnn_sdp_enabled() == (taken and before)
        assert flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled()
    assert flags.cudnn_sdp_enabled() == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("length", [64, 192, 704, 1088])
def test_no_nan_where_cudnn_makes_them(dtype, length):
    """The reproduction of pytorch#196678: log-sum-exps below −88.7 and 64 keys over."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 64, device="cuda", dtype=dtype) for _ in range(3))
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, -120 * 8.0
    for x in (q, k, v):
        x.requires_grad_()
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
    out = fused_attention(q, k, v, Visibility(mask), 0.0)
    out.backward(torch.randn_like(out))
    assert all(x.grad.isfinite().all() for x in (q, k, v))
