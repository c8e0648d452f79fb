"""Kernels of ring attention: merged by their log-sum-exp, and chosen by what a GPU can."""

from pathlib import Path

import pytest
import torch

from outpace.parallel.ring_kernels import Dropout, Flash, Scores, choose_ring_kernel, takes_flash

RANKS = Path(__file__).with_name("context_ranks.py")
TOLERANCES = {"torch.float64": 1e-14, "torch.float32": 1e-6, "torch.bfloat16": 8e-3}


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 4])
def test_turns_of_any_kernel_are_merged_to_the_whole(size, on_ranks):
    """The way of a GPU's kernel, with the CPU's in its place: rounded to 16 bits at each turn."""
    for name, error in on_ranks(size, RANKS).items():
        assert error < TOLERANCES[name.split()[1]], (name, error)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(64, 64, True), (32, 64, False), (64, 32, False)]
)
def test_what_a_gpu_is_given_fits_its_operators(groups, queries, keys, causal):
    """Shapes and dtypes by torch's own rules for them, without a device."""
    q = torch.empty(2, 4, queries, 64, dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty(2, groups, keys, 64, dtype=torch.bfloat16, device="meta") for _ in "kv")
    out, lse = Flash().forward(0, q, k, v, causal)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (2, 4, queries) and lse.dtype == torch.float32
    gradients = Flash().backward(0, q, k, v, causal, out, out, lse)
    for gradient, operand in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == operand.shape and gradient.dtype == operand.dtype


@pytest.mark.parametrize(("device", "capability", "dtype", "width", "dropout", "taken"), [
    ("cuda", (9, 0), torch.bfloat16, 128, 0.0, True),
    ("cuda", (8, 0), torch.float16, 256, 0.0, True),
    ("cuda", (7, 5), torch.float16, 64, 0.0, False),
    ("cuda", (9, 0), torch.float32, 64, 0.0, False),
    ("cuda", (9, 0), torch.bfloat16, 20, 0.0, False),
    ("cuda", (9, 0), torch.bfloat16, 264, 0.0, False),
    ("cuda", (9, 0), torch.bfloat16, 64, 0.1, False),
    ("cpu", (0, 0), torch.bfloat16, 64, 0.0, False),
])  # fmt: skip
def test_where_flash_attention_is_taken(device, capability, dtype, width, dropout, taken):
    assert takes_flash(device, capability, dtype, width, dropout) == taken


def test_a_cpu_holds_scores():
    q = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16)
    assert isinstance(choose_ring_kernel(q, Dropout(0.0, 0)), Scores)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_is_scores(groups, causal):
    """Two turns, merged, beside the same by matmuls in fp32."""
    draw = torch.Generator("cuda").manual_seed(0)
    q, grad = (torch.randn(2, 4, 256, 64, generator=draw, device="cuda") for _ in range(2))
    k, v = (torch.randn(2, groups, 256, 64, generator=draw, device="cuda") for _ in range(2))
    low = [x.bfloat16() for x in (q, k, v, grad)]
    made = []
    for kernel in (Flash(), Scores(Dropout(0.0, 0))):
        out, lse = kernel.forward(0, *low[:3], causal)
        made.append([out, lse, *kernel.backward(0, *low[:3], causal, low[3], out.bfloat16(), lse)])
    for own, right in zip(*made, strict=True):
        assert (own.float() - right.float()).norm() < 1e-2 * right.float().norm()
