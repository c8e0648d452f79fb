"""Outlines: what layers are made of, parameters and FLOPs."""

import pytest

from outpace.catalog.models import PRESETS
from outpace.catalog.outlines import OUTLINES
from outpace.planner.model import flops
from outpace.planner.model.outline import (
    layer_parameters,
    outline,
    parameters,
    second_matmuls,
    weights,
)
from outpace.planner.model.outline_flops import forward_flops, layer_flops, recomputed_flops
from outpace.records.errors import BadInputError
from outpace.records.outline import AttentionShape, MatmulShape, Mlp, Outline, Stack
from outpace.records.plan import Checkpointing

HEADS = AttentionShape(heads=4, kv_heads=2, head_dim=8, value_dim=8)


@pytest.mark.parametrize("name", PRESETS)
def test_a_specs_outline_has_its_parameters_and_flops(name: str) -> None:
    spec = PRESETS[name].spec
    made = outline(spec, name)
    assert parameters(made) == flops.parameter_count(spec)
    assert forward_flops(made, 512, 3) == flops.forward_flops(spec, 512, 3)


def named(stack: Stack) -> dict[str, tuple[int, int]]:
    return {weight.name: (weight.inputs, weight.outputs) for weight in weights(stack, 32)}


def test_grouped_queries() -> None:
    stack = Stack(layers=1, attention=HEADS, mlp=Mlp(width=48, gated=True))
    assert named(stack) == {"qkv": (32, 64), "out": (32, 32), "up": (32, 96), "down": (48, 32)}
    assert layer_parameters(stack, 32) == 32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32


def test_latent_attention() -> None:
    latent = AttentionShape(
        heads=4, kv_heads=4, head_dim=12, value_dim=6, query_rank=10, kv_rank=16, rope_dim=4,
        qkv_bias=True,
    )  # fmt: skip
    stack = Stack(layers=1, attention=latent)
    assert named(stack) == {
        "q down": (32, 10), "q up": (10, 48), "kv down": (32, 20), "kv up": (16, 4 * (8 + 6)),
        "out": (24, 32),
    }  # fmt: skip
    matmuls = 320 + 480 + 640 + 16 * 56 + 24 * 32
    # The ways down have biases, and what they give is normalised (10 and 16 wide).
    assert layer_parameters(stack, 32) == matmuls + 10 + 20 + 2 * 32 + 10 + 16
    with pytest.raises(ValueError, match="rope_dim 12 is not below head_dim 12"):
        AttentionShape(heads=1, kv_heads=1, head_dim=12, value_dim=6, kv_rank=16, rope_dim=12)


def test_experts() -> None:
    mlp = Mlp(width=24, gated=True, experts=4, active=2, shared=40, shared_gate=True)
    stack = Stack(layers=1, mlp=mlp, norms=0)
    assert layer_parameters(stack, 32) == 32 * 4 + 4 * 3 * 32 * 24 + 3 * 32 * 40 + 32
    used = 32 * 4 + 2 * 3 * 32 * 24 + 3 * 32 * 40 + 32
    assert layer_flops(stack, 32, length=7, seen=7) == 2 * 7 * used


def test_every_second_matmul_is_keys_the_output_and_half_of_a_gated_mlp() -> None:
    found = outline(PRESETS["llama-3-8b"].spec, "llama-3-8b")
    shares = second_matmuls(found.stacks[0], found.hidden)
    assert shares == {"qkv": 1024 / 6144, "out": 1.0, "up": 0.5, "down": 0.0}
    plain = outline(PRESETS["gpt2"].spec, "gpt2")  # queries, keys, values, output, up, down
    shares = second_matmuls(plain.stacks[0], plain.hidden)
    assert shares == {"qkv": 1 / 3, "out": 1.0, "up": 0.0, "down": 1.0}


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "bert-base"])
@pytest.mark.parametrize("mode", ["full", "attention"])
def test_an_outline_recomputes_what_a_trained_block_does(name: str, mode: Checkpointing) -> None:
    """As counted in torch's own steps (tests/planner/model/test_flops.py)."""
    spec = PRESETS[name].spec
    again = recomputed_flops(outline(spec, name), 256, 2, {mode: 1.0}, stops_early=True)
    own = sum(flops.recomputed_flops(spec, 256, mode, layer) for layer in range(spec.layers))
    assert again == 2 * own


def test_cross_attention_sees_another_length() -> None:
    stack = Stack(layers=1, cross_attention=HEADS, norms=0)
    assert named(stack) == {"cross q": (32, 32), "cross kv": (32, 32), "cross out": (32, 32)}
    own, others = 2 * 5 * 2 * 32 * 32, 2 * 9 * 32 * 32
    assert layer_flops(stack, 32, length=5, seen=9) == own + others + 2 * 4 * 16 * 5 * 9


def test_matmuls_of_a_traced_layer() -> None:
    bare = HEADS.model_copy(update={"projected": False})
    other = (
        MatmulShape(name="a", inputs=3, outputs=5, count=2, uses=4),
        MatmulShape(name="b", inputs=2, outputs=2, positions=10, weighted=False),
    )
    stack = Stack(layers=1, attention=bare, other=other, other_parameters=11, norms=0)
    assert [(w.name, w.elements) for w in weights(stack, 32)] == [("a", 15), ("a", 15)]
    assert layer_parameters(stack, 32) == 30 + 11
    matmuls = 2 * 6 * 15 * 2 * 4 + 2 * 10 * 4
    assert layer_flops(stack, 32, length=6, seen=6) == matmuls + 2 * 4 * 16 * 36


def test_a_narrow_embedding() -> None:
    into = MatmulShape(name="in", inputs=16, outputs=32)
    made = Outline(
        name="x", hidden=32, stacks=(Stack(layers=1, norms=1),), vocab=61, outputs=61, tied=True,
        embedding_width=16, embed_matmuls=(into,), learned_positions=10, max_positions=10,
        head_matmuls=(into.model_copy(update={"inputs": 32, "outputs": 16}),),
    )  # fmt: skip
    assert parameters(made) == 61 * 16 + 10 * 32 + 2 * 16 * 32 + 32
    assert forward_flops(made, 10, 2) == 2 * 2 * 10 * (2 * 16 * 32 + 61 * 16)
    one = made.model_copy(update={"predicted": 1})
    assert forward_flops(one, 10, 1) == 2 * 10 * 16 * 32 + 2 * (16 * 32 + 61 * 16)


def test_outlines_of_the_catalog() -> None:
    """Papers' and model cards' counts: tests/interop/test_outline.py."""
    for name, made in OUTLINES.items():
        assert made.name == name and made.source and made.untrained
        assert Outline.model_validate_json(made.model_dump_json()) == made
    assert not set(OUTLINES) & set(PRESETS)
    # 37B a token (arXiv 2412.19437, abstract), without the embedding's 0.9B, attention aside.
    v3 = OUTLINES["deepseek-v3"]
    assert forward_flops(v3, 1, 1) / 2 == pytest.approx(36.6e9, rel=0.01)


def test_bad_records_are_sentences() -> None:
    with pytest.raises(BadInputError, match="x: active is 3, but there are only 2 experts"):
        Mlp.parse({"width": 4, "experts": 2, "active": 3}, "x")
