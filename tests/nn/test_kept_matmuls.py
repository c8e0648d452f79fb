"""Selective checkpointing without a policy, against the policy."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from outpace.nn import block as blocks
from outpace.nn import kept_matmuls
from outpace.nn.fp32_modules import compute_in_fp32
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.model_options import apply_checkpointing
from outpace.nn.transformer import Transformer
from outpace.trace.allocations import Allocations


@pytest.fixture
def as_on_cuda(monkeypatch):
    """No operators that are for CPUs."""
    for module in (blocks, kept_matmuls):
        monkeypatch.setattr(module, "suits_operator", lambda *_: False)


class Operators(TorchDispatchMode):
    """Counts operators while it is entered."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _objective(make_spec, family, joins=False, **values):
    objective = LanguageModelObjective(Transformer(make_spec(family, **values)), "plain", None)
    for block in objective.model.blocks:
        block.attention.mix, block.attention.joins = blocks.fused_attention, joins
    return objective


def _step(objective, tokens, dtype):
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss_sum, _ = objective({"tokens": tokens, "targets": tokens})
    loss_sum.backward()
    return {name: p.grad for name, p in objective.named_parameters()}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_gradients_and_matmuls_are_those_of_a_plain_backward(
    make_spec, tokens, as_on_cuda, monkeypatch, family, joins, dtype
):
    plain = _objective(make_spec, family, joins)
    kept = copy.deepcopy(plain)
    apply_checkpointing(kept.model, "selective")
    monkeypatch.setattr(
        "outpace.nn.model_options.checkpoint", lambda *_, **__: pytest.fail("a policy")
    )
    flops = []
    for objective in (plain, kept):
        with FlopCounterMode(display=False) as counter:
            _step(objective, tokens, dtype)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1]
    for one, other in zip(plain.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_norms_over_weights_of_16_bits_are_made_again_as_they_were(
    make_spec, tokens, as_on_cuda, monkeypatch, family
):
    """As ranks that split parameters gather them."""
    plain = _objective(make_spec, family)
    plain.model.blocks.bfloat16()
    compute_in_fp32(plain.model.blocks, "cuda")
    kept = copy.deepcopy(plain)
    apply_checkpointing(kept.model, "selective")
    monkeypatch.setattr(
        "outpace.nn.model_options.checkpoint", lambda *_, **__: pytest.fail("a policy")
    )
    for objective in (plain, kept):
        _step(objective, tokens, torch.bfloat16)
    for one, other in zip(plain.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("trains", ["norms", "half of the matmuls"])
def test_gradients_are_those_of_a_plain_backward_where_not_all_train(
    make_spec, tokens, as_on_cuda, trains
):
    """Autograd saves no input of a weight that does not train."""
    plain = _objective(make_spec, "llama", True)
    for name, parameter in plain.model.named_parameters():
        wanted = ("norm",) if trains == "norms" else ("k.weight", "up.weight")
        parameter.requires_grad = any(part in name for part in wanted)
    kept = copy.deepcopy(plain)
    apply_checkpointing(kept.model, "selective")
    for objective in (plain, kept):
        _step(objective, tokens, torch.bfloat16)
    for one, other in zip(plain.parameters(), kept.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) == (not one.requires_grad)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_a_host_has_few_operators_more(make_spec, tokens, as_on_cuda):
    """By hooks around each matmul they were 43 of a block."""
    counts = []
    for mode in ("none", "selective"):
        objective = _objective(make_spec, "gpt2", joins=True)
        apply_checkpointing(objective.model, mode)
        _step(objective, tokens, torch.bfloat16)
        with Operators() as operators:
            _step(objective, tokens, torch.bfloat16)
        counts.append(operators.count)
    assert counts[1] - counts[0] <= 22 * len(objective.model.blocks)


@pytest.mark.usefixtures("native_bf16")
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_more_is_kept_than_by_a_policy(make_spec, as_on_cuda, family, joins):
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    peaks = {}
    for name in ("none", "policy", "kept"):
        objective = _objective(make_spec, family, joins)
        mode = "none" if name == "none" else "selective"
        apply_checkpointing(objective.model, mode, by_policy=name == "policy")
        _step(objective, tokens, torch.bfloat16)
        with Allocations() as allocated:
            _step(objective, tokens, torch.bfloat16)
        peaks[name] = allocated.peak_bytes
    assert peaks["kept"] <= peaks["policy"] < peaks["none"]


def test_other_blocks_have_a_policy(make_spec, tokens, as_on_cuda):
    x = torch.zeros(1, 4, 32)
    for family, values in (("qwen3", {}), ("bert", {})):
        block = _objective(make_spec, family, **values).model.blocks[0]
        assert not kept_matmuls.can_keep_matmuls(block, x)
    block = _objective(make_spec, "gpt2").model.blocks[0]
    assert kept_matmuls.can_keep_matmuls(block, x)
    assert not kept_matmuls.can_keep_matmuls(block, x, None, None, object())
    block.attention.q.register_forward_pre_hook(lambda *_: None)
    assert not kept_matmuls.can_keep_matmuls(block, x)
