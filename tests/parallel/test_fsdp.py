"""Ranks that split parameters gather them in 16 bits and reduce gradients in fp32, over gloo."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from outpace.parallel.fsdp import policy_of
from outpace.parallel.whole_parameters import explain_shards
from outpace.records.precisions import PRECISION_TRAITS, WEIGHTS, Precision

RANKS = Path(__file__).with_name("fsdp_ranks.py")
GATHERS, SUMS = "allgather_base", "reduce_scatter_base"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("processes", "strategies"),
    [(2, "zero2,zero3"), pytest.param(4, "zero2,zero3,hsdp", marks=pytest.mark.slow)],
)
def test_gloo_gathers_bf16_and_reduces_fp32(processes, strategies, on_ranks):
    for strategy, low in on_ranks(processes, RANKS, strategies, "bf16").items():
        assert low["passed"], low["reason"]
        assert low["bytes_by_kind"] == low["bytes_by_kind_formula"]
        gathers, sums = f"{GATHERS} torch.bfloat16", f"{SUMS} torch.float32"
        assert set(low["calls"]) == {gathers, sums}
        # Of 5 blocks and the rest, in 3 steps of 2 micro-batches; blocks twice but for ZeRO-2.
        assert low["calls"][sums] == 6 * 3 * 2
        assert low["calls"][gathers] == (6 if strategy == "zero2" else 11) * 3 * 2


@pytest.mark.parametrize("precision", get_args(Precision))
def test_what_is_planned_to_be_sent_is_what_units_send(precision):
    """Of time, memory and the network alike."""
    kept = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(WEIGHTS.get(precision))
    kept = kept or (torch.float64 if precision == "fp64" else torch.float32)
    policy = policy_of([nn.Parameter(torch.ones(2))], precision)
    sent = policy.param_dtype or kept, policy.reduce_dtype or policy.param_dtype or kept
    assert PRECISION_TRAITS[precision].shard_bytes == tuple(dtype.itemsize for dtype in sent)


def test_a_unit_with_weights_of_integers_sends_all_as_it_is():
    scales, codes = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).byte(), False)
    low = policy_of([scales], "bf16")
    assert (low.param_dtype, low.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert not low.cast_forward_inputs
    for parameters, precision in (([scales, codes], "bf16"), ([scales], "fp32")):
        kept = policy_of(parameters, precision)
        assert (kept.param_dtype, kept.reduce_dtype) == (None, None)


def test_gradients_of_shards_that_a_users_function_asks_for_are_explained():
    """As an adjoint method does that is given module.parameters() outside of its blocks' calls."""
    x, shard = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError) as unused:
        torch.autograd.grad(x.sum(), (x, shard))
    assert "outside of a call of the block" in str(explain_shards(unused.value))
