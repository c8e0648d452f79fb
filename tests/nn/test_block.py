"""Queries, keys and values by one matmul: the same values and gradients as by three."""

from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.nn.block import Attention
from outpace.nn.lora import add_adapters
from outpace.nn.model_options import apply_checkpointing
from outpace.nn.transformer import Transformer
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.trace.allocations import Allocations

GPT2 = ModelSpec(family="gpt2", layers=2, hidden=32, heads=4, vocab=50, max_positions=16, dropout=0)
LLAMA = ModelSpec(
    family="llama", layers=2, hidden=32, heads=4, kv_heads=2, vocab=50, max_positions=16
)


class Matmuls(TorchDispatchMode):
    """Counts matmuls."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def taken(model, joins):
    """Hidden states, all gradients, and matmuls of a forward and backward."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.joins = joins
    tokens = torch.arange(24).view(2, 12) % 50
    model.zero_grad()
    with Matmuls() as matmuls:
        hidden = model(tokens)
        hidden.square().sum().backward()
    return hidden, {n: p.grad for n, p in model.named_parameters()}, matmuls.count


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.family)
def test_one_matmul_gives_what_three_give(spec):
    model = Transformer(spec, seed=1).double()
    apart, own, many = taken(model, False)
    joined, gradients, few = taken(model, True)
    torch.testing.assert_close(joined, apart, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(gradients, own, rtol=1e-11, atol=1e-12)
    # A layer has two matmuls less forward, and four less backward.
    assert many - few == 6 * spec.layers


def test_it_is_taken_on_an_accelerator_and_only_of_plain_layers():
    attention = Transformer(GPT2, seed=1).blocks[0].attention
    here, there = torch.empty(2, 3, 32), torch.empty(2, 3, 32, device="meta")
    assert not attention.can_join(here) and not attention.can_join(there)
    with patch.object(type(there), "device", torch.device("cuda")):
        assert attention.can_join(there)
    attention.joins = True
    assert attention.can_join(here)
    handle = attention.k.register_forward_hook(lambda *_: None)
    assert not attention.can_join(here)
    handle.remove()
    adapted = add_adapters(
        Transformer(GPT2, seed=1), Plan(lora_rank=2, lora_targets=("v",)), seed=1
    )
    adapted.blocks[0].attention.joins = True
    assert not adapted.blocks[0].attention.can_join(here)


def test_joined_weights_are_not_kept_for_the_backward():
    """Those of all layers would be, and where each rank has a part, whole ones."""
    spec = GPT2.model_copy(update={"hidden": 128, "layers": 3})
    left_bytes = []
    for joins in (False, True):
        model = Transformer(spec, seed=1)
        taken(model, joins)
        with Allocations() as allocated:
            hidden = model(torch.arange(4).view(1, 4))
        hidden.sum().backward()
        left_bytes.append(allocated.left_bytes)
    assert left_bytes[1] - left_bytes[0] < 128 * 128 * 4  # of one projection of one layer


@pytest.mark.parametrize("mode", ["full", "attention"])
def test_one_matmul_within_checkpoints_whose_hooks_have_what_is_saved(mode):
    plain, checkpointed = (Transformer(LLAMA, seed=1).double() for _ in range(2))
    apply_checkpointing(checkpointed, mode)
    wanted, found = taken(plain, True), taken(checkpointed, True)
    torch.testing.assert_close(found[:2], wanted[:2], rtol=0, atol=0)


@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_it_is_compiled_without_a_break():
    model = Transformer(LLAMA, seed=1)
    for block in model.blocks:
        block.attention.joins = True
    tokens = torch.arange(24).view(2, 12) % 50
    wanted = model(tokens)
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(tokens), wanted)


def test_norms_of_heads_have_weights_of_their_inputs_dtype():
    """torch warns of others, which are an error here, and leaves its own kernel."""
    spec = LLAMA.model_copy(update={"qk_norm": True})
    model = Transformer(spec).bfloat16()
    model(torch.zeros(1, 8, dtype=torch.long)).float().sum().backward()
    grad = model.blocks[0].attention.q_norm.weight.grad
    assert grad is not None and grad.dtype == torch.bfloat16
