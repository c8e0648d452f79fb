"""Adapters beside frozen weights, as they are and in 4 bits."""

import pytest
import torch
from torch.nn import functional as F

from outpace.nn.lora import NF4Linear, adapters, add_adapters, parameter_counts
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 50, "max_positions": 16}
LLAMA = ModelSpec.parse({"family": "llama", "kv_heads": 2, "ffn": 96, **SIZES}, "test")
GPT2 = ModelSpec.parse({"family": "gpt2", **SIZES}, "test")
TOKENS = torch.arange(24).view(2, 12)


def adapted(spec=LLAMA, spread=0.3, **plan):
    model = add_adapters(Transformer(spec, 1), Plan(lora_rank=3, **plan), seed=5)
    with torch.no_grad():
        for _, b, _ in adapters(model).values():
            b.normal_(0, spread)
    return model.eval()


@pytest.mark.parametrize("base", ["fp32", "nf4"])
@pytest.mark.parametrize("targets", [("q", "v"), ("out", "gate", "down"), ("all",)])
def test_an_adapter_is_a_matmul_of_low_rank_added_to_its_matrix(targets, base):
    model = adapted(lora_targets=targets, lora_alpha=6, base=base).double()
    places = {name.rpartition(".")[2] for name in adapters(model)}
    assert places == ({"q", "k", "v", "out", "gate", "up", "down"} if "all" in targets else
                      set(targets))  # fmt: skip
    whole = Transformer(LLAMA, 1).eval().double()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, NF4Linear):
                whole.get_submodule(name).weight.copy_(module.base_weight())
        for name, (a, b, scale) in adapters(model).items():
            assert scale == 2
            whole.get_submodule(name).weight += 2 * b @ a
        torch.testing.assert_close(model(TOKENS), whole(TOKENS), rtol=1e-12, atol=1e-12)


def test_training_begins_where_the_model_was_and_moves_adapters_alone():
    model = adapted(spread=0.0)
    plain = Transformer(LLAMA, 1).eval()
    assert torch.equal(model(TOKENS), plain(TOKENS))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.{half}" for name in adapters(model) for half in
                       ("lora_a", "lora_b")}  # fmt: skip
    assert plain.state_dict().keys() == model.state_dict().keys() - trained
    again, other = (
        adapted(spread=0.0),
        add_adapters(Transformer(LLAMA, 1), Plan(lora_rank=3), seed=6),
    )
    for name, (a, _, _) in adapters(model).items():
        assert torch.equal(a, adapters(again)[name][0])
        assert not torch.equal(a, adapters(other)[name][0])
        assert 0 < a.abs().max() <= a.shape[1] ** -0.5


def test_weights_in_4_bits_are_near_and_take_a_seventh_of_the_memory():
    linear = adapted(base="nf4", lora_targets=("q",)).blocks[0].mlp.up
    was = Transformer(LLAMA, 1).blocks[0].mlp.up.weight.detach()
    off = (linear.base_weight() - was).norm() / was.norm()
    assert 0.05 < off < 0.11  # 16 levels of a normal distribution
    held = sum(p.nbytes for p in linear.parameters())
    assert held < was.nbytes / 7 + 1024 + 8  # the levels of scales do not grow with the matrix
    x = torch.randn(5, 64, requires_grad=True)
    (F.linear(x, linear.base_weight()).square().sum()).backward()
    wanted, x.grad = x.grad, None
    linear(x).square().sum().backward()
    torch.testing.assert_close(x.grad, wanted)


def test_parameters_are_counted_whatever_their_form():
    plain = sum(p.numel() for p in Transformer(LLAMA, 1).parameters())
    ours = 2 * 3 * (64 + 64)  # q of two layers
    for base in ("fp32", "nf4"):
        model = adapted(base=base, lora_targets=("q",))
        assert parameter_counts(model) == (plain + ours, ours)


def test_what_is_refused():
    with pytest.raises(BadInputError, match=r"--lora-targets gate: .* no gate\. Use any of q, k"):
        adapted(GPT2, lora_targets=("q", "gate"))
    for values, said in [
        ({"base": "nf4"}, "base nf4 belongs to LoRA and 4-bit weights cannot be trained"),
        ({"lora_targets": ("q",)}, "belongs to LoRA. Give a lora_rank"),
        ({"lora_rank": 4, "lora_targets": ()}, "names no matrix"),
        ({"lora_rank": 4, "strategy": "tp", "tp": 2, "base": "nf4"}, "Use zero3"),
        ({"lora_rank": 4, "strategy": "tp", "tp": 2, "lora_dropout": 0.1}, "Set lora_dropout to 0"),
        ({"lora_rank": 4, "precision": "fp8"}, "including adapters. Use precision bf16"),
    ]:
        with pytest.raises(BadInputError, match=said):
            Plan.parse(values, "test")


def test_targets_of_one_word():
    assert Plan.parse({"lora_rank": "2", "lora_targets": "q+v"}, "test").lora_targets == ("q", "v")
